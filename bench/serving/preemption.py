"""Measures the gain of latency-sensitive requests from preemption, and its cost for the others, with real servers.

    python bench/serving/preemption.py --work /tmp/bench --model demo --rates 4 7 10 --claim 10 \\
        [--vllm /path/to/venv/bin/vllm] [--json bench/results/serving/preemption_demo.json] [--png docs/images/...]

A fifth of the requests are latency-sensitive (LS), the others best effort (BE). Lengths are ShareGPT's, divided by
--shrink, from the trace in --lengths. Where the trace is absent, they come from a log-normal distribution with the same
means, and the result names the origin. Prompts are random tokens, so no prefix cache helps. Arrivals are Poisson. All
systems run at most 32 sequences, and are given the class as `service_class`, or as `priority` 0 and 1 where they read
that. Expert-level preemption holds up to 32 more LS sequences; "LS first, 64 places" shows the effect of places alone.

With --device cuda the model is Qwen3-30B-A3B with random weights, and two systems serve it one after another, because
one card holds one: "iteration-level LS first" and "expert-level preemption", alike but for the mode. All best-effort
requests of a point are sent at its start, with prompts of --be-input tokens and answers of 8, so that prompts queue
while LS requests arrive, with 256 tokens and answers of 16. `duration_s` is the time in which the same work is done.

Each round sends the same requests at the same times to every system in turn, so that drift of the machine affects all
alike. The rates of --claim get --rounds rounds, the others one. The rank has a core of its own; the API server and the
client share the other. A process of its own sends each round, under --wrap (such as `chrt -f 1`) if given.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import psutil
import uvloop
import zstandard

from moestro.config.run_record import RunRecord, run_record
from moestro.loadgen.client import BenchClient, Endpoint
from moestro.loadgen.load import BenchLoad, run_load
from moestro.loadgen.settings import EndpointSettings
from moestro.workload.generated.draws import poisson
from moestro.workload.run_records import Records, make_report, spread_of

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.models import DEMO, ROOT, make_qwen3_config, make_random_model
from shared.results import make_parser, package_version, save, spread
from shared.server import COMMAND, Server, engines_of, started

LENGTHS = ROOT.parent / "shared" / "traces" / "sharegpt_qwen3_hash16.jsonl.zst"
STAND_IN = {"input": (862, 0.6), "output": (665, 0.2)}  # mean and sigma of the log, as the trace has them
NUM_SEQS, BUDGET, MAX_MODEL_LEN, KV_BYTES = 32, 2048, 2048, 512 << 20
LS_SHARE, VOCAB, PORT = 0.2, 4096, 8220
LS_FIRST = ["--scheduling-policy", "qllm", "--evict-policy", "least_computed_be_first"]
MODES = {
    "run to completion": ["--batch-policy", "run_to_completion"],
    "continuous, FCFS": [],
    "iteration-level priority": ["--scheduling-policy", "priority"],
    "iteration-level LS first": LS_FIRST,
    "iteration-level LS first, 64 places": [*LS_FIRST, "--max-num-seqs", str(2 * NUM_SEQS)],
    "iteration-level, Algorithm 1": [*LS_FIRST, "--batch-policy", "qllm"],
    "expert-level preemption": [*LS_FIRST, "--mode", "preemptive"],
    "expert-level, every token": [*LS_FIRST, "--mode", "preemptive", "--pass-decodes"],
}
QWEN3 = "qwen3-30b-a3b"
ON_GPU = ("iteration-level LS first", "expert-level preemption")  # the modes that only preemption tells apart
GPU_MAX_MODEL_LEN, GPU_BE_OUTPUT, GPU_LS_INPUT, GPU_LS_OUTPUT = 16_384, 8, 256, 16
VLLM = "vLLM, priority"
READ_PRIORITY = ("iteration-level priority", VLLM)  # the others refuse a priority, because they ignore it
CLASSES = ("ls", "be")


@dataclass(frozen=True)
class Point:
    """One load on one server.

    Attributes:
        pid: the server's process.
        reads_priority: whether the class is sent as a priority too.
        be_input: least and most tokens of the prompts of a best-effort backlog; None means other lengths, all Poisson.
    """

    url: str
    pid: int
    reads_priority: bool
    rate: float
    seconds: float
    seed: int
    shrink: float
    lengths: str
    be_input: tuple[int, int] | None = None


@dataclass(frozen=True)
class Requests:
    """Requests of one seed, the same for every system, n of them."""

    prompts: list[list[int]]
    num_output: np.ndarray
    is_ls: np.ndarray
    offsets_ns: np.ndarray


def trace_lengths(path: Path) -> np.ndarray | None:
    """Read the lengths of prompts and answers, int64[n, 2]. None means that the file does not exist."""
    if not path.is_file():
        return None
    with zstandard.open(path, "rb") as packed:
        rows = [json.loads(line) for line in io.TextIOWrapper(packed)]
    return np.array([(row["input_length"], row["output_length"]) for row in rows])


def draw(point: Point) -> Requests:
    """Draw the requests of a point."""
    rng = np.random.default_rng([point.seed, round(1000 * point.rate)])
    count = max(round(point.rate * point.seconds), 5)
    if point.be_input is not None:
        return backlog(point, count, rng)
    known = trace_lengths(Path(point.lengths))
    if known is not None:
        lengths = known[rng.integers(0, len(known), count)]
    else:
        drawn = [rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count) for mean, sigma in STAND_IN.values()]
        lengths = np.stack(drawn, axis=1)
    sizes = np.maximum(np.rint(lengths / point.shrink), 1).astype(np.int64)
    is_ls = np.zeros(count, np.bool_)
    is_ls[rng.permutation(count)[: round(LS_SHARE * count)]] = True  # an exact share, in random order
    prompts = [rng.integers(3, VOCAB, size).tolist() for size in sizes[:, 0].tolist()]
    return Requests(prompts, sizes[:, 1], is_ls, poisson(count, point.rate, rng))


def backlog(point: Point, count: int, rng: np.random.Generator) -> Requests:
    """Draw best-effort requests that are all sent at the start, and LS requests that arrive in `point.seconds`."""
    assert point.be_input is not None
    num_ls = max(round(LS_SHARE * count), 1)
    is_ls = np.arange(count) >= count - num_ls
    sizes = np.where(is_ls, GPU_LS_INPUT, rng.integers(*point.be_input, count, endpoint=True))
    offsets_ns = np.zeros(count, np.int64)
    offsets_ns[is_ls] = poisson(num_ls, num_ls / point.seconds, rng)
    prompts = [rng.integers(3, VOCAB, size).tolist() for size in sizes.tolist()]
    return Requests(prompts, np.where(is_ls, GPU_LS_OUTPUT, GPU_BE_OUTPUT), is_ls, offsets_ns)


def bodies(point: Point, requests: Requests, model: str) -> list[bytes]:
    rows = zip(requests.prompts, requests.num_output.tolist(), requests.is_ls.tolist(), strict=True)
    return [body(model, prompt, num_output, classes(is_ls, point)) for prompt, num_output, is_ls in rows]


def classes(is_ls: bool, point: Point) -> dict[str, object]:  # noqa: FBT001 a column of the load
    fields: dict[str, object] = {"service_class": "ls" if is_ls else "be"}
    return fields | {"priority": 0 if is_ls else 1} if point.reads_priority else fields


def body(model: str, prompt: list[int], num_output: int, more: dict[str, object]) -> bytes:
    fields = {"model": model, "prompt": prompt, "max_tokens": num_output, "temperature": 0, "ignore_eos": True} | more
    return msgspec.json.encode(fields | {"stream": True, "stream_options": {"include_usage": True}})


async def find(settings: EndpointSettings) -> Endpoint:
    async with BenchClient(settings) as client:
        return await client.find_endpoint()


def send(point: Point) -> dict[str, object]:
    """Measure one point: figures of each class and of all requests."""
    requests, settings = draw(point), EndpointSettings(base_url=point.url)
    endpoint = uvloop.run(find(settings))
    load = BenchLoad(
        bodies=bodies(point, requests, endpoint.model),
        num_requested_tokens=requests.num_output,
        offsets_ns=requests.offsets_ns,
        limit=None,
        name=f"preemption-{point.seed}",
    )
    before_s = engine_cpu_s(point.pid)
    records = run_load(settings, endpoint, load)
    cpu_s = engine_cpu_s(point.pid) - before_s
    report = make_report(records)
    assert report.num_ok == report.num_requests, report.failures
    assert report.num_wrong_length == 0
    found: dict[str, object] = {name: figures(records, requests.is_ls == (name == "ls")) for name in CLASSES}
    return found | {
        "tokens_per_s": round(report.output_tokens_per_s, 2),
        # A busy neighbour on this machine does not change the tokens of a CPU-second.
        "tokens_per_cpu_s": round(report.num_output_tokens / cpu_s, 2),
        "requests_per_s": round(report.requests_per_s, 3),
        "duration_s": round(report.duration_s, 2),
        "client_late_p99_ms": round(max(report.send_lateness.p99, report.client_stalls.p99), 2),
    }


def engine_cpu_s(pid: int) -> float:
    """Return the processor time of the server's engines so far, seconds."""
    times = [process.cpu_times() for process in engine_processes(psutil.Process(pid))]
    return sum(each.user + each.system for each in times)


