"""Measures what the record of all levels costs a request, in microseconds of processor time and in bytes.

    python bench/micro/request_record.py [--json bench/results/micro/request_record.json]

An engine serves requests of 100 prompt tokens and 20 output tokens, 32 at once, on a device that computes nothing, with
and without its recorder, and with visits of experts on two workers. The API server's part is the router and the log of
two engines, with as many reports of figures; it has a file, whose lines a thread encodes.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from moestro.config.run_record import run_record
from moestro.core.hashing import hash_blocks, hash_key
from moestro.core.load_figures import IDLE
from moestro.core.request import FinishReason, Request, SamplingParams
from moestro.core.scheduling_events import (
    ExpertVisits,
    PoliciesStarted,
    SequenceAdmitted,
    SequenceLeft,
    SequenceQueued,
)
from moestro.core.work import BlockMoves, Forward, StepResult, StepVisits
from moestro.engine.rank import build_rank, recorder_of
from moestro.engine.settings import SchedulerSettings
from moestro.routing.decision_record import PolicyText, RecordedRouter
from moestro.routing.registry import policy_from
from moestro.routing.router import Router
from moestro.routing.settings import RouterSettings
from moestro.server.engines.engine_reports import RequestLog

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save, spread

NUM_REQUESTS, NUM_PROMPT, NUM_OUTPUT, NUM_SEQS, BLOCK_SIZE, REPEATS = 1000, 100, 20, 32, 16, 5
ENDS, PAIRS = (1, 3, 5, 7), ((1, 2),) * 4


def make_request(i: int) -> Request:
    ids, key = np.arange(i % 50, i % 50 + NUM_PROMPT, dtype=np.int32), hash_key("bench", None, str(i))
    return Request(
        request_id=f"cmpl-{i:032x}-0",
        num_prompt_tokens=NUM_PROMPT,
        sampling=SamplingParams(max_tokens=NUM_OUTPUT),
        arrival_ns=i,
        token_ids=ids.tobytes(),
        block_hashes=hash_blocks(key, ids, BLOCK_SIZE),
        hash_key=key,
    )


class IdleDevice:
    """Returns token 7 for each request at once; with `has_visits`, also the experts that computed it."""

    def __init__(self, *, has_visits: bool) -> None:
        self._items: deque[Forward] = deque()
        self._has_visits = has_visits

    def launch(self, item: Forward, now_ns: int) -> None:
        self._items.append(item)

    def move_blocks(self, moves: BlockMoves, now_ns: int) -> None:
        raise AssertionError("no KV leaves the device")

    def poll(self, now_ns: int) -> list[StepResult]:
        found = []
        while self._items:
            units = self._items.popleft().units
            tokens = np.where(units.logits > 0, 7, -1).astype(np.int32)
            visits = StepVisits(0, ENDS, np.ones((len(units), 4, 2), np.int64)) if self._has_visits else None
            found.append(StepResult(units.slot, tokens, visits=visits))
        return found

    def ready_at_ns(self) -> int | None:
        return None


def engine_us(*, is_recorded: bool, has_visits: bool = False) -> tuple[float, float]:
    """Return microseconds of an engine for a request, and bytes of its events."""
    settings = SchedulerSettings(
        num_blocks=1000, block_size=BLOCK_SIZE, max_model_len=256, max_num_seqs=NUM_SEQS, max_num_batched_tokens=512
    )
    rank = build_rank(settings, IdleDevice(has_visits=has_visits))
    recorder = recorder_of(rank) if is_recorded else None
    requests, num_ended, num_bytes, now_ns = deque(map(make_request, range(NUM_REQUESTS))), 0, 0, 0
    started = time.process_time()
    while num_ended < NUM_REQUESTS:
        while requests and NUM_REQUESTS - len(requests) < num_ended + NUM_SEQS + 8:
            rank.add(requests.popleft(), now_ns)
        num_ended += sum(output.finish_reason is not None for output in rank.step(now_ns))
        if recorder is not None:
            num_bytes += len(msgspec.msgpack.encode(recorder.take()))
        now_ns += 1_000_000
    return (time.process_time() - started) / NUM_REQUESTS * 1e6, num_bytes / NUM_REQUESTS


def server_us(*, is_recorded: bool) -> tuple[float, float]:
    """Return microseconds of the API server's event loop for a request, and bytes of its lines in the file."""
    entries: list[Any] = []
    settings, log = RouterSettings(block_size=BLOCK_SIZE), None
    router: Router = Router(policy_from("moestro"), settings)
    if is_recorded:
        router, log = RecordedRouter(PolicyText("moestro"), settings, entries.append), RequestLog("", 2, entries.append)
        for engine in range(2):
            log.took(engine, [PoliciesStarted("fcfs", "last_in_order")])
    for _ in range(2):
        router.set_routable(router.add_engine(), routable=True)
    requests = [make_request(i) for i in range(NUM_REQUESTS)]
    figures = msgspec.structs.replace(IDLE, num_running=4, num_waiting=1, kv_usage=0.3, num_tokens=500)
    started = time.process_time()
    for i, request in enumerate(requests):
        now_ns, name = i * 10_000_000, request.request_id
        decision = router.submit(request, now_ns)
        if log is not None:
            log.routed(request, decision, "")
            log.took(decision.engine, [SequenceQueued(name, now_ns, 0, 1), SequenceAdmitted(name, now_ns)])
        for step in range(NUM_OUTPUT):
            router.report(decision.engine, figures, now_ns + step, now_ns + step)
        router.first_token(name, now_ns)
        if log is not None:
            log.took(decision.engine, [SequenceLeft(name, 0, NUM_OUTPUT, (ExpertVisits(0, ENDS, PAIRS),))])
        router.ended(name, now_ns, NUM_OUTPUT)
        if log is not None:
            log.ended(request, decision.engine, FinishReason.LENGTH, NUM_OUTPUT)
    spent_us = (time.process_time() - started) / NUM_REQUESTS * 1e6
    return spent_us, len(msgspec.json.Encoder().encode_lines(entries)) / NUM_REQUESTS


CASES: dict[str, Callable[[], tuple[float, float]]] = {
    "engine, without": lambda: engine_us(is_recorded=False),
    "engine, recorded": lambda: engine_us(is_recorded=True),
    "engine, recorded with visits": lambda: engine_us(is_recorded=True, has_visits=True),
    "API server, without": lambda: server_us(is_recorded=False),
    "API server, recorded": lambda: server_us(is_recorded=True),
}


def main() -> None:
    """Measure all cases in turn, several times."""
    options = make_parser(__doc__).parse_args()
    conditions = run_record("measured")
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    for _ in range(REPEATS):
        for name, case in CASES.items():
            found[name].append(case())
    figures = {
        name: {"us_per_request": spread([us for us, _ in runs]), "bytes_per_request": round(runs[0][1])}
        for name, runs in found.items()
    }
    for name, row in figures.items():
        spent = row["us_per_request"]
        span = f"{spent['min']:.0f} to {spent['max']:.0f}"
        print(f"{name:30} {spent['median']:6.0f} us ({span}), {row['bytes_per_request']} bytes")
    save(options.json, conditions, {"requests": NUM_REQUESTS, "output_tokens": NUM_OUTPUT, "cases": figures})


if __name__ == "__main__":
    main()
