"""Measures what a load in the head of each answer costs, in microseconds of processor time.

    python bench/micro/load_report.py [--json bench/results/micro/load_report.json]

In the API server: to sum the reports of one and of eight engines, and to write the header. In the router: to find the
head of an answer among cached ones, with a load and without, then to read the load and to hand it to the router before
a decision. The lower bound is the look-up of a head without a load. Each figure is the least of ROUNDS rounds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from moestro.config.run_record import run_record
from moestro.core.load_figures import LoadFigures
from moestro.gateway.clients.http_headers import HeaderCache
from moestro.routing.registry import policy_from
from moestro.routing.router import Router
from moestro.routing.settings import EngineSpec, RouterSettings
from moestro.wire.load_report import LOAD_REPORT_HEADER, LoadReport, merged_load, read, written

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save

NUM_CALLS, ROUNDS, NUM_ENGINES = 1000, 20, 16
LOAD = LoadFigures(num_running=37, num_waiting=4, kv_usage=0.4375, queued_prefill_tokens=8123, num_tokens=70251)
HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
    b"X-Request-Id: moestro-route-0\r\n%bTransfer-Encoding: chunked\r\nDate: Fri, 27 Nov 2026 20:00:00 GMT\r\n\r\n"
)


def least_us(call: Callable[[int], object]) -> float:
    """The least mean of a round, microseconds of processor time."""
    found = []
    for _ in range(ROUNDS):
        begin = time.process_time_ns()
        for number in range(NUM_CALLS):
            call(number)
        found.append((time.process_time_ns() - begin) / NUM_CALLS / 1e3)
    return round(min(found), 2)


def measured() -> dict[str, float]:
    """All figures by name."""
    value = written(LoadReport(1234, LOAD)).encode()
    cache: HeaderCache[str] = HeaderCache(16, LOAD_REPORT_HEADER)
    plain, loaded = HEAD % b"", HEAD % (LOAD_REPORT_HEADER.encode() + b": " + value + b"\r\n")
    for head in (plain, loaded):
        cache.learn(head, "head", has_length=False)
    router = Router(policy_from("lmetric"), RouterSettings(block_size=16))
    for _ in range(NUM_ENGINES):
        router.set_routable(router.add_engine(EngineSpec(num_blocks=8192)), routable=True)

    def report(number: int) -> None:
        found = read(value)
        assert found is not None
        router.report(number % NUM_ENGINES, found.load, number, number)

    return {
        "server: sum and write, 1 engine": least_us(lambda _: written(LoadReport(1234, merged_load([LOAD])))),
        "server: sum and write, 8 engines": least_us(lambda _: written(LoadReport(1234, merged_load([LOAD] * 8)))),
        "router: find a head without a load": least_us(lambda _: cache.find(plain)),
        "router: find a head with a load": least_us(lambda _: cache.find(loaded)),
        "router: read the load and report it": least_us(report),
        "header, bytes": len(loaded) - len(plain),
    }


def main() -> None:
    """Print the figures, and store them where --json says."""
    given = make_parser(__doc__).parse_args()
    conditions, figures = run_record("measured"), measured()
    for name, value in figures.items():
        print(f"{value:8.2f}  {name}")
    save(given.json, conditions, {"figures": figures})


if __name__ == "__main__":
    main()