def engine_processes(server: psutil.Process) -> list[psutil.Process]:
    """Return the processes that compute: Moestro's engines without other children, or all children of a peer."""
    return engines_of(server) or server.children(recursive=True)


def figures(records: Records, rows: np.ndarray) -> dict[str, object]:
    lines = records.timelines
    found: dict[str, object] = {"num": int(rows.sum())}
    for name, values_ns in (("ttft_ms", lines.ttft_ns[rows]), ("turnaround_ms", lines.e2e_ns[rows])):
        spread_ms = spread_of(values_ns)
        assert spread_ms
        found[name] = {key: round(getattr(spread_ms, key), 1) for key in ("mean", "p50", "p99")}
    return found


# --- servers ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def systems(args: argparse.Namespace, directory: Path) -> Iterator[dict[str, Server]]:
    """Start every system of `args.modes`, all serving the model with one compute thread each."""
    one = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    common = ["--dtype", "bfloat16", "--max-num-batched-tokens", str(args.budget)]
    common += ["--max-model-len", str(GPU_MAX_MODEL_LEN if args.model == QWEN3 else MAX_MODEL_LEN)]
    common += ["--load-format", "dummy", "--tokenizer", str(DEMO)] if args.model == QWEN3 else []
    places = ["--max-num-seqs", str(NUM_SEQS)]
    with contextlib.ExitStack() as stack:
        found = {}
        for number, (name, flags) in enumerate(MODES.items()):
            if name in args.modes:
                port, log = PORT + number, args.work / f"preemption-{number}.log"
                command = [*COMMAND, "serve", str(directory), "--port", str(port), "--device", args.device]
                command += [*common, *flags]
                command += [] if places[0] in flags else places
                if args.device == "cpu":
                    command += ["--kv-cache-memory-bytes", str((4 if args.model == QWEN3 else 1) * KV_BYTES)]
                server = stack.enter_context(started(command, port, log, **one))
                if args.device == "cpu":
                    pin(psutil.Process(server.process.pid))
                found[name] = server
        if args.vllm:
            command = [str(args.vllm), "serve", str(directory), "--port", str(PORT - 1), *common, *places]
            command += ["--scheduling-policy", "priority"]
            extra = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
            extra["PATH"] = f"{Path(args.vllm).parent}:{os.environ['PATH']}"
            server = stack.enter_context(started(command, PORT - 1, args.work / "preemption-vllm.log", **one, **extra))
            pin(psutil.Process(server.process.pid))
            found[VLLM] = server
        yield found


