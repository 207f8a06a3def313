"""Measures the router's queue before two real vLLM servers that get more requests than they can answer.

    python bench/routing/vllm_queue.py --vllm /path/to/venv/bin/vllm [--rounds 5] \\
        [--json bench/results/routing/vllm_queue.json]
    python bench/routing/vllm_queue.py --vllm ... --rounds 1 --seconds 5 --capacity-requests 60    # a short try

A third of the requests is latency-sensitive (urgent, class `ls`), the others are best effort (`be`). The rate of the
answers when all requests come at once is the capacity; each run sends 1.2 times as many for some seconds. In every
round the rows of ROWS take turns, in another order each time, with the same requests. The servers run at most
NUM_SEQS requests at once and order by `priority`, which is 0 for every request unless the router writes the class, so
that they serve in order of arrival.

Figures are the client's: times to the first token by class, and output tokens a second from the first request to the
last token.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np

from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import vllm_pair
from shared.results import make_parser, package_version, save, spread

LOAD, URGENT_SHARE, NUM_SEQS = 1.2, 1 / 3, 16
PROMPT_TOKENS, ANSWER_TOKENS = (64, 512), (16, 64)  # least and most
VOCABULARY = 4096
BASE = "no queue"
ROWS = {
    BASE: (),
    "queue fcfs": ("--queue-policy", "fcfs"),
    "queue qllm": ("--queue-policy", "qllm"),
    "queue qllm, evicts": ("--queue-policy", "qllm", "--evict-best-effort"),
    "queue qllm, sends classes": ("--queue-policy", "qllm", "--send-class", "vllm"),
}


@dataclass(frozen=True)
class Request:
    """One request of a load."""

    at_s: float
    is_urgent: bool
    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Answer:
    """Times of one answer, from the start of the run."""

    request: Request
    first_s: float
    last_s: float


def load(seed: int, rate: float, num_requests: int) -> list[Request]:
    """Draw requests that come at random times, `rate` a second."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, num_requests)) if np.isfinite(rate) else np.zeros(num_requests)
    return [
        Request(
            at_s=float(at_s),
            is_urgent=bool(rng.random() < URGENT_SHARE),
            prompt=rng.integers(3, VOCABULARY, rng.integers(*PROMPT_TOKENS)).tolist(),
            max_tokens=int(rng.integers(*ANSWER_TOKENS)),
        )
        for at_s in times
    ]


async def ask(client: aiohttp.ClientSession, url: str, request: Request, began_s: float) -> Answer | None:
    """Send a request at its time, and read its stream. Returns None if it fails, and prints why."""
    await asyncio.sleep(max(0.0, began_s + request.at_s - time.perf_counter()))
    body = {
        "model": "m", "prompt": request.prompt, "max_tokens": request.max_tokens, "ignore_eos": True, "stream": True,
        "temperature": 1, "service_class": "ls" if request.is_urgent else "be",
    }  # fmt: skip
    first_s = 0.0
    async with client.post(f"{url}/v1/completions", json=body) as answer:
        if answer.status != 200:
            print(f"status {answer.status}: {await answer.text()}", flush=True)
            return None
        async for line in answer.content:
            if line.startswith(b'data: {"error"'):
                print(line.decode(), flush=True)
                return None
            if line.strip() == b"data: [DONE]":
                return Answer(request, first_s, time.perf_counter() - began_s)
            if line.startswith(b"data: {") and not first_s:
                first_s = time.perf_counter() - began_s
    raise AssertionError("a stream without an end")


async def measured(url: str, requests: list[Request]) -> list[Answer | None]:
    """Send all requests at their times. Returns their answers; None is a failure."""
    limits = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300), connector=limits) as client:
        began_s = time.perf_counter() + 0.2
        return await asyncio.gather(*(ask(client, url, request, began_s) for request in requests))


