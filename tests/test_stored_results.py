"""`tools/stored_results.py` lists the results that are older than the code that they measure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import stored_results  # noqa: E402 (its folder is no package)


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A repository with one commit, one room and one result of that commit."""
    (tmp_path / "src/moestro/routing").mkdir(parents=True)
    (tmp_path / "src/moestro/routing/router.py").write_text("first\n")
    (tmp_path / "bench/results/micro").mkdir(parents=True)
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "first")):
        subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e", *words], cwd=tmp_path, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    monkeypatch.setattr(stored_results, "ROOT", tmp_path)
    monkeypatch.setattr(stored_results, "RESULTS", tmp_path / "bench/results")
    store(tmp_path, head.strip())
    return tmp_path


def store(clone, commit):
    (clone / "bench/results/micro/router_decision.json").write_text(f'{{"conditions": {{"commit": "{commit}"}}}}')


def test_a_result_is_older_once_its_room_has_changed_and_not_by_another_room(clone):
    assert stored_results.older() == {}
    (clone / "src/moestro/engine").mkdir()
    (clone / "src/moestro/engine/scheduler.py").write_text("new\n")
    subprocess.run(["git", "add", "."], cwd=clone, check=True)
    assert stored_results.older() == {}
    (clone / "src/moestro/routing/router.py").write_text("second\n")
    assert list(stored_results.older()) == ["micro/router_decision.json"]


@pytest.mark.parametrize("commit", ["", "0123456789ab"])
def test_a_result_of_an_unknown_commit_counts_as_older(clone, commit):
    store(clone, commit)
    assert list(stored_results.older()) == ["micro/router_decision.json"]


def test_older_results_are_printed(clone, capsys):
    (clone / "src/moestro/routing/router.py").write_text("second\n")
    assert stored_results.main() == 0
    assert capsys.readouterr().out.splitlines() == [
        "micro/router_decision.json: 1 of 1 runs, day unknown",
        "1 of 1 results are older than their code",
    ]


@pytest.mark.parametrize(
    ("stored", "commits"),
    [
        ({"conditions": {"commit": "a"}}, ["a"]),
        ({"commit": "a"}, ["a"]),
        (
            {"conditions": {"commit": "a"}, "parts": {"chat": {"commit": "b"}}, "renewed": {"x": {"commit": "c"}}},
            ["b", "c"],
        ),
        ({"ours": {"conditions": {"commit": "a"}}, "theirs": {"conditions": {"commit": "b-dirty"}}}, ["a", "b"]),
        ({"rows": []}, [""]),
    ],
)
def test_every_run_of_a_result_counts(clone, stored, commits):
    (clone / "bench/results/micro/router_decision.json").write_text(json.dumps(stored))
    found = stored_results.records("micro/router_decision.json")
    assert [stored_results.commit_of(record) for record in found] == commits


@pytest.mark.parametrize("result", stored_results.results())
def test_each_result_names_rooms_that_exist(result):
    assert all((ROOT / folder).is_dir() for folder in stored_results.folders_of(result))
