"""Ten times the load that the server can bear, for a minute: goodput beside the peak, refusals, memory.

    # Starts `moestro serve` itself
    python bench/serving/overload.py [--seconds 60] [--json bench/results/serving/overload.json]

The sustainable rate is what a closed load of as many users as may run reaches. Peak: the best goodput of open loads
around that rate, each before a server that has rested. Goodput counts requests whose first token came within
TTFT_SLO_MS and the others within TPOT_SLO_MS each.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save
from shared.server import MOESTRO, Server, moestro

PORT, INPUT_LEN, OUTPUT_LEN = 8192, 64, 16
RUNNING, QUEUED = 32, 32  # what the server may hold
TTFT_SLO_MS, TPOT_SLO_MS = 3000, 100
URL = f"http://127.0.0.1:{PORT}"


def bench(work: Path, num_prompts: int, *load: str) -> dict[str, object]:
    """One run of `moestro bench`."""
    out = work / "run.json"
    sizes = ["--random-input-len", str(INPUT_LEN), "--random-output-len", str(OUTPUT_LEN)]
    slos = ["--goodput", f"ttft:{TTFT_SLO_MS}", f"tpot:{TPOT_SLO_MS}"]
    command = [MOESTRO, "bench", "--base-url", URL, "--num-prompts", str(num_prompts), *sizes, *slos, *load]
    done = subprocess.run([*command, "--json", str(out)], capture_output=True, text=True, check=False)
    assert out.exists(), done.stderr[-2000:]
    return json.loads(out.read_text())["report"]


def refusals(stop: threading.Event, found: list[dict[str, object]]) -> None:
    """Ask once a second; keep how long a refusal took, and its Retry-After."""
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    while not stop.wait(1):
        request = urllib.request.Request(f"{URL}/v1/completions", body, {"Content-Type": "application/json"})
        started = time.perf_counter()
        try:
            urllib.request.urlopen(request, timeout=30).read()
        except urllib.error.HTTPError as error:
            ms = 1e3 * (time.perf_counter() - started)
            found.append({"status": error.code, "retry_after": error.headers["Retry-After"], "ms": round(ms, 1)})


def pin(server: Server) -> None:
    """The rank has a core of its own, as it has a GPU in life; the API server shares the others with the client."""
    front, (rank,) = psutil.Process(server.process.pid), server.engines()
    rank.cpu_affinity([0])
    others = list(range(1, os.cpu_count() or 1))
    front.cpu_affinity(others)
    psutil.Process().cpu_affinity(others)  # and so its children's: the load generator's


def memory_mb(server: psutil.Process) -> list[float]:
    """Resident memory of the API server and of each rank."""
    return [round(p.memory_info().rss / 2**20, 1) for p in [server, *server.children(recursive=True)]]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    conditions = run_record("measured")
    limits = ["--max-num-seqs", str(RUNNING), "--max-num-queued-reqs", str(QUEUED), "--log-level", "warning"]
    with moestro(PORT, *limits, OMP_NUM_THREADS="1") as server, tempfile.TemporaryDirectory() as directory:
        pin(server)
        result = measure(Path(directory), args.seconds, server)
    print(json.dumps(result, indent=1))
    save(args.json, conditions, result)


def measure(work: Path, seconds: float, server: Server) -> dict[str, object]:
    process = psutil.Process(server.process.pid)
    rate = bench(work, 300, "--max-concurrency", str(RUNNING))["requests_per_s"]
    probes = {}
    for factor in (0.8, 1.0, 1.2, 1.4, 1.7):
        report = bench(
            work, int(10 * factor * rate), "--request-rate", str(factor * rate), "--seed", str(int(10 * factor))
        )
        probes[factor] = report["goodput"]["requests_per_s"]
    before, stop, refused = memory_mb(process), threading.Event(), []
    watcher = threading.Thread(target=refusals, args=(stop, refused))
    watcher.start()
    over = bench(work, int(10 * rate * seconds), "--request-rate", str(10 * rate), "--seed", "7")
    stop.set()
    watcher.join()
    left = server.wait_until_idle()
    after = memory_mb(process)
    return {
        "pinning": "the rank has a core of its own, the API server and the client share the others",
        "slo_ms": {"ttft": TTFT_SLO_MS, "tpot": TPOT_SLO_MS},
        "sustainable_requests_per_s": rate,
        "goodput_by_factor": probes,
        "overload_goodput": over["goodput"]["requests_per_s"],
        "overload_goodput_over_peak": over["goodput"]["requests_per_s"] / max(probes.values()),
        "overload_requests": over["num_requests"],
        "overload_seconds": over["duration_s"],
        "overload_answered": over["num_ok"],
        "overload_failures": {reason: failure["count"] for reason, failure in over["failures"].items()},
        "client_is_valid": over["is_valid"],
        "sampled_refusals": {
            "count": len(refused),
            "with_retry_after": sum(refusal["retry_after"] is not None for refusal in refused),
            "statuses": sorted({refusal["status"] for refusal in refused}),
            "ms": {
                "median": statistics.median(refusal["ms"] for refusal in refused),
                "max": max(refusal["ms"] for refusal in refused),
            },
        },
        "memory_mb_before": before,
        "memory_mb_after": after,
        "left_over": left,
    }


if __name__ == "__main__":
    main()
