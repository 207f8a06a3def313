"""Gimbal's reproduction, small: every kind of part is run, and the claims follow from what was run."""

from __future__ import annotations

import importlib
import io
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from moestro.config.run_record import run_record
from moestro.cost.model import PopularityForm
from moestro.cost.networks import CONFIGS
from moestro.errors import ConfigError
from moestro.repro.gimbal import GimbalSettings
from moestro.repro.gimbal.claims import claims_of
from moestro.repro.gimbal.experiment import GimbalExperiment, make_experiment
from moestro.repro.gimbal.loads import (
    USERS,
    GimbalCell,
    GimbalFindings,
    PrefixCell,
    RunName,
    Tenants,
    burstgpt,
    fitting,
    shaped_load,
    tenant_load,
    user_load,
)
from moestro.repro.gimbal.paper import QUICK, GimbalPart, whole
from moestro.repro.gimbal.systems import (
    BLOCK_SIZE,
    DPLB,
    EDR,
    GIMBAL_V1,
    GIMBAL_V2,
    MOESTRO,
    PLACE,
    SJFS,
    STACK,
    SYSTEMS,
    V1_NO_USERS,
    VLLM,
    VLLM_EPLB,
    VLLM_LEAST,
    EpBed,
)
from moestro.repro.results import LoadPart, Reproduced, merged, write_result
from moestro.repro.testbed import Latency
from moestro.workload.generated.draws import SHAPES

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import renew_cells

