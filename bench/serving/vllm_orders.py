"""Measures what the order of waiting requests changes inside vLLM, with real servers of vLLM's CPU build.

    python bench/serving/vllm_orders.py --work /tmp/bench --vllm /path/to/venv/bin/vllm \\
        [--loads mixed adversary] [--json bench/results/serving/vllm_orders.json] [--quick]

The environment of --vllm has vLLM, moestro and moestro-vllm (integrations/vllm/README.md). The systems are vLLM's two
orders and the scheduler classes of moestro-vllm. All servers start first; then all but one are stopped (SIGSTOP), so
that the one under load has the machine. Each round sends the same requests at the same times to every system in turn;
the next round begins with another system.

*Mixed load*: short prompts, and long ones that share a few documents, arrive as a Poisson process at --load of the
capacity. The capacity is the rate at which vLLM's FCFS answers such requests when all are sent at once, measured at the
start of each round, because the speed of a virtual machine varies. Orders can differ only where requests wait, and only
below the age at which a request goes first. The result therefore states the part of the requests whose time to first
token is above the age. A result with a large part says nothing about orders.

*Bursts*: the same requests at the same mean rate, in bursts of --burst requests at once, which arrive as a Poisson
process. A burst waits longer than steady arrivals do, and the long prompts in it wait for all short ones.

*Adversary*: one long prompt arrives amid more short ones than the server can serve. With ageing it waits for about
--age seconds and until a running request ends. Without ageing (`SJF, no ageing`) it waits until the short ones end.

Long prompts are marked as an operator would do it: by `priority` 1 where the server reads priorities, and for all
systems by the class `be` and a user of their own in `vllm_xargs`. *QLLM by priority* has its classes from `priority`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import psutil
import uvloop

from moestro.config.run_record import RunRecord, run_record
from moestro.loadgen.client import BenchClient, Endpoint
from moestro.loadgen.load import BenchLoad, run_load
from moestro.loadgen.settings import EndpointSettings
from moestro.workload.generated.draws import poisson
from moestro.workload.run_records import make_report, spread_of

import sys  # isort: skip

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.models import DEMO, make_random_model
from shared.results import make_parser, package_version, save, spread
from shared.server import Server, started

PORT, VOCAB, MAX_MODEL_LEN = 8260, 4096, 2048
SHORT, LONG = (20, 80), (1000, 1500)  # tokens of a prompt, from and to
NUM_DOCUMENTS, DOCUMENT = 4, 900  # documents that long prompts begin with, and their tokens
LONG_SHARE, NUM_OUTPUT, NUM_SEQS = 0.15, 16, 4
NO_AGE_S = 1e6
WARM_RATE, NUM_WARM, WARM_SEED = 2.0, 8, 999
NUM_AT_ONCE, CAPACITY_SEED = 120, 5000  # requests that measure the capacity
FCFS, PRIORITY, UNBOUNDED = "vLLM, FCFS", "vLLM, priority", "SJF, no ageing"
QLLM = "QLLM by priority"
CLASSES = ("FCFS", "SJF", "PrefillAware", "EDF", "WeightedFair")
SYSTEMS = (FCFS, PRIORITY, *CLASSES, UNBOUNDED, QLLM)
LOADS = ("mixed", "bursts", "adversary")
READS_PRIORITY = (PRIORITY, QLLM)
ADVERSARY = (FCFS, "SJF", UNBOUNDED)  # the systems that get the adversary's load
AGEING = ("SJF", "PrefillAware")


@dataclass(frozen=True)
class Requests:
    """Requests of one load, n of them.

    Attributes:
        prompts: Token ids of each prompt.
        is_long: bool[n].
        offsets_ns: int64[n], time of sending since the start.
    """

    prompts: list[list[int]]
    is_long: np.ndarray
    offsets_ns: np.ndarray


def mixed(rate: float, count: int, seed: int, burst: int = 1) -> Requests:
    """Draw the mixed load in bursts of `burst` requests at once; a rate of inf sends all requests at once."""
    rng = np.random.default_rng(seed)
    is_long = np.zeros(count, np.bool_)
    is_long[rng.permutation(count)[: max(round(LONG_SHARE * count), 1)]] = True  # an exact share, in random order
    documents = np.random.default_rng([seed, 1]).integers(3, VOCAB, (NUM_DOCUMENTS, DOCUMENT))
    prompts = [draw(rng, is_one, documents) for is_one in is_long.tolist()]
    offsets_ns = np.zeros(count, np.int64)
    if np.isfinite(rate):
        offsets_ns = np.repeat(poisson(-(-count // burst), rate / burst, rng), burst)[:count]
    return Requests(prompts, is_long, offsets_ns)


def adversary(rate: float, seconds: float, seed: int) -> Requests:
    """Draw short prompts at a steady rate, and one long prompt after a quarter of a second."""
    rng = np.random.default_rng([seed, 2])
    offsets_ns = (np.arange(round(rate * seconds)) / rate * 1e9).astype(np.int64)
    at = int(np.searchsorted(offsets_ns, 250_000_000))
    documents = rng.integers(3, VOCAB, (1, DOCUMENT))
    is_long = np.zeros(len(offsets_ns), np.bool_)
    is_long[at] = True
    return Requests([draw(rng, is_one, documents) for is_one in is_long.tolist()], is_long, offsets_ns)


def draw(rng: np.random.Generator, is_long: bool, documents: np.ndarray) -> list[int]:  # noqa: FBT001 a column
    low, high = LONG if is_long else SHORT
    begin = documents[rng.integers(len(documents))].tolist() if is_long else []
    return begin + rng.integers(3, VOCAB, int(rng.integers(low, high + 1)) - len(begin)).tolist()


def body(model: str, prompt: list[int], *, is_long: bool, reads_priority: bool) -> bytes:
    kind = {"service_class": "be", "user": "batch"} if is_long else {"service_class": "ls", "user": "chat"}
    fields = {"model": model, "prompt": prompt, "max_tokens": NUM_OUTPUT, "temperature": 0, "ignore_eos": True}
    fields |= {"stream": True, "stream_options": {"include_usage": True}, "vllm_xargs": kind}
    return msgspec.json.encode(fields | ({"priority": int(is_long)} if reads_priority else {}))


async def find(settings: EndpointSettings) -> Endpoint:
    async with BenchClient(settings) as client:
        return await client.find_endpoint()


def send(url: str, requests: Requests, system: str) -> dict[str, object]:
    """Send one load, and return times to first token by kind of prompt, and the throughput."""
    settings = EndpointSettings(base_url=url)
    endpoint = uvloop.run(find(settings))
    rows = zip(requests.prompts, requests.is_long.tolist(), strict=True)
    load = BenchLoad(
        bodies=[body(endpoint.model, p, is_long=one, reads_priority=system in READS_PRIORITY) for p, one in rows],
        num_requested_tokens=np.full(len(requests.prompts), NUM_OUTPUT),
        offsets_ns=requests.offsets_ns,
        limit=None,
        name="vllm-orders",
    )
    records = run_load(settings, endpoint, load)
    report = make_report(records)
    assert report.num_ok == report.num_requests, report.failures
    found: dict[str, object] = {}
    for name, is_one in (("short", ~requests.is_long), ("long", requests.is_long)):
        times = spread_of(records.timelines.ttft_ns[is_one])
        assert times
        found[name] = {key: round(getattr(times, key), 1) for key in ("mean", "p50", "p99")}
    return found | {
        "ttft_s": (records.timelines.ttft_ns / 1e9).round(3).tolist(),
        "num_requests": report.num_requests,
        "tokens_per_s": round(report.output_tokens_per_s, 2),
        "requests_per_s": round(report.requests_per_s, 3),
    }


def command(args: argparse.Namespace, system: str, directory: Path, port: int) -> list[str]:
    """Return the command that starts a system."""
    flags = ["--port", str(port), "--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN), "--enforce-eager"]
    flags += ["--max-num-seqs", str(NUM_SEQS), "--enable-prefix-caching", "--block-size", "32"]
    if system in READS_PRIORITY:
        flags += ["--scheduling-policy", "priority"]
    if system == QLLM:
        flags += ["--scheduler-cls", "moestro_vllm.QLLM"]
        flags += ["--additional-config", json.dumps({"moestro": {"be_priority": 1, "theta_age_s": args.age}})]
    elif system not in {FCFS, PRIORITY}:
        flags += ["--scheduler-cls", f"moestro_vllm.{system.partition(',')[0]}"]
        if system in AGEING or system == UNBOUNDED:
            age_s = NO_AGE_S if system == UNBOUNDED else args.age
            flags += ["--additional-config", json.dumps({"moestro": {"theta_age_s": age_s}})]
    return [str(args.vllm), "serve", str(directory), *flags]


@contextlib.contextmanager
def started_and_stopped(args: argparse.Namespace, directory: Path) -> Iterator[dict[str, Server]]:
    """Start all systems one after the other, warm each, and stop its processes until it is measured."""
    extra = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    extra["PATH"] = f"{args.vllm.parent}:{os.environ['PATH']}"
    servers: dict[str, Server] = {}
    with contextlib.ExitStack() as stack:
        for system in args.systems:
            port, log = PORT + SYSTEMS.index(system), args.work / f"vllm-orders-{SYSTEMS.index(system)}.log"
            server = stack.enter_context(started(command(args, system, directory, port), port, log, **extra))
            stack.callback(signal_all, server, signal.SIGCONT)  # a stopped process does not end on SIGTERM
            servers[system] = server
            send(server.url, mixed(WARM_RATE, NUM_WARM, WARM_SEED), system)
            signal_all(server, signal.SIGSTOP)
        yield servers


def signal_all(server: Server, number: signal.Signals) -> None:
    """Send a signal to all processes of a server."""
    assert server.process is not None
    parent = psutil.Process(server.process.pid)
    for process in (parent, *parent.children(recursive=True)):
        process.send_signal(number)


@contextlib.contextmanager
def running(server: Server) -> Iterator[str]:
    """Let a stopped server run; yield its address."""
    signal_all(server, signal.SIGCONT)
    try:
        yield server.url
    finally:
        signal_all(server, signal.SIGSTOP)


def capacity(server: Server, seed: int) -> float:
    """Return the requests/s that a server answers when all are sent at once."""
    with running(server) as url:
        return send(url, mixed(np.inf, NUM_AT_ONCE, seed), FCFS)["requests_per_s"]


def measure(args: argparse.Namespace, server: Server, system: str, rate: float, number: int) -> dict[str, object]:
    """Send a system the loads of one round."""
    seed = args.seed + number
    found: dict[str, object] = {"round": number, "seed": seed, "system": system, "rate": round(rate, 3)}
    bursts = {"mixed": 1, "bursts": args.burst}
    with running(server) as url:
        for load, burst in bursts.items() if system != UNBOUNDED else ():
            if load in args.loads:
                row = send(url, mixed(rate, round(rate * args.seconds), seed, burst), system)
                found[load] = row | {"part_above_age": round(np.mean(np.array(row.pop("ttft_s")) > args.age), 3)}
        if system in ADVERSARY and "adversary" in args.loads:
            requests = adversary(args.flood, args.flood_seconds, seed)
            row = send(url, requests, system)
            row["long_ttft_s"] = row.pop("ttft_s")[int(np.flatnonzero(requests.is_long)[0])]
            found["adversary"] = row
    return found | {"load_average": round(os.getloadavg()[0], 2)}


def rounds(args: argparse.Namespace, directory: Path) -> Iterator[dict[str, object]]:
    """Measure every system in each round; a round begins with another system than the one before."""
    with started_and_stopped(args, directory) as servers:
        for number in range(args.rounds):
            first = number % len(args.systems)
            rate = args.load * capacity(servers[FCFS], CAPACITY_SEED + number)
            for system in args.systems[first:] + args.systems[:first]:
                yield measure(args, servers[system], system, rate, number)


def summaries(found: list[dict[str, object]]) -> list[dict[str, object]]:
    """Summarise the rounds of each system, and its ratio to vLLM's FCFS in the same round."""
    table = []
    for system in dict.fromkeys(row["system"] for row in found):
        own = [row for row in found if row["system"] == system]
        summary: dict[str, object] = {"system": system, "rounds": len(own)}
        for load in ("mixed", "bursts"):
            summary |= summary_of_load(found, system, load)
        if "adversary" in own[0]:
            summary["adversary_long_ttft_s"] = spread([row["adversary"]["long_ttft_s"] for row in own])
        table.append(summary)
    return table


