"""Measures the sampler on a CPU, beside vLLM's own on the same logits, round by round.

    OMP_NUM_THREADS=1 python bench/micro/sampler.py [--vllm-python VENV/bin/python] \\
        --json bench/results/micro/sampler.json

Milliseconds for a step's logits in float32, of the demo model's vocabulary and of Qwen3's. The settings are the usual
ones: greedy, temperature alone, top_p alone, top_k with top_p, min_p. Moestro draws each token by (seed, position).
vLLM (`v1/sample/ops/topk_topp_sampler.py`, its way for CPUs) draws without seeds, which is its faster way, and is given
a copy of the logits that is not timed. It has no min_p there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from moestro.config.run_record import run_record
from moestro.core.work import SAMPLING_ROW
from moestro.model.sampler import find_peaks, sample

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, package_version, save, spread

VOCABULARIES, SIZES, ROUNDS, CALLS = (4096, 151_936), (1, 8, 32), 7, 5
SETTINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0},
    "temperature 1": {"temperature": 1},
    "top_p 0.9": {"temperature": 1, "top_p": 0.9},
    "top_k 20, top_p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "min_p 0.05": {"temperature": 1, "min_p": 0.05},
}
_PEER = """
import json, sys, time, torch
from vllm.platforms import current_platform
current_platform.import_kernels()
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
sampler = TopKTopPSampler()
print("ready", flush=True)
for line in sys.stdin:
    path, wanted, calls = json.loads(line)
    logits, times = torch.load(path), []
    def column(name, dtype):
        return torch.full((len(logits),), wanted[name], dtype=dtype) if name in wanted else None
    k, p = column("top_k", torch.int64), column("top_p", torch.float32)
    with torch.inference_mode():
        for _ in range(calls + 1):
            copy = logits.clone()
            begun = time.perf_counter()
            if wanted["temperature"]:
                sampler.forward_cpu(copy.div_(wanted["temperature"]), {}, k, p)
            else:
                copy.argmax(-1)
            times.append(1e3 * (time.perf_counter() - begun))
    print(json.dumps(sorted(times[1:])[calls // 2]), flush=True)
"""


class Peer:
    """vLLM's sampler in its own environment."""

    def __init__(self, python: Path) -> None:
        self.process = subprocess.Popen(
            [python, "-c", _PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        while self._line() != "ready":
            pass

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("vLLM's sampler did not start")
        return line.strip()

    def ms(self, path: Path, wanted: dict[str, float]) -> float:
        assert self.process.stdin is not None
        print(json.dumps([str(path), wanted, CALLS]), file=self.process.stdin, flush=True)
        return float(json.loads(self._line()))


def own_ms(logits: torch.Tensor, wanted: dict[str, float]) -> float:
    rows = np.zeros(len(logits), SAMPLING_ROW)
    rows["top_p"] = 1
    rows["seed"] = np.arange(len(logits))
    for name, value in wanted.items():
        rows[name] = value
    positions, times = np.arange(len(logits)) + 100, []
    with torch.inference_mode():
        for _ in range(CALLS + 1):
            begun = time.perf_counter()
            sample(logits, rows, positions, find_peaks(logits).tokens)
            times.append(1e3 * (time.perf_counter() - begun))
    return sorted(times[1:])[CALLS // 2]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--vllm-python", type=Path, help="the interpreter of an environment with vLLM for CPUs")
    parser.add_argument("--work", type=Path, default=Path("/tmp"), help="directory for the logits that both read")
    args = parser.parse_args()
    conditions, rows = run_record("measured"), []
    peer = None if args.vllm_python is None else Peer(args.vllm_python)
    path = args.work / "sampler-logits.pt"
    for vocabulary in VOCABULARIES:
        for count in SIZES:
            # Logits of a language model: a few likely tokens before a long tail.
            drawn = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(count))
            logits = drawn * 2 + 12 * (drawn > drawn.topk(8).values[:, -1:])
            torch.save(logits, path)
            for name, wanted in SETTINGS.items():
                measures_peer = peer is not None and "min_p" not in wanted
                pairs = [
                    (own_ms(logits, wanted), peer.ms(path, wanted) if peer is not None and measures_peer else 0.0)
                    for _ in range(ROUNDS)
                ]
                row: dict[str, object] = {"vocabulary": vocabulary, "sequences": count, "sampling": name}
                row["own_ms"] = spread([own for own, _ in pairs])
                if measures_peer:
                    row["vllm_ms"] = spread([other for _, other in pairs])
                    row["own_over_vllm"] = spread([own / other for own, other in pairs])
                rows.append(row)
                print(json.dumps(row), flush=True)
    version = "" if args.vllm_python is None else package_version(args.vllm_python, "vllm")
    save(
        args.json, conditions, {"num_threads": torch.get_num_threads(), "rounds": ROUNDS, "vllm": version, "rows": rows}
    )


if __name__ == "__main__":
    main()
