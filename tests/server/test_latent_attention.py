"""`moestro serve` with DeepSeek's attention: a small memory holds many tokens, and preemption changes no answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from parity import tiny
from support.running import REAL, Running, complete, metrics

NUM_BLOCKS = 21
KV_BYTES = NUM_BLOCKS * 16 * (16 + 8) * 3 * 4  # blocks, tokens, latent and rotated entries, layers, bytes of a number


@pytest.fixture(scope="module")
def server(demo_dir, tmp_path_factory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("latents")
    checkpoint = tiny.save_checkpoint(directory / "deepseek", tiny.make_config("deepseek_v3", vocab_size=4096))
    flags = ("--tokenizer", str(demo_dir), "--dtype", "float32", "--max-num-seqs", "6")
    sizes = ("--kv-cache-memory-bytes", str(KV_BYTES), "--kv-offloading-size", "0.001")
    running = Running((*REAL, str(checkpoint), *flags, *sizes), directory)
    yield running
    running.kill()


def test_answers_are_those_of_requests_alone_after_preemptions(server):
    assert any(f'num_gpu_blocks="{NUM_BLOCKS}"' in name for name in metrics(server))
    prompts = ["def f(x):\n    return " + "x + " * count for count in (1, 9, 4, 14, 2, 7)]

    def answer(prompts: list[str]) -> list[str]:
        reply = complete(server, prompt=prompts, max_tokens=90, temperature=0, ignore_eos=True)
        assert reply.status == 200, reply.body
        return [choice["text"] for choice in reply.json["choices"]]

    alone = [text for prompt in prompts for text in answer([prompt])]
    assert answer(prompts) == alone
    counts = metrics(server).items()
    assert sum(count for name, count in counts if name.startswith("vllm:num_preemptions_total")) > 0