def summary_of_load(found: list[dict[str, object]], system: str, load: str) -> dict[str, object]:
    """Summarise one load of one system; figures of bursts have a prefix."""
    prefix = "" if load == "mixed" else f"{load} "
    reference = {row["round"]: row[load] for row in found if row["system"] == FCFS and load in row}
    rows = {row["round"]: row[load] for row in found if row["system"] == system and load in row}
    summary: dict[str, object] = {}
    for kind in ("short", "long") if rows else ():
        for key in ("mean", "p50", "p99"):
            name = f"{prefix}{kind}_ttft_ms_{key}"
            summary[name] = spread([row[kind][key] for row in rows.values()])
            ratios = [rows[n][kind][key] / reference[n][kind][key] for n in rows if n in reference]
            if ratios and system != FCFS:
                summary[f"{name} over {FCFS}"] = spread(ratios)
    for name in ("tokens_per_s", "part_above_age") if rows else ():
        summary[f"{prefix}{name}"] = spread([row[name] for row in rows.values()])
    return summary


def store(args: argparse.Namespace, conditions: RunRecord, found: list[dict[str, object]]) -> None:
    """Write the result measured so far."""
    python = args.vllm.with_name("python")
    setting = {
        "model": args.model, "load": args.load, "seconds": args.seconds, "age_s": args.age, "long_share": LONG_SHARE,
        "short_tokens": SHORT, "long_tokens": LONG, "output_tokens": NUM_OUTPUT, "max_num_seqs": NUM_SEQS,
        "loads": args.loads, "burst": args.burst, "flood_rate": args.flood, "flood_seconds": args.flood_seconds,
        "vllm": package_version(python, "vllm"), "moestro-vllm": package_version(python, "moestro-vllm"),
        "commands": {name: " ".join(command(args, name, Path("MODEL"), PORT)[1:]) for name in args.systems},
    }  # fmt: skip
    save(args.json, conditions, {**setting, "summary": summaries(found), "points": found})


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for the random model and the servers' logs")
    parser.add_argument("--vllm", type=Path, required=True, help="vLLM's command in a separate virtual environment")
    parser.add_argument("--model", choices=["demo", "random-640m"], default="demo")
    parser.add_argument("--systems", nargs="*", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--loads", nargs="*", default=["mixed", "adversary"], choices=LOADS)
    parser.add_argument("--burst", type=int, default=24, help="requests of a burst, which arrive at once")
    parser.add_argument("--load", type=float, default=0.9, help="rate of the mixed load, in capacities of vLLM's FCFS")
    parser.add_argument("--seconds", type=float, default=20, help="time for which they arrive")
    parser.add_argument("--age", type=float, default=5, help="theta_age_s of the classes with ageing, seconds")
    parser.add_argument("--flood", type=float, default=60, help="short prompts/s around the adversary's long one")
    parser.add_argument("--flood-seconds", type=float, default=8, help="time for which they arrive")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1, help="seed of the first round; the others follow")
    parser.add_argument("--quick", action="store_true", help="one short round of vLLM's FCFS and SJF; for a try")
    args = parser.parse_args()
    args.systems = [FCFS, *(name for name in args.systems if name != FCFS)]  # its capacity sets the rate
    if args.quick:
        args.systems, args.rounds, args.seconds, args.flood_seconds, args.age = [FCFS, "SJF"], 1, 5, 6, 2
    conditions = run_record("measured")
    args.work.mkdir(parents=True, exist_ok=True)
    directory = DEMO if args.model == "demo" else make_random_model(args.work / args.model)
    found = []
    for row in rounds(args, directory):
        print(json.dumps(row), flush=True)
        found.append(row)
        store(args, conditions, found)  # after each system, because a long run may be interrupted


if __name__ == "__main__":
    main()
