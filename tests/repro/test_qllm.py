"""QLLM's reproduction, small: everything is run, and what is reported of it follows from what was run."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from moestro.config.run_record import run_record
from moestro.errors import ConfigError
from moestro.repro.experiment import GridPlan
from moestro.repro.qllm import QllmSettings
from moestro.repro.qllm.claims import claims_of
from moestro.repro.qllm.experiment import QUICK, QllmExperiment, make_experiment
from moestro.repro.qllm.loads import (
    ANSWER_LIMITS,
    ENGINES,
    EXPERT,
    FCFS,
    FCFS_64,
    ITERATION,
    LS_SHARE,
    MAX_BATCH,
    MIDDLE,
    NUM_PLACES,
    PAPER_RATES,
    RUN_TO_COMPLETION,
    SHORT,
    WHOLE_ANSWERS,
    make_engine,
    make_rows,
    offsets_ns,
    planned,
)
from moestro.repro.qllm.paper import ClassFigures, QllmCell, QllmFindings, ls_ttft, sweep_point
from moestro.repro.results import Reproduced, claims_table, merged, write_result
from moestro.repro.runner import save_pictures
from moestro.repro.testbed import Latency

TINY = GridPlan(
    loads=(
        replace(planned(SHORT), num_requests=40, rates=(2, 7)),
        replace(planned(WHOLE_ANSWERS), num_requests=12, rates=(0.5,), systems=None),
    ),
    systems=tuple(ENGINES),
    seeds=(1, 2),
)


@pytest.fixture(scope="module")
def found():
    steps, experiment = [], QllmExperiment(TINY, None)
    return merged([experiment.run(load, steps.append) for load in experiment.loads]), steps


def test_every_engine_is_run_at_every_rate_under_every_seed(found):
    findings, steps = found
    experiment = QllmExperiment(TINY, None)
    assert len(findings.cells) == len(steps) == sum(map(experiment.num_runs, experiment.loads)) == 9 * 2 * 3
    assert len({(cell.load, cell.rate, cell.system, cell.seed) for cell in findings.cells}) == len(steps)
    assert all(cell.ls.num_requests and cell.be.num_requests for cell in findings.cells)


def test_urgent_requests_wait_least_where_they_preempt_and_most_for_whole_batches(found):
    findings, _ = found
    for load in findings.loads:
        rate = findings.rates(load)[-1]
        waits = {engine: findings.values(load, rate, engine, ls_ttft).mean() for engine in ENGINES}
        assert waits[EXPERT] < waits[FCFS] < waits[RUN_TO_COMPLETION]
        assert waits[EXPERT] < waits[ITERATION]


def test_the_claims_follow_from_the_findings(found):
    findings, _ = found
    claims = claims_of(findings)
    assert {claim.source.split(",")[0] for claim in claims} == {
        "abstract", "abstract and Fig. 2", "Fig. 2", "Fig. 3", "Fig. 4", "section 2.4", "section 6", "our own goal",
    }  # fmt: skip
    assert {claim.source.split(",")[0] for claim in claims if claim.holds is not None} == {"our own goal"}


def cell_of(load, rate, engine, ttft_s, num_tokens):
    figures = ClassFigures(num_requests=9, ttft_ms=Latency(ttft_s * 1e3, 0, 0), turnaround_ms=Latency(9e3, 0, 0))
    return QllmCell(
        load=load, rate=rate, system=engine, seed=0, ls=figures, be=figures, requests_per_s=1.0, tokens_per_s=num_tokens
    )


def swept(ttft_s, rates=PAPER_RATES):
    """Findings of loads of which every engine has the mean TTFT that is given for QLLM and for the others."""
    return QllmFindings(
        cells=[
            cell_of(load, rate, engine, ours if engine == EXPERT else others, ANSWER_LIMITS[load])
            for load, (ours, others) in ttft_s.items()
            for rate in rates
            for engine in (RUN_TO_COMPLETION, FCFS, FCFS_64, ITERATION, EXPERT)
        ]
    )


def test_figure_2_needs_answers_that_are_neither_short_nor_long():
    findings = swept({"answers_10": (0.5, 2.0), "answers_60": (2.0, 140.0), "answers_240": (9.0, 900.0)})
    points = {load: sweep_point(findings, load) for load in findings.loads}
    assert [point.has_figure_2 for point in points.values()] == [False, True, False]
    assert points["answers_60"].mean_factor == pytest.approx(70)
    assert points["answers_60"].num_answer_tokens == 60
    claims = claims_of(findings)
    assert claims[0].holds
    assert "at 60 tokens an answer: 70.0x" in claims[0].ours
    fig_2 = {claim.source: claim.holds for claim in claims if "below 3 s" in claim.paper}
    assert fig_2 == {"Fig. 2, answers_10": True, "Fig. 2, answers_60": True, "Fig. 2, answers_240": False}
    assert not claims_of(swept({"answers_60": (2.0, 100.0)}))[0].holds


def test_both_readings_of_the_baseline_are_judged_by_their_own_runs():
    findings = swept({"answers_60": (2.0, 140.0)})
    findings.cells = [
        cell_of(each.load, each.rate, FCFS, 2.5, 60) if each.system == FCFS else each for each in findings.cells
    ]
    holds = {claim.paper.rpartition("baseline: ")[2]: claim.holds for claim in claims_of(findings)[:2]}
    assert holds == {"run-to-completion (Q1)": True, "continuous batching (2.3, 3.2, Fig. 1a)": False}
    factors = [claim for claim in claims_of(findings) if claim.source == "abstract, answers_60"]
    assert [claim.holds for claim in factors] == [True, False]
    assert [claim.ours.partition(" ")[0] for claim in factors] == ["70.0x", "1.2x"]
    assert "with as many places as QLLM 70.0x" in factors[1].ours
    held = [claim for claim in claims_of(findings) if "not below 3 s" in claim.paper]
    assert [claim.holds for claim in held] == [True, False]


def test_claims_are_judged_at_the_papers_rates_only():
    beyond = swept({"answers_60": (2.0, 140.0)}, rates=(*PAPER_RATES, 10))
    beyond.cells += [cell_of("answers_60", 20, engine, 99.0, 60) for engine in (EXPERT, FCFS, RUN_TO_COMPLETION)]
    assert sweep_point(beyond, "answers_60").held == list(PAPER_RATES)
    assert claims_of(beyond)[0].holds
    fewer = claims_of(swept({"answers_60": (2.0, 140.0)}, rates=PAPER_RATES[1:]))
    assert {claim.holds for claim in fewer} == {None}


def test_findings_are_shown_and_kept(found, tmp_path):
    findings, _ = found
    console, claims = Console(file=io.StringIO(), width=200), claims_of(findings)
    console.print(*QllmExperiment(TINY, None).tables(findings), claims_table(claims))
    assert "ShareGPT's published means" in console.file.getvalue()
    assert "What the paper says" in console.file.getvalue()
    result = Reproduced(conditions=run_record("simulated"), findings=findings, claims=claims)
    write_result(result, tmp_path / "new" / "qllm.json")
    kept = json.loads((tmp_path / "new" / "qllm.json").read_text())
    assert kept["findings"]["kind"] == kept["conditions"]["kind"] == "simulated"
    assert len(kept["claims"]) == len(claims)


def test_pictures_are_drawn(found, tmp_path):
    pytest.importorskip("matplotlib")
    paths = save_pictures("qllm", QllmExperiment(TINY, None), found[0], tmp_path)
    assert [path.name for path in paths] == ["qllm_answers_10.png", "qllm_sharegpt_answers.png", "qllm_lengths.png"]
    assert all(path.stat().st_size > 10_000 for path in paths)


def test_equal_seeds_give_equal_figures():
    plan = replace(TINY, loads=TINY.loads[:1], systems=(EXPERT,), seeds=(3,))
    first, second = (QllmExperiment(plan, None).run(SHORT, lambda _: None) for _ in range(2))
    assert first.cells == second.cells


def test_lengths_have_sharegpts_means_and_a_fifth_is_urgent():
    rows = make_rows(planned(WHOLE_ANSWERS, 40_000), 0, None)
    assert rows.num_prompt_tokens.mean() == pytest.approx(161.31, rel=0.03)
    assert rows.num_output_tokens.mean() == pytest.approx(337.99, rel=0.03)
    assert rows.is_ls.mean() == pytest.approx(LS_SHARE, abs=0.01)
    assert offsets_ns(planned(SHORT), 4, 0)[-1] == pytest.approx(400 / 4 * 1e9)


def test_loads_differ_only_in_where_answers_are_cut():
    whole = make_rows(planned(WHOLE_ANSWERS, 50), 0, None)
    for name, limit in ANSWER_LIMITS.items():
        rows = make_rows(planned(name, 50), 0, None)
        assert (rows.num_prompt_tokens == whole.num_prompt_tokens).all()
        assert (rows.is_ls == whole.is_ls).all()
        assert rows.num_output_tokens.tolist() == [min(n, limit or n) for n in whole.num_output_tokens.tolist()]


def test_lengths_may_come_from_a_trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": i, "input_length": 100 + i, "output_length": 7, "hash_ids": []} for i in range(9)]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    rows = make_rows(planned(MIDDLE, 20), 0, path)
    assert len(rows) == 20
    assert set(rows.num_output_tokens.tolist()) == {7}
    assert not rows.is_generated


def test_engines_differ_in_policies_alone_and_in_places_where_stated():
    settings = {name: make_engine(name).seats[0].rank.scheduler.settings for name in ENGINES}
    for name in ("num_blocks", "block_size", "max_num_batched_tokens"):
        assert len({getattr(each, name) for each in settings.values()}) == 1
    assert {name for name, each in settings.items() if each.num_slots == MAX_BATCH} == {RUN_TO_COMPLETION, FCFS}
    assert {each.num_slots for each in settings.values()} == {MAX_BATCH, NUM_PLACES}
    assert settings[FCFS].num_blocks == pytest.approx((0.9 * 80 * 2**30 - 22.93e9) / (128 * 1024 * 16), abs=1)


def test_loads_are_chosen_by_name():
    assert [load.name for load in QUICK.chosen((SHORT,)).loads] == [SHORT]
    assert QUICK.chosen(None) is QUICK
    with pytest.raises(ConfigError, match="no load poems; known: answers_10, answers_60"):
        QUICK.chosen(("poems",))


def test_the_number_of_requests_may_be_chosen():
    plan = make_experiment(QllmSettings(quick=True, num_requests=7)).plan
    assert {load.num_requests for load in plan.loads} == {7}


def test_spread_is_over_seeds(found):
    findings, _ = found
    values = findings.values(SHORT, 7, FCFS, ls_ttft)
    assert len(values) == 2
    assert np.ptp(values) > 0
