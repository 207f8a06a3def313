"""Limits on what moves, and the choice of layers whose move pays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.placement.devices import PlaceLimits
from moestro.placement.search.problem import Experts
from moestro.placement.traffic import Floats


@dataclass(slots=True, eq=False)
class Allowance:
    """Copies that may still be received.

    Attributes:
        total: Copies of all devices; infinite without a limit.
        each: float64[devices], copies of each device.
    """

    total: float
    each: Floats

    @property
    def is_limited(self) -> bool:
        """Whether there is any limit."""
        return bool(np.isfinite(self.total) or np.isfinite(self.each).any())

    def admit(self, gain: Floats, devices: Experts, receives: Experts) -> NDArray[np.bool_]:
        """Admit exchanges, those with the largest gain per received copy first, and count what they receive.

        Args:
            gain: float64[exchanges], seconds per step.
            devices: int64[exchanges, 2], the two devices of each exchange.
            receives: int64[exchanges, 2], copies that each of them receives; negative where it gives back one that it
                had received.
        """
        order = np.argsort(-gain / np.maximum(receives.sum(axis=1), 1e-3), kind="stable")
        taken = np.zeros(len(gain), np.bool_)
        while len(order):
            due = np.zeros((len(order), len(self.each)))
            rows = np.arange(len(order))
            for side in range(2):
                due[rows, devices[order, side]] += np.maximum(receives[order, side], 0)
            running = due.cumsum(axis=0)
            fits = (running.sum(axis=1) <= self.total) & (running <= self.each).all(axis=1)
            num_first = len(order) if fits.all() else int(fits.argmin())
            first = order[:num_first]
            taken[first] = True
            for side in range(2):
                np.subtract.at(self.each, devices[first, side], receives[first, side])
            self.total -= float(receives[first].sum())
            # The exchange that did not fit is left out; later ones of other devices may fit.
            order = order[num_first + 1 :]
            order = order[(receives[order] <= 0).all(axis=1) | self._may_fit(devices[order], receives[order])]
        return taken

    def _may_fit(self, devices: Experts, receives: Experts) -> NDArray[np.bool_]:
        due = np.maximum(receives, 0)
        fits: NDArray[np.bool_] = np.less_equal(due, self.each[devices]).all(axis=1) & (due.sum(axis=1) <= self.total)
        return fits


def allowance_of(limits: PlaceLimits, expert_bytes: int, num_devices: int) -> Allowance:
    """Return what the limits allow before anything moved."""
    total = np.inf if limits.max_bytes is None else float(limits.max_bytes // max(expert_bytes, 1))
    each = np.inf if limits.max_receives is None else float(limits.max_receives)
    return Allowance(total, np.full(num_devices, each))


@dataclass(frozen=True, slots=True, eq=False)
class LayerOffers:
    """What changing each layer would save and cost.

    Attributes:
        saved_s: float64[layers], seconds per step.
        receives: int64[layers, devices], copies that each device would receive.
        receive_s: float64[layers, devices], seconds of these copies.
    """

    saved_s: Floats
    receives: Experts
    receive_s: Floats

    def with_layers(self, layers: NDArray[np.bool_], other: LayerOffers) -> LayerOffers:
        """Return these offers with some layers of others."""
        column = layers[:, None]
        return LayerOffers(
            np.where(layers, other.saved_s, self.saved_s),
            np.where(column, other.receives, self.receives),
            np.where(column, other.receive_s, self.receive_s),
        )


def layers_that_pay(
    offers: LayerOffers, allowance: Allowance, max_layers: int | None, horizon_steps: float, hysteresis: float
) -> tuple[NDArray[np.intp], float]:
    """Choose the layers to change, those that save the most per received copy first.

    Args:
        allowance: Copies that devices may receive.
        max_layers: Layers that may change. None means no limit.
        horizon_steps: Steps in which the savings must exceed the seconds of the move.
        hysteresis: Part by which they must exceed them.

    Returns:
        The layers, and the seconds that they gain over the horizon, net of the move; none and 0 if nothing pays.
    """
    num_received = offers.receives.sum(axis=1)
    order = np.argsort(-offers.saved_s / np.maximum(num_received, 1e-3), kind="stable")
    left = order[offers.saved_s[order] > 0]
    chosen, received = np.zeros(0, np.intp), np.zeros(len(allowance.each))
    while len(left) and (max_layers is None or len(chosen) < max_layers):
        running = received + offers.receives[left].cumsum(axis=0)
        fits = (running.sum(axis=1) <= allowance.total) & (running <= allowance.each).all(axis=1)
        num_first = len(left) if fits.all() else int(fits.argmin())
        chosen = np.append(chosen, left[:num_first])
        received = received + offers.receives[left[:num_first]].sum(axis=0)
        # The layer that did not fit is left out; later ones may fit.
        left = left[num_first + 1 :]
    chosen = chosen[:max_layers]
    busiest_s = offers.receive_s[chosen].cumsum(axis=0).max(axis=1, initial=0.0)
    net = horizon_steps * offers.saved_s[chosen].cumsum() - (1 + hysteresis) * busiest_s
    if not len(net) or net.max() <= 0:
        return chosen[:0], 0.0
    best = int(net.argmax())
    return chosen[: best + 1], float(net[best])