def pin(front: psutil.Process) -> None:
    """Pin each engine to a separate core, in place of a GPU; the API server and the client share the rest."""
    for process in engine_processes(front):
        process.cpu_affinity([0])
    front.cpu_affinity(list(range(1, os.cpu_count() or 1)) or [0])


def measure(args: argparse.Namespace, points: list[Point]) -> Iterator[dict[str, object]]:
    """Run `send` for each point, one after another, in a separate process."""
    encoded = json.dumps([asdict(point) for point in points])
    command = [*shlex.split(args.wrap), sys.executable, __file__, "--points", encoded]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return map(json.loads, done.stdout.splitlines())


def point_of(args: argparse.Namespace, system: str, server: Server, rate: float, seed: int) -> Point:
    return Point(
        url=server.url,
        pid=server.process.pid,
        reads_priority=system in READ_PRIORITY,
        rate=rate,
        seconds=args.seconds,
        seed=seed,
        shrink=args.shrink,
        lengths=str(args.lengths),
        be_input=tuple(args.be_input) if args.be_input else None,
    )


def rounds(args: argparse.Namespace, directory: Path) -> Iterator[dict[str, object]]:
    """Measure a row for each rate, round and system. A GPU holds one system at a time."""
    for modes in [[name] for name in args.modes] if args.device == "cuda" else [args.modes]:
        yield from rounds_of(argparse.Namespace(**vars(args) | {"modes": modes}), directory)


