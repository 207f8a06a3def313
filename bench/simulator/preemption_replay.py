"""Replays the loads of `bench/serving/preemption.py` on one rank in this process, whose clock is its processor time.

    OMP_NUM_THREADS=1 python bench/simulator/preemption_replay.py [--seeds 5] \\
        [--json bench/results/simulator/preemption_replay.json]

The demo model computes for real. HTTP, the API server and the wait for other processes are left out, so that schedulers
can be compared on a busy machine. Idle time is skipped. All systems get the same arrivals for a seed, and ratios are
taken for each seed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from moestro.config.run_record import run_record
from moestro.core.request import Request, SamplingParams, ServiceClass
from moestro.engine.rank import Rank, build_preemptive_rank, build_rank
from moestro.engine.settings import SchedulerSettings
from moestro.flow.policies.one_queue import in_order
from moestro.flow.policies.qllm import ExpertLevelPreemption
from moestro.model.device import TorchDevice
from moestro.model.settings import ModelSettings
from moestro.model.staged.staged_device import StagedTorchDevice, open_staged_device

sys.path.insert(0, str(Path(__file__).parents[1]))
from serving.preemption import BUDGET, LENGTHS, NUM_SEQS, Point, Requests, draw
from shared.models import DEMO
from shared.results import make_parser, save, spread

NUM_BLOCKS, BLOCK_SIZE, MAX_LEN = 4000, 16, 2048
LS_FIRST = {"scheduling_policy": "qllm", "evict_policy": "least_computed_be_first"}
BASELINE = "continuous, FCFS"
FIGURES = ("ls_ttft_ms", "ls_turnaround_ms", "be_ttft_ms", "be_turnaround_ms", "tokens_per_s")


def ranks(staged: StagedTorchDevice) -> dict[str, Callable[[], Rank]]:
    """Return the maker of each system's rank, all on the same network."""
    bounds = {
        "num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "max_model_len": MAX_LEN, "max_num_seqs": NUM_SEQS,
        "max_num_batched_tokens": BUDGET,
    }  # fmt: skip
    urgent = bounds | LS_FIRST | {"max_num_urgent_seqs": NUM_SEQS}

    def fused(**more: str) -> Rank:
        return build_rank(SchedulerSettings(**bounds | more), TorchDevice(staged.staged.network, staged.pools))

    def stepping(policy, *, passes_decodes: bool = False) -> Rank:
        return build_preemptive_rank(SchedulerSettings(**urgent), staged, policy, passes_decodes=passes_decodes)

    return {
        BASELINE: fused,
        "iteration-level LS first": lambda: fused(**LS_FIRST),
        "in stages, none preempted": lambda: stepping(in_order),
        "expert-level preemption": lambda: stepping(ExpertLevelPreemption()),
        "expert-level, every token": lambda: stepping(ExpertLevelPreemption(), passes_decodes=True),
    }


def request(requests: Requests, i: int) -> Request:
    return Request(
        request_id=str(i),
        num_prompt_tokens=len(requests.prompts[i]),
        sampling=SamplingParams(max_tokens=int(requests.num_output[i]), temperature=0.0),
        arrival_ns=int(requests.offsets_ns[i]),
        token_ids=np.array(requests.prompts[i], np.int32).tobytes(),
        service_class=ServiceClass.LS if requests.is_ls[i] else ServiceClass.BE,
    )


def replay(rank: Rank, requests: Requests) -> dict[str, float]:
    """Serve all requests; return means of each class, and the throughput."""
    num, came = 0, requests.offsets_ns
    first, last = np.zeros(len(came), np.int64), np.zeros(len(came), np.int64)
    begun_ns = time.process_time_ns()
    while num < len(came) or rank.has_work:
        if not rank.has_work:  # skips the idle time until the next arrival
            begun_ns = min(begun_ns, time.process_time_ns() - int(came[num]))
        now_ns = time.process_time_ns() - begun_ns
        while num < len(came) and came[num] <= now_ns:
            rank.add(request(requests, num), now_ns)
            num += 1
        due_ns = begun_ns + int(came[num]) if num < len(came) else 2**63
        outputs = rank.step(now_ns, lambda due_ns=due_ns: time.process_time_ns() >= due_ns)
        for output in outputs:
            i, now_ns = int(output.request_id), time.process_time_ns() - begun_ns
            first[i] = first[i] or now_ns
            last[i] = now_ns
    found = {}
    for name, rows in (("ls", requests.is_ls), ("be", ~requests.is_ls)):
        found[f"{name}_ttft_ms"] = float((first - came)[rows].mean()) / 1e6
        found[f"{name}_turnaround_ms"] = float((last - came)[rows].mean()) / 1e6
    found["tokens_per_s"] = float(requests.num_output.sum()) * 1e9 / float(last.max() - came.min())
    return found


def measure(args: argparse.Namespace) -> list[dict[str, object]]:
    settings = ModelSettings(model=str(DEMO), dtype="bfloat16", device="cpu", num_gpu_blocks_override=NUM_BLOCKS)
    staged, _ = open_staged_device(settings, max_tokens=BUDGET)
    made, table = ranks(staged), []
    for rate in args.rates:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in made}
        for seed in range(1, args.seeds + 1):
            seconds, lengths = args.requests / rate, str(args.lengths)
            requests = draw(
                Point(
                    url="",
                    pid=0,
                    reads_priority=False,
                    rate=rate,
                    seconds=seconds,
                    seed=seed,
                    shrink=8,
                    lengths=lengths,
                )
            )
            for name, make in made.items():
                runs[name].append(replay(make(), requests))
        for name, own in runs.items():
            row: dict[str, object] = {"rate": rate, "system": name}
            for figure in FIGURES:
                row[figure] = spread([run[figure] for run in own])
                ratios = [run[figure] / base[figure] for run, base in zip(own, runs[BASELINE], strict=True)]
                row[f"{figure}_over_fcfs"] = spread(ratios)
            table.append(row)
            print(json.dumps(row), flush=True)
    return table


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[12, 24], help="requests/s")
    parser.add_argument("--requests", type=int, default=60, help="of one run")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--lengths", type=Path, default=LENGTHS, help="a trace with input_length and output_length")
    args = parser.parse_args()
    conditions = run_record("measured")
    rows = measure(args)
    setting = {
        "clock": "processor time of one process", "num_threads": 1, "requests": args.requests, "seeds": args.seeds,
        "lengths": "ShareGPT / 8" if args.lengths.is_file() else "log-normal stand-in for ShareGPT / 8",
        "ls_share": 0.2,
    }  # fmt: skip
    save(args.json, conditions, {**setting, "rows": rows})


if __name__ == "__main__":
    main()
