"""Compares routing policies over the data-parallel ranks of one real vLLM server with vLLM's own balancer.

    python bench/routing/vllm_ranks.py --vllm /path/to/venv/bin/vllm [--rounds 5] \\
        [--json bench/results/routing/vllm_ranks.json]
    python bench/routing/vllm_ranks.py --vllm ... --rounds 1 --seconds 5 --capacity-requests 60    # a short try

This is the setting of Gimbal's Algorithm 1: a dispatcher before the ranks of one server. The network is a dense one of
random weights, because vLLM computes no experts under data parallelism on a CPU. With the policy `vllm`, the router
knows the server as one engine, and the server chooses the rank. The loads are the sessions of vllm_loads.py at a share
of the capacity, the rate of the answers when all requests come at once. In every round the policies take turns, in
another order each time, with the same sessions and empty caches.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import shared.vllm
from accuracy.run import figures
from shared.models import DEMO, make_dense_model
from shared.results import make_parser, package_version, save, spread
from shared.server import MOESTRO, started
from vllm_loads import report_of, send, write_sessions

OWN_BALANCER, BASE, CAPACITY_POLICY = "vllm", "round_robin", "lmetric"
POLICIES = (BASE, OWN_BALANCER, "gimbal-v1", CAPACITY_POLICY, "moestro")
NUM_RANKS, NUM_BLOCKS = 2, 330  # blocks of a rank
CAPACITY_SEED, FIRST_SEED = 100, 101
ROUTE_PORT, ADMIN_PORT, VLLM_PORT, EVENTS_PORT, REPLAY_PORT = 8340, 8341, 8342, 8350, 8360
VLLM_URL = f"http://127.0.0.1:{VLLM_PORT}"


def server(command: str, model: Path, log: Path) -> contextlib.AbstractContextManager:
    """Start the server with its ranks, a core and a port of KV events each."""
    flags = ["--dtype", "bfloat16", "--num-gpu-blocks-override", str(NUM_BLOCKS)]
    flags += ["--data-parallel-size", str(NUM_RANKS), *shared.vllm.kv_events(EVENTS_PORT, REPLAY_PORT)]
    cores = "|".join(str(rank) for rank in range(NUM_RANKS))
    return started(
        shared.vllm.command(command, VLLM_PORT, *flags, model=model),
        VLLM_PORT,
        log / "vllm.log",
        **shared.vllm.environment(command, cores),
    )


def empty_caches() -> None:
    """Empty the caches of all ranks. A request follows each, because vLLM reports the change with its next step."""
    body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 1}).encode()
    requests = [("/reset_prefix_cache", b"", {})]
    requests += [("/v1/completions", body, {"X-data-parallel-rank": str(rank)}) for rank in range(NUM_RANKS)]
    for path, content, headers in requests:
        request = urllib.request.Request(VLLM_URL + path, content, {"Content-Type": "application/json", **headers})
        with urllib.request.urlopen(request, timeout=30) as answer:
            answer.read()


@contextlib.contextmanager
def routed(policy: str, work: Path) -> Iterator[str]:
    """Empty the caches, and start a router with one policy. Yields its address."""
    empty_caches()
    flags = [MOESTRO, "route", "--port", str(ROUTE_PORT), "--admin-port", str(ADMIN_PORT)]
    flags += ["--engine", f"e={VLLM_URL}", "--metrics-interval", "0.1", "--record", str(work / f"{policy}.jsonl")]
    flags += ["--tokenizer", str(DEMO), "--block-size", str(shared.vllm.BLOCK_SIZE)]
    if policy == OWN_BALANCER:
        flags += ["--route-policy", BASE]
    else:
        flags += ["--route-policy", policy, "--dp-ranks", str(NUM_RANKS)]
        flags += ["--kv-events", f"e=tcp://*:{EVENTS_PORT}", "--kv-replay", f"e=tcp://*:{REPLAY_PORT}"]
    with started(flags, ROUTE_PORT, work / f"route_{policy}.log") as router:
        time.sleep(2.0)  # until it has subscribed to the events
        yield router.url


def measure(policy: str, work: Path, trace: Path, seed: int, *more: str) -> dict:
    """The report of a run of a trace through one policy."""
    out = work / "report.json"
    with routed(policy, work) as url:
        send(url, trace, out, seed, "--num-warmups", "0", *more)
    return report_of(out)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--vllm", required=True, help="the vllm command")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.9, help="of the capacity")
    parser.add_argument("--seconds", type=float, default=25.0, help="over which the requests of a run arrive")
    parser.add_argument("--capacity-requests", type=int, default=600, help="of the run that finds the capacity")
    parser.add_argument("--work", type=Path, help="keep traces and logs here")
    given = parser.parse_args()
    conditions = run_record("measured")
    runs: dict[str, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
    with contextlib.ExitStack() as stack:
        work = given.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        stack.enter_context(server(given.vllm, make_dense_model(work / "model"), work))
        trace = work / "load.jsonl"
        write_sessions(trace, CAPACITY_SEED, 1.0, given.capacity_requests)
        at_once = measure(CAPACITY_POLICY, work, trace, CAPACITY_SEED, "--request-rate", "inf")
        capacity = at_once["num_ok"] / at_once["duration_s"]
        print(f"capacity: {capacity:.2f} requests/s", flush=True)
        rate = given.share * capacity
        for number in range(given.rounds):
            seed, start = FIRST_SEED + number, number % len(POLICIES)
            write_sessions(trace, seed, rate, round(rate * given.seconds))
            for policy in (*POLICIES[start:], *POLICIES[:start]):
                runs[policy].append(figures(measure(policy, work, trace, seed)))
                shown = {name: f"{value:.3g}" for name, value in runs[policy][-1].items()}
                print(f"round {number}, {policy}: {shown}", flush=True)
    table = {
        policy: {name: spread([one[name] for one in found]) for name in found[0]}
        | {
            f"{name}_over_{BASE}": spread([one[name] / base[name] for one, base in zip(found, runs[BASE], strict=True)])
            for name in ("ttft_mean_ms", "ttft_p99_ms", "tpot_mean_ms")
        }
        for policy, found in runs.items()
    }
    for policy, row in table.items():
        print(f"{policy}: TTFT {row['ttft_mean_ms']}, over {BASE} {row[f'ttft_mean_ms_over_{BASE}']}")
    save(
        given.json,
        conditions,
        {
            "model": "a dense Qwen3 of the demo model's width, random weights, bfloat16, one core a rank",
            "vllm": package_version(Path(given.vllm).with_name("python"), "vllm"),
            "share": given.share,
            "seconds": given.seconds,
            "blocks_a_rank": NUM_BLOCKS,
            "capacity_requests_per_s": round(capacity, 3),
            "policies": table,
            "runs": runs,
        },
    )


if __name__ == "__main__":
    main()