def rounds_of(args: argparse.Namespace, directory: Path) -> Iterator[dict[str, object]]:
    """Measure a row for each rate, round and system, which run side by side."""
    with systems(args, directory) as servers:
        for name, server in servers.items():
            send(replace(point_of(args, name, server, 4, 99), seconds=2))
        for number in range(args.rounds):
            for rate in args.rates if number == 0 else args.claim:
                seed = args.seed + number
                points = [point_of(args, name, server, rate, seed) for name, server in servers.items()]
                for name, found in zip(servers, measure(args, points), strict=True):
                    load = {"load_average": round(os.getloadavg()[0], 2)}
                    yield {"rate": rate, "round": number, "seed": seed, "system": name, **found, **load}


# --- what is stored ---------------------------------------------------------------------------------------------------


def value(row: dict[str, object], path: tuple[str, ...]) -> float:
    for key in path:
        row = row[key]
    return row


def summaries(found: list[dict[str, object]]) -> list[dict[str, object]]:
    """Summarise the rounds of each rate and system, with ratios to other systems in each round."""
    paths = [
        (c, figure, key) for c in CLASSES for figure in ("ttft_ms", "turnaround_ms") for key in ("mean", "p50", "p99")
    ]
    paths += [("tokens_per_s",), ("tokens_per_cpu_s",)]
    table = []
    for rate in sorted({row["rate"] for row in found}):
        here = [row for row in found if row["rate"] == rate]
        for system in dict.fromkeys(row["system"] for row in here):
            own = {row["round"]: row for row in here if row["system"] == system}
            summary: dict[str, object] = {"rate": rate, "system": system, "rounds": len(own)}
            for path in paths:
                summary["_".join(path)] = spread([value(row, path) for row in own.values()])
            for other in ("continuous, FCFS", "iteration-level priority", "iteration-level LS first"):
                theirs = {row["round"]: row for row in here if row["system"] == other}
                if other != system and own.keys() & theirs.keys():
                    summary[f"over {other}"] = {
                        "_".join(path): spread(
                            [value(own[n], path) / value(theirs[n], path) for n in own if n in theirs]
                        )
                        for path in paths
                        if path[-1] != "p99"
                    }
            table.append(summary)
    return table


def store(args: argparse.Namespace, conditions: RunRecord, found: list[dict[str, object]]) -> None:
    """Write the requested files from the points measured so far."""
    table = summaries(found)
    origin = "ShareGPT" if args.lengths.is_file() else "a log-normal stand-in for ShareGPT"
    lengths = f"{origin}, divided by {args.shrink:g}"
    if args.be_input:
        lengths = f"a backlog of BE prompts of {args.be_input[0]} to {args.be_input[1]} tokens"
    if args.json:
        setting = {
            "model": args.model, "num_threads": 1,
            "lengths": lengths, "arrivals": "poisson", "ls_share": LS_SHARE,
            "seconds": args.seconds, "max_num_seqs": NUM_SEQS, "max_num_batched_tokens": args.budget,
            "device": args.device, "layers": args.layers, "experts": args.experts, "be_input": args.be_input,
            "vllm": package_version(args.vllm.with_name("python"), "vllm") if args.vllm else None,
            "flags": {name: " ".join(flags) for name, flags in MODES.items() if name in args.modes},
        }  # fmt: skip
        save(args.json, conditions, {**setting, "summary": table, "points": found})
    if args.png:
        plot(args.png, table, f"{args.model}, 20 % LS, lengths: {lengths}; medians, min and max")