def figures(results: list[Answer | None]) -> dict[str, float]:
    """Return the latencies of both classes, the throughput and the failures of one run."""
    answers = [one for one in results if one is not None]
    ttft_s = {
        is_urgent: [one.first_s - one.request.at_s for one in answers if one.request.is_urgent == is_urgent]
        for is_urgent in (True, False)
    }
    seconds = max(one.last_s for one in answers) - min(one.request.at_s for one in answers)
    return {
        "failed": len(results) - len(answers),
        "urgent_ttft_mean_s": statistics.fmean(ttft_s[True]),
        "urgent_ttft_p99_s": float(np.percentile(ttft_s[True], 99)),
        "best_effort_ttft_mean_s": statistics.fmean(ttft_s[False]),
        "best_effort_ttft_max_s": max(ttft_s[False]),
        "tokens_per_s": sum(one.request.max_tokens for one in answers) / seconds,
    }


@contextlib.contextmanager
def routed(row: str, work: Path) -> Iterator[str]:
    """Empty the servers' caches, and start a router. Yields its address."""
    vllm_pair.empty_caches()
    with vllm_pair.router(0, "least_loaded", work, "--metrics-interval", "0.1", *ROWS[row]) as router:
        time.sleep(2.0)  # until it has subscribed to the events
        yield router.url


def run_row(row: str, work: Path, requests: list[Request]) -> list[Answer | None]:
    with routed(row, work) as url:
        return asyncio.run(measured(url, requests))


def measured_capacity(work: Path, num_requests: int) -> float:
    """Requests a second that both servers answer when all of them wait at once."""
    answers = [one for one in run_row(BASE, work, load(0, np.inf, num_requests)) if one is not None]
    return len(answers) / max(one.last_s for one in answers)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--vllm", required=True, help="the vllm command")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=25.0, help="over which the requests of a run arrive")
    parser.add_argument("--capacity-requests", type=int, default=400, help="of the run that finds the capacity")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    given = parser.parse_args()
    conditions = run_record("measured")
    runs: dict[str, list[dict[str, float]]] = {row: [] for row in given.rows}
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = ("--max-num-seqs", str(NUM_SEQS), "--scheduling-policy", "priority")
        for at in range(2):
            stack.enter_context(vllm_pair.vllm(given.vllm, at, work, *flags))
        capacity = measured_capacity(work, given.capacity_requests)
        print(f"capacity: {capacity:.2f} requests/s", flush=True)
        for number in range(given.rounds):
            requests = load(1 + number, LOAD * capacity, round(LOAD * capacity * given.seconds))
            start = number % len(runs)
            for row in (*given.rows[start:], *given.rows[:start]):
                runs[row].append(figures(run_row(row, work, requests)))
                shown = {name: round(value, 3) for name, value in runs[row][-1].items()}
                print(f"round {number}, {row}: {shown}", flush=True)
    rows = {row: {name: spread([one[name] for one in found]) for name in found[0]} for row, found in runs.items()}
    ratios = {
        row: {name: spread([one[name] / base[name] for one, base in zip(found, runs[BASE], strict=True)])
              for name in found[0] if name != "failed"}
        for row, found in runs.items() if BASE in runs
    }  # fmt: skip
    for row, over in ratios.items():
        print(f"{row}: over {BASE}: urgent TTFT {over['urgent_ttft_mean_s']}, tokens/s {over['tokens_per_s']}")
    save(
        given.json,
        conditions,
        {
            "model": "the demo model, bfloat16, vLLM on the CPU, one thread a server",
            "vllm": package_version(Path(given.vllm).with_name("python"), "vllm"),
            "workload": {
                "load": LOAD, "urgent_share": URGENT_SHARE, "max_num_seqs": NUM_SEQS, "seconds": given.seconds,
                "prompt_tokens": PROMPT_TOKENS, "answer_tokens": ANSWER_TOKENS,
            },
            "capacity_requests_per_s": round(capacity, 3),
            "rows": rows,
            "over_no_queue": ratios,
            "runs": runs,
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
