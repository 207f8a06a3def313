"""Measures what host memory saves where KV blocks are scarce: KV for all requests, KV computed again, KV copied back.

    OMP_NUM_THREADS=1 python bench/serving/kv_offload.py --work /tmp/bench \\
        [--json bench/results/serving/kv_offload.json]

The requests have short prompts of random tokens and long greedy answers, and all arrive at the start. One engine in
this process serves them. Its KV cache has blocks for half of their need; the bound has blocks for all of it. Only
processor time is counted, so that other work on the machine changes little. Every round runs the three cases in turn,
and compares the answers. The networks run in float32, because in bfloat16 another batch may change an answer.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from moestro.config.run_record import run_record
from moestro.core.request import Request, SamplingParams
from moestro.engine.rank import build_rank
from moestro.engine.settings import SchedulerSettings
from moestro.model.device import TorchDevice, open_device
from moestro.model.settings import ModelSettings

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.models import DEMO, make_random_model
from shared.results import make_parser, save, spread

BLOCK_SIZE, VOCAB, REPEATS = 16, 4096, 5
# By model: requests, tokens of each prompt and of each answer.
SHAPES = {"demo": (24, 64, 256), "random-640m": (10, 32, 96)}
SYSTEMS = ("KV for all", "computed again", "host memory")


def make_requests(num: int, num_prompt: int, num_output: int) -> list[Request]:
    rng = np.random.default_rng(0)
    return [
        Request(
            request_id=f"r{i}",
            num_prompt_tokens=num_prompt,
            sampling=SamplingParams(temperature=0.0, max_tokens=num_output),
            arrival_ns=i,
            token_ids=rng.integers(3, VOCAB, num_prompt, dtype=np.int32).tobytes(),
        )
        for i in range(num)
    ]


def run(device: TorchDevice, bounds: SchedulerSettings, requests: list[Request]) -> dict[str, object]:
    """Serve all requests; return CPU-seconds, preemptions, copies, and the answers."""
    rank, answers = build_rank(bounds, device), {request.request_id: [] for request in requests}
    began = time.process_time()
    for request in requests:
        rank.add(request, 0)
    now_ns = 0
    while rank.has_work:
        now_ns += 1
        for output in rank.step(now_ns):
            answers[output.request_id].extend(output.token_ids)
    stats = rank.stats()
    return {
        "cpu_s": time.process_time() - began,
        "preemptions": stats.num_preemptions,
        "restored_tokens": stats.num_restored_tokens,
        "answers": answers,
    }


def measure(model: str, directory: Path) -> dict[str, object]:
    num, num_prompt, num_output = SHAPES[model]
    longest = num_prompt + num_output
    needed = num * -(-longest // BLOCK_SIZE)
    blocks = {"KV for all": needed + num, "computed again": needed // 2, "host memory": needed // 2}
    host = {"KV for all": 0, "computed again": 0, "host memory": needed}
    settings = ModelSettings(
        model=str(directory), dtype="float32", device="cpu", max_model_len=longest, block_size=BLOCK_SIZE,
        num_gpu_blocks_override=needed + num, kv_offloading_size=1.0,
    )  # fmt: skip
    device, info = open_device(settings)
    assert info.num_host_blocks >= needed
    requests, found, wanted = make_requests(num, num_prompt, num_output), {name: [] for name in SYSTEMS}, None
    for _ in range(REPEATS):
        for name in SYSTEMS:
            bounds = SchedulerSettings(
                num_blocks=blocks[name], num_host_blocks=host[name], block_size=BLOCK_SIZE, max_model_len=longest,
                max_num_seqs=num, max_num_batched_tokens=2048, enable_prefix_caching=False,
            )  # fmt: skip
            one = run(device, bounds, requests)
            wanted = wanted or one["answers"]
            assert one.pop("answers") == wanted, f"{name}: other tokens"
            found[name].append(one)
    print(json.dumps({"model": model, **found}), flush=True)
    free = [one["cpu_s"] for one in found["KV for all"]]
    rows = []
    for name in SYSTEMS:
        times = [one["cpu_s"] for one in found[name]]
        rows.append(
            {
                "system": name,
                "cpu_s": spread(times),
                "over KV for all": spread([each / bound for each, bound in zip(times, free, strict=True)]),
                "preemptions": found[name][0]["preemptions"],
                "restored_tokens": found[name][0]["restored_tokens"],
            }
        )
    again = [one["cpu_s"] for one in found["computed again"]]
    kept = [one["cpu_s"] for one in found["host memory"]]
    ratio = spread([each / other for each, other in zip(kept, again, strict=True)])
    shape = {"requests": num, "prompt_tokens": num_prompt, "output_tokens": num_output}
    return {"model": model, **shape, "rows": rows, "host memory over computed again": ratio}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for the random model")
    args = parser.parse_args()
    conditions = run_record("measured")
    found = [measure("demo", DEMO), measure("random-640m", make_random_model(args.work / "random-640m"))]
    figures = {
        "repeats": REPEATS, "dtype": "float32", "num_threads": os.environ.get("OMP_NUM_THREADS", "all"),
        "models": found,
    }  # fmt: skip
    print(json.dumps(figures, indent=1))
    save(args.json, conditions, figures)


if __name__ == "__main__":
    main()
