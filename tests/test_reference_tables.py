"""The tables of docs/ that are made from the code are current, and every policy states what they show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moestro.engine.registry import BATCH_POLICIES, EVICT_POLICIES, ORDER_POLICIES
from moestro.flow.registry import STEP_POLICIES
from moestro.routing.registry import ROUTE_POLICIES

ROOT = Path(__file__).parents[1]
POLICIES = [
    pytest.param(kind, name, id=f"{kind.flag} {name}")
    for kind in (ROUTE_POLICIES, ORDER_POLICIES, BATCH_POLICIES, EVICT_POLICIES, STEP_POLICIES)
    for name in kind.names()
]


def test_generated_tables_are_current():
    check = [sys.executable, ROOT / "tools" / "reference_tables.py", "--check"]
    found = subprocess.run(check, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_site_has_the_tables_that_the_repository_only_names():
    script = (
        "import sys; sys.path.insert(0, 'tools'); import reference_tables as it; "
        "print(it.with_tables(open('docs/flags.md').read(), it.for_site)); [it.for_site(name) for name in it.SITE_ONLY]"
    )
    made = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert "* `--gpu-memory-utilization FLOAT`:" in made.stdout
    assert "--gpu-memory-utilization" not in (ROOT / "docs" / "flags.md").read_text()


@pytest.mark.parametrize(("kind", "name"), POLICIES)
def test_a_policy_has_a_source_and_a_description_and_is_made_with_defaults(kind, name):
    entry = kind.entries()[name]
    assert entry.source
    assert entry.description.endswith(".")
    assert "|" not in entry.description + entry.source, "a table's cell ends there"
    assert kind.make(name) is not None
    assert f"| `{name}` | {entry.description} |" in (ROOT / "docs" / "policies.md").read_text()
