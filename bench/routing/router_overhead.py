"""What a router costs: CPU for each request, and the latency that it adds, before the same two responders.

    python bench/routing/router_overhead.py --peers DIR --rounds 3 --json bench/results/routing/router_overhead.json

DIR is a virtual environment in which any of `sglang-router`, `smg` and `vllm-router` is installed; those found are
measured beside `moestro route`. Every round measures every router in every case, one after the other, so that what the
machine does besides falls on all of them alike; "bytes passed on" is a proxy in Python that looks at nothing. CPU is
that of the router's process and its threads (user and system, from the scheduler's own nanoseconds) over the requests
answered; latency is compared with the same load sent straight to the responders. With --append the rounds are added to
those in the file.
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


def routers(peers: Path | None, policies: list[str], tokenizer: Path | None) -> dict:
    """Name -> what makes its command line."""
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
        found[f"smg {version}"] = peer([str(peers / "bin" / "smg"), "launch"], "--log-level", "warn")
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
    """User and system time of a process, its children and all their threads."""
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
    """Median and range over the rounds, and what was added to the direct way."""
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
    parser.add_argument("--case", action="append", choices=CASES, help="only these")
    parser.add_argument("--append", action="store_true", help="add to the rounds in the file")
    parser.add_argument("--logs", type=Path, default=Path("/tmp"))
    args = parser.parse_args()
    conditions = run_record("measured")
    for case in set(CASES) - set(args.case or CASES):
        del CASES[case]
    rounds = json.loads(args.json.read_text())["rounds"] if args.append and args.json.exists() else []
    workers = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in workers]
    with contextlib.ExitStack() as stack:
        log = args.logs / "router_overhead_responder.log"
        stack.enter_context(running([sys.executable, str(PARTS), "respond", *map(str, workers)], log))
        targets: dict = {"direct": (urls[0], None)}
        for number, (name, command) in enumerate(routers(args.peers, args.policy, args.tokenizer).items()):
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
    save(args.json, conditions, {"num_rounds": len(rounds), "summary": table, "rounds": rounds})


if __name__ == "__main__":
    main()
