"""The real commands on a GPU: `moestro serve` over HTTP, in both modes, and `moestro calibrate`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gpu.conftest import require_cuda
from support.running import Running, call, metrics

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
# The package need not be installed: PYTHONPATH=src does.
COMMAND = (sys.executable, "-c", "from moestro.cli import main; main()")
SERVE = ("serve", "--kv-cache-memory-bytes", "100000000", "--dtype", "float32")
PROMPTS = ("The engine", "A gate chooses", "One, two, three,", "def main():")
MODES = {"fused": (), "preemptive": ("--mode", "preemptive"), "scarce": ("--num-gpu-blocks-override", "24",
         "--max-model-len", "128", "--kv-offloading-size", "0.01")}  # fmt: skip


@pytest.fixture(autouse=True)
def _cuda() -> None:
    require_cuda()


@contextmanager
def serving(directory: Path, *arguments: str) -> Iterator[Running]:
    directory.mkdir()
    running = Running((*COMMAND, *SERVE, *arguments), directory)
    try:
        yield running
        assert running.stop() == 0
        assert running.left_behind() == []
    finally:
        running.kill()


def answers(server: Running) -> list[str]:
    """Greedy and seeded texts of all prompts, requested at once."""
    found = []
    for fields in ({"temperature": 0}, {"temperature": 1, "seed": 5, "top_p": 0.9, "presence_penalty": 0.5}):
        body = {"model": "moestro-demo", "prompt": list(PROMPTS), "max_tokens": 24, **fields}
        reply = call(server, "POST", "/v1/completions", body)
        assert reply.status == 200, reply.body
        found += [choice["text"] for choice in reply.json["choices"]]
    return found


@pytest.fixture(scope="module")
def texts_of_cpu(tmp_path_factory) -> list[str]:
    require_cuda()
    with serving(tmp_path_factory.mktemp("cpu") / "cpu", "--device", "cpu") as server:
        return answers(server)


@pytest.mark.parametrize("mode", MODES)
def test_a_server_gives_the_texts_of_one_on_the_cpu(mode, texts_of_cpu, tmp_path):
    with serving(tmp_path / "gpu", "--device", DEVICE, *MODES[mode]) as server:
        assert answers(server) == texts_of_cpu
        body = {"model": "moestro-demo", "messages": [{"role": "user", "content": "Name a colour."}], "stream": True,
                "max_tokens": 16, "logprobs": True, "top_logprobs": 3,
                "response_format": {"type": "json_object"}}  # fmt: skip
        reply = call(server, "POST", "/v1/chat/completions", body)
        assert reply.status == 200
        assert reply.events[-1] == "[DONE]"
        figures = metrics(server)
        assert any(name.startswith("vllm:generation_tokens") and value > 0 for name, value in figures.items())


def test_calibrate_writes_a_table_of_the_gpu(tmp_path):
    out = tmp_path / "table.json"
    arguments = ("calibrate", "--device", DEVICE, "--rounds", "2", "--num-checks", "2", "--max-num-seqs", "8",
                 "--max-model-len", "256", "--max-num-batched-tokens", "128", "--out", str(out))  # fmt: skip
    subprocess.run([*COMMAND, *arguments], check=True, capture_output=True, timeout=300)
    table = json.loads(out.read_text())
    assert table["device"] == DEVICE
    assert all(point["ns"] > 0 for point in table["decode"] + table["prefill"])
    assert table["host"]["step_ns"] > 0
