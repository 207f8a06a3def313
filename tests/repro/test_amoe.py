"""AMoE's reproduction, small: its loads, one short run of every kind of system, and its claims."""

from __future__ import annotations

import io
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from rich.console import Console

from moestro.cli.main import main
from moestro.config.run_record import run_record
from moestro.errors import ConfigError
from moestro.repro import ReproSettings
from moestro.repro.amoe.claims import claims_of
from moestro.repro.amoe.experiment import AmoeExperiment, batch_curve, make_experiment, num_in_progress
from moestro.repro.amoe.loads import (
    LENGTHS,
    AmoeCell,
    AmoeFindings,
    ClosedRun,
    closed_load,
    closed_throughput,
    in_progress,
    open_load,
)
from moestro.repro.amoe.paper import FLFS, MTFS, QUICK, WHOLE, Part, Timing, panel
from moestro.repro.amoe.systems import ABOUT, ASYNC, EP, EP_STALLS, OVERLAP, REPLICAS, Bed, build
from moestro.repro.results import Reproduced
from moestro.repro.runner import reproduce, save_pictures

LENGTH = LENGTHS["short"]
LIMITS = (LENGTH.mean_context, LENGTH.longest)
TINY = Timing(ladder=(8, 16), passes=(1, 1), begin_s=0.2, stop_s=0.4)
PART = Part(
    name=panel("short", 1, "same"), figure="9", lengths="short", bed=Bed(popularity="same"), rates=(10.0,),
    systems=(ASYNC, EP, REPLICAS), shares=(0.5,), timing=TINY,
)  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out, experiment = tmp_path_factory.mktemp("amoe"), AmoeExperiment((PART,))
    console = Console(file=io.StringIO(), width=200)
    return reproduce(console, "amoe", experiment, out), experiment, out, console.file.getvalue()