CONFIGS["small"] = {**CONFIGS["qwen3-30b-a3b"], "num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 4}
BED = EpBed(network="small", interval_steps=40, check_ns=10**6)
TINY = (
    GimbalPart(
        name="healthy_random", num_requests=6, rates=(4.0,), bed=BED, systems=(VLLM, DPLB, SJFS, EDR, GIMBAL_V1)
    ),
    GimbalPart(
        name="kv_memory", shape="central", num_requests=6, rates=(40.0,), bed=BED, systems=(VLLM, DPLB),
        kv_blocks=(512,),
    ),
    GimbalPart(
        name="prefix_users", users=USERS, num_requests=60, rates=(30.0,), num_runs=2,
        systems=(VLLM, GIMBAL_V1, V1_NO_USERS), bed=replace(BED, has_cache=True),
    ),
    GimbalPart(
        name="stack", num_requests=6, rates=(30.0,), systems=(VLLM_EPLB, PLACE, MOESTRO),
        bed=replace(BED, num_ranks=4, num_machines=2, num_spares=1,
                    popularity=PopularityForm(hot_ids="permuted", num_domains=4)),
        tenants=Tenants(drifts=True), users=USERS,
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def found():
    steps, experiment = [], GimbalExperiment(TINY, None)
    return merged([experiment.run(load, steps.append) for load in experiment.loads]), experiment, steps


def test_every_system_is_run_on_every_part(found):
    findings, experiment, steps = found
    assert len(steps) == sum(map(experiment.num_runs, experiment.loads)) == len(findings.cells) + len(findings.prefixes)
    assert {cell.system for cell in findings.cells if cell.load == "stack"} == {VLLM_EPLB, PLACE, MOESTRO}
    assert {cell.num_requests for cell in findings.cells} == {6}
    read = msgspec.json.decode(msgspec.json.encode(findings), type=GimbalFindings)
    assert read.cells == findings.cells


def test_algorithm_1_takes_the_engines_in_turn_below_its_threshold_as_round_robin_does(found):
    findings, _, _ = found
    [plain], [dplb] = (findings.of("healthy_random", 4.0, name) for name in (VLLM, DPLB))
    assert dplb.branches == {"no user": 6}
    assert dplb.ttft_ms == plain.ttft_ms


def test_placement_is_planned_while_serving_and_moves_are_charged(found):
    findings, _, _ = found
    [eplb], [ours] = (findings.of("stack", 30.0, name) for name in (VLLM_EPLB, PLACE))
    assert eplb.num_plans > 1
    assert eplb.moved_gb > ours.moved_gb
    assert eplb.stall_ms > ours.stall_ms


def test_tables_and_claims_are_shown(found):
    findings, experiment, _ = found
    console = Console(file=io.StringIO(), width=250)
    for table in experiment.tables(findings):
        console.print(table)
    printed = console.file.getvalue()
    assert "kv_memory 512" in printed
    assert "prefix caches" in printed
    sources = {claim.source for claim in experiment.claims(findings)}
    assert {"our own goal", "v1, figure 11, prefix_users"} <= sources


def test_pictures_are_drawn(found):
    pytest.importorskip("matplotlib")
    findings, experiment, _ = found
    drawing = importlib.import_module(experiment.drawing)
    cells = [replace_system(findings.of("stack", 30.0, MOESTRO)[0], name) for name in STACK]
    with_stack = msgspec.structs.replace(findings, cells=[*findings.cells, *cells])
    assert set(drawing.pictures(experiment, with_stack)) == {"healthy", "stack"}


def replace_system(cell: GimbalCell, system: str) -> GimbalCell:
    return msgspec.structs.replace(cell, system=system)


# --- judging ----------------------------------------------------------------------------------------------------------


def cell(load: str, system: str, ttft: float, *, tpot: float = 50.0, rate: float = 1.4, seed: int = 0, **changes):
    latency = Latency(ttft, ttft, 3 * ttft)
    given = {
        "load": load, "rate": rate, "system": system, "seed": seed, "num_requests": 10, "ttft_ms": latency,
        "tpot_ms": Latency(tpot, tpot, tpot), "requests_per_s": rate, "tokens_per_s": 100.0, "step_ms": 10.0,
        "num_plans": 1, "moved_gb": 0.0, "stall_ms": 0.0, "balance": 0.9, "branches": {}, "num_aged": 0,
        "num_preemptions": 0, "is_generated": True, **changes,
    }  # fmt: skip
    return GimbalCell(**given)


def verdicts(findings: GimbalFindings) -> dict[str, bool | None]:
    return {claim.paper: claim.holds for claim in claims_of(findings)}


@pytest.mark.parametrize(("ttft", "holds"), [(80.0, True), (99.0, False), (120.0, False)])
def test_a_gain_holds_by_more_than_two_percent(ttft, holds):
    cells = [cell(f"slow_{shape}", name, each) for shape in SHAPES for name, each in ((VLLM, 100.0), (GIMBAL_V1, ttft))]
    assert verdicts(GimbalFindings(cells=cells))["gimbal_v1: TTFT -17.76% from vLLM"] is holds
    assert verdicts(GimbalFindings(cells=cells[:-2]))["gimbal_v1: TTFT -17.76% from vLLM"] is None


def test_changes_are_those_of_equal_seeds():
    findings = GimbalFindings(cells=[])
    ours = [cell("x", GIMBAL_V1, 90.0), cell("x", GIMBAL_V1, 60.0, seed=1)]
    base = [cell("x", VLLM, 100.0), cell("x", VLLM, 500.0, seed=2)]
    assert findings.change("TTFT", ours, base) == pytest.approx(-0.1)
    assert findings.change("TTFT", ours[1:], base) is None


def test_systems_are_compared_on_the_seeds_that_all_have():
    parts = [cell("slow_random", name, 95.0) for name in (DPLB, SJFS, EDR, VLLM_LEAST)]
    whole = [
        cell("slow_random", name, ttft, seed=seed)
        for seed, ttft in ((0, 90.0), (1, 20.0))
        for name in (GIMBAL_V1, GIMBAL_V2, MOESTRO)
    ]
    base = [cell("slow_random", VLLM, 100.0, seed=seed) for seed in (0, 1)]
    claims = {claim.paper: claim for claim in claims_of(GimbalFindings(cells=[*parts, *whole, *base]))}
    alone = claims["Gimbal has a lower TTFT than each part alone"]
    assert alone.ours == "dplb -5.0%, sjfs -5.0%, edr -5.0%, gimbal_v1 -10.0%; 1 equal seed"
    balancer = claims["TTFT is lower than vLLM's; here with the balancer of vLLM's code"]
    assert balancer.ours.startswith("vllm_least -5.0%, gimbal_v1 -10.0%")
    assert balancer.holds is None
    assert "1 of 5 shapes, 2 seeds" in claims["gimbal_v1: TTFT -17.76% from vLLM"].ours


def test_memory_is_judged_only_where_the_threshold_binds():
    def findings(branch: str, ttft: float) -> GimbalFindings:
        cells = [cell("kv_memory", VLLM, 100.0, setting="512")]
        return GimbalFindings(cells=[*cells, cell("kv_memory", DPLB, ttft, setting="512", branches={branch: 9})])

    claim = "where KV use exceeds theta_kv, requests go to the engine with the least KV or load, and TTFT falls"
    assert verdicts(findings("no user", 50.0))[claim] is None
    assert verdicts(findings("least KV", 50.0))[claim] is True
    assert verdicts(findings("least KV", 100.0))[claim] is False


def test_hits_are_compared_by_count_and_rate():
    def prefix(system: str, run: int, hits: int) -> PrefixCell:
        return PrefixCell(load=load, system=system, run=run, num_requests=10, hit_blocks=hits, queried_blocks=1000)

    for load in (part.name for part in whole(1000) if part.counts_hits):
        runs = [prefix(VLLM, 0, 40), prefix(VLLM, 1, 30), prefix(GIMBAL_V1, 0, 44), prefix(GIMBAL_V1, 1, 44)]
        assert list(verdicts(GimbalFindings(prefixes=runs)).values()) == [True, True], load


def test_the_stack_is_judged_where_it_was_run_and_shows_what_was_run():
    base, ours = cell("stack", VLLM_EPLB, 100.0), cell("stack", MOESTRO, 90.0)
    [claim] = claims_of(GimbalFindings(cells=[base, ours]))
    assert (claim.ours, claim.holds) == ("moestro: TTFT -10.0%, TPOT +0.0%, throughput +0.0%", True)
    assert claims_of(GimbalFindings(cells=[base, cell("stack", PLACE, 90.0)])) == []
    assert claims_of(GimbalFindings(cells=[ours])) == []


# --- loads and plans --------------------------------------------------------------------------------------------------


def test_a_seed_has_the_same_requests_at_every_rate():
    slow, fast = (shaped_load(None, "average", 20, rate, 3) for rate in (1.0, 2.0))
    assert (slow.rows.num_prompt_tokens == fast.rows.num_prompt_tokens).all()
    np.testing.assert_allclose(slow.offsets_ns, 2 * fast.offsets_ns, atol=2)
    assert abs(np.log(burstgpt(None).num_prompt_tokens.mean() / 363)) < 0.1


def test_runs_of_users_differ_in_order_alone():
    one, other = (user_load(USERS, 200, 30.0, 0.05, run) for run in (0, 1))
    assert sorted(one.rows.num_prompt_tokens) == sorted(other.rows.num_prompt_tokens)
    assert (one.rows.num_prompt_tokens != other.rows.num_prompt_tokens).any()
    assert (np.diff(one.offsets_ns) >= 0).all()


def test_tenants_drift_and_requests_fit_small_caches():
    rows = shaped_load(None, "random", 400, 1.0, 0).rows
    load = tenant_load(rows, Tenants(drifts=True), 5.0, 0)
    assert set(load.rows.domain[:200]) == {0, 1}
    assert set(load.rows.domain[200:]) == {2, 3}
    assert (load.rows.user % 4 == load.rows.domain).all()
    shuffled = tenant_load(rows, Tenants(is_shuffled=True), 5.0, 0).rows
    assert (shuffled.user % 4 != shuffled.domain).any()
    short = fitting(rows, 20 * BLOCK_SIZE)
    assert (short.num_prompt_tokens + short.num_output_tokens).max() <= 15 * BLOCK_SIZE
    assert short.num_output_tokens.min() >= 1
    assert short.num_prompt_tokens.max() + short.num_output_tokens.max() <= 20 * BLOCK_SIZE, "as each client asks"


def test_the_plan_names_known_systems_and_quick_is_a_part_of_it():
    parts = whole(1000)
    assert len({part.name for part in parts}) == len(parts)
    assert {name for part in (*parts, *QUICK) for name in part.systems} <= set(SYSTEMS)
    assert {part.name for part in QUICK} <= {part.name for part in parts}
    assert make_experiment(GimbalSettings(quick=True)).loads == [part.name for part in QUICK]
    with pytest.raises(ConfigError, match="no load"):
        make_experiment(GimbalSettings(loads=("nowhere",)))


def test_the_slower_the_engine_the_longer_the_wait_which_the_search_uses():
    part = replace(TINY[0], name="slow", finds="slowdown", systems=(VLLM,), num_requests=4)
    experiment = GimbalExperiment((part,), None)
    findings = experiment.run("slow", lambda _: None)
    [found] = findings.cells
    assert found.ttft_ms.p99 == pytest.approx(4900, rel=0.06)
    assert findings.levels["slow"] > 10


def test_algorithm_3_is_judged_where_layers_have_affinity_and_where_they_have_none():
    def findings(recorded: float, shifted: float) -> GimbalFindings:
        cells = [cell("routing", "place:static", 100.0, setting=name) for name in ("recorded", "shifted")]
        tpots = {"recorded": recorded, "shifted": shifted}
        cells += [
            cell("routing", "place:gimbal_v1", 100.0, tpot=tpot, setting=name, kept_pairs=0.6)
            for name, tpot in tpots.items()
        ]
        return GimbalFindings(cells=cells)

    claim = "experts with affinity between layers on one GPU lower TPOT"
    holds = [verdicts(findings(*tpots))[claim] for tpots in ((45.0, 48.0), (45.0, 45.0), (49.5, 52.0))]
    assert holds == [True, False, False]


def test_parts_with_recorded_routing_need_a_recording_and_vary_its_affinity_alone(tmp_path):
    np.save(tmp_path / "choices.npy", recorded := np.random.default_rng(0).integers(0, 16, (40, 4, 4), np.uint8))
    (tmp_path / "index.jsonl").write_text(
        '{"dataset": "a", "category": "", "num_tokens": 40, "offset": 0, "prompt_tokens": 1}\n'
    )
    part = GimbalPart(
        name="routing", num_requests=4, rates=(9.0,), bed=BED, systems=("place:static", "place:gimbal_v1"),
        routings=("recorded", "shifted", "drawn"),
    )  # fmt: skip
    files = (tmp_path / "choices.npy", tmp_path / "index.jsonl")
    experiment = GimbalExperiment((part,), None, files)
    steps: list[str] = []
    findings = experiment.run("routing", steps.append)
    assert len(findings.cells) == len(steps) == experiment.num_runs("routing") == 6
    assert findings.settings("routing") == ["recorded", "shifted", "drawn"]
    assert experiment.plan_of("routing")[-1] == "choices.npy"
    device = np.arange(16) // 8  # of experts in order
    choices = device[recorded.astype(int)]
    kept = (choices[:, :-1, :, None] == choices[:, 1:, None, :]).mean()
    [static, *_] = findings.cells
    assert static.kept_pairs == pytest.approx(kept, abs=0.05)
    assert "routing" not in make_experiment(GimbalSettings()).loads
    assert "routing" in make_experiment(GimbalSettings(routing=files[0], routing_index=files[1])).loads
    with pytest.raises(ConfigError, match="give both, or none"):
        make_experiment(GimbalSettings(routing=files[0]))


def test_loads_of_a_later_run_take_the_place_of_the_stored_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(renew_cells, "RESULTS", tmp_path)
    old = GimbalFindings(cells=[cell(load, VLLM, 100.0) for load in ("kept", "made")], levels={"made": 2.0})
    new = GimbalFindings(cells=[cell("made", VLLM, 50.0), cell("made", MOESTRO, 40.0)], levels={"made": 3.0})
    stored = Reproduced(conditions=run_record("simulated"), parts={}, findings=old, claims=[])
    write_result(stored, tmp_path / "gimbal.json")
    part = LoadPart(run_record("simulated", note="later"), {}, msgspec.Raw(msgspec.json.encode(new)))
    write_result(part, tmp_path / "parts" / "gimbal.made.json")
    path, joined = renew_cells.join("gimbal", tmp_path / "parts")
    assert path == tmp_path / "gimbal.json"
    assert [(each.load, each.system, each.ttft_ms.mean) for each in joined.findings.cells] == [
        ("kept", VLLM, 100.0), ("made", VLLM, 50.0), ("made", MOESTRO, 40.0)
    ]  # fmt: skip
    assert joined.findings.levels == {"made": 3.0}
    assert joined.parts["made"].note == "later"


def test_what_a_plan_has_and_the_stored_runs_lack_is_run_at_their_level():
    part = GimbalPart(
        name="slow_few", finds="slowdown", num_requests=6, rates=(1.4,), systems=(VLLM, MOESTRO), seeds=(0, 1),
        bed=EpBed(network="small"),
    )  # fmt: skip
    experiment = GimbalExperiment([part], None)
    found = GimbalFindings(levels={"slow_few": 3.0})
    experiment.run_missing("slow_few", found, lambda what: None)
    assert [(each.system, each.seed) for each in found.cells] == [
        (VLLM, 0), (MOESTRO, 0), (VLLM, 1), (MOESTRO, 1)
    ]  # fmt: skip
    steps: list[str] = []
    less = GimbalFindings(levels=found.levels, cells=found.cells[:1] + found.cells[2:])
    experiment.run_missing("slow_few", less, steps.append)
    assert steps == ["slow_few at 1.4/s : moestro, seed 0"]
    assert less.cells[-1] == found.cells[1]
    assert (
        found.cells[0].step_ms > 2 * experiment._serve(part, RunName(load="x", rate=1.4, system=VLLM, seed=0)).step_ms
    )
