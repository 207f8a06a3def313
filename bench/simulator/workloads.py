"""Compares figures of published traces with those of generated sessions, and measures the making of requests.

    python bench/simulator/workloads.py --traces TRACES --json bench/results/simulator/workloads.json

TRACES is a folder with the available traces; missing ones are left out. Generated sessions are drawn with five seeds,
each in a window as long and as busy as the trace that they imitate.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from moestro.config.run_record import run_record
from moestro.core.hashing import hash_key
from moestro.workload.generated.sessions import CHAT, SHAPES, generate, steady_rows
from moestro.workload.rows import RequestForm, RequestMaker, Rows, equal_rows
from moestro.workload.traces.reading import read_trace
from moestro.workload.traces.servegen import Span, draw_requests, read_clients

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save
from shared.workload_statistics import Statistics, measure

SEEDS, REPEATS = range(5), 5
TRACES = {  # name -> block size of the unlimited cache
    "mooncake_conversation.jsonl.zst": 512,
    "mooncake_synthetic.jsonl.zst": 512,
    "sharegpt_qwen3_hash16.jsonl.zst": 16,
    "azure2023_code.csv.zst": 16,
    "azure2023_conv.csv.zst": 16,
    "burstgpt_lengths_8000.csv.zst": 16,
}
SERVEGEN = "servegen_deepseek_r1.jsonl.zst"
# As many requests a second, for as long, in blocks of the same size, as in the trace.
WINDOWS = {
    "chat": (43_058, 5.98, 16),
    "api_agent": (172_800, 24.0, 16),
    "coder": (43_011, 5.97, 16),
    "tool_agent": (23_608, 6.67, 512),
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--traces", type=Path, required=True)
    args = parser.parse_args()
    conditions = run_record("computed")
    at_hand = {name: size for name, size in TRACES.items() if (args.traces / name).exists()}
    recorded = {name: measure(read_trace(args.traces / name), size) for name, size in at_hand.items()}
    if (args.traces / SERVEGEN).exists():
        hour = draw_requests(read_clients(args.traces / SERVEGEN), Span(start_s=36_000), 0)
        recorded[f"{SERVEGEN}, hour 10, seed 0"] = measure(hour)
    generated = {
        name: [measure(steady_rows(SHAPES[name], count, rate, seed), size) for seed in SEEDS]
        for name, (count, rate, size) in WINDOWS.items()
    }
    result = {
        "traces": {name: msgspec.to_builtins(each) for name, each in recorded.items()},
        "generated": {name: [msgspec.to_builtins(each) for each in several] for name, several in generated.items()},
        "cost_us": costs(args.traces),
    }
    save(args.json, conditions, result)
    for name, each in recorded.items():
        print(line(name, [each]))
    for name, several in generated.items():
        print(line(f"{name} (generated)", several))
    print(json.dumps(result["cost_us"], indent=1))


def costs(traces: Path) -> dict[str, dict[str, float]]:
    """Measure the CPU microseconds to make a request with its script, and to generate it."""
    subjects: dict[str, tuple[Rows, int, bool]] = {
        "equal lengths, 24 blocks": (equal_rows(20_000, 384, 256), 16, True),
        "equal lengths, no names": (equal_rows(20_000, 384, 256), 16, False),
        "chat sessions, blocks of 16": (generate(CHAT, 20_000, 6, 0).rows, 16, True),
    }
    path = traces / "mooncake_conversation.jsonl.zst"
    if path.exists():
        rows = read_trace(path)
        subjects |= {f"Mooncake conversation, blocks of {size}": (rows, size, True) for size in (512, 16)}
    found = {}
    for name, (rows, size, names) in subjects.items():
        form = RequestForm(block_size=size, hash_key=hash_key("m"), names_blocks=names)
        maker = RequestMaker(rows, form)
        found[f"make: {name}"] = spread([cpu_us(partial(consume, maker), len(rows)) for _ in range(REPEATS)])
    found["generate: chat sessions"] = spread(
        [cpu_us(lambda: generate(CHAT, 100_000, 6, 0), 100_000) for _ in range(REPEATS)]
    )
    return found


def consume(maker: RequestMaker) -> None:
    for _ in maker.timed(np.arange(len(maker))):
        pass


def cpu_us(work, num_requests: int) -> float:
    started = time.process_time()
    work()
    return 1e6 * (time.process_time() - started) / num_requests


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def line(name: str, several: list[Statistics]) -> str:
    """Format one row of the table in docs/workloads.md: the median over seeds and half the range."""

    def over(read) -> str:
        values = [read(each) for each in several]
        if any(value is None for value in values):
            return "-"
        middle = statistics.median(values)
        apart = "" if len(values) == 1 else f" ±{(max(values) - min(values)) / 2:.2g}"
        return (f"{middle:,.0f}" if middle >= 100 else f"{middle:.3g}") + apart

    cells = [
        over(lambda s: s.rate),
        over(lambda s: s.gap_cv),
        *(over(lambda s, p=p: getattr(s.prompt_tokens, p)) for p in ("mean", "p50", "p99")),
        *(over(lambda s, p=p: getattr(s.output_tokens, p)) for p in ("mean", "p50", "p99")),
        over(lambda s: s.turns and s.turns.single_share),
        over(lambda s: s.turns and s.turns.follow_up_share),
        over(lambda s: s.turns and s.turns.gap_s and s.turns.gap_s.p50),
        over(lambda s: s.turns and s.turns.gap_s and s.turns.gap_s.p90),
        over(lambda s: s.reuse and s.reuse.hit_share),
        over(lambda s: s.reuse and s.reuse.own_session_share),
        over(lambda s: s.reuse and s.reuse.reused_share),
        over(lambda s: s.reuse and s.reuse.again_s and s.reuse.again_s.p50),
    ]
    return f"| {name} | {several[0].num_requests:,} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
