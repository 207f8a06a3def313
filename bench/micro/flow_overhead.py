"""Measures the overhead of the flow core, for each item and for a decode step in stages against one forward pass.

    OMP_NUM_THREADS=1 python bench/micro/flow_overhead.py --work /tmp/bench \
        --json bench/results/micro/flow_overhead.json

The first part runs plans of one-token units on a device that computes nothing. The time of an item is then that of the
core, the policy and the executor. Budgets (docs/architecture.md) at 256 tokens: 250 microseconds for an attention and
100 for an expert item. The second part decodes with the demo model (own kernels in bfloat16, torch's in float32) and
with a random Qwen3-MoE of 640M parameters, without any preemption: six steps fused, twelve in stages, six fused, and
so on, until a round has lasted four seconds. The first step of each turn is left out, because it finds the caches
filled by the other executor. Each round gives two ratios, that of the median steps and that of the lower quartiles,
which other work on the host disturbs less.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from decode_mix import decode

from moestro.config.run_record import run_record
from moestro.core.stages import Attention, AttentionDone, Experts, ExpertsDone, Sample, StageShape
from moestro.core.views import ATTENTION, BE, EVERY_EXPERT, LS, QueueTable, Run, StepFunction
from moestro.core.work import Plan, StepResult
from moestro.engine.rank import FusedExecutor
from moestro.flow.executor import FlowExecutor
from moestro.flow.policies.qllm import ExpertLevelPreemption
from moestro.model.device import TorchDevice
from moestro.model.settings import ModelSettings

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.models import DEMO, make_random_model
from shared.results import make_parser, save, spread

SHAPE = StageShape(is_sparse=(True,) * 16, num_experts=32, num_chosen=4, num_rows=4096, num_places=4096)
TOKENS, REPEATS, STEPS, UNITS = (64, 256, 1024), 9, 5, (1, 8, 32)
ROUNDS, ROUND_S = 15, 4.0  # rounds, and seconds of a round at least
TURN, COLD = 6, 1  # steps of a turn, and how many of its first steps are left out


class NullDevice:
    """A device that answers at once with gate outputs drawn in advance."""

    works_when_polled = True
    shape = SHAPE

    def __init__(self, num_tokens: int) -> None:
        rng = np.random.default_rng(0)
        scores = rng.random((SHAPE.num_layers, num_tokens, SHAPE.num_experts))
        chosen = np.sort(np.argsort(scores, axis=2)[:, :, : SHAPE.num_chosen], axis=2)
        self.gates = chosen.astype(np.int32)
        self.kinds = {Attention: 0, Experts: 0, Sample: 0}

    def launch(self, item, now_ns: int) -> None:
        """Implement `StagedDevice.launch`."""
        self.item = item
        self.kinds[type(item)] += 1

    def poll(self, now_ns: int) -> list:
        """Return the answer of the item launched last."""
        match self.item:
            case Attention(layer):
                return [AttentionDone(self.gates[layer])]
            case Experts(experts=experts):
                return [ExpertsDone(len(experts))]
            case Sample(units):
                return [StepResult(units.slot, np.zeros(len(units), np.int32))]

    def withdraw(self, now_ns: int) -> None:
        """Withdraw nothing, because every item has started."""

    def ready_at_ns(self) -> None:
        """Return None: an item is ready when it is polled."""


@StepFunction
def one_by_one(view: QueueTable, now_ns: int) -> Run:
    """Run layers in order, each expert as a separate item, as an expert worker does."""
    layer = int(np.flatnonzero(view.runnable.any(axis=(0, 2)))[0])
    groups = np.flatnonzero(view.runnable[:, layer].any(axis=0))
    return Run(layer, int(groups[-1]), 2**31 - 1, (LS, BE))


@StepFunction
def whole_layers(view: QueueTable, now_ns: int) -> Run:
    """Run layers in order, all experts of a layer as one item."""
    layer = int(np.flatnonzero(view.runnable.any(axis=(0, 2)))[0])
    group = ATTENTION if view.n[:, layer, ATTENTION].any() else EVERY_EXPERT
    return Run(layer, group, 2**31 - 1, (LS, BE))


def items_us(num_tokens: int, policy) -> float:
    """Measure the mean microseconds of an item over STEPS plans."""
    device = NullDevice(num_tokens)
    executor = FlowExecutor(device, policy)
    units = decode([32] * num_tokens).units
    for step in range(2 + STEPS):
        if step == 2:
            before, started = sum(device.kinds.values()), time.perf_counter_ns()
        executor.submit(Plan(step, units), 0)
        assert executor.poll(0) is not None
    return (time.perf_counter_ns() - started) / 1e3 / (sum(device.kinds.values()) - before)


def core_rows() -> list[dict[str, object]]:
    rows = []
    for num_tokens in TOKENS:
        for name, policy in (
            ("attention and all experts of a layer", whole_layers),
            ("mostly single experts", one_by_one),
        ):
            row = {"tokens": num_tokens, "items": name}
            row["us_per_item"] = spread([items_us(num_tokens, policy) for _ in range(REPEATS)])
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def step_ms(executor, item) -> float:
    started = time.perf_counter()
    executor.submit(Plan(0, item.units), 0)
    assert executor.poll(0) is not None
    return 1e3 * (time.perf_counter() - started)


def quartiles_ms(executors, item, limit_s: float) -> np.ndarray:
    """Measure the lower quartile and the median of a step's milliseconds [executor, 2], of two that take turns."""
    found: list[list[float]] = [[], []]
    until = time.perf_counter() + limit_s
    while not found[0] or time.perf_counter() < until:
        for which in (0, 1, 1, 0):
            found[which] += [step_ms(executors[which], item) for _ in range(TURN)][COLD:]
    return np.quantile(found, (0.25, 0.5), axis=1).T


