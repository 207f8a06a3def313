"""Runs transformers' continuous batching under a closed load, for `engine.py`: one JSON line in and out for each run.

    python bench/serving/transformers_cb.py MODEL_DIR

In: {"users": 8, "num_requests": 16, "input_len": 128, "output_len": 32, "seed": 0}. Out: the latencies of each
request in milliseconds, and the tokens a second. HTTP and tokenizer are left out, which favours this system.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

MAX_BATCH_TOKENS = 2048


def run(manager, vocab_size: int, load: dict) -> dict:
    """Run one closed load: `users` requests at a time until `num_requests` are done."""
    generator = torch.Generator().manual_seed(load["seed"])
    prompts = torch.randint(3, vocab_size, (load["num_requests"], load["input_len"]), generator=generator).tolist()
    waiting, sent, ttft_ms, tpot_ms = list(enumerate(prompts)), {}, [], []
    started = time.perf_counter()

    def send() -> None:
        index, prompt = waiting.pop()
        request_id = f"{load['seed']}-{index}"
        sent[request_id] = time.perf_counter()
        manager.add_request(
            prompt, request_id=request_id, max_new_tokens=load["output_len"], record_timestamps=True, eos_token_id=-1
        )

    for _ in range(min(load["users"], len(waiting))):
        send()
    while sent:
        output = manager.get_result(timeout=1)
        if output is None or not output.is_finished():
            continue
        assert output.error is None, output.error
        assert len(output.generated_tokens) == load["output_len"], len(output.generated_tokens)
        first, last = output.timestamps[0], output.timestamps[-1]
        ttft_ms.append(1e3 * (first - sent.pop(output.request_id)))
        tpot_ms.append(1e3 * (last - first) / (load["output_len"] - 1))
        if waiting:
            send()
    seconds = time.perf_counter() - started
    tokens_per_s = load["num_requests"] * load["output_len"] / seconds
    return {"output_tokens_per_s": tokens_per_s, "ttft_ms": ttft_ms, "tpot_ms": tpot_ms}


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(max_batch_tokens=MAX_BATCH_TOKENS, num_blocks=128, allow_block_sharing=False)
    manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=batching)
    manager.start()
    print(json.dumps({"ready": True, "torch_threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(manager, model.config.vocab_size, json.loads(line))), flush=True)
    manager.stop(block=True)


if __name__ == "__main__":
    main()
