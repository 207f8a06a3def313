"""docs/placement.md: its commands run as they are written, in order, in one shell, where `examples/` is, and print what
the page shows."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "placement.md"
# A block of commands, and a block of text right after it, which shows parts of what they print.
BLOCKS = re.compile(r"^```bash\n(.*?)^```$(?:\n+```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
END = "--- end of a block ---"
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def assert_shows(text: str, output: str) -> None:
    """Check that an output has the parts of a block of text, in order; a line of dots stands for what is left out.

    Numbers may differ by 3 %, because other processors round other last bits, and a plan may then differ.
    """
    words, at = output.split(), 0
    for part in re.split(r"^\.\.\.\n", text, flags=re.MULTILINE):
        shown = part.split()
        ends = range(at + len(shown), len(words) + 1)
        at = next((end for end in ends if are_alike(shown, words[end - len(shown) : end])), 0)
        assert at, f"the page is stale; the command prints:\n{output}"


def are_alike(shown: list[str], printed: list[str]) -> bool:
    return all(
        NUMBER.sub("#", one) == NUMBER.sub("#", other)
        and [number(each) for each in NUMBER.findall(one)]
        == pytest.approx([number(each) for each in NUMBER.findall(other)], rel=0.03)
        for one, other in zip(shown, printed, strict=True)
    )


def number(text: str) -> float:
    return float(text.replace(",", ""))


def test_every_command_of_the_page_runs(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for rank in range(2):  # what SGLang leaves in its folder
        dump = ROOT / "tests" / "workload" / "sglang_dumps" / f"per_token_{rank}.pt"
        shutil.copy(dump, tmp_path / f"expert_distribution_recorder_1763839000.0_{rank}.pt")
    blocks = BLOCKS.findall(PAGE.read_text())
    script = "set -e\n" + "\n".join(f"{commands}echo '{END}'" for commands, _ in blocks)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Priced by the traffic model") == 4
    printed = done.stdout.split(END)
    assert [place for place, (_, text) in enumerate(blocks) if text] == [0]
    assert_shows(blocks[0][1], printed[0])
    rows = json.loads((tmp_path / "init.json").read_text())["physical_to_logical_map"]
    assert (len(rows), len(rows[0])) == (24, 40)
    after = json.loads((tmp_path / "placement.json").read_text())["after"]
    assert after["mean_balance"] > 0.95
    assert (tmp_path / "placement.png").stat().st_size > 10_000
