"""QLLM's reproduction, small: everything is run, and what is said of it follows from what was run."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from rich.console import Console

from moestro.config.run_record import run_record
from moestro.errors import ConfigError
from moestro.repro.grid import GridPlan
from moestro.repro.qllm.claims import claims_of
from moestro.repro.qllm.engines import (
    ENGINES,
    EXPERT,
    FCFS,
    ITERATION,
    MAX_BATCH,
    NUM_PLACES,
    RUN_TO_COMPLETION,
    make_engine,
)
from moestro.repro.qllm.experiment import QUICK, QllmExperiment
from moestro.repro.qllm.findings import QllmFindings, ls_ttft
from moestro.repro.qllm.loads import LONG, LS_SHARE, SHORT, make_rows, offsets_ns
from moestro.repro.results import Reproduced, merged, write_result
from moestro.repro.runner import save_pictures
from moestro.repro.tables import claims_table
from moestro.repro.testbed import Latency

TINY = GridPlan(
    loads=(replace(SHORT, num_requests=40, rates=(2, 6)), replace(LONG, num_requests=12, rates=(0.5,))),
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
        "abstract", "Fig. 2", "Fig. 3", "Fig. 4", "section 2.4", "section 6", "our own goal",
    }  # fmt: skip
    assert next(claim for claim in claims if claim.source == "Fig. 2, ten_tokens").holds
    late = Latency(9e6, 9e6, 9e6)
    slower = [
        msgspec.structs.replace(cell, ls=msgspec.structs.replace(cell.ls, ttft_ms=late))
        if cell.system == EXPERT
        else cell
        for cell in findings.cells
    ]
    worse = claims_of(QllmFindings(cells=slower))
    assert not next(claim for claim in worse if claim.source == "Fig. 2, ten_tokens").holds


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
    assert [path.name for path in paths] == ["qllm_ten_tokens.png", "qllm_sharegpt_answers.png"]
    assert all(path.stat().st_size > 10_000 for path in paths)


def test_equal_seeds_give_equal_figures():
    plan = replace(TINY, loads=TINY.loads[:1], systems=(EXPERT,), seeds=(3,))
    first, second = (QllmExperiment(plan, None).run("ten_tokens", lambda _: None) for _ in range(2))
    assert first.cells == second.cells


def test_lengths_have_sharegpts_means_and_a_fifth_is_urgent():
    rows = make_rows(replace(LONG, num_requests=40_000), 0, None)
    assert rows.num_prompt_tokens.mean() == pytest.approx(161.31, rel=0.03)
    assert rows.num_output_tokens.mean() == pytest.approx(337.99, rel=0.03)
    assert rows.is_ls.mean() == pytest.approx(LS_SHARE, abs=0.01)
    assert set(make_rows(SHORT, 0, None).num_output_tokens.tolist()) == {10}
    assert offsets_ns(SHORT, 4, 0)[-1] == pytest.approx(400 / 4 * 1e9)


def test_lengths_may_come_from_a_trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": i, "input_length": 100 + i, "output_length": 7, "hash_ids": []} for i in range(9)]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    rows = make_rows(LONG, 0, path)
    assert len(rows) == LONG.num_requests
    assert set(rows.num_output_tokens.tolist()) == {7}
    assert not rows.is_generated


def test_engines_differ_in_policies_alone_and_in_places_where_it_is_said():
    settings = {name: make_engine(name).seats[0].rank.scheduler.settings for name in ENGINES}
    for name in ("num_blocks", "block_size", "max_num_batched_tokens"):
        assert len({getattr(each, name) for each in settings.values()}) == 1
    assert {name for name, each in settings.items() if each.num_slots == MAX_BATCH} == {RUN_TO_COMPLETION, FCFS}
    assert {each.num_slots for each in settings.values()} == {MAX_BATCH, NUM_PLACES}
    assert settings[FCFS].num_blocks == pytest.approx((0.9 * 80 * 2**30 - 22.93e9) / (128 * 1024 * 16), abs=1)


def test_loads_are_chosen_by_name():
    assert [load.name for load in QUICK.chosen(("ten_tokens",)).loads] == ["ten_tokens"]
    assert QUICK.chosen(None) is QUICK
    with pytest.raises(ConfigError, match="no load poems; known: ten_tokens, sharegpt_answers"):
        QUICK.chosen(("poems",))


def test_spread_is_over_seeds(found):
    findings, _ = found
    values = findings.values("ten_tokens", 6, FCFS, ls_ttft)
    assert len(values) == 2
    assert np.ptp(values) > 0
