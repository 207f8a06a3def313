"""The integer program of Gimbal's first paper: section III-D, equations 3 to 12."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.placement.gimbal_affinity import Affinity
from moestro.placement.integer_program import IntegerProgram


@dataclass(frozen=True, slots=True, eq=False)
class GimbalProgram:
    """The data of the program. It has no layer index: one map from experts to devices serves all layers.

    Attributes:
        activation: float64[layers, experts], the matrix A, tokens per step.
        affinity: pairs (j, k) with j < k and their weights W[j, k], scope "model".
        sizes: int64[devices], experts that each device holds: equation 4, which asks for m/g of each.
        alpha, beta: weights of imbalance and cut.
    """

    activation: NDArray[np.float64]
    affinity: Affinity
    sizes: NDArray[np.int64]
    alpha: float
    beta: float

    def cost(self, device_of: NDArray[np.int64]) -> float:
        """Equation 12 for a map, int64[experts]."""
        is_on = device_of[:, None] == np.arange(len(self.sizes))
        loads = self.activation @ is_on  # equation 7
        ideal = self.activation.sum(axis=1, keepdims=True) / len(self.sizes)  # equations 5 and 6
        is_cut = device_of[self.affinity.expert] != device_of[self.affinity.partner]  # equation 11
        return self.alpha * float(np.abs(loads - ideal).max()) + self.beta * float(self.affinity.weight[is_cut].sum())


def solve_program(program: GimbalProgram, time_limit_s: float) -> NDArray[np.int64]:
    """Return the device of each expert, int64[experts], at the least cost.

    The same-part indicators s are continuous here: with 0-1 x and a positive weight, each takes the value 0 or 1.

    Raises:
        ConfigError: scipy is not installed.
        ValueError: No optimum is proven within the time.
    """
    num_layers, num_experts = program.activation.shape
    num_devices = len(program.sizes)
    first, second, weight = program.affinity.expert, program.affinity.partner, program.affinity.weight
    solver = IntegerProgram("gimbal_v1_milp")
    unit = float(program.activation.max(initial=0.0)) or 1.0  # the solver's tolerances are absolute
    x = solver.binaries(num_experts, num_devices)
    deviation = solver.continuous(1, cost=program.alpha * unit)  # D, in units
    same = [solver.continuous(1, num_devices, upper=1.0, cost=-program.beta * float(each)) for each in weight]
    solver.constrain(x, 1.0, 1.0, 1.0)  # equation 3
    solver.constrain(x.T, 1.0, program.sizes.astype(np.float64), program.sizes.astype(np.float64))  # equation 4
    activation = program.activation / unit
    ideal = activation.sum(axis=1) / num_devices
    for device in range(num_devices):
        ids = np.tile(np.append(x[:, device], deviation), (num_layers, 1))
        ones = np.ones((num_layers, 1))
        solver.constrain(ids, np.hstack([activation, -ones]), -np.inf, ideal)  # equation 8
        solver.constrain(ids, np.hstack([activation, ones]), ideal, np.inf)  # equation 9
    for j, k, s in zip(first, second, same, strict=True):  # equation 10
        together = s.ravel()
        solver.constrain(np.stack([together, x[j]], axis=1), np.array([1.0, -1.0]), -np.inf, 0.0)
        solver.constrain(np.stack([together, x[k]], axis=1), np.array([1.0, -1.0]), -np.inf, 0.0)
        solver.constrain(np.stack([together, x[j], x[k]], axis=1), np.array([1.0, -1.0, -1.0]), -1.0, np.inf)
    values = solver.solve(time_limit_s)
    device_of: NDArray[np.int64] = values[x].argmax(axis=1)
    return device_of
