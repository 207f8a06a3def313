"""Measures `moestro serve` on a GPU: time to readiness, latencies at several numbers of users, and the graph's step.

    python bench/serving/gpu_served.py --json bench/results/serving/gpu_served.json

The network is Qwen3-30B-A3B with random weights. For each number of users, `moestro bench` sends prompts of 1,024
random tokens and reads answers of 128, in closed load, round after round while --round-seconds last. Answers are drawn
at temperature 1, because greedy answers of random weights repeat few tokens, which visit few experts.

The server measures no device time of a step. So after it has ended, this process loads the same network and times
decode steps of as many sequences as ran at once (`running`, the median of samples), whose mean length is that of a
sequence halfway through its answer. `step_ms` is one step of several that are launched at once, as `queued_ms` of
`cuda_steps.py`. `itl_over_step` is the median time between tokens over that. The two see different random tokens, and
so not the same experts.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.models import DEMO, make_qwen3_config
from shared.results import make_parser, save, spread
from shared.server import COMMAND, Server, free_port, started

VOCABULARY, MAX_MODEL_LEN, MAX_SEQS = 151_936, 16_384, 256
FIGURES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
_SAMPLE_S, _REPEATS = 0.05, 5

Row = dict[str, Any]


def serve_flags(args: argparse.Namespace, config: Path) -> list[str]:
    """Flags of the server."""
    flags = ["--load-format", "dummy", "--tokenizer", str(DEMO), "--device", args.device, "--dtype", "bfloat16"]
    flags += ["--max-num-seqs", str(MAX_SEQS), "--max-model-len", str(MAX_MODEL_LEN)]
    if args.device == "cpu":
        flags += ["--kv-cache-memory-bytes", str(1 << 30)]
    return ["serve", "--model", str(config), *flags, *args.flags.split()]


def banner_lines(log: Path) -> list[str]:
    """Lines of the banner that name memory, kernels or graphs."""
    wanted = re.compile(r"GiB|KV cache|kernels|graphs", re.IGNORECASE)
    return [line.strip(" │|") for line in log.read_text().splitlines() if wanted.search(line)]


def sample_running(server: Server, stop: threading.Event, found: list[int]) -> None:
    """Sample the number of running sequences until `stop`."""
    while not stop.wait(_SAMPLE_S):
        try:
            found.append(sum(engine["num_running"] for engine in server.load()["engines"]))
        except OSError:
            continue


def one_round(args: argparse.Namespace, server: Server, users: int, seed: int, directory: Path) -> Row:
    """Send one round of closed load: percentiles, throughput, and the usual number of running sequences."""
    result, running, stop = directory / "bench.json", [], threading.Event()
    sampler = threading.Thread(target=sample_running, args=(server, stop, running))
    command = [*COMMAND, "bench", "--base-url", server.url, "--dataset-name", "random", "--json", str(result)]
    command += ["--random-input-len", str(args.input), "--random-output-len", str(args.output)]
    command += ["--vocab-size", str(VOCABULARY), "--temperature", "1", "--seed", str(seed), "--num-warmups", "0"]
    command += ["--max-concurrency", str(users), "--num-prompts", str(max(2 * users, 4))]
    before = sum(server.samples("moestro:steps_ahead_total"))
    sampler.start()
    try:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    finally:
        stop.set()
        sampler.join()
    report = json.loads(result.read_text())
    report = report.get("report", report)
    assert report["num_ok"] == report["num_requests"], report
    busy = [each for each in running if each]
    return {
        **{name: report[name] for name in FIGURES if name in report},
        "output_tokens_per_s": report["output_tokens_per_s"],
        "running": round(statistics.median(busy)) if busy else users,
        "steps_ahead": sum(server.samples("moestro:steps_ahead_total")) - before,
    }


def served(args: argparse.Namespace, config: Path, directory: Path) -> Row:
    """Start the server and measure every number of users."""
    port, log = free_port(), directory / "server.log"
    began = time.perf_counter()
    with started([*COMMAND, *serve_flags(args, config), "--port", str(port)], port, log, COLUMNS="160") as server:
        ready_s = time.perf_counter() - began
        rows = []
        for users in args.users:
            rounds, began = [], time.perf_counter()
            while not rounds or (time.perf_counter() - began) * (1 + 1 / len(rounds)) < args.round_seconds:
                rounds.append(one_round(args, server, users, 1000 * users + len(rounds), directory))
            rows.append(summary(users, rounds))
            print(json.dumps(rows[-1]), flush=True)
        return {"ready_s": round(ready_s, 1), "banner": banner_lines(log), "rows": rows}


def summary(users: int, rounds: list[Row]) -> Row:
    """Medians and spread over the rounds of one number of users."""
    row: Row = {
        "users": users,
        "rounds": len(rounds),
        "running": round(statistics.median(r["running"] for r in rounds)),
    }
    for name in FIGURES:
        kinds = [key for key in ("mean", "p50", "p99") if key in rounds[0].get(name, {})]
        row[name] = {key: spread([each[name][key] for each in rounds]) for key in kinds}
    for name in ("output_tokens_per_s", "steps_ahead"):
        row[name] = spread([each[name] for each in rounds])
    return row


def add_steps(args: argparse.Namespace, config: Path, rows: list[Row]) -> Row:
    """Time the decode steps of each row in this process, and add them; return facts of the device."""
    import torch  # noqa: PLC0415 - only when the server has left the device
    from serving import cuda_steps  # noqa: PLC0415

    from moestro.model.settings import ModelSettings  # noqa: PLC0415

    settings = ModelSettings(
        model=str(config), device=args.device, dtype="bfloat16", load_format="dummy",
        block_size=cuda_steps.BLOCK_SIZE, kernels="eager", kv_cache_memory_bytes=1,
    )  # fmt: skip
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    bench = cuda_steps.Bench(device, _REPEATS, settings)
    way = cuda_steps.own_kernels if args.device == "cuda" else cuda_steps.moestro
    for row in rows:
        shape = cuda_steps.Shape(row["running"], 1, args.input + args.output // 2)
        (found,) = way(bench, shape, temperature=1)
        row["step_ms"] = found["queued_ms"]
        row["itl_over_step"] = round(row["itl_ms"]["p50"]["median"] / found["queued_ms"]["median"], 3)
        print(json.dumps({name: row[name] for name in ("users", "running", "step_ms", "itl_over_step")}), flush=True)
    return cuda_steps.device_facts(device)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--users", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--input", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--round-seconds", type=float, default=15, help="time for the rounds of one number of users")
    parser.add_argument("--flags", default="", help="further flags of the server")
    parser.add_argument("--quick", action="store_true", help="one round each, of 1 and 8 users")
    args = parser.parse_args()
    if args.quick:
        args.users, args.round_seconds = [1, 8], 0
    conditions = run_record("measured")
    names = ("device", "layers", "experts", "input", "output", "round_seconds", "flags")
    settings = {name: getattr(args, name) for name in names} | {"temperature": 1}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        config = make_qwen3_config(directory / "model", args.layers, args.experts, VOCABULARY)
        found = served(args, config, directory)
        save(args.json, conditions, {"settings": settings, **found})  # a failure below must not cost it
        facts = add_steps(args, config, found["rows"])
    save(args.json, conditions, {"settings": settings, **facts, **found})


if __name__ == "__main__":
    main()
