"""LMetric's reproduction, small: everything is run, and what is reported of it follows from what was run."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import pytest
from rich.console import Console

from moestro import __version__
from moestro.config.run_record import run_record
from moestro.errors import ConfigError
from moestro.repro import testbed
from moestro.repro.lmetric import LmetricSettings
from moestro.repro.lmetric.claims import claims_of
from moestro.repro.lmetric.experiment import QUICK, TUNED, LmetricExperiment, LmetricPlan, make_experiment
from moestro.repro.lmetric.findings import tables_of
from moestro.repro.lmetric.paper import SCORED_SEED, TUNING_SEED, generated_sources, trace_sources
from moestro.repro.lmetric.rollout import HOT_TOKENS, OWN_TOKENS, WatchedClasses, with_hot_prefix
from moestro.repro.results import LoadPart, Reproduced, claims_table, merged, write_result
from moestro.repro.runner import reproduce, save_pictures
from moestro.repro.testbed import (
    batch_figures,
    measured,
    num_until_full,
    paired_interval,
    run,
    signals_of,
    sustained_rate,
)
from moestro.routing.registry import ROUTE_POLICIES, policy_from
from moestro.workload.generated.draws import at_rate
from moestro.workload.rows import RequestForm, RequestMaker

TINY = replace(
    QUICK, num_requests=60, sources=("chat", "api_agent"), others=("round_robin", "preble"), has_second_network=True
)


@pytest.fixture(scope="module", autouse=True)
def little() -> Iterator[None]:
    """Run a quarter of the engines, and sweep the values of which claims speak: more of both is nothing but longer."""
    few = {"bailian": (0.1, 0.5, 0.9), "dynamo": (0.5, 8, 128), "aibrix": (4, 16)}
    with pytest.MonkeyPatch.context() as patch:
        tuned = {policy: (parameter, few[policy]) for policy, (parameter, _) in TUNED.items()}
        patch.setattr("moestro.repro.lmetric.experiment.TUNED", tuned)
        patch.setattr("moestro.repro.lmetric.experiment.Testbed", partial(testbed.Testbed, num_engines=4))
        yield


@pytest.fixture(scope="module")
def found():
    steps = []
    experiment = LmetricExperiment(TINY, None)
    parts = [experiment.run(load, steps.append) for load in experiment.loads]
    return experiment, merged(parts), steps


def test_as_many_runs_as_the_progress_bar_expects(found):
    experiment, _, steps = found
    assert len(steps) == sum(experiment.num_runs(load) for load in experiment.loads)


def test_every_policy_is_measured_at_every_rate_and_the_claims_follow(found):
    _, findings, _ = found
    assert findings.loads == ["chat", "api_agent"]
    for load in findings.loads:
        assert findings.shares(load) == list(TINY.shares)
        assert findings.by_policy(load, 0.5).keys() == {*TINY.policies, *TINY.others}
        assert findings.by_policy(load, 0.9).keys() == set(TINY.policies)
        assert findings.sweeps[load].keys() == TUNED.keys()
    assert findings.by_policy("api_agent", 0.5, "qwen2-7b").keys() == set(TINY.policies)
    assert [cell.system for cell in findings.weighed[:3]] == [f"bailian:hit_weight={each}" for each in (0.4, 0.7, 0.9)]
    half = {*TINY.policies, *(cell.system for cell in findings.weighed)}
    assert {course.system for course in findings.courses if course.load == "chat"} == half
    assert len(findings.pairs) == 2 * 2 * 4  # loads, shares, figures
    assert all(pair.difference.low <= pair.difference.mean <= pair.difference.high for pair in findings.pairs)
    assert [(errors.load, errors.is_tuned) for errors in findings.errors] == [("chat", True), ("chat", False)]
    assert findings.classes.keys() == {"chat", "api_agent"}
    assert findings.capacity.keys() == {"chat", "api_agent", "api_agent, qwen2-7b"}
    assert [each.mitigation for each in findings.hotspots] == ["off", "filter", "load"]
    sources = {claim.source.split(",")[0] for claim in claims_of(findings)}
    figures = ("7", "8", "9", "10", "11", "12", "15", "18", "19", "22", "25", "26", "27")
    assert {"abstract", *(f"Fig. {each}" for each in figures), "section 5.2", "our own goal"} <= sources


def test_tuned_parameters_are_the_ones_that_are_scored(found):
    experiment, findings, _ = found
    chat = experiment.sources["chat"]
    tuned = findings.sweeps["chat"]["bailian"].best[0]
    policy = policy_from(f"bailian:hit_weight={tuned:g}")
    scored = findings.by_policy("chat", 0.5)["bailian"]
    load = chat.load(scored.rate, SCORED_SEED)
    results = run(experiment.bed(chat), load, policy, signals_of(policy))
    assert measured(results, num_until_full(experiment.bed(chat), load.rows)) == scored.measured


def test_parameters_are_tuned_on_the_requests_that_are_not_scored(found):
    experiment, findings, _ = found
    chat = experiment.sources["chat"]
    bed, load = experiment.bed(chat), chat.load(0.5 * findings.capacity["chat"][1], TUNING_SEED)
    lead_in = num_until_full(bed, load.rows)
    for sweep in findings.sweeps["chat"].values():
        value, figures = sweep.values[0]
        policy = policy_from(f"{sweep.policy}:{sweep.parameter}={value:g}")
        assert measured(run(bed, load, policy, signals_of(policy)), lead_in) == figures


def test_the_rate_is_a_share_of_the_capacity(found):
    _, findings, _ = found
    _, capacity = findings.capacity["chat"]
    chat = [cell for cell in findings.cells if cell.load == "chat"]
    assert [cell.rate for cell in chat] == pytest.approx([cell.share * capacity for cell in chat])


def test_findings_are_shown_and_kept(found, tmp_path):
    _, findings, _ = found
    console, claims = Console(file=io.StringIO(), width=200), claims_of(findings)
    console.print(*tables_of(findings), claims_table(claims))
    shown = console.file.getvalue()
    assert "generated sessions" in shown
    assert "What the paper says" in shown
    result = Reproduced(conditions=run_record("simulated"), findings=findings, claims=claims)
    write_result(result, tmp_path / "new" / "lmetric.json")
    kept = json.loads((tmp_path / "new" / "lmetric.json").read_text())
    assert kept["findings"]["kind"] == kept["conditions"]["kind"] == "simulated"
    assert len(kept["claims"]) == len(claims)


def test_pictures_are_drawn(found, tmp_path):
    pytest.importorskip("matplotlib")
    paths = save_pictures("lmetric", found[0], found[1], tmp_path)
    assert {path.name for path in paths} >= {"lmetric_rates_chat.png", "lmetric_tuning.png", "lmetric_prediction.png"}
    assert {path.name for path in paths} >= {"lmetric_courses_chat.png", "lmetric_latencies_api_agent.png"}
    assert all(path.stat().st_size > 10_000 for path in paths)


def test_equal_seeds_give_equal_figures():
    experiment = LmetricExperiment(TINY, None)
    [chat, _] = experiment.sources.values()
    runs = []
    for _ in range(2):
        policy = ROUTE_POLICIES.make("lmetric")
        load = chat.load(20.0, 3)
        runs.append(measured(run(experiment.bed(chat), load, policy, signals_of(policy))))
    assert runs[0] == runs[1]


def test_windows_of_a_trace_have_no_request_in_common(tmp_path):
    lines = [
        json.dumps({"timestamp": i * 100, "input_length": 100 + i, "output_length": 5, "hash_ids": []})
        for i in range(60)
    ]
    (tmp_path / "mooncake_synthetic.jsonl").write_text("\n".join(lines))
    [source] = trace_sources(tmp_path, 4000)
    tuned, scored = (source.load(1.0, seed).rows.num_prompt_tokens for seed in (TUNING_SEED, SCORED_SEED))
    assert (len(tuned), len(scored)) == (15, 45)
    assert not set(tuned.tolist()) & set(scored.tolist())


def test_a_load_has_the_requested_rate():
    [chat, *_] = generated_sources(50)
    load = chat.load(12.5, SCORED_SEED)
    assert len(load.rows) == 50
    assert load.rate == pytest.approx(12.5)
    assert (np.diff(load.offsets_ns) >= 0).all()


def test_hot_requests_share_their_long_beginning_and_nothing_with_others():
    [chat, *_] = generated_sources(600)
    maker = RequestMaker(with_hot_prefix(chat.load(20.0, SCORED_SEED), 0).rows, RequestForm(block_size=16))
    requests = [maker.make(i, 0)[0] for i in range(600)]
    hot = [request for request in requests[200:400] if request.num_prompt_tokens == HOT_TOKENS + OWN_TOKENS]
    assert 30 < len(hot) < 130
    assert len({request.block_hashes[: HOT_TOKENS // 16 * 16] for request in hot}) == 1
    assert not any(hot[0].block_hashes[:16] == request.block_hashes[:16] for request in requests[:200])


def test_an_interval_holds_the_mean_and_is_wider_than_nothing():
    mean, low, high = paired_interval([1.0, 1.1, 0.9], [1.0, 1.0, 1.0], lambda _: 4.303)
    assert mean == pytest.approx(0)
    assert low < mean < high
    assert paired_interval([1.0], [2.0], lambda _: 0.0)[1] == float("-inf")


def test_a_load_that_is_not_there_is_named_with_those_that_are():
    known = "no load mooncake_conversation; known: chat, .*tool_agent"
    with pytest.raises(ConfigError, match=f"{known}; Mooncake's traces are read from --traces DIRECTORY"):
        make_experiment(LmetricSettings(quick=True, loads=("mooncake_conversation",)))


def test_a_directory_without_mooncakes_traces_is_refused_before_hours_of_other_loads(tmp_path):
    with pytest.raises(
        ConfigError, match=f"--traces {tmp_path} has no mooncake_conversation.jsonl and no mooncake_synt"
    ):
        make_experiment(LmetricSettings(traces=tmp_path))


def reproduce_lmetric(console, plan, out):
    return reproduce(console, "lmetric", LmetricExperiment(plan, None), out)


@pytest.fixture
def least(monkeypatch) -> LmetricPlan:
    """A plan that runs as little as it can: how parts are kept does not depend on what is in them."""
    monkeypatch.setattr("moestro.repro.lmetric.experiment._CAPABLE", ("lmetric",))
    return replace(TINY, num_requests=40, shares=(0.5,), policies=("lmetric", "moestro"), others=(), predicted=(),
                   has_second_network=False)  # fmt: skip


def test_a_run_that_was_stopped_goes_on_where_it_was(least, tmp_path):
    console, of = Console(file=io.StringIO()), lambda *names: replace(least, sources=names)
    reproduce_lmetric(console, of("tool_agent"), tmp_path)
    reproduce_lmetric(console, of("coder"), tmp_path)
    first = (tmp_path / "lmetric.coder.json").stat().st_mtime_ns
    both = reproduce_lmetric(console, of("tool_agent", "coder"), tmp_path)
    assert (tmp_path / "lmetric.coder.json").stat().st_mtime_ns == first
    assert both.findings.capacity.keys() == {"tool_agent", "coder"}
    assert both.findings == reproduce_lmetric(console, of("tool_agent", "coder"), None).findings
    reproduce_lmetric(console, replace(of("coder"), num_requests=41), tmp_path)
    assert (tmp_path / "lmetric.coder.json").stat().st_mtime_ns != first


def test_a_part_of_another_commit_is_named_and_one_of_another_version_is_made_again(least, tmp_path):
    plan, path = replace(least, sources=("coder",)), tmp_path / "lmetric.coder.json"
    first = reproduce_lmetric(Console(file=io.StringIO()), plan, tmp_path)
    assert first.parts == {"coder": first.conditions}
    assert first.conditions.moestro == __version__

    def again(**then):
        part = msgspec.json.decode(path.read_bytes(), type=LoadPart)
        older = msgspec.structs.replace(part.conditions, **then)
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(part, conditions=older)))
        console = Console(file=io.StringIO(), width=200)
        result = reproduce_lmetric(console, plan, tmp_path)
        return older, result, "is of commit" in console.file.getvalue()

    for commit in ("0123456789ab", ""):
        older, result, is_named = again(commit=commit)
        assert result.parts == {"coder": older}
        assert is_named
    _, result, is_named = again(moestro="0.0.1")
    assert result.parts == {"coder": result.conditions}
    assert not is_named
    assert result.findings == first.findings


def test_requests_of_hot_classes_are_watched():
    experiment = LmetricExperiment(TINY, None)
    chat = experiment.sources["chat"]
    policy = WatchedClasses(ROUTE_POLICIES.make("lmetric"))
    run(experiment.bed(chat), with_hot_prefix(chat.load(20.0, 3), 0), policy, signals_of(policy))
    class_shares, holder_shares = policy.sample(7)
    assert len(class_shares) == len(holder_shares) == 7
    assert all(0 < x < 1 for x in class_shares)
    assert all(0 < m <= 1 for m in holder_shares)


def test_a_run_counts_from_where_caches_are_full_but_at_most_half_of_the_requests():
    experiment = LmetricExperiment(TINY, None)
    chat = experiment.sources["chat"]
    rows, bed = generated_sources(400)[0].load(20.0, SCORED_SEED).rows, experiment.bed(chat)
    assert num_until_full(bed, rows) == 200
    for num_engines, at_least in ((1, 120), (2, 200)):
        small = replace(bed, num_engines=num_engines)
        assert at_least <= num_until_full(small, rows) <= 200


def test_batches_are_parts_of_the_counted_requests():
    experiment = LmetricExperiment(TINY, None)
    chat, policy = experiment.sources["chat"], policy_from("lmetric")
    results = run(experiment.bed(chat), chat.load(20.0, 3), policy, signals_of(policy))
    batches, whole = batch_figures(results, 20, 4), measured(results, 20)
    assert {len(values) for values in batches.values()} == {4}
    assert np.mean(batches["TTFT mean"]) == pytest.approx(whole.ttft_ms.mean)
    assert batch_figures(results, 20, 1)["TPOT P99"] == (whole.tpot_ms.p99,)


def test_the_capacity_does_not_hang_on_the_first_rate():
    experiment = LmetricExperiment(TINY, None)
    source = generated_sources(600)[1]
    bed, load = replace(experiment.bed(source), num_engines=1), source.load(1.0, SCORED_SEED)
    low, high = (
        sustained_rate(
            bed,
            replace(load, offsets_ns=at_rate(load.offsets_ns, rate)),
            partial(policy_from, "lmetric"),
        )
        for rate in (15.0, 60.0)
    )
    assert low == pytest.approx(high, rel=0.15)
    assert 10 < low < 60
