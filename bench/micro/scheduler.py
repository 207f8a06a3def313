"""Measures one step of the scheduler, schedule and update, in microseconds, with all sequences in decode.

    python bench/micro/scheduler.py [--json bench/results/micro/scheduler.json]

Budgets (docs/architecture.md): 25 at 12 running sequences, 60 at 64. The same step is also measured with a plain twin
that has one Python object for each sequence. The twin keeps the same state and decides nothing.

A second part measures `schedule` alone, for each order, with a long waiting queue whose first request does not fit. One
queue stays as it is. In the other, a request arrives and another leaves at every step, so that each step sorts it. No
budget covers these; `fcfs` with an empty queue stands beside them.

A third part (`--only clients` measures it alone) repeats that with requests of several clients under `fcfs`, in turn
without shares by client and with them. Each client holds an equal part, so that no share changes a plan.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from moestro.config.run_record import run_record
from moestro.core.hashing import hash_blocks, hash_key
from moestro.core.request import Request, SamplingParams
from moestro.core.work import StepResult
from moestro.engine.registry import ORDER_POLICIES
from moestro.engine.scheduler import Scheduler
from moestro.engine.settings import SchedulerSettings

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save

BLOCK_SIZE, PROMPT, STEPS, REPEATS = 16, 256, 1000, 7


def make_request(i: int, num_clients: int = 1) -> Request:
    ids, key = np.arange(PROMPT, dtype=np.int32), hash_key("bench", None, str(i))
    return Request(
        request_id=f"r{i}",
        num_prompt_tokens=PROMPT,
        sampling=SamplingParams(max_tokens=STEPS + 100, stop_token_ids=(0,)),
        arrival_ns=i,
        token_ids=ids.tobytes(),
        block_hashes=hash_blocks(key, ids, BLOCK_SIZE),
        hash_key=key,
        client=f"10.0.0.{i % num_clients}",
    )


def scheduler_step_us(num_sequences: int) -> tuple[float, float]:
    """Measure the mean microseconds of (schedule, update) over STEPS decode steps, with block borders and hashes."""
    blocks = num_sequences * (-(-(PROMPT + STEPS + 200) // BLOCK_SIZE))
    scheduler = Scheduler(
        SchedulerSettings(
            num_blocks=blocks,
            block_size=BLOCK_SIZE,
            max_model_len=PROMPT + STEPS + 100,
            max_num_seqs=num_sequences,
            max_num_batched_tokens=num_sequences * PROMPT,
        )
    )
    for i in range(num_sequences):
        scheduler.add(make_request(i))
    spent = [0, 0]
    for step in range(-10, STEPS):
        started = time.perf_counter_ns()
        plan = scheduler.schedule(0)
        scheduled = time.perf_counter_ns()
        assert plan is not None
        result = StepResult(plan.units.slot, np.ones(len(plan.units), np.int32))
        computed = time.perf_counter_ns()
        scheduler.update(result, 0)
        if step >= 0:
            spent[0] += scheduled - started
            spent[1] += time.perf_counter_ns() - computed
    return spent[0] / STEPS / 1e3, spent[1] / STEPS / 1e3


class PlainSequence:
    """A sequence of the twin, with attributes in place of columns."""

    def __init__(self, i: int) -> None:
        self.slot, self.num_computed, self.num_tokens, self.last = i, PROMPT, PROMPT + 1, PROMPT + STEPS + 100
        self.tokens, self.table, self.stop = list(range(PROMPT + 1)), list(range(PROMPT // BLOCK_SIZE)), {0}


def plain_step_us(num_sequences: int) -> float:
    """Measure the same decode step with one Python object for each sequence, without hashing and eviction."""
    sequences = [PlainSequence(i) for i in range(num_sequences)]
    started = time.perf_counter_ns()
    for _ in range(STEPS):
        for s in sequences:
            if s.num_computed + 1 > len(s.table) * BLOCK_SIZE:
                s.table.append(len(s.table))
        width = max(len(s.table) for s in sequences)
        np.array([s.table + [0] * (width - len(s.table)) for s in sequences], np.int32)
        np.array([[s.slot, s.num_computed, 1, s.tokens[s.num_computed]] for s in sequences], np.int32)
        for s in sequences:
            s.num_computed += 1
            s.tokens.append(1)
            s.num_tokens += 1
            _ = 1 in s.stop or s.num_tokens >= s.last
    return (time.perf_counter_ns() - started) / STEPS / 1e3


def full_scheduler(order: str, num_waiting: int, num_clients: int = 1, share: str = "equal") -> Scheduler:
    """Make a scheduler with 64 decodes, 16 free blocks, and `num_waiting` requests, the first of which never fits."""
    per_sequence = (PROMPT + STEPS) // BLOCK_SIZE + 1
    scheduler = Scheduler(
        SchedulerSettings(
            num_blocks=64 * per_sequence + 16,
            block_size=BLOCK_SIZE,
            max_model_len=PROMPT + STEPS + 100,
            max_num_seqs=80,
            max_num_batched_tokens=64 * PROMPT,
            max_num_queued_reqs=64 + num_waiting + 1,
            scheduling_policy=order,
            share_policy=share,
        )
    )
    for i in range(64):
        scheduler.add(make_request(i, num_clients))
    plan = scheduler.schedule(0)
    assert plan is not None
    assert len(scheduler.waiting) == 0
    scheduler.update(StepResult(plan.units.slot, np.ones(len(plan.units), np.int32)), 0)
    for slot in scheduler.table.running.tolist():  # allocates every block they will need, so that only 16 stay free
        while len(scheduler.table.at(slot).blocks) < per_sequence:
            scheduler.table.add_block(slot, scheduler.pool.allocate())
    for i in range(64, 64 + num_waiting):
        scheduler.add(make_request(i, num_clients))
    return scheduler


def long_queue_us(order: str, num_waiting: int, *, changes: bool, num_clients: int = 1, share: str = "equal") -> float:
    """Measure the mean microseconds of `schedule` over 200 decode steps at intervals of 50 ms, in time of the CPU."""
    scheduler, spent, steps = full_scheduler(order, num_waiting, num_clients, share), 0, 200
    for step in range(-10, steps):
        now_ns = (step + 10) * 50_000_000
        if changes:
            scheduler.abort(f"r{64 + step + 10}", 0)
            scheduler.add(make_request(10**6 + step, num_clients))
        started = time.thread_time_ns()
        plan = scheduler.schedule(now_ns)
        if step >= 0:
            spent += time.thread_time_ns() - started
        assert plan is not None
        assert len(plan.units) == 64, "the policy admitted a waiting request"
        scheduler.update(StepResult(plan.units.slot, np.ones(len(plan.units), np.int32)), now_ns)
    return spent / steps / 1e3


def long_queue_rows() -> list[dict[str, object]]:
    """Measure one row for each order, with an empty queue for comparison."""
    rows: list[dict[str, object]] = []
    for order, num_waiting in (("fcfs", 0), *((order, 1000) for order in ORDER_POLICIES.names())):
        row: dict[str, object] = {"running": 64, "waiting": num_waiting, "order": order}
        for name, changes in (("queue_stays", False), ("queue_changes", True)):
            if num_waiting or not changes:
                times = sorted(long_queue_us(order, num_waiting, changes=changes) for _ in range(REPEATS))
                row[f"schedule_us_{name}"] = {"min": times[0], "median": times[REPEATS // 2], "max": times[-1]}
        rows.append(row)
        print(json.dumps(row))
    return rows


def client_rows() -> list[dict[str, object]]:
    """Measure `schedule` with several clients, in turn without shares and with them."""
    rows: list[dict[str, object]] = []
    for num_clients in (1, 8, 64):
        for num_waiting, changes in ((0, False), (1000, False), (1000, True)):
            times: dict[str, list[float]] = {"none": [], "equal": []}
            for _ in range(REPEATS):
                for share, found in times.items():
                    found.append(
                        long_queue_us("fcfs", num_waiting, changes=changes, num_clients=num_clients, share=share)
                    )
            row: dict[str, object] = {"clients": num_clients, "waiting": num_waiting, "queue_changes": changes}
            for share, found in times.items():
                found.sort()
                row[f"schedule_us_{share}"] = {"min": found[0], "median": found[REPEATS // 2], "max": found[-1]}
            rows.append(row)
            print(json.dumps(row))
    return rows


def step_rows() -> list[dict[str, object]]:
    """Measure whole steps with all sequences in decode."""
    rows: list[dict[str, object]] = []
    for num_sequences, budget in ((12, 25), (64, 60)):
        pairs = [(scheduler_step_us(num_sequences), plain_step_us(num_sequences)) for _ in range(REPEATS)]
        totals = sorted(schedule + update for (schedule, update), _ in pairs)
        ratios = sorted((schedule + update) / plain for (schedule, update), plain in pairs)
        rows.append(
            {
                "running": num_sequences,
                "budget_us": budget,
                "step_us": {"min": totals[0], "median": totals[REPEATS // 2], "max": totals[-1]},
                "schedule_us_median": sorted(s for (s, _), _ in pairs)[REPEATS // 2],
                "over_plain_twin": {"min": ratios[0], "median": ratios[REPEATS // 2], "max": ratios[-1]},
            }
        )
        print(json.dumps(rows[-1]))
    return rows


PARTS = {"rows": step_rows, "long_queue": long_queue_rows, "clients": client_rows}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", choices=PARTS, help="the part that is measured; all of them if it is left out")
    args = parser.parse_args()
    conditions = run_record("measured")
    parts = [args.only] if args.only else list(PARTS)
    save(args.json, conditions, {"repeats": REPEATS} | {part: PARTS[part]() for part in parts})


if __name__ == "__main__":
    main()
