"""The frame: what a folder declares becomes a verb, and a small grid is run, kept, shown and drawn."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from moestro.cli.main import main
from moestro.errors import ConfigError
from moestro.repro.grid import GridExperiment, GridPlan, PlannedLoad, plan_for
from moestro.repro.papers import papers
from moestro.repro.results import Cell, Claim, Findings
from moestro.repro.runner import reproduce, save_pictures
from moestro.repro.settings import ReproSettings
from moestro.repro.tables import Column

PLAN = GridPlan(
    loads=(
        PlannedLoad(name="short", num_requests=3, rates=(1, 2)),
        PlannedLoad(name="long", num_requests=3, rates=(1,)),
    ),
    systems=("first", "second"),
    seeds=(0, 1),
)


class Timed(Cell, frozen=True, kw_only=True):
    seconds: float


class Small(GridExperiment[Findings[Timed]]):
    findings_type = Findings[Timed]
    columns = (Column("time, ms", lambda cell: cell.seconds, 1e-3),)
    num_loads_made = 0

    def served(self, load, seed):
        self.num_loads_made += 1
        return lambda rate, system: Timed(
            load=load.name, rate=rate, system=system, seed=seed, seconds=rate * (2 if system == "second" else 1) + seed
        )

    def claims(self, findings):
        return [Claim(source="here", paper="faster", ours=f"{len(findings.cells)} runs", holds=True)]


def run(out, plan=PLAN):
    experiment, console = Small(plan), Console(file=io.StringIO(), width=120)
    return reproduce(console, "small", experiment, out), experiment, console.file.getvalue()


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
    assert paper.experiment(paper.settings(quick=True)).loads
    with pytest.raises(SystemExit):
        main(["repro", paper.name, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert paper.about.split(":")[0] in said
    assert all(flag in said for flag in ("--quick", "--loads", "--out"))
