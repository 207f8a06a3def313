"""Measures answers of a server with two threads beside busy programs, by the rounds for which waiting threads spin.

    python bench/serving/busy_cores.py --json bench/results/serving/busy_cores.json

One user asks the demo model for 24 tokens, again and again, while other programs compute on the same cores. A thread of
an engine that waits for the others spins for GOMP_SPINCOUNT rounds, then sleeps; 300,000 is OpenMP's own choice, and
`config/cores.py` has the server's. One thread stands beside them. Figures are milliseconds of an answer.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save, spread
from shared.server import free_port, moestro

BUSY_PROGRAMS, ROUNDS_OF_SPINNING, NUM_ANSWERS = (0, 1, 2, 4), (1_000, 3_000, 10_000, 30_000, 300_000), 12


@contextlib.contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """Run programs that need a core each."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def answer_ms(url: str) -> float:
    body = {"model": "moestro-demo", "prompt": "def read_file(path):\n", "max_tokens": 24, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    started = time.perf_counter()
    with urllib.request.urlopen(request) as answer:
        answer.read()
    return 1e3 * (time.perf_counter() - started)


def main() -> None:
    parser = make_parser(__doc__)
    args = parser.parse_args()
    conditions, rows = run_record("measured"), []
    for num_busy in BUSY_PROGRAMS:
        for num_threads, num_rounds in ((1, 0), *((2, each) for each in ROUNDS_OF_SPINNING)):
            flags = ("moestro-demo", "--device", "cpu", "--threads", str(num_threads))
            with busy_programs(num_busy), moestro(free_port(), *flags, GOMP_SPINCOUNT=str(num_rounds)) as server:
                answer_ms(server.url)
                times = [answer_ms(server.url) for _ in range(NUM_ANSWERS)]
            row = {"busy_programs": num_busy, "threads": num_threads, "rounds": num_rounds}
            rows.append({**row, "answer_ms": spread(times)})
            print(json.dumps(rows[-1]), flush=True)
    save(args.json, conditions, {"answers": NUM_ANSWERS, "rows": rows})


if __name__ == "__main__":
    main()
