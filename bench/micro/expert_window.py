"""Measures what the collection of expert load costs a rank, as a share of its steps.

    python bench/micro/expert_window.py [--json bench/results/micro/expert_window.json]

The first part is the demo model in `fused` mode, with own kernels and with torch's: rounds of decode steps with and
without collection in turn, in processor time. The difference is smaller than what rounds differ by on a busy machine,
so the time within the collection's calls is measured too. The goal is 1 % of a step.

The second part is the window alone, on the shapes of large networks, against a priced decode step of one H200: the
window's time is measured, the step's is modelled.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from moestro.config.run_record import run_record
from moestro.core.request import Request, SamplingParams
from moestro.core.work import StepResult
from moestro.cost.gpus import gpu_named
from moestro.cost.model import Batch
from moestro.cost.networks import network_named
from moestro.cost.roofline import Roofline, RooflineSettings
from moestro.engine.rank import Rank, build_rank
from moestro.engine.settings import SchedulerSettings
from moestro.model.device import TorchDevice
from moestro.model.kernels.exchange import KernelExchange
from moestro.model.kernels.library import KernelBuild, KernelLibrary
from moestro.model.load import load_network, read_config
from moestro.model.settings import ModelSettings
from moestro.placement.load_window import PAIR_INTERVAL, LoadWindow
from moestro.placement.settings import ExpertLoadSettings
from moestro.worker.rank_builder import ExpertCollection

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.models import DEMO
from shared.results import make_parser, save, spread

CONTEXT, STEPS, ROUNDS = 64, 4 * PAIR_INTERVAL, 5
NETWORKS, SEQUENCES = ("gpt-oss-120b", "qwen3-30b-a3b", "deepseek-v3"), 32


class TimedCollection(ExpertCollection):
    """Measures its own calls, within the rank's steps."""

    spent_ns = 0

    def observe(self, result: StepResult) -> None:
        started = time.thread_time_ns()
        super().observe(result)
        self.spent_ns += time.thread_time_ns() - started


def make_rank(library: KernelLibrary | None) -> tuple[Rank, TorchDevice]:
    """A rank of the demo model, with own kernels or, without a library, torch's."""
    settings = ModelSettings(model=str(DEMO), dtype="bfloat16", device="cpu")
    network, _ = load_network(settings, read_config(settings))
    device = TorchDevice(network, network.probe(16)[0].allocate(1024))
    if library is not None:
        network.use_kernels(KernelExchange(library))
    network.pack()
    limits = SchedulerSettings(
        num_blocks=1024, block_size=16, max_model_len=1024, max_num_batched_tokens=8192, enable_prefix_caching=False
    )
    return build_rank(limits, device), device


def step_us(rank: Rank, num_sequences: int, seed: int) -> float:
    """Measure the mean processor time of STEPS decode steps, after the prompts are computed."""
    tokens = np.random.default_rng(seed).integers(3, 4096, (num_sequences, CONTEXT)).astype(np.int32)
    for i, prompt in enumerate(tokens):
        sampling = SamplingParams(max_tokens=STEPS + 1, temperature=0)
        request = Request(
            request_id=f"{seed} {i}",
            num_prompt_tokens=CONTEXT,
            sampling=sampling,
            arrival_ns=i,
            token_ids=prompt.tobytes(),
        )
        rank.add(request, 0)
    rank.step(0)  # submits the prompts
    rank.step(0)
    started = time.process_time()
    for _ in range(STEPS):
        rank.step(0)
    return 1e6 * (time.process_time() - started) / STEPS


def demo_row(kernels: str, rank: Rank, device: TorchDevice, num_sequences: int) -> dict[str, object]:
    collection = TimedCollection(ExpertLoadSettings())
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * ROUNDS + 2):
        collects = turn % 2 == 1
        rank.expert_observer = collection if collects else None
        device.network.sample_choices(PAIR_INTERVAL if collects else 0)
        found = step_us(rank, num_sequences, turn // 2)
        if turn == 1:
            collection.spent_ns = 0  # the first round made the arrays
        if turn > 1:
            times[collects].append(found)
    shares = [100 * (on / off - 1) for off, on in zip(times[False], times[True], strict=True)]
    within_us = collection.spent_ns / 1e3 / ROUNDS / (STEPS + 1)
    return {
        "network": f"demo, {kernels} kernels",
        "sequences": num_sequences,
        "step_us": spread(times[False]),
        "step_us_collecting": spread(times[True]),
        "per_cent_in_turn": spread(shares),
        "within_calls_us": round(within_us, 1),
        "per_cent": round(100 * within_us / statistics.median(times[False]), 3),
    }


def window_us(num_layers: int, num_experts: int, num_chosen: int) -> tuple[float, float]:
    """Measure the processor time of a step's counts, and of a sampled step's choices."""
    rng, window = np.random.default_rng(0), LoadWindow(num_layers, num_experts, 1000.0)
    counts = rng.poisson(SEQUENCES * num_chosen / num_experts, (num_layers, num_experts))
    choices = rng.integers(0, num_experts, (num_layers, SEQUENCES, num_chosen)).astype(np.int32)
    window.observe_choices(choices, SEQUENCES)
    started = time.process_time()
    for _ in range(500):
        window.observe(counts)
    observed = time.process_time()
    for _ in range(20):
        window.observe_choices(choices, SEQUENCES)
    return 1e6 * (observed - started) / 500, 1e6 * (time.process_time() - observed) / 20


def priced_row(name: str) -> dict[str, object]:
    network = network_named(name)
    experts = network.experts
    assert experts is not None, "a network with experts"
    cost = Roofline(RooflineSettings(network=network, gpu=gpu_named("h200")))
    lengths = np.full(SEQUENCES, 1000, np.int32)
    step = cost.step_ns(Batch(lengths, np.ones_like(lengths))) / 1e3
    repeats = [window_us(network.num_layers, experts.num_experts, experts.top_k) for _ in range(ROUNDS)]
    observe, choose = (statistics.median(column) for column in zip(*repeats, strict=True))
    return {
        "network": name,
        "sequences": SEQUENCES,
        "priced_step_us": round(step),
        "counts_us": round(observe, 1),
        "choices_us": round(choose, 1),
        "per_cent": round(100 * (observe + choose / PAIR_INTERVAL) / step, 3),
    }


def main() -> None:
    parser = make_parser(__doc__)
    args = parser.parse_args()
    conditions = run_record("measured")
    rows: list[dict[str, object]] = []
    own = KernelBuild().wait()
    if own is None:
        raise SystemExit("the kernels cannot be compiled here")
    torch.set_num_threads(1)
    for kernels, library in (("own", own), ("torch's", None)):
        rank, device = make_rank(library)
        for num_sequences in (1, 16):
            rows.append(demo_row(kernels, rank, device, num_sequences))
            print(json.dumps(rows[-1]))
    for name in NETWORKS:
        rows.append(priced_row(name))
        print(json.dumps(rows[-1]))
    save(args.json, conditions, {"rounds": ROUNDS, "rows": rows})


if __name__ == "__main__":
    main()
