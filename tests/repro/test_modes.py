"""The map of modes, small: its tables of experts, one short run of every system, and what is read from runs."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from moestro.cli.main import main
from moestro.core.experts.expert_table import EMPTY
from moestro.cost.model import exponential_popularity
from moestro.errors import ConfigError
from moestro.repro import ReproSettings
from moestro.repro.amoe.loads import LENGTHS, ClosedRun, LengthRanges, closed_load, closed_throughput
from moestro.repro.amoe.systems import build
from moestro.repro.modes.experiment import (
    BASE,
    CASES,
    QUICK,
    SYSTEMS,
    MapCase,
    ModesExperiment,
    ModesFindings,
    UnevenBed,
    _runs,
    make_experiment,
    with_copies,
)
from moestro.repro.runner import reproduce, save_pictures
from moestro.sim.closed_loop import Replacing

LENGTH = LENGTHS["medium"]
TINY = MapCase(
    name="tiny", axis="all", about="faults", ladder=(8, 16), passes=(1, 1), seeds=(3,),
    bed=replace(
        BASE, gpu="a100-80g", slow=(2.0,), variation=0.2, added_latency_ns=50_000, num_spares=1, host_factor=2.0
    ),
)  # fmt: skip


def run(system, number, tokens, *, load="x", seed=0):
    return ClosedRun(load=load, system=system, seed=seed, num_requests=number, tokens_per_s=tokens)


# --- tables with copies -----------------------------------------------------------------------------------------------


def loads(table, popularity):
    """float64[workers, layers], load of each worker if copies share evenly."""
    copies = table.num_copies
    return (copies * (popularity / copies.sum(axis=0))).sum(axis=2)


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_further_copies_balance_every_layer(num_slots):
    popularity = np.array(
        [np.random.default_rng(layer).permutation(exponential_popularity(8, 0.5)) for layer in range(6)]
    )
    table = with_copies(popularity, range(4, 12), 12, num_slots)
    assert (table.logical_of[:4] == EMPTY).all()
    assert (table.num_copies.sum(axis=0) >= 1).all()
    most = loads(table, popularity).max(axis=0)
    if num_slots > 1:
        assert (most < popularity.max(axis=1)).all()
        assert (most <= 1.5 / 8).all()


def test_copies_of_a_known_case():
    """Loads 6, 4, 1, 1 and six slots: 3 3 2 2 1 1. The second 2 may not join the first, which is on the idlest."""
    popularity = np.array([[6.0, 4.0, 1.0, 1.0]]) / 12
    table = with_copies(popularity, [0, 1, 2], 3, 2)
    assert table.num_copies[:, 0].sum(axis=0).tolist() == [2, 2, 1, 1]
    assert (12 * loads(table, popularity)[:, 0]).round(6).tolist() == [5.0, 4.0, 3.0]


def test_a_stale_plan_is_one_for_another_popularity():
    fresh, stale = replace(BASE, num_spares=1), replace(BASE, num_spares=1, is_plan_stale=True)
    holders = range(8)
    popularity = fresh._popularity(0)[0]
    by_plan = [loads(bed.table(holders, 8, 0), popularity).max(axis=0).mean() for bed in (fresh, stale)]
    assert by_plan[0] < 0.2 < by_plan[1]


# --- beds and runs ----------------------------------------------------------------------------------------------------


def test_a_bed_without_faults_is_that_of_amoe():
    bed = UnevenBed()
    assert bed.slowdown is None
    assert bed.jitter(0) is None
    assert (bed.gate(1).choose(np.arange(50, dtype=np.uint64), 0) < 8).all()
    slow = replace(bed, slow=(2.0,))
    assert slow.slowdown.tolist() == [2.0, *[1.0] * 7]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out, experiment = tmp_path_factory.mktemp("modes"), ModesExperiment((TINY,))
    console = Console(file=io.StringIO(), width=200)
    return reproduce(console, "modes", experiment, out), experiment, out, console.file.getvalue()


def test_every_system_is_run_shown_and_drawn(found):
    pytest.importorskip("matplotlib")
    result, experiment, out, shown = found
    assert {run.system for run in result.findings.closed} == set(SYSTEMS)
    assert {run.num_requests for run in result.findings.closed} == {8, 16}
    assert "simulated" in shown
    assert "async / best other" in shown
    assert all(path.exists() for path in save_pictures("modes", experiment, result.findings, out))


@pytest.mark.parametrize(
    ("change", "slower"),
    [({"slow": (3.0,)}, True), ({"variation": 0.8}, True), ({"added_latency_ns": 2_000_000}, True), ({}, False)],
)
def test_faults_slow_lock_step_down(change, slower):
    def rate(bed):
        built = build("ep", bed, (LENGTH.mean_context, LENGTH.longest), 0)
        return closed_throughput(built, closed_load(LENGTH, 64, 32, 0), (1, 1)).tokens_per_s

    plain = replace(BASE, gpus_per_machine=8)
    assert (rate(replace(plain, **change)) < 0.9 * rate(plain)) is slower


def test_a_division_that_does_not_fit_has_no_runs():
    """Three experts of 11.3 GB do not fit 40 GB."""
    case = replace(TINY, bed=replace(BASE, num_spares=1), ladder=(4,), seeds=(0,))
    runs = ModesExperiment((case,)).run("tiny", lambda _: None).closed
    assert {run.system for run in runs} == set(SYSTEMS) - {"async", "ping_pong"}


def test_names_of_cases_differ_and_the_verb_knows_them(capsys):
    assert len({case.name for case in CASES}) == len(CASES)
    assert make_experiment(ReproSettings(quick=True)).loads == [QUICK[0].name]
    assert make_experiment(ReproSettings(loads=("base_permuted",))).loads == ["base_permuted"]
    with pytest.raises(ConfigError, match="no load nothing"):
        make_experiment(ReproSettings(loads=("nothing",)))
    with pytest.raises(SystemExit):
        main(["repro", "modes", "--help"])
    assert "plain replicas win" in capsys.readouterr().out


# --- reading ----------------------------------------------------------------------------------------------------------


def test_throughput_within_a_bound_is_read_between_runs():
    findings = ModesFindings(closed=[run("ep", 10, 100.0), run("ep", 30, 150.0)])  # 100 ms and 200 ms
    assert findings.most("x", "ep", 99.0) == [0.0]
    assert findings.most("x", "ep", 100.0) == [100.0]
    assert findings.most("x", "ep", 150.0) == [125.0]
    assert findings.most("x", "ep", 1e3) == [150.0]
    assert findings.most("x", "replicas", 1e3) == [0.0]


def test_the_gain_is_that_over_the_best_other_of_each_seed():
    closed = [
        run(system, 10, tokens * (1 + seed), seed=seed)
        for system, tokens in (("async", 100.0), ("async_colocated", 300.0), ("ep", 150.0), ("replicas", 200.0))
        for seed in (0, 1)
    ]
    findings = ModesFindings(closed=closed)
    assert findings.gain("x", 1e3).tolist() == [1.5, 1.5]
    assert findings.best("x", 1e3) == "async_colocated"
    assert findings.best("x", 1.0) == "none"
    assert np.isnan(findings.gain("x", 1.0)).all()


def test_the_goal_is_judged_by_the_least_of_five_seeds():
    def claims(*ours):
        closed = [run("async", 10, tokens, seed=seed) for seed, tokens in enumerate(ours)]
        closed += [run("ep", 10, 100.0, seed=seed) for seed in range(len(ours))]
        return ModesExperiment(QUICK).claims(ModesFindings(closed=closed))

    assert claims(200.0) == []
    assert claims(*[160.0] * 5)[0].holds is True
    assert claims(*[160.0] * 4, 140.0)[0].holds is False


# --- classes and prompts ----------------------------------------------------------------------------------------------


def test_a_request_that_ends_is_replaced_by_one_of_its_class():
    load = closed_load(LENGTH, 20, 10, 0, num_sensitive=5)
    is_ls = load.rows.is_ls
    assert is_ls[:20].tolist() == [True, False, False, False] * 5
    arrivals = Replacing(load)
    assert all(is_ls[arrivals.next_turn(row, 0)[0]] == is_ls[row] for row in range(20) if row % 4 == 0 or row < 12)
    assert sum(arrivals.next_turn(1, 0) is not None for _ in range(10)) == 1  # ten of a class are there, and nine came


def test_with_two_classes_the_itl_is_that_of_the_latency_sensitive_requests():
    case = replace(TINY, bed=BASE, ladder=(16,), num_sensitive=4, step_policy="priority")
    (found,) = _runs(case, "async_colocated", 0)
    assert (found.system, found.num_sensitive) == ("async_colocated", 4)
    assert 0 < found.sensitive_tokens_per_s < found.tokens_per_s
    assert found.itl_ms == pytest.approx(4e3 / found.sensitive_tokens_per_s)


def test_prompts_that_are_computed_cost_throughput():
    def rate(computes_prompts):
        built = build("ep", BASE, (LENGTH.mean_context, LENGTH.longest), 0)
        short = LengthRanges(prompt=(200, 200), output=(2, 4))
        return closed_throughput(built, closed_load(short, 16, 64, 0), (3, 3), computes_prompts=computes_prompts)

    assert rate(True).tokens_per_s < 0.5 * rate(False).tokens_per_s