def plot(path: Path, table: list[dict[str, object]], title: str) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415 - only where a picture is requested

    panels = {
        "ls_ttft_ms_mean": "LS: TTFT, mean, ms", "ls_ttft_ms_p99": "LS: TTFT, P99, ms",
        "ls_turnaround_ms_mean": "LS: turnaround, mean, ms", "be_ttft_ms_mean": "BE: TTFT, mean, ms",
        "be_turnaround_ms_mean": "BE: turnaround, mean, ms", "tokens_per_s": "all: output tokens/s",
    }  # fmt: skip
    figure = Figure(figsize=(14, 8.5), layout="constrained")
    for axes, (figure_name, label) in zip(figure.subplots(2, 3).flat, panels.items(), strict=True):
        for system in dict.fromkeys(each["system"] for each in table):
            own = [each for each in table if each["system"] == system]
            x, y = [each["rate"] for each in own], [each[figure_name]["median"] for each in own]
            lows = [each[figure_name]["median"] - each[figure_name]["min"] for each in own]
            highs = [each[figure_name]["max"] - each[figure_name]["median"] for each in own]
            axes.errorbar(x, y, (lows, highs), marker="o", markersize=4, capsize=3, label=system)
        axes.set(title=label, xlabel="requests/s offered")
        axes.set_ylim(bottom=0) if figure_name == "tokens_per_s" else axes.set_yscale("log")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def model_directory(args: argparse.Namespace) -> Path:
    """Return the directory of the served model, which is made if necessary."""
    if args.model == "demo":
        return DEMO
    if args.model == QWEN3:
        return make_qwen3_config(args.work / args.model, args.layers, args.experts)
    return make_random_model(args.work / args.model)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--points", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help="folder for the random model and the servers' logs")
    parser.add_argument("--model", choices=["demo", "random-640m", QWEN3], default=None)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--layers", type=int, default=48, help=f"layers of {QWEN3}")
    parser.add_argument("--experts", type=int, default=128, help=f"experts of a layer of {QWEN3}")
    parser.add_argument("--modes", nargs="*", default=None, choices=list(MODES))
    parser.add_argument(
        "--be-input", type=int, nargs=2, metavar=("LEAST", "MOST"), help="tokens of a backlog's prompts"
    )
    parser.add_argument("--budget", type=int, help="tokens of a step")
    parser.add_argument("--vllm", type=Path, help="vLLM's command in a separate virtual environment")
    parser.add_argument("--rates", type=float, nargs="+", default=[4, 7, 10], help="requests/s")
    parser.add_argument("--claim", type=float, nargs="*", default=[], help="rates that get --rounds rounds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=25, help="time for which requests arrive, at each point")
    parser.add_argument("--shrink", type=float, default=8, help="lengths are divided by it")
    parser.add_argument("--lengths", type=Path, default=LENGTHS, help="a trace with input_length and output_length")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first round; the others follow")
    parser.add_argument("--wrap", default="", help="command that runs each point's command")
    parser.add_argument("--png", type=Path, help="draw the curves here")
    args = parser.parse_args()
    if args.points is not None:
        for point in args.points:
            print(json.dumps(send(Point(**point))), flush=True)
        return
    conditions = run_record("measured")
    is_gpu = args.device == "cuda"
    args.model = args.model or (QWEN3 if is_gpu else "demo")
    args.modes = args.modes or list(ON_GPU if is_gpu else MODES)
    args.budget = args.budget or (4 * BUDGET if is_gpu else BUDGET)
    args.be_input = args.be_input or ([4096, 8192] if is_gpu else None)
    args.work.mkdir(parents=True, exist_ok=True)
    directory = model_directory(args)
    found = []
    for row in rounds(args, directory):
        print(json.dumps(row), flush=True)
        found.append(row)
        store(args, conditions, found)  # after each point, because a long run may be interrupted


if __name__ == "__main__":
    main()
