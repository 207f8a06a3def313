"""The tables of docs/ that are made from the code are current."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_generated_tables_are_current():
    check = [sys.executable, ROOT / "tools" / "reference_tables.py", "--check"]
    found = subprocess.run(check, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
