"""Measures throughput, TTFT and TPOT of the engine and its peers: same prompts, one compute thread each, interleaved.

    python bench/serving/engine.py --work /tmp/bench --models demo --json bench/results/serving/engine_cpu_demo.json \\
        [--vllm /path/to/venv/bin/vllm] [--transformers /path/to/venv/bin/python]

There are two models: the demo model, and a random Qwen3-MoE of 640M parameters (hidden 1024, 12 layers, 32 experts
top-4, expert width 512), made once in --work. Each system serves both in bfloat16. A closed load of 1, 8 and 32 users
asks for exact lengths, `--input-len` and `--output-len`. `moestro bench` measures `moestro` and vLLM through HTTP;
transformers' continuous batching runs in process. Every round visits every system, so that drift of the machine affects
all alike. Ratios are taken in each round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import track

from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.models import DEMO, make_random_model
from shared.results import make_parser, save, spread
from shared.server import MOESTRO, started

USERS = (1, 8, 32)
PORTS = {"moestro": 8181, "vllm": 8182}
FIGURES = ("output_tokens_per_s", "ttft_ms", "tpot_ms")


@dataclass(frozen=True)
class Model:
    """One network under test. `requests` is the number of requests of a run, by number of users."""

    name: str
    directory: Path
    requests: dict[int, int]


@dataclass(frozen=True)
class Load:
    """A closed load: `users` requests at once until `num_requests` are done. Lengths in tokens."""

    users: int
    num_requests: int
    input_len: int
    output_len: int


class HttpSystem:
    """A server that `moestro bench` measures."""

    def __init__(self, url: str, work: Path) -> None:
        self.url, self.result = url, work / "run.json"

    def run(self, load: Load, seed: int) -> dict[str, float]:
        """Run a load, and return means over its requests."""
        command = [
            *(MOESTRO, "bench", "--base-url", self.url),
            *("--max-concurrency", str(load.users), "--num-prompts", str(load.num_requests), "--seed", str(seed)),
            *("--random-input-len", str(load.input_len), "--random-output-len", str(load.output_len)),
            *("--num-warmups", "1", "--json", str(self.result)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        report = json.loads(self.result.read_text())["report"]
        assert report["num_ok"] == load.num_requests, report["failures"]
        assert report["num_wrong_length"] == 0, report
        return {
            "output_tokens_per_s": report["output_tokens_per_s"],
            "ttft_ms": report["ttft_ms"]["mean"],
            "tpot_ms": report["tpot_ms"]["mean"],
        }


class InProcessSystem:
    """transformers' continuous batching in a separate process, driven through pipes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def run(self, load: Load, seed: int) -> dict[str, float]:
        """Run a load, and return means over its requests."""
        assert self.process.stdin
        assert self.process.stdout
        print(json.dumps({**asdict(load), "seed": seed}), file=self.process.stdin, flush=True)
        report = json.loads(self.process.stdout.readline())
        return {
            "output_tokens_per_s": report["output_tokens_per_s"],
            "ttft_ms": statistics.mean(report["ttft_ms"]),
            "tpot_ms": statistics.mean(report["tpot_ms"]),
        }


@contextlib.contextmanager
def systems(args: argparse.Namespace, model: Model) -> Iterator[dict[str, HttpSystem | InProcessSystem]]:
    """Start all systems, each serving `model` with one compute thread."""
    with contextlib.ExitStack() as stack:
        found: dict[str, HttpSystem | InProcessSystem] = {}
        one = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        directory, name = str(model.directory), model.name
        command = [MOESTRO, "serve", directory, "--port", str(PORTS["moestro"])]
        command += ["--dtype", "bfloat16", "--max-model-len", "2048"]
        log = args.work / f"moestro-{name}.log"
        own = stack.enter_context(started(command, PORTS["moestro"], log, **one))
        found["moestro"] = HttpSystem(own.url, args.work)
        if args.vllm:
            command = [str(args.vllm), "serve", directory, "--port", str(PORTS["vllm"]), "--dtype", "bfloat16"]
            command += ["--max-model-len", "2048"]
            extra = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
            log = args.work / f"vllm-{name}.log"
            peer = stack.enter_context(started(command, PORTS["vllm"], log, **one, **extra))
            found["vllm"] = HttpSystem(peer.url, args.work)
        if args.transformers:
            command = [str(args.transformers), str(Path(__file__).with_name("transformers_cb.py")), directory]
            log = stack.enter_context((args.work / f"transformers-{name}.log").open("w"))
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
            process = stack.enter_context(subprocess.Popen(command, env={**os.environ, **one}, **pipes))
            stack.callback(process.terminate)
            assert json.loads(process.stdout.readline())["torch_threads"] == 1
            found["transformers"] = InProcessSystem(process)
        yield found


def measure(args: argparse.Namespace, model: Model) -> list[dict[str, object]]:
    """Measure a row for each system and number of users: median, min and max, and the ratio to `moestro` by round."""
    rows: list[dict[str, object]] = []
    with systems(args, model) as found:
        for system in found.values():
            system.run(Load(1, 2, args.input_len, args.output_len), seed=10_000)
        for users in args.users:
            load = Load(users, model.requests[users], args.input_len, args.output_len)
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in found}
            for number in track(range(args.rounds), description=f"{model.name}, {users} users"):
                for name, system in found.items():
                    # Each run has a different seed, so that no prefix cache helps.
                    runs[name].append(system.run(load, seed=1000 * users + number))
            rows += [summary(model.name, users, name, runs) for name in found]
            for row in rows[-len(found) :]:
                print(json.dumps(row), flush=True)
    return rows


def summary(model: str, users: int, name: str, runs: dict[str, list[dict[str, float]]]) -> dict[str, object]:
    row: dict[str, object] = {"model": model, "users": users, "system": name}
    for figure in FIGURES:
        values = [run[figure] for run in runs[name]]
        ratios = [run[figure] / own[figure] for run, own in zip(runs[name], runs["moestro"], strict=True)]
        row[figure] = spread(values)
        row[f"{figure}_over_moestro"] = spread(ratios)
    return row


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for the random model and the servers' logs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--input-len", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--output-len", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--users", type=int, nargs="+", default=list(USERS), choices=USERS)
    parser.add_argument("--models", nargs="+", default=["demo", "random-640m"], choices=["demo", "random-640m"])
    parser.add_argument("--vllm", type=Path, help="vLLM's command in a separate virtual environment")
    parser.add_argument("--transformers", type=Path, help="Python of a virtual environment with transformers and torch")
    args = parser.parse_args()
    conditions = run_record("measured")
    args.work.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, object]] = []
    for name in args.models:
        if name == "demo":
            model = Model(name, DEMO, {1: 8, 8: 32, 32: 64})
        else:
            model = Model(name, make_random_model(args.work / name), {1: 2, 8: 8, 32: 32})
        rows += measure(args, model)
    lengths = {"input_len": args.input_len, "output_len": args.output_len}
    save(args.json, conditions, {"num_threads": 1, **lengths, "rounds": args.rounds, "rows": rows})


if __name__ == "__main__":
    main()
