"""`moestro serve` in modes `ep` and `async`, two processes with experts on one real GPU: the answers of one device."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from gpu.conftest import require_cuda
from support.running import Running, is_idle, wait_until
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from worker.test_async_mode import ask_many, texts, worker

DEMO = Path(__file__).parents[2] / "src" / "moestro" / "assets" / "demo"
SERVE = (sys.executable, "-c", "import sys; from moestro.cli import main; sys.exit(main())", "serve")
FLAGS = ("--dtype", "bfloat16", "--kv-cache-memory-bytes", "200000000", "--max-num-seqs", "16",
         "--max-num-batched-tokens", "512")  # fmt: skip
NUM, NUM_EXPERTS = 10, 16
GREEDY = {"temperature": 0, "seed": None, "logprobs": None, "max_tokens": 24}
SHARED = "through host memory, because processes share a GPU"
MODES = {
    "fused": (),
    "ep": ("--mode", "ep", "--engines", "2"),
    # Each worker has every expert, so that the other one can go on alone.
    "async": ("--mode", "async", "--attention", "1", "--experts", "2", "--inline-limit", "0",
              "--num-redundant-experts", str(NUM_EXPERTS)),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A network of four layers with random weights that move its answers."""
    directory = tmp_path_factory.mktemp("model")
    config = Qwen3MoeConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, num_experts=NUM_EXPERTS, num_experts_per_tok=4, moe_intermediate_size=128,
        norm_topk_prob=True, max_position_embeddings=2048, eos_token_id=2, pad_token_id=0, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / name, directory / name)
    return directory


@contextmanager
def served(model: Path, directory: Path, device: str = "cuda") -> Iterator[dict[str, Running]]:
    """Run a server of each mode, all at once, because most of a start is compilation in one thread."""

    def start(mode: str) -> Running:
        (directory / mode).mkdir()
        command = (*SERVE, "--model", str(model), "--device", device, *FLAGS, *MODES[mode])
        return Running(command, directory / mode, forked=False)

    with ThreadPoolExecutor(len(MODES)) as pool:
        started = {mode: pool.submit(start, mode) for mode in MODES}
    running = {mode: each.result() for mode, each in started.items() if each.exception() is None}
    try:
        assert len(running) == len(MODES), [each.exception() for each in started.values()]
        yield running
        assert [each.stop() for each in running.values()] == [0] * len(MODES)
    finally:
        for each in running.values():
            each.kill()


@pytest.mark.gpu
def test_processes_that_share_a_gpu_give_the_answers_of_one_while_a_worker_dies(model, tmp_path):
    require_cuda()
    with served(model, tmp_path) as running:
        expected = texts(ask_many(running["fused"], NUM, **GREEDY))
        assert len(set(expected)) > 1
        assert texts(ask_many(running["ep"], NUM, **GREEDY)) == expected
        assert f"Engines exchange tokens by sockets {SHARED}" in " ".join(running["ep"].text.split())
        group = running["async"]
        assert f"large tensors go to 2 of 2 workers by gloo {SHARED}" in " ".join(group.text.split())
        assert texts(ask_many(group, NUM, **GREEDY)) == expected
        old = worker(group, "experts", 0)
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(ask_many, group, NUM, **GREEDY)
            wait_until(lambda: not is_idle(group))
            old.kill()
            assert texts(answers.result()) == expected
        wait_until(lambda: worker(group, "experts", 0).pid != old.pid)
        assert texts(ask_many(group, NUM, **GREEDY)) == expected
