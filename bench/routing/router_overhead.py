"""Measures the cost of a router: CPU for each request and added latency, in front of the same two responders.

    python bench/routing/router_overhead.py --peers DIR --rounds 3 --json bench/results/routing/router_overhead.json

DIR is a virtual environment that holds any of `sglang-router`, `smg` and `vllm-router`; those found are measured beside
`moestro route`. Every round measures every router in every case, one after another, so that drift of the machine
affects all alike. "bytes passed on" is a Python proxy that inspects nothing. CPU is the user and system time of the
router's process and threads, in nanoseconds of the kernel's scheduler, over the answered requests. Latency is compared
with the same load sent straight to the responders. With --append the rounds are added to those in the file.

    # Throughput of 2 workers beside that of one, under a load that saturates them
    python bench/routing/router_overhead.py --workers 1 2 --policy least_loaded --case saturated \
        --rounds 5 --seconds 3 --json bench/results/routing/router_workers.json

The ratios to the first number of workers are those of a round, with their median and range. Load and responders need
cores of their own: on a machine without them, requests/s are those of all processes together. There the CPU time of a
request shows what a worker costs beside others, and `on_own_cores` is computed from it: the requests/s over those of
the first number if each worker had a core, the number of workers times the inverse ratio of CPU time. Saturated workers
serve as many requests as their cores can, however unevenly the kernel spreads the connections.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, package_version, save

PARTS = Path(__file__).with_name("router_parts.py")
CASES = {
    "small": {"size": 2400, "stream": False, "users": 8},
    "32 kB": {"size": 32_000, "stream": False, "users": 8},
    "small, stream": {"size": 2400, "stream": True, "users": 16},
    "32 kB, stream": {"size": 32_000, "stream": True, "users": 16},
    "small, one user": {"size": 2400, "stream": False, "users": 1},
    "small, stream, one user": {"size": 2400, "stream": True, "users": 1},
}
SATURATED = {"size": 2400, "stream": False, "users": 64}  # runs where it is named; the kernel spreads connections
READY_S = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ours(policy: str, *flags: str):
    run = "import sys; from moestro.cli import main; main(sys.argv[1:])"

    def command(port: int, workers: list[str]) -> list[str]:
        engines = [part for url in workers for part in ("--engine", url)]
        fixed = ["--port", str(port), "--admin-port", "0", "--log-level", "warning", "--route-policy", policy]
        return [sys.executable, "-c", run, "route", *engines, *fixed, *flags]

    return command


def peer(program: list[str], *flags: str):
    def command(port: int, workers: list[str]) -> list[str]:
        fixed = [
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--policy",
            "cache_aware",
            "--worker-startup-timeout-secs",
            "20",
        ]
        prometheus = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        return [*program, *fixed, *prometheus, "--worker-urls", *workers, *flags]

    return command


def with_workers(policy: str, numbers: list[int]) -> dict:
    """Return the maker of the command line of `moestro route` with each number of workers."""
    return {_workers_name(number): ours(policy, "--workers", str(number)) for number in numbers}


def _workers_name(number: int) -> str:
    return f"moestro route, {number} workers"


def ratios(rounds: list[dict], numbers: list[int]) -> dict:
    """Compute requests/s and CPU of each number of workers over those of the first, in the same round."""
    first, found = _workers_name(numbers[0]), {}
    for case, number in ((case, number) for case in CASES for number in numbers[1:]):
        name = _workers_name(number)
        for key in ("requests_per_s", "cpu_us"):
            values = [each[case][name][key] / each[case][first][key] for each in rounds]
            found.setdefault(case, {}).setdefault(name, {})[key] = _range_of(values)
        values = [number / numbers[0] * each[case][first]["cpu_us"] / each[case][name]["cpu_us"] for each in rounds]
        found[case][name]["on_own_cores"] = _range_of(values)
    return found


def _range_of(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def routers(peers: Path | None, policies: list[str], tokenizer: Path | None) -> dict:
    """Return the maker of each router's command line, by name."""
    found = {"bytes passed on": lambda port, workers: [sys.executable, str(PARTS), "pass", str(port), workers[0]]}
    found |= {f"moestro route, {policy}": ours(policy) for policy in policies}
    if tokenizer is not None:
        found[f"moestro route, {policies[0]}, exact"] = ours(policies[0], "--tokenizer", str(tokenizer))
    if peers is None:
        return found
    python = str(peers / "bin" / "python")
    for name, module, flags in (
        ("sglang-router", "sglang_router.launch_router", ("--log-level", "warn", "--max-concurrent-requests", "-1")),
        ("vllm-router", "vllm_router.launch_router", ("--log-level", "warning")),
    ):
        version = package_version(python, name)
        if version:
            found[f"{name} {version}"] = peer([python, "-m", module], *flags)
    if version := package_version(python, "smg"):
        # The program `smg` may be another: sglang-router installs one of that name, which is itself.
        found[f"smg {version}"] = peer([python, "-m", "smg", "launch"], "--log-level", "warn")
    return found


