"""The search on small networks whose answer is known, what is read from runs, and the verb."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from moestro.cli.main import main
from moestro.cost.gpus import gpu_named
from moestro.cost.model import Batch
from moestro.cost.networks import CONFIGS, network_named
from moestro.cost.roofline import Roofline, RooflineSettings
from moestro.planner.divisions import GpuDivision, divisions_of, memory_of
from moestro.planner.plan import ALLOWANCE, Margin, PlanSearch, SearchFindings, inverted, ladder, make_plan, margin_of
from moestro.planner.question import LengthSample, make_question
from moestro.planner.settings import (
    HardwareSettings,
    ObjectiveSettings,
    PlanSearchSettings,
    PlanSettings,
    TrafficSettings,
)
from moestro.planner.simulated import (
    Curve,
    Estimator,
    FittingDivision,
    SimulatedPoint,
    best_within,
    chunks_of_prompt,
    mean_steps,
)
from moestro.planner.verb import print_plan, verdict

SMALL = {
    "hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 2048, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 32000,
}  # fmt: skip

LITTLE = 0.0735  # of the memory of an A100: 0.3 GB beside the workspace, so that few requests fit


@pytest.fixture
def small(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return tmp_path


def settings_of(model, *, num_gpus=2, search=None, **objectives):
    return PlanSettings(
        model=str(model),
        hardware=HardwareSettings(
            gpu="a100",
            num_gpus=num_gpus,
            gpus_per_machine=1,
            link_across="ethernet-100g",
            gpu_memory_utilization=LITTLE,
        ),
        traffic=TrafficSettings(isl=32, osl=32),
        objectives=ObjectiveSettings(**{"max_itl": 3.0, **objectives}),
        search=search or PlanSearchSettings(num_seeds=2),
    )


@pytest.fixture
def quick(monkeypatch):
    """A search without `async`, whose runs take a hundred times as long."""
    monkeypatch.setattr(
        "moestro.planner.plan.divisions_of",
        lambda question: [each for each in divisions_of(question) if each.mode != "async"],
    )


def point(number, tokens, itl, ttft=10.0):
    return SimulatedPoint(
        num_requests=number, seed=0, tokens_per_s=tokens, itl_ms=itl, itl_p99_ms=itl, ttft_ms=ttft, ttft_p99_ms=ttft
    )


def fitting_of(question, division):
    return FittingDivision(question, division, memory_of(question, division))


# --- what is read from runs -------------------------------------------------------------------------------------------


def test_the_best_lies_on_the_line_between_runs():
    objectives = ObjectiveSettings(max_itl=50)
    best = best_within([point(10, 100, 20), point(20, 150, 40), point(40, 200, 80)], objectives)
    assert (best.num_requests, best.tokens_per_s, best.itl_ms) == (25, 162.5, 50)
    assert best_within([point(10, 100, 60)], objectives) is None
    assert best_within([point(10, 100, 20)], objectives).tokens_per_s == 100


def test_the_objective_of_ttft_counts_too():
    runs = [point(10, 100, 20, 100), point(20, 150, 40, 300)]
    assert best_within(runs, ObjectiveSettings(max_itl=50)).num_requests == 20
    assert best_within(runs, ObjectiveSettings(max_itl=50, max_ttft=200)).num_requests == 15


def test_requests_in_progress_are_those_of_a_long_queue():
    lengths = LengthSample(np.array([10, 20]), np.array([100, 300]))
    load = lengths.steady_load(4000, 10, 0.1, 0)
    left, context = load.rows.num_output_tokens[:4000], load.rows.num_prompt_tokens[:4000]
    assert left.min() >= 1
    assert context.mean() == pytest.approx(lengths.mean_context, rel=0.01)
    assert left.mean() == pytest.approx((100**2 + 300**2) / (100 + 300) / 2, rel=0.01)


def test_a_margin_whose_interval_holds_1_is_a_tie(small):
    question = make_question(settings_of(small))
    curves = [Curve(fitting_of(question, each), 0.0, [point(10, 100 + n, 1)]) for n, each in
              enumerate((GpuDivision("fused", 2, 1), GpuDivision("ep", 1, 2)))]  # fmt: skip
    ranked = SearchFindings({}, curves).ranked(question.settings.objectives)
    assert [curve.fitting.division.mode for curve, _ in ranked] == ["ep", "fused"]
    close = SearchFindings(
        {}, curves, pairs=[(point(1, a, 1), point(1, b, 1)) for a, b in ((10, 9), (9, 10), (11, 10))]
    )
    assert margin_of(close, ranked).is_tie
    clear = SearchFindings({}, curves, pairs=[(point(1, a, 1), point(1, 10, 1)) for a in (12.0, 12.1, 11.9)])
    margin = margin_of(clear, ranked)
    assert not margin.is_tie
    assert margin.low < 1.2 < margin.high
    assert inverted(inverted(margin)).low == pytest.approx(margin.low)
    behind = SearchFindings({}, curves, pairs=[(point(1, a, 1), point(1, 10, 1)) for a in (8.0, 8.1, 7.9)])
    assert make_plan(question, behind).winner == "2 replicas"


def test_one_seed_leaves_the_noise_unknown():
    margin = Margin(first="a", second="b", mean=1.5, low=0.0, high=float("inf"), num_seeds=1)
    assert margin.is_tie


# --- prices and estimates ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", ["mixtral-8x7b", "qwen3-30b-a3b"])
def test_a_replica_costs_what_the_roofline_says(network):
    """The grouped product over drawn experts has the price of a whole step, which expects them."""
    question = make_question(
        PlanSettings(
            model=network,
            hardware=HardwareSettings(gpu="h200", num_gpus=1),
            traffic=TrafficSettings(isl=1, osl=1000, hot_experts="same"),
        )
    )
    found = Estimator(0).estimate(fitting_of(question, GpuDivision("fused", 1, 1)), 128)
    cost = Roofline(RooflineSettings(network=network_named(network), gpu=gpu_named("h200")))
    expected = cost.step_ns(Batch(np.full(128, 501), np.ones(128, np.int64))) / 1e6
    assert found.itl_ms == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("number", [8, 256])
def test_estimates_in_lock_step_are_within_the_allowance_of_the_simulation(small, number):
    question = make_question(settings_of(small))
    for division in divisions_of(question):
        if division.mode != "async":
            fitting = fitting_of(question, division)
            simulated = fitting.run(number, 0).tokens_per_s
            assert simulated < ALLOWANCE * Estimator(0).estimate(fitting, number).tokens_per_s, division.title


@pytest.mark.parametrize("number", [7, 1439])
def test_few_requests_and_many_have_their_estimate(number):
    """Few requests have a prompt in few steps, and many need more tokens in a step than the setting."""
    question = make_question(
        PlanSettings(
            model="qwen3-30b-a3b",
            hardware=HardwareSettings(gpu="a100", num_gpus=4),
            traffic=TrafficSettings(isl=512, osl=128),
        )
    )
    fitting = fitting_of(question, GpuDivision("fused", 2, 2))
    assert fitting.run(number, 0).tokens_per_s == pytest.approx(
        Estimator(0).estimate(fitting, number).tokens_per_s, rel=0.05
    )


def test_a_run_at_the_limit_of_memory_is_in_a_steady_state(small, monkeypatch):
    question = make_question(replace(settings_of(small), traffic=TrafficSettings(isl=256, osl=32)))
    fitting = fitting_of(question, GpuDivision("fused", 2, 1))
    number = fitting.most_requests
    assert fitting.limits(number).max_num_batched_tokens >= number / 2 * (1 + 256 / 32)
    short = fitting.run(number, 0).tokens_per_s
    monkeypatch.setattr("moestro.planner.simulated._PASSES", (64, 64))
    assert short == pytest.approx(fitting.run(number, 0).tokens_per_s, rel=0.05)


def test_the_shares_of_mean_steps_are_those_of_prompts(small):
    """All requests get a token in a step in which their prompt has one chunk; chunks are where they are on average."""
    question = make_question(settings_of(small))
    for division in (GpuDivision("fused", 2, 1), GpuDivision("ep", 1, 2)):
        fitting = fitting_of(question, division)
        for each in (1, 4, 64):
            steps = mean_steps(fitting, each, 1)
            assert sum(step.share for step in steps) == pytest.approx(1)
            assert {len(batch.start) for step in steps for batch in step.batches} == {each}
            tokens = sum(step.share * sum(batch.num_tokens.sum() for batch in step.batches) for step in steps)
            # A request has 32 tokens of a prompt and 31 further steps of one token each.
            assert tokens == pytest.approx(division.num_engines * each * (32 + 31) / 32, rel=0.02)


def test_a_prompt_beyond_the_budget_takes_several_steps(small):
    search = PlanSearchSettings(max_num_batched_tokens=16)
    fitting = fitting_of(make_question(settings_of(small, search=search)), GpuDivision("fused", 2, 1))
    assert [chunks_of_prompt(fitting, each) for each in (1, 8)] == [2, 4]
    assert fitting.run(2, 0).tokens_per_s == pytest.approx(Estimator(0).estimate(fitting, 2).tokens_per_s, rel=0.05)


def test_async_is_below_its_estimate(small):
    question = make_question(settings_of(small))
    for division in (GpuDivision("async", 1, 2), GpuDivision("async", 1, 2, 1)):
        fitting = fitting_of(question, division)
        assert fitting.run(64, 0).tokens_per_s < Estimator(0).estimate(fitting, 64).tokens_per_s


def test_rungs_ascend_from_one_request_an_engine_to_what_fits(small):
    question = make_question(settings_of(small))
    fitting = fitting_of(question, GpuDivision("fused", 2, 1))
    rungs = ladder(fitting)
    assert rungs[0] == 2
    assert rungs == sorted(set(rungs))
    assert rungs[-1] == fitting.most_requests


# --- searches ---------------------------------------------------------------------------------------------------------


def test_replicas_win_where_experts_are_few_and_links_are_slow(small, quick):
    question = make_question(settings_of(small))
    plan = make_plan(question, PlanSearch(question).run())
    assert plan.winner == plan.served == "2 replicas"
    winner = plan.named(plan.winner)
    assert winner.itl_ms <= 3.0
    assert winner.commands[0].startswith(f"moestro serve {small} --mode fused --engines 2")
    assert {each.status for each in plan.deployments} <= {
        "kept", "missed", "dominated", "left out", "not reached",
    }  # fmt: skip


def test_the_same_seed_gives_the_same_plan(small, quick):
    question = make_question(settings_of(small))
    first, second = (make_plan(question, PlanSearch(question).run()) for _ in range(2))
    assert first == second


def test_objectives_that_nothing_keeps_show_the_nearest(small, quick):
    question = make_question(settings_of(small, max_itl=0.001))
    plan = make_plan(question, PlanSearch(question).run())
    assert plan.winner is None
    assert plan.nearest_point.itl_ms > 0.001
    assert verdict(plan)[0].startswith(f"No deployment keeps the objectives. The nearest is {plan.nearest}")


def test_a_search_without_time_names_what_it_did_not_reach(small):
    question = make_question(settings_of(small))
    plan = make_plan(question, PlanSearch(question, lambda: 0.0).run())
    assert "not reached" in {each.status for each in plan.deployments}
    assert any("raise --time" in sentence for sentence in verdict(plan))


@pytest.mark.parametrize(("rate", "text"), [(1.0, "It serves --request-rate with"), (1e6, "as many GPUs are needed")])
def test_a_rate_is_compared_with_the_throughput(small, rate, text):
    settings = settings_of(small, search=PlanSearchSettings(num_seeds=2, served_only=True))
    question = make_question(replace(settings, traffic=replace(settings.traffic, request_rate=rate)))
    plan = make_plan(question, PlanSearch(question, lambda: 0.0).run())
    console = Console(file=io.StringIO(), width=120)
    print_plan(console, plan)
    assert text in console.file.getvalue()


# --- the verb ---------------------------------------------------------------------------------------------------------


def run_verb(arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert not ended.value.code


def test_the_verb_plans_shows_and_writes(small, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "plan"
    run_verb(
        ["plan", str(small), "--gpu", "a100", "--num-gpus", "2", "--isl", "32", "--osl", "32", "--max-itl", "3",
         "--gpu-memory-utilization", str(LITTLE), "--served-only", "--time", "3", "--out", str(out)]
    )  # fmt: skip
    shown = capsys.readouterr().out
    assert "simulated" in shown
    assert "moestro serve" in shown
    written = json.loads((out / "plan.json").read_text())
    assert written["kind"] == "simulated"
    assert written["winner"] in shown
    assert (out / "curves.png").stat().st_size > 0


def test_the_verb_says_how_many_gpus_would_do(capsys):
    run_verb(["plan", "mixtral-8x7b", "--gpu", "a100-40g", "--num-gpus", "2"])
    assert "mixtral-8x7b does not fit 2 a100-40g; 4 would do" in capsys.readouterr().out


def test_a_network_without_experts_is_reported_to_have_replicas_alone(tmp_path, capsys):
    dense = {key: value for key, value in SMALL.items() if "expert" not in key}
    (tmp_path / "config.json").write_text(json.dumps(dense))
    run_verb(["plan", str(tmp_path), "--gpu", "a100", "--num-gpus", "2", "--isl", "32", "--osl", "32", "--time", "1"])
    assert "has no experts: replicas alone are planned" in capsys.readouterr().out


@pytest.mark.parametrize("find", ["throughput", "fewest-gpus"])
def test_requests_beyond_the_networks_positions_are_refused(tmp_path, find, capsys):
    """The printed command had a --max-model-len that its server refuses."""
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "max_position_embeddings": 1024}))
    times = ["--max-ttft", "2000", "--request-rate", "1"] if find == "fewest-gpus" else []
    flags = ["--num-gpus", "1", "--osl", "32", "--find", find, *times]
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(tmp_path), "--isl", "993", *flags])
    assert ended.value.code == 2
    words = " ".join(capsys.readouterr().err.split())
    assert "the longest request needs 1,025 tokens" in words
    assert "was made for 1,024 (max_position_embeddings of its config.json)" in words
    run_verb(["plan", str(tmp_path), "--isl", "992", *flags, "--time", "1"])
    assert "--max-model-len 1024" in capsys.readouterr().out


@pytest.mark.parametrize(("flags", "text"), [(["--gpu", "b300"], "known: a100-80g"), (["--osl", "1"], "--osl")])
def test_the_verb_refuses_what_it_does_not_know(flags, text, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", "mixtral-8x7b", *flags])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_a_trace_supplies_the_lengths(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"input_length": 10, "output_length": 20}\n{"input_length": 30, "output_length": 40}\n')
    settings = PlanSettings(model="mixtral-8x7b", traffic=TrafficSettings(dataset_path=trace))
    lengths = make_question(settings).lengths
    assert (lengths.mean_prompt, lengths.mean_output, lengths.longest) == (20, 30, 70)


def test_the_verb_shows_what_of_a_trace_has_no_effect(tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    trace.write_text("Timestamp,Request tokens,Response tokens,chat_id\n0,32,32,1\n1,32,0,2\n")
    flags = ["--gpu", "a100-80g", "--num-gpus", "2", "--dataset-path", str(trace), "--time", "1"]
    run_verb(["plan", "qwen3-30b-a3b", *flags])
    text = " ".join(capsys.readouterr().out.split())
    assert "- --dataset-path: entries of the file without an answered request, which are left out: 1" in text
    assert "- --dataset-path: arrivals and common prefixes of the file have no effect on a plan" in text
    assert "- --dataset-path: fields of the file that have no effect beside its other fields: chat_id" in text


def test_every_named_network_can_be_planned():
    for name in CONFIGS:
        question = make_question(PlanSettings(model=name))
        assert divisions_of(question)