def decode_rows(model: str, directory: Path, dtype: str) -> list[dict[str, object]]:
    from moestro.model.staged.staged_device import open_staged_device  # noqa: PLC0415 - the core needs no network

    kernels = "own" if dtype == "bfloat16" else "auto"
    settings = ModelSettings(
        model=str(directory), dtype=dtype, device="cpu", num_gpu_blocks_override=512, kernels=kernels
    )
    staged, _ = open_staged_device(settings, max_tokens=2048)
    fused = FusedExecutor(TorchDevice(staged.staged.network, staged.pools))
    flow = FlowExecutor(staged, ExpertLevelPreemption())
    rows = []
    for num_units in UNITS:
        item = decode([128] * num_units)
        quartiles_ms((fused, flow), item, 0)  # makes the executors warm
        rounds = np.array([quartiles_ms((fused, flow), item, ROUND_S) for _ in range(ROUNDS)])
        row = {"model": model, "dtype": dtype, "kernels": kernels, "units": num_units, "rounds": ROUNDS}
        row["fused_ms"], row["flow_ms"] = (spread(rounds[:, which, 1].tolist()) for which in (0, 1))
        over_fused = rounds[:, 1] / rounds[:, 0]
        row["flow_over_fused"] = spread(over_fused[:, 1].tolist())
        row["flow_over_fused_lower_quartile"] = spread(over_fused[:, 0].tolist())
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="directory for the random model, kept between runs")
    args = parser.parse_args()
    conditions = run_record("measured")
    result = {
        "num_threads": torch.get_num_threads(),
        "core_rounds": REPEATS,
        "core": core_rows(),
        "decode": [
            *decode_rows("demo", DEMO, "bfloat16"),
            *decode_rows("demo", DEMO, "float32"),
            *decode_rows("random-640m", make_random_model(args.work / "random-640m"), "bfloat16"),
        ],
    }
    save(args.json, conditions, result)


if __name__ == "__main__":
    main()
