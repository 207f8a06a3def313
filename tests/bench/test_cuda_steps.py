"""`bench/serving/cuda_steps.py`: the whole command on a small network on the CPU, and what a second run keeps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import imitated_accelerator
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from serving import cuda_steps

from moestro.model.load import build_skeleton
from moestro.model.network import Network

SMALL = (
    "--device", "cpu", "--layers", "1", "--experts", "8", "--vocabulary", "64", "--decode", "2x16", "--prefill", "8",
    "--repeats", "2",
)  # fmt: skip


def run(path: Path, *arguments: str) -> list[dict]:
    command = [sys.executable, cuda_steps.__file__, *SMALL, "--json", str(path)]
    subprocess.run([*command, *arguments], check=True, capture_output=True)
    return json.loads(path.read_text())["rows"]


def test_every_part_has_its_rows_and_a_second_run_does_only_what_is_missing(tmp_path):
    path = tmp_path / "steps.json"
    first = run(path, "--parts", "ceilings", "moestro")
    assert [row["part"] for row in first] == ["ceilings", "moestro: decode 2 x 16", "moestro: prefill 1 x 8"]
    rows = run(path)
    assert rows[:3] == first
    assert not [row for row in rows if "error" in row]
    by_part = {row["part"]: row for row in rows}
    assert set(by_part) >= {
        f"{part}: {step}"
        for part in ("moestro", "profile", "transformers")
        for step in ("decode 2 x 16", "prefill 1 x 8")
    } | {"continuous batching: decode 2 x 16"}
    decode = by_part["moestro: decode 2 x 16"]
    assert decode["touched"] == 8  # two tokens with eight experts each, of eight
    assert decode["floor_ms"] > 0
    assert by_part["profile: prefill 1 x 8"]["operations"]


def test_a_bench_on_an_accelerator_opens_it_before_it_reads_its_memory(monkeypatch):
    with imitated_accelerator.imitated(monkeypatch):
        with pytest.raises(RuntimeError, match="Invalid device"):
            torch.cuda.reset_peak_memory_stats()
        assert cuda_steps.Bench(imitated_accelerator.DEVICE, 1, settings=None).peak_bytes() > 0


@pytest.mark.parametrize("shape", [(1, 1, 1024), (2, 1, 1024), (5, 1, 96), (32, 1, 1024), (1, 2048, 0), (1, 1, 1)])
def test_each_step_is_another_batch_whose_lengths_have_the_given_mean(shape):
    shape = cuda_steps.Shape(*shape)
    seen, totals = set(), []
    for seed in range(40):
        units = cuda_steps.units_of(shape, 64, seed)
        new, base = units.num_tokens, shape.context or shape.num_new
        around = units.start if shape.context else new
        assert (np.abs(around - base) <= base // 2).all()
        assert len(units.token_ids) == new.sum()
        used = [table[: -(-length // 16)] for table, length in zip(units.block_tables, units.start + new, strict=True)]
        blocks = np.concatenate(used)
        assert len(set(blocks.tolist())) == len(blocks), "no two units share a block"
        assert blocks.max() < shape.num_blocks
        seen.add(tuple(around.tolist()))
        totals.append(around.sum())
    assert np.mean(totals) == base * shape.num_units
    assert len(seen) > 30 or base == 1


def test_a_part_that_fails_or_takes_too_long_has_a_row_with_the_error():
    bench = cuda_steps.Bench(torch.device("cpu"), 1, settings=None)

    def fails(_bench):
        raise RuntimeError("out of memory")
        yield {}

    def hangs(_bench):
        while True:
            pass
        yield {}

    assert cuda_steps.run_part(fails, bench, 60.0) == [{"error": "RuntimeError: out of memory"}]
    (row,) = cuda_steps.run_part(hangs, bench, 0.05)
    assert row["error"].startswith("TimeoutError")


@pytest.mark.parametrize("what", ["commit", "settings", "error"])
def test_rows_of_other_code_other_settings_and_failed_parts_are_measured_again(what, tmp_path):
    path, settings = tmp_path / "steps.json", {"layers": 2}
    good = {"part": "ceilings", "bytes_per_s": 1.0}
    rows = [good, {"part": "moestro: decode 1 x 8", **({"error": "x"} if what == "error" else {})}]
    path.write_text(json.dumps({"conditions": {"commit": "a"}, "settings": settings, "rows": rows}))
    kept = cuda_steps.kept_rows(
        path, settings if what != "settings" else {"layers": 3}, "a" if what != "commit" else "b"
    )
    assert kept == ([good] if what == "error" else [])
    assert cuda_steps.kept_rows(tmp_path / "none", settings, "a") == []


def test_the_floor_counts_the_bytes_and_operations_of_the_named_network(tmp_path):
    """Qwen3-30B-A3B: 30.5 billion parameters, of which a token uses 3.3 billion."""
    config = cuda_steps.make_qwen3_config(tmp_path)
    network = Network(build_skeleton(AutoConfig.from_pretrained(config)).bfloat16(), torch.device("cpu"))
    assert network.num_parameters == pytest.approx(30.5e9, rel=0.01)
    probe = SimpleNamespace(bytes_per_block=16 * 98_304, block_size=16)
    checked = SimpleNamespace(network=network, num_chosen=8, probe=probe)
    num_bytes, flops = cuda_steps.work_of(checked, cuda_steps.Shape(1, 1, 0), 48 * 8)
    assert flops / 2 == pytest.approx(3.05e9, rel=0.02)  # without the embedding
    assert num_bytes == pytest.approx(2 * 3.05e9, rel=0.02)
    more, _ = cuda_steps.work_of(checked, cuda_steps.Shape(32, 1, 1024), 48 * 8)
    assert more - num_bytes == 32 * 1024 * 98_304
