"""`moestro serve --device cuda` where torch finds no GPU: the real command says so in one sentence."""

from __future__ import annotations

import pytest
from support.running import PATIENCE_S, REAL, Running

torch = pytest.importorskip("torch")


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch finds a CUDA device")
def test_a_gpu_that_is_not_there_ends_the_start_with_status_2(tmp_path):
    server = Running((*REAL, "--device", "cuda"), tmp_path, wait=False)
    try:
        assert server.process.wait(PATIENCE_S) == 2
    finally:
        server.kill()
    errors = [line for line in server.text.splitlines() if " INFO " not in line]
    assert len(errors) == 1, server.text
    assert errors[0].startswith("moestro: --device cuda: torch ")
    assert errors[0].count(". ") == 0, "one sentence"
    assert "give --device cpu" in errors[0]