@contextlib.contextmanager
def running(command: list[str], log: Path):
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_ready(url: str, process: subprocess.Popen, log: Path) -> None:
    body = json.dumps({"model": "bench", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            if urllib.request.urlopen(request, timeout=5).status == 200:
                return
        time.sleep(0.2)
    raise SystemExit(f"{url} does not answer:\n{log.read_text()}")


def cpu_ns(pid: int) -> int:
    """Return the user and system time of a process, its children and all their threads."""
    processes = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    total = 0
    for each in processes:
        for task in Path(f"/proc/{each}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has just ended
                total += int((task / "schedstat").read_text().split()[0])
    return total


def measure(url: str, pid: int | None, case: dict, seconds: float) -> dict:
    arguments = json.dumps(case | {"seconds": seconds})
    loader = subprocess.Popen(
        [sys.executable, str(PARTS), "load", url, arguments],
        stdout=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert loader.stdout is not None
    if loader.stdout.readline().strip() != "begin":
        raise SystemExit(f"the load on {url} failed")
    before = cpu_ns(pid) if pid else 0
    loader.stdout.readline()
    spent = (cpu_ns(pid) if pid else 0) - before
    measured = json.loads(loader.stdout.readline())
    loader.wait()
    if pid:
        measured["cpu_us"] = spent / 1e3 / measured["num_requests"]
        measured["rss_mb"] = psutil.Process(pid).memory_info().rss / 1e6
    return measured


def summary(rounds: list[dict]) -> dict:
    """Compute median and range over the rounds, and the latency added to the direct path."""
    table: dict = {}
    for case in CASES:
        for name in rounds[0][case]:
            cells = [each[case][name] for each in rounds if name in each[case]]
            row = table.setdefault(case, {}).setdefault(name, {})
            for key in ("cpu_us", "requests_per_s", "first_byte_p50_ms", "whole_p50_ms", "rss_mb"):
                values = [cell[key] for cell in cells if key in cell]
                if values:
                    row[key] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
            added = [
                each[case][name]["first_byte_p50_ms"] - each[case]["direct"]["first_byte_p50_ms"] for each in rounds
            ]
            row["added_first_byte_p50_ms"] = statistics.median(added)
    return table


def show(table: dict) -> None:
    print(f"{'case':24} {'router':34} {'CPU us/request':>22} {'requests/s':>11} {'first byte ms':>14} {'added ms':>9}")
    for case, rows in table.items():
        for name, row in rows.items():
            cpu = row.get("cpu_us")
            spent = f"{cpu['median']:.1f} ({cpu['min']:.0f} to {cpu['max']:.0f})" if cpu else ""
            rate, first = row["requests_per_s"]["median"], row["first_byte_p50_ms"]["median"]
            print(f"{case:24} {name:34} {spent:>22} {rate:11.0f} {first:14.3f} {row['added_first_byte_p50_ms']:9.3f}")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--peers", type=Path, help="a virtual environment with the peers")
    parser.add_argument("--policy", nargs="+", default=["moestro", "least_loaded"], help="of moestro route, one each")
    parser.add_argument("--tokenizer", type=Path, help="measure exact mode too, with this one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.8, help="of each cell")
    parser.add_argument("--case", action="append", choices=[*CASES, "saturated"], help="only these")
    parser.add_argument("--workers", type=int, nargs="+", help="only moestro route, with these numbers of workers")
    parser.add_argument("--append", action="store_true", help="add to the rounds in the file")
    parser.add_argument("--logs", type=Path, default=Path("/tmp"))
    args = parser.parse_args()
    conditions = run_record("measured")
    if "saturated" in (args.case or ()):
        CASES["saturated"] = SATURATED
    for case in set(CASES) - set(args.case or CASES):
        del CASES[case]
    rounds = json.loads(args.json.read_text())["rounds"] if args.append and args.json.exists() else []
    workers = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in workers]
    with contextlib.ExitStack() as stack:
        log = args.logs / "router_overhead_responder.log"
        stack.enter_context(running([sys.executable, str(PARTS), "respond", *map(str, workers)], log))
        targets: dict = {"direct": (urls[0], None)}
        commands = (
            with_workers(args.policy[0], args.workers)
            if args.workers
            else routers(args.peers, args.policy, args.tokenizer)
        )
        for number, (name, command) in enumerate(commands.items()):
            port, log = free_port(), args.logs / f"router_overhead_{number}.log"
            process = stack.enter_context(running(command(port, urls), log))
            wait_until_ready(f"http://127.0.0.1:{port}", process, log)
            targets[name] = (f"http://127.0.0.1:{port}", process.pid)
        for number in range(args.rounds):
            rounds.append(
                {
                    case: {name: measure(url, pid, settings, args.seconds) for name, (url, pid) in targets.items()}
                    for case, settings in CASES.items()
                }
            )
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    table = summary(rounds)
    show(table)
    result = {"num_rounds": len(rounds), "summary": table, "rounds": rounds}
    if args.workers:
        result["over_the_first"] = ratios(rounds, args.workers)
        print(json.dumps(result["over_the_first"], indent=1))
    save(args.json, conditions, result)


if __name__ == "__main__":
    main()
