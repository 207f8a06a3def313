"""Measures a scheduler's step beside vLLM's, in microseconds of processor time, while a device computes nothing.

    python bench/micro/scheduler_peer.py --vllm-python VENV/bin/python --json bench/results/micro/scheduler_peer.json

A step is: plan, take the sampled tokens, and encode the outputs for the API server. Prompts have 256 tokens, blocks 16,
and both cache prefixes. `decodes` is a batch in which no sequence ends. In `turnover`, answers have 256 tokens, and a
request comes when one ends. Both systems measure the same load in turn, each in its own process, whose garbage
collector leaves out what the start made; arrivals are not measured. vLLM schedules step by step, as Moestro does here.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from moestro.config.run_record import run_record
from moestro.core.hashing import hash_blocks, hash_key
from moestro.core.load_figures import IDLE
from moestro.core.request import Request, SamplingParams
from moestro.core.work import StepResult
from moestro.engine.rank import outputs_of
from moestro.engine.scheduler import Scheduler
from moestro.engine.settings import SchedulerSettings
from moestro.wire.messages import Outputs, encode

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.models import DEMO
from shared.results import make_parser, package_version, save, spread
from shared.scheduler_load import BLOCK_SIZE, PROMPT, Load, step_us

ROUNDS = 5
LOADS = {
    f"{name}, {num_sequences}": Load(num_sequences, answer, num_steps)
    for name, answer in (("decodes", 0), ("turnover", 256))
    for num_sequences, num_steps in ((1, 600), (8, 600), (32, 400), (256, 300))
}
_PEER = str(Path(__file__).with_name("vllm_scheduler.py"))


class OwnScheduler:
    """The scheduler of a rank, whose device answers at once with token 1; implements `MeasuredScheduler`."""

    def __init__(self, load: Load) -> None:
        self._scheduler = Scheduler(
            SchedulerSettings(
                num_blocks=load.num_blocks,
                block_size=BLOCK_SIZE,
                max_model_len=load.max_model_len,
                max_num_seqs=load.num_sequences,
                max_num_batched_tokens=max(load.num_sequences * PROMPT, load.max_model_len),
            )
        )
        self._key = hash_key("bench")

    def add(self, request_id: str, token_ids: list[int], num_tokens: int) -> None:
        ids = np.array(token_ids, np.int32)
        request = Request(
            request_id=request_id,
            num_prompt_tokens=len(ids),
            sampling=SamplingParams(max_tokens=num_tokens, stop_token_ids=(0,)),
            arrival_ns=0,
            token_ids=ids.tobytes(),
            block_hashes=hash_blocks(self._key, ids, BLOCK_SIZE),
            hash_key=self._key,
        )
        self._scheduler.add(request)

    def step_ns(self) -> tuple[int, int]:
        started = time.thread_time_ns()
        plan = self._scheduler.schedule(0)
        spent = time.thread_time_ns() - started
        assert plan is not None
        result = StepResult(plan.units.slot, np.ones(len(plan.units), np.int32))
        started = time.thread_time_ns()
        encode(Outputs(outputs_of(self._scheduler.update(result, 0)), IDLE))
        return spent + time.thread_time_ns() - started, len(plan.units)


class VllmProcess:
    """Runs vLLM's scheduler in another process, with vLLM's interpreter."""

    def __init__(self, python: Path) -> None:
        self._process = subprocess.Popen(
            [python, _PEER, DEMO],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"VLLM_CONFIGURE_LOGGING": "0"},  # its log would be on standard output
        )
        while self._line() != "ready":
            pass

    def step_us(self, load: Load) -> float:
        assert self._process.stdin is not None
        print(json.dumps(asdict(load)), file=self._process.stdin, flush=True)
        return float(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("vLLM's scheduler ended; run bench/micro/vllm_scheduler.py by hand to see why")
        return line.strip()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--vllm-python", type=Path, help="the interpreter of an environment with vLLM for CPUs")
    args = parser.parse_args()
    conditions = run_record("measured")
    peer = None if args.vllm_python is None else VllmProcess(args.vllm_python)
    gc.collect()
    gc.freeze()
    rows = []
    for name, load in LOADS.items():
        pairs = [(step_us(OwnScheduler(load), load), peer.step_us(load) if peer else 0.0) for _ in range(ROUNDS)]
        row: dict[str, object] = {"load": name, "sequences": load.num_sequences, "answer": load.answer}
        row["moestro_us"] = spread([own for own, _ in pairs])
        if peer is not None:
            row["vllm_us"] = spread([other for _, other in pairs])
            row["vllm_over_moestro"] = spread([other / own for own, other in pairs])
        rows.append(row)
        print(json.dumps(row), flush=True)
    version = "" if args.vllm_python is None else package_version(args.vllm_python, "vllm")
    save(args.json, conditions, {"rounds": ROUNDS, "vllm": version, "rows": rows})


if __name__ == "__main__":
    main()
