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


def assert_shows(text: str, output: str) -> None:
    """Check that an output has the parts of a block of text, in order; a line of dots stands for what is left out."""
    rest = "\n".join(line.rstrip() for line in output.splitlines()) + "\n"
    for part in re.split(r"^\.\.\.\n", text, flags=re.MULTILINE):
        assert part in rest, f"the page is stale; the command prints:\n{output}"
        rest = rest.partition(part)[2]


@pytest.mark.timeout(180)
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
        timeout=170,
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
