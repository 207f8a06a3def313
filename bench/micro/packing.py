"""Measures what packed weights save in a CPU decode step: the same network unpacked and packed, in turn.

    python bench/micro/packing.py --work /tmp/bench --json bench/results/micro/packing_cpu.json

The models are those of `bench/serving/engine.py` in bfloat16, with contexts of about 128 tokens. Set OMP_NUM_THREADS.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from moestro.config.run_record import run_record
from moestro.core.request import Request, SamplingParams
from moestro.engine.rank import Rank, build_rank
from moestro.engine.settings import SchedulerSettings
from moestro.model.device import TorchDevice
from moestro.model.load import load_network, read_config
from moestro.model.settings import ModelSettings

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.models import DEMO, make_random_model
from shared.results import make_parser, save, spread

CONTEXT, STEPS, ROUNDS = 128, 6, 7


def make_rank(directory: Path, *, packed: bool) -> Rank:
    settings = ModelSettings(model=str(directory), dtype="bfloat16", device="cpu")
    network, _ = load_network(settings, read_config(settings))
    pools = network.probe(16)[0].allocate(1024)
    if packed:
        network.pack()
    limits = SchedulerSettings(
        num_blocks=1024, block_size=16, max_model_len=1024, max_num_batched_tokens=8192, enable_prefix_caching=False
    )
    return build_rank(limits, TorchDevice(network, pools))


def decode_ms(rank: Rank, num_sequences: int) -> float:
    """Measure the median of STEPS decode steps with `num_sequences` running, after their prompts are computed."""
    tokens = np.random.default_rng(0).integers(3, 4096, (num_sequences, CONTEXT)).astype(np.int32)
    for i, prompt in enumerate(tokens):
        sampling = SamplingParams(max_tokens=STEPS + 2, temperature=0)
        request = Request(
            request_id=str(i), num_prompt_tokens=CONTEXT, sampling=sampling, arrival_ns=i, token_ids=prompt.tobytes()
        )
        rank.add(request, 0)
    rank.step(0)  # submits the prompts
    times = []
    while rank.has_work:
        started = time.perf_counter()
        rank.step(0)
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[1:STEPS])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for the random model")
    args = parser.parse_args()
    conditions = run_record("measured")
    rows = []
    for name, directory in (("demo", DEMO), ("random-640m", make_random_model(args.work / "random-640m"))):
        ranks = {packed: make_rank(directory, packed=packed) for packed in (False, True)}
        for num_sequences in (1, 8, 32):
            pairs = [tuple(decode_ms(ranks[packed], num_sequences) for packed in (False, True)) for _ in range(ROUNDS)]
            rows.append(
                {
                    "model": name,
                    "running": num_sequences,
                    "unpacked_ms": spread([plain for plain, _ in pairs]),
                    "packed_ms": spread([packed for _, packed in pairs]),
                    "packed_over_unpacked": spread([packed / plain for plain, packed in pairs]),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    setting = {"num_threads": torch.get_num_threads(), "rounds": ROUNDS, "context": CONTEXT}
    save(args.json, conditions, {**setting, "rows": rows})


if __name__ == "__main__":
    main()
