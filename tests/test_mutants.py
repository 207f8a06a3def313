"""The list of faults in tests/mutants.toml fits the sources, and its tool tells caught ones from others."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "mutants.toml"
RESULT = ROOT / "bench" / "results" / "robustness" / "mutants.json"

# A fault that a test catches, and an equal program, which none can catch.
TWO = """
[[core]]
fault = "Seconds are taken for milliseconds"
file = "core/clock.py"
text = 'FOREVER_NS) * NS_PER_S)'
becomes = 'FOREVER_NS) * NS_PER_MS)'
tests = ["engine/policies/test_ordering.py::test_what_has_a_bound_by_default"]

[[core]]
fault = "The same in brackets"
file = "core/clock.py"
text = 'FOREVER_NS) * NS_PER_S)'
becomes = 'FOREVER_NS) * (NS_PER_S))'
tests = ["engine/policies/test_ordering.py::test_what_has_a_bound_by_default"]
"""


def run_tool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tools" / "mutants.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_each_text_of_the_list_occurs_once_and_its_tests_exist():
    found = run_tool("--check")
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_list_has_sixty_faults_in_all_areas():
    areas = tomllib.loads(LIST.read_text())
    assert {"routing", "ordering", "batching", "scheduler", "flow", "sampler", "placement"} <= set(areas)
    faults = [each["fault"] for entries in areas.values() for each in entries]
    assert len(faults) == len(set(faults)) >= 60


def test_the_stored_run_caught_all_faults():
    stored = json.loads(RESULT.read_text())
    assert stored["num_caught"] == stored["num_mutants"] >= 60


def test_what_does_not_fit_is_named(tmp_path):
    wrong = [
        TWO.replace("FOREVER_NS) * NS_PER_S)'", "NEVER_NS'"),
        TWO.replace("core/clock.py", "core/no_clock.py"),
        TWO.replace("* (NS_PER_S))", "* (NS_PER_S)"),
        TWO.replace("_by_default", "_by_chance"),
    ]
    (tmp_path / "mutants.toml").write_text("".join(wrong))
    found = run_tool("--check", "--list", tmp_path / "mutants.toml")
    assert found.returncode == 1
    for why in ("occurs 0 times", "there is no such file", "was never closed", "there is no test"):
        assert why in found.stdout


def test_surviving_and_caught_faults_are_distinguished(tmp_path):
    (tmp_path / "mutants.toml").write_text(TWO)
    found = run_tool("--jobs", "2", "--list", tmp_path / "mutants.toml", "--json", tmp_path / "found.json")
    assert found.returncode == 1, found.stdout + found.stderr
    assert "survived: core/clock.py: The same in brackets" in found.stdout
    assert "1 of 2 faults are caught" in found.stdout
    stored = json.loads((tmp_path / "found.json").read_text())["mutants"]
    assert [each["outcome"] for each in stored] == ["caught", "survived"]
    assert stored[0]["caught_by"].endswith("::test_what_has_a_bound_by_default")
