"""docs/placement.md: its commands run as they are written, in order, in one shell, where `examples/` is."""

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


@pytest.mark.timeout(180)
def test_every_command_of_the_page_runs(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for rank in range(2):  # what SGLang leaves in its folder
        dump = ROOT / "tests" / "workload" / "sglang_dumps" / f"per_token_{rank}.pt"
        shutil.copy(dump, tmp_path / f"expert_distribution_recorder_1763839000.0_{rank}.pt")
    script = "set -e\n" + "\n".join(re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))
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
    rows = json.loads((tmp_path / "init.json").read_text())["physical_to_logical_map"]
    assert (len(rows), len(rows[0])) == (24, 40)
    after = json.loads((tmp_path / "placement.json").read_text())["after"]
    assert after["mean_balance"] > 0.95
    assert (tmp_path / "placement.png").stat().st_size > 10_000
