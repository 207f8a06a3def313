"""Measures steps of vLLM's scheduler for `scheduler_peer.py`, which runs it with vLLM's own interpreter.

    VENV/bin/python bench/micro/vllm_scheduler.py CHECKPOINT

Reads the fields of a `Load` as a line of JSON, and answers with the mean microseconds of a step.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.scheduler_load import BLOCK_SIZE, PROMPT, Load, step_us


class VllmScheduler:
    """The scheduler of vLLM's engine process, whose device answers at once with token 1."""

    def __init__(self, model: str, load: Load) -> None:
        config = EngineArgs(
            model=model,
            max_model_len=load.max_model_len,
            max_num_seqs=load.num_sequences,
            max_num_batched_tokens=max(load.num_sequences * PROMPT, load.max_model_len),
            block_size=BLOCK_SIZE,
            enable_prefix_caching=True,
            async_scheduling=False,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = load.num_blocks
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        kv = KVCacheConfig(load.num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._block_hasher = get_request_block_hasher(BLOCK_SIZE, hash_function)
        self._scheduler = Scheduler(config, kv, StructuredOutputManager(config), BLOCK_SIZE)
        self._encode = MsgpackEncoder().encode

    def add(self, request_id: str, token_ids: list[int], num_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, stop_token_ids=[0])
        self._scheduler.add_request(Request(request_id, token_ids, sampling, None, block_hasher=self._block_hasher))

    def step_ns(self) -> tuple[int, int]:
        started = time.thread_time_ns()
        planned = self._scheduler.schedule()
        spent = time.thread_time_ns() - started
        ids = list(planned.num_scheduled_tokens)
        result = ModelRunnerOutput(ids, {request_id: row for row, request_id in enumerate(ids)}, [[1] for _ in ids])
        started = time.thread_time_ns()
        for outputs in self._scheduler.update_from_output(planned, result).values():
            self._encode(outputs)
        return spent + time.thread_time_ns() - started, len(ids)


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        load = Load(**json.loads(line))
        scheduler = VllmScheduler(sys.argv[1], load)
        gc.collect()
        gc.freeze()  # as vLLM's engine process does at the end of its start
        print(json.dumps(step_us(scheduler, load)), flush=True)


if __name__ == "__main__":
    main()
