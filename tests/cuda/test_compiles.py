"""Kernels compile for GPUs that are not here: no spills, matrix instructions, and as much shared memory as there is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moestro.model.cuda.tiles import dense_tile, expert_tile

PASSED = Path(__file__).with_name("passed_launches.txt")
TOOL = Path(__file__).parents[2] / "tools" / "kernel_table.py"
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_120": 99 << 10}


def compiled(*arguments: str) -> str:
    """What `tools/kernel_table.py` prints, which compiles launches for all GPUs without one."""
    run = subprocess.run(
        [sys.executable, TOOL, "--jobs", "2", *arguments],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout.splitlines()[-1]


def test_the_largest_tile_of_each_kernel_compiles_for_each_gpu(tmp_path):
    """Few spills, matrix instructions in products, shared memory that fits, no fused multiply-add where bits count.

    Launches of the same sources that have passed, on whatever machine, pass again. After a change of the kernels
    `tools/kernel_table.py` notes those that pass (its docstring has the command); without it the test takes minutes.
    """
    passed = tmp_path / "passed"
    shutil.copyfile(PASSED, passed)
    summary = compiled("--heaviest", "--targets", "80", "90", "100", "120", "--passed", str(passed))
    assert summary.endswith("with 0 problems")
    names = passed.read_text().split()
    assert len(names) == int(summary.split()[2]) >= 40


def test_a_launch_is_compiled_unless_it_is_noted_with_the_same_sources(tmp_path):
    passed, options = tmp_path / "passed", ("--heaviest", "--targets", "80", "--only", "add_answers")
    passed.write_text("0123456789abcdef\n")
    assert compiled(*options, "--passed", str(passed)).startswith("1 of 1 ")
    assert compiled(*options, "--passed", str(passed)).startswith("0 of 1 ")


@pytest.mark.slow
def test_each_tile_of_each_kernel_compiles_for_each_gpu():
    assert compiled().endswith("with 0 problems")


@pytest.mark.parametrize("shared_bytes", SHARED_BYTES.values(), ids=SHARED_BYTES)
@pytest.mark.parametrize("num_rows", [1, 17, 33, 65, 2048])
def test_tiles_fit_the_shared_memory_of_each_gpu_at_the_same_depth(num_rows, shared_bytes):
    for choose, num_weights in ((dense_tile, 1), (expert_tile, 2)):
        tile = choose(num_rows, torch.bfloat16, shared_bytes)
        largest = choose(num_rows, torch.bfloat16, 227 << 10)
        assert tile.num_stages >= 2
        assert tile.num_stages * tile.depth * (tile.tokens + num_weights * tile.outs) * 2 <= shared_bytes
        assert (tile.tokens, tile.outs, tile.depth) == (largest.tokens, largest.outs, largest.depth)