def test_requests_in_progress_are_those_of_a_long_queue():
    """Renewal theory: an open system watched at a late time shows the lengths and progress that are drawn."""
    rng = np.random.default_rng(0)
    output = rng.integers(LENGTH.output[0], LENGTH.output[1] + 1, 400_000)
    end = output.cumsum()
    at = rng.integers(end[-1] // 2, end[-1], 20_000)
    which = end.searchsorted(at, side="right")
    left = end[which] - at
    kept, drawn = in_progress(LENGTH, 20_000, np.random.default_rng(1))
    assert drawn.min() >= 1
    assert kept.min() >= LENGTH.prompt[0]
    assert np.percentile(drawn, [10, 50, 90]) == pytest.approx(np.percentile(left, [10, 50, 90]), rel=0.05)
    assert kept.mean() == pytest.approx(LENGTH.mean_context, rel=0.02)


def test_an_open_load_has_the_rate_and_the_requests_in_progress():
    load = open_load(LENGTH, 100.0, 5.0, 300, 0)
    assert len(load.rows) == 300 + 500
    assert (np.diff(load.offsets_ns) >= 0).all()
    assert load.offsets_ns[-1] == 5_000_000_000
    same = open_load(LENGTH, 100.0, 5.0, 300, 0)
    assert (load.rows.num_output_tokens == same.rows.num_output_tokens).all()


def test_the_number_in_progress_lies_between_the_runs_around_the_throughput():
    runs = [
        ClosedRun(load="x", system=EP, seed=0, num_requests=number, tokens_per_s=tokens)
        for number, tokens in ((10, 100.0), (20, 150.0), (40, 160.0))
    ]
    assert [num_in_progress(runs, tokens) for tokens in (50, 100, 125, 155, 1e9)] == [5, 10, 15, 30, 40]


@pytest.mark.parametrize("system", [*ABOUT, "async:mtfs", "async:2+6", "async:defrag:lookahead=3"])
def test_a_system_serves_a_constant_number_of_requests_below_its_bound(system):
    built = build(system, PART.bed, LIMITS, 0)
    rate = closed_throughput(built, closed_load(LENGTH, 12, 12, 0), (1, 1)).tokens_per_s
    assert 0 < rate < built.bound()
    assert built.most_requests >= 64 * built.num_seats


@pytest.mark.parametrize("system", ["nothing", "async:2+7"])
def test_an_unknown_system_is_an_error(system):
    with pytest.raises(ConfigError):
        build(system, PART.bed, LIMITS, 0)


def test_stalls_lengthen_steps_and_overlap_never_does():
    rates = {
        system: closed_throughput(
            build(system, PART.bed, LIMITS, 0), closed_load(LENGTH, 2048, 512, 0), (1, 2)
        ).tokens_per_s
        for system in (EP, EP_STALLS, OVERLAP)
    }
    assert rates[EP_STALLS] < rates[EP] <= rates[OVERLAP]


def test_every_part_fits_its_testbed_and_has_a_name_of_its_own():
    assert len({part.name for part in WHOLE}) == len(WHOLE)
    lengths = LENGTHS["reasonable"]  # the longest contexts
    wanted = {
        (replace(part.bed, popularity="same", prices="prototype"), system) for part in WHOLE for system in part.systems
    }
    for bed, system in wanted:
        if system.startswith("async:defrag"):
            continue  # as large as `async`
        assert build(system, bed, (lengths.mean_context, lengths.longest), 0).most_requests > 256, (bed, system)


def test_the_parts_hold_every_panel_and_figure_of_the_paper():
    assert {part.figure for part in WHOLE} == {"4", "9", "9, seeds", "9b", "10", "11", "12", "sec. 3.3", "sec. 3.4"}
    assert sum(part.figure == "9" for part in WHOLE) == 3 * 2 * 2 + 1


def test_a_part_is_run_kept_shown_and_drawn(found):
    pytest.importorskip("matplotlib")
    result, experiment, out, shown = found
    systems = PART.systems
    assert {(cell.system, cell.rate) for cell in result.findings.cells if cell.rate == 10} == {(s, 10) for s in systems}
    assert len(result.findings.cells) == 2 * len(systems)
    assert {run.system for run in result.findings.closed} == set(systems)
    assert "10 requests/s" in shown
    assert "simulated" in shown
    written = msgspec.json.decode((out / "amoe.json").read_bytes(), type=Reproduced[AmoeFindings])
    assert written.findings == result.findings
    assert save_pictures("amoe", experiment, result.findings, out)[0].exists()
    cell = next(cell for cell in result.findings.cells if cell.system == ASYNC)
    assert cell.attention_step is not None
    assert cell.attention_step.ms > 0.45  # the constant of an attention item
    assert all(cell.tokens_per_s < cell.bound for cell in result.findings.cells)


def test_a_part_runs_every_seed():
    part = replace(PART, systems=(EP,), shares=(), seeds=(1, 2))
    experiment = AmoeExperiment((part,))
    steps = []
    findings = experiment.run(part.name, steps.append)
    assert [cell.seed for cell in findings.cells] == [1, 2]
    assert findings.cells[0].tokens_per_s != findings.cells[1].tokens_per_s
    assert len(steps) == experiment.num_runs(part.name)


def test_an_overload_follows_the_rates_and_is_past_the_capacity_of_every_system(found):
    findings = found[0].findings
    kept = msgspec.structs.replace(findings, cells=list(findings.cells))
    steps = []
    part = replace(PART, overload=1.1)
    AmoeExperiment((part,)).serve_rates(part.name, kept, steps.append)
    new = kept.cells[len(findings.cells) :]
    assert [cell.system for cell in new] == list(part.systems)  # what was there is not run again
    most = max(run.tokens_per_s for run in findings.closed)
    [rate] = {cell.rate for cell in new}
    assert rate * LENGTH.mean_output == pytest.approx(1.1 * most, rel=0.01)
    assert len(steps) == len(new)
    assert AmoeExperiment((part,)).num_runs(part.name) == AmoeExperiment((PART,)).num_runs(part.name) + len(new)


def test_a_kept_part_is_not_run_again(found):
    result, experiment, out, _ = found
    again = reproduce(Console(file=io.StringIO()), "amoe", experiment, out)
    assert again.parts[PART.name] == result.parts[PART.name]


def test_the_same_seed_gives_the_same_findings(found):
    result, _, _, _ = found
    part = replace(PART, systems=(ASYNC,), shares=())
    assert AmoeExperiment((part,)).run(part.name, lambda _: None).cells == [
        cell for cell in result.findings.cells if (cell.system, cell.rate) == (ASYNC, 10)
    ]


def test_the_verb_knows_its_parts():
    assert list(make_experiment(ReproSettings()).loads) == [part.name for part in WHOLE]
    assert make_experiment(ReproSettings(quick=True)).loads == [QUICK[0].name]
    assert make_experiment(ReproSettings(loads=("stalls",))).loads == ["stalls"]
    with pytest.raises(ConfigError, match="no load nothing"):
        make_experiment(ReproSettings(loads=("nothing",)))


def test_the_verb_has_help(capsys):
    with pytest.raises(SystemExit):
        main(["repro", "amoe", "--help"])
    assert "Mixtral" in capsys.readouterr().out


# --- claims -----------------------------------------------------------------------------------------------------------


def cell(load, system, rate, tokens, itl, *, ended=None, bound=5e4, seed=0):
    return AmoeCell(
        load=load, rate=rate, system=system, seed=seed, tokens_per_s=tokens, itl_ms=itl, itl_p99_ms=itl,
        requests_per_s=rate if ended is None else ended, bound=bound, stall_shares=(0.0, 0.5), num_first=1,
    )  # fmt: skip


def verdicts(*cells, **more):
    return {
        claim.source + ": " + claim.paper: claim.holds for claim in claims_of(AmoeFindings(cells=list(cells), **more))
    }


def verdict(found, *words):
    [holds] = [holds for key, holds in found.items() if all(word in key for word in words)]
    return holds


def closed(load, system, *points):
    """Runs with constant numbers of requests: (number, tokens a second)."""
    return [
        ClosedRun(load=load, system=system, seed=0, num_requests=number, tokens_per_s=tokens)
        for number, tokens in points
    ]


def test_the_gain_is_one_of_capacities_whatever_the_offered_rates_show():
    load = panel("medium", 1, "permuted")
    cells = [cell(load, name, 250, 10e3, 90) for name in (ASYNC, EP_STALLS, EP)]  # all keep up with a low rate
    runs = [*closed(load, EP_STALLS, (1024, 10e3)), *closed(load, EP, (1024, 20e3))]
    ours = closed(load, ASYNC, (1024, 15e3), (4096, 24e3))
    found = verdicts(*cells, closed=[*runs, *ours])
    assert verdict(found, "Fig. 9", "SGLang") is True
    assert verdict(found, "Fig. 9", "best of the others") is False
    assert verdict(verdicts(*cells, closed=[*runs, *ours[:1]]), "Fig. 9", "SGLang") is False
    [claim] = [each for each in claims_of(AmoeFindings(cells=cells, closed=[*runs, *ours])) if "SGLang" in each.paper]
    assert "2.40 x ep_stalls" in claim.ours
    assert "over the offered rates 1.00 x" in claim.ours
    assert "permuted" in claim.source, "the paper does not state which experts are hot in which layer"


def test_the_row_of_seeds_names_the_offered_load_and_is_no_verdict():
    cells = [
        cell("spread_permuted", system, 250, tokens * (1 + seed), 100, seed=seed)
        for system, tokens in ((ASYNC, 24e3), (EP_STALLS, 10e3), (EP, 20e3), (OVERLAP, 20e3))
        for seed in (0, 1)
    ]
    [claim] = [each for each in claims_of(AmoeFindings(cells=cells)) if "2 seeds" in each.source]
    assert claim.holds is None
    assert "offers 37,500 tokens/s" in claim.ours
    assert "2.40 x (2.40 to 2.40) SGLang" in claim.ours
    assert "1.20 x (1.20 to 1.20) the best" in claim.ours


@pytest.mark.parametrize(("stalls", "holds"), [((0.1, 0.2), False), ((0.2, 0.7), True)])
def test_the_stalls_of_figure_4_are_judged_by_the_idlest_gpu(stalls, holds):
    seen = msgspec.structs.replace(cell("stalls", EP, 100, 1e4, 38), stall_shares=stalls)
    assert verdict(verdicts(seen), "Fig. 4") is holds


def test_a_scheduler_figure_that_was_not_run_says_so():
    load = "schedulers_top1_permuted"
    cells = [cell(load, ASYNC, 250, 1e4, 100), cell(load, MTFS, 250, 1e4, 150), cell(load, FLFS, 250, 5e3, 200)]
    [claim] = [each for each in claims_of(AmoeFindings(cells=cells)) if "top-2" in each.source]
    assert (claim.ours, claim.holds) == ("not run", None)


def test_even_experts_are_not_judged():
    load = panel("short", 1, "uniform")
    found = verdicts(closed=[run for name in (ASYNC, EP_STALLS, EP) for run in closed(load, name, (9, 9e3))])
    assert verdict(found, "SGLang") is None


def test_schedulers_are_judged_by_both_figures():
    load = "schedulers_top1_permuted"
    good = [cell(load, ASYNC, 250, 1e4, 100), cell(load, MTFS, 250, 1e4, 150), cell(load, FLFS, 250, 5e3, 200)]
    assert verdict(verdicts(*good), "Fig. 11", "top-1") is True
    assert verdict(verdicts(good[0], good[1], cell(load, FLFS, 250, 1e4, 90)), "Fig. 11", "top-1") is False


@pytest.mark.parametrize(("ended", "holds"), [(100, True), (249, False)])
def test_the_output_rate_of_flfs_is_judged_against_the_input_rate(ended, holds):
    found = verdicts(cell("cold_permuted", ASYNC, 250, 1, 1), cell("cold_permuted", FLFS, 250, 1, 1, ended=ended))
    assert verdict(found, "Fig. 12") is holds


def test_scaling_is_judged_by_the_capacity_of_either_testbed():
    runs = [
        run
        for nodes, tokens_of in (("one_node", (10e3, 9e3, 6e3)), ("two_nodes", (19e3, 12e3, 6e3)))
        for system, tokens in zip((ASYNC, EP, EP_STALLS), tokens_of, strict=True)
        for run in closed(f"{nodes}_permuted", system, (250, tokens), (125, tokens / 2))
    ]
    found = verdicts(closed=runs)
    assert verdict(found, "Fig. 10", "1.92 x") is True
    assert verdict(found, "Fig. 10", "3 x") is True
    assert verdict(found, "Fig. 10", "nothing") is False


def test_the_batch_curve_is_linear_up_to_128_rows():
    found = verdicts(batch_curve={"a100-40g prototype": batch_curve(Bed(gpu="a100-40g"))})
    assert verdict(found, "Fig. 3") is True


def test_a_throughput_at_an_itl_lies_between_the_runs():
    closed = [
        ClosedRun(load="x", system=EP, seed=0, num_requests=number, tokens_per_s=tokens)
        for number, tokens in ((100, 1000.0), (400, 2000.0))
    ]
    findings = AmoeFindings(closed=closed)
    assert findings.closed_at("x", EP, 50.0) is None
    assert findings.closed_at("x", EP, 150.0) == pytest.approx(1500.0)
    assert findings.closed_at("x", EP, 1e9) == 2000.0


def test_a_result_names_its_evidence():
    result = Reproduced(conditions=run_record("simulated"), findings=AmoeFindings(), claims=[])
    assert result.findings.kind == "simulated"
