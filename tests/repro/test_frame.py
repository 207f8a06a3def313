"""The frame: what a folder declares becomes a verb, and a small grid is run, kept, shown and drawn."""

from __future__ import annotations

import io
import json
import pickle
from dataclasses import replace

import pytest
from rich.console import Console
from support.small_paper import SmallPaper

from moestro.cli.main import main
from moestro.errors import ConfigError
from moestro.repro import ReproSettings
from moestro.repro.experiment import GridPlan, PlannedLoad, plan_for
from moestro.repro.papers import papers
from moestro.repro.results import StoredClaim
from moestro.repro.runner import reproduce, save_pictures

PLAN = GridPlan(
    loads=(
        PlannedLoad(name="short", num_requests=3, rates=(1, 2)),
        PlannedLoad(name="long", num_requests=3, rates=(1,)),
    ),
    systems=("first", "second"),
    seeds=(0, 1),
)


def run(out, plan=PLAN, num_processes=1):
    experiment, console = SmallPaper(plan), Console(file=io.StringIO(), width=120)
    return reproduce(console, "small", experiment, out, num_processes), experiment, console.file.getvalue()


def test_a_grid_is_run_shown_kept_and_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    result, experiment, shown = run(tmp_path)
    save_pictures("small", experiment, result.findings, tmp_path)
    assert len(result.findings.cells) == (2 + 1) * 2 * 2
    assert result.findings.values("short", 2, "second", lambda cell: cell.seconds).tolist() == [4, 5]
    assert experiment.num_loads_made == 4
    assert "short, 2 requests/s" in shown
    assert "4.5e+03 (4e+03, 5e+03)" in shown
    assert {path.name for path in tmp_path.iterdir()} == {
        "small.json", "small.short.json", "small.long.json", "small_short.png", "small_long.png"
    }  # fmt: skip


def test_kept_loads_of_an_equal_plan_are_not_made_again(tmp_path):
    first, _, _ = run(tmp_path)
    again, experiment, _ = run(tmp_path)
    assert experiment.num_loads_made == 0
    assert again.findings == first.findings
    assert again.parts == first.parts
    other = GridPlan(loads=PLAN.loads, systems=PLAN.systems, seeds=(5,))
    assert run(tmp_path, other)[1].num_loads_made == 2


def test_a_quick_run_judges_nothing_and_shows_the_stored_verdicts(tmp_path):
    stored = [StoredClaim(source="here", paper="faster", ours="9,999 runs", holds=False)]
    console = Console(file=io.StringIO(), width=200)
    result = reproduce(console, "small", SmallPaper(PLAN), tmp_path, stored=stored)
    [row] = [line for line in console.file.getvalue().splitlines() if "faster" in line]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["here", "faster", "12 runs", "9,999 runs", "does not"]
    assert [claim.holds for claim in result.claims] == [None]
    assert json.loads((tmp_path / "small.json").read_text())["claims"][0]["holds"] is None
    assert run(tmp_path)[0].claims[0].holds is True, "the same run is judged when it is no quick one"


def test_a_quick_run_says_where_the_stored_run_has_no_such_claim():
    console = Console(file=io.StringIO(), width=200)
    reproduce(console, "small", SmallPaper(PLAN), None, stored=[])
    assert "no such claim" in console.file.getvalue()
    assert "holds" not in console.file.getvalue()


@pytest.mark.parametrize("paper", papers(), ids=lambda paper: paper.name)
def test_each_verb_passes_the_stored_claims_to_a_quick_run_alone(paper, monkeypatch):
    given = []
    monkeypatch.setattr("moestro.repro.runner.reproduce", lambda *arguments: given.append(arguments[-1]))
    for flags in (["--quick"], []):
        with pytest.raises(SystemExit):
            main(["repro", paper.name, *flags])
    assert given == [paper.stored_claims(), None]


def test_processes_share_the_loads_and_find_the_same(tmp_path):
    here, _, _ = run(None)
    apart, experiment, shown = run(tmp_path, num_processes=2)
    assert experiment.num_loads_made == 0
    assert apart.findings == here.findings
    assert list(apart.parts) == ["short", "long"]
    assert "short, 2 requests/s" in shown
    assert run(tmp_path)[1].num_loads_made == 0


def test_a_load_has_its_own_systems():
    loads = (PLAN.loads[0], replace(PLAN.loads[1], systems=("second",)))
    result, experiment, _ = run(None, replace(PLAN, loads=loads))
    assert [experiment.num_runs(load) for load in experiment.loads] == [8, 2]
    assert {cell.system for cell in result.findings.cells if cell.load == "long"} == {"second"}


def test_nothing_is_written_without_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(None)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_follows_the_settings():
    quick = GridPlan(loads=PLAN.loads[:1], systems=("first",), seeds=(0,))
    assert plan_for(ReproSettings(), PLAN, quick) is PLAN
    assert plan_for(ReproSettings(quick=True), PLAN, quick) is quick
    assert [load.name for load in plan_for(ReproSettings(loads=("long",)), PLAN, quick).loads] == ["long"]
    with pytest.raises(ConfigError, match="no load long; known: short"):
        plan_for(ReproSettings(quick=True, loads=("long",)), PLAN, quick)


@pytest.mark.parametrize("paper", papers(), ids=lambda paper: paper.name)
def test_each_folder_is_a_verb_with_its_flags(paper, capsys):
    experiment = paper.experiment(paper.settings(quick=True))
    assert pickle.loads(pickle.dumps(experiment)).loads == experiment.loads  # it travels between processes
    with pytest.raises(SystemExit):
        main(["repro", paper.name, "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert paper.about.split(":")[0] in printed
    assert all(flag in printed for flag in ("--quick", "--loads", "--out"))
