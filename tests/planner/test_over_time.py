"""`moestro plan` over the times of requests: a stored day, an engine file as calibrate writes it, and the answer."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from moestro.cli.main import main
from moestro.core.clock import NS_PER_MS, NS_PER_S, ClockPair
from moestro.cost.tables import FORMAT, DecodePoint, HostTimes, PrefillPoint, Table
from moestro.errors import ConfigError
from moestro.planner.day import choices_of, figures_of, read_load, windows_of
from moestro.planner.settings import (
    HardwareSettings,
    ObjectiveSettings,
    PlanSearchSettings,
    PlanSettings,
    ServingSettings,
    TrafficSettings,
)
from moestro.planner.systems import system_named
from moestro.planner.timed_plan import TimedSearch, plan_over_time, sentences
from moestro.sim.results import ANSWERED, Results
from moestro.workload.traces.request_record import Header, RecordedRequest

DAY = Path(__file__).with_name("day.jsonl")  # 300 requests in 40 minutes, most of them within 4 minutes
STEP_NS, TOKEN_NS = 200e6, 2e6
OBJECTIVES = ObjectiveSettings(max_ttft=2500, max_itl=1000, window=300)


@pytest.fixture
def engine(tmp_path):
    """The files of a calibrated engine: a step takes 200 ms and 2 ms for each token of a prompt."""
    table = Table(
        format=FORMAT,
        model="served-name",
        device="http://127.0.0.1:8000",
        prefill=tuple(
            PrefillPoint(new=new, cached=cached, ns=STEP_NS + TOKEN_NS * new, spread=0)
            for new in (1, 1024)
            for cached in (0, 1024)
        ),
        short_chunks=(),
        decode=tuple(
            DecodePoint(sequences=rows, context=context, ns=STEP_NS + TOKEN_NS * rows, spread=0)
            for rows in (1, 64)
            for context in (16, 4096)
        ),
        host=HostTimes(step_ns=0, sequence_ns=0),
    )
    (tmp_path / "engine.json").write_bytes(msgspec.json.encode(table))
    path = tmp_path / "engine.toml"
    path.write_text(
        '[engines]\ntable = "engine.json"\nnum_blocks = 900  # probed\nblock_size = 16\nmax_num_seqs = 8\n'
        "max_num_batched_tokens = 256\nmax_model_len = 1024\napi_us = 1000.0\napi_token_us = 2.0\n"
    )
    return path


def settings_of(engine, *, num_gpus=8, find=None, hardware=None, serving=None, **traffic):
    return PlanSettings(
        model=str(engine),
        hardware=HardwareSettings(num_gpus=num_gpus, **(hardware or {})),
        traffic=TrafficSettings(**{"dataset_path": DAY, **traffic}),
        objectives=OBJECTIVES,
        serving=serving or ServingSettings(),
        search=PlanSearchSettings(find=find),
    )


def plan_of(settings):
    return plan_over_time(settings, lambda: float("inf"), lambda _: None)


def search_of(settings):
    system, load = system_named(settings.serving.system, settings.serving.for_version), read_load(settings)
    (choice,), _ = choices_of(settings, system, load)
    return TimedSearch(settings, system, load), choice


def run_verb(arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert not ended.value.code


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_verb_finds_the_fewest_engines_over_a_day_and_prints_vllms_commands(engine, tmp_path, capsys):
    out = tmp_path / "out"
    run_verb(
        ["plan", str(engine), "--for", "vllm", "--for-version", "0.32.0", "--dataset-path", str(DAY),
         "--max-ttft", "2500", "--max-itl", "1000", "--window", "300",
         "--server-flags", "--dtype bfloat16", "--out", str(out)]
    )  # fmt: skip
    shown = capsys.readouterr().out
    plan = json.loads((out / "plan.json").read_text())
    best = plan["servers"][0]
    assert best["holds"]
    assert best["num_servers"] > 1
    assert best["load_held"] >= 1
    assert best["load_broken"] <= 1.05 * best["load_held"]
    assert f"{best['num_servers']} x engine of engine.toml" in shown
    assert f"At {best['load_broken']:.3g} times, {best['broken_by']}" in shown
    assert len(plan["commands"]) == best["num_servers"] + 1
    for number, command in enumerate(plan["commands"][:-1]):
        assert command in shown
        words = shlex.split(command)
        assert words[:4] == [f"CUDA_VISIBLE_DEVICES={number}", "vllm", "serve", "served-name"]
        assert words[-4:] == ["--dtype", "bfloat16", "--port", str(8001 + number)]
        assert {"--max-num-seqs", "--max-num-batched-tokens", "--num-gpu-blocks-override"} <= set(words)
    assert plan["commands"][-1].startswith("moestro route --engine http://127.0.0.1:8001 --engine")


def test_a_network_is_divided_by_tensor_and_expert_parallelism(tmp_path, capsys):
    out = tmp_path / "out"
    run_verb(
        ["plan", "mixtral-8x7b", "--for", "sglang", "--gpu", "h100", "--num-gpus", "4", "--dataset-path", str(DAY),
         "--request-rate", "2", "--max-ttft", "2000", "--time", "600", "--find", "figures", "--out", str(out)]
    )  # fmt: skip
    plan = json.loads((out / "plan.json").read_text())
    titles = {each["title"] for each in plan["servers"]}
    assert titles == {"2 GPUs, TP 2", "2 GPUs, EP 2", "4 GPUs, TP 4", "4 GPUs, EP 4", "4 GPUs, TP 2, EP 4"}
    assert "93.4 GB of weights" in plan["misfits"]["1 GPU"]
    assert all(each["num_servers"] * each["gpus_per_server"] == 4 for each in plan["servers"])
    # Twice the GPUs of an engine shorten its steps, and by less than half, because of the all-reduces.
    itl = {each["title"]: each["figures"]["itl_ms"] for each in plan["servers"]}
    assert itl["2 GPUs, TP 2"] / 2 < itl["4 GPUs, TP 4"] < itl["2 GPUs, TP 2"]
    assert "python -m sglang.launch_server --model-path mixtral-8x7b" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--find", "throughput"], "--find throughput divides the GPUs of a network"),
        (["--calibrated-gpu", "h100"], "--calibrated-gpu and --network go together"),
        (["--for", "vllm", "--for-version", "0.1"], "Known: 0.32.0, 0.33.0"),
        (["--for-version", "0.1"], "commands of moestro are those of this version"),
        (["--num-gpus", "0"], "--num-gpus"),
        (["--server-flags", '--name "x'], "--server-flags '--name \"x' is no list of flags: No closing quotation"),
        (["--load-factor", "1e-300"], "a factor of 1e-300 on the rate is too low"),
        (["--gpus-per-engine", "4"], "--gpus-per-engine 4: moestro serve has no tensor parallelism"),
        (["--gpus-per-engine", "16", "--for", "vllm"], "--gpus-per-engine 16 is more than --num-gpus 8"),
        (["--link-across", "string"], "no constants for link 'string'"),
        (["--gpu", "h200"], "--gpu needs --calibrated-gpu and --network: on which GPU was"),
        (["--max-num-seqs", "3"], "--max-num-seqs is for a network"),
        (["--redundant-experts", "3"], "--redundant-experts is for a network"),
        (["--max-kv-offloading-size", "3"], "--max-kv-offloading-size goes with --find throughput"),
        (["--popularity", "uniform"], "--popularity goes with --find throughput"),
        (["--num-seeds", "9"], "--num-seeds goes with --find throughput"),
    ],
)
def test_wrong_questions_are_refused_with_what_is_allowed(engine, flags, text, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(engine), "--dataset-path", str(DAY), "--max-ttft", "400", *flags])
    assert ended.value.code == 2
    assert text in " ".join(capsys.readouterr().err.split())


def test_settings_that_need_each_other_are_named():
    with pytest.raises(ConfigError, match="needs --max-ttft or --max-ttft-p99"):
        PlanSettings(model="mixtral-8x7b", search=PlanSearchSettings(find="fewest-gpus"))
    with pytest.raises(ConfigError, match="--load-factor goes with --find"):
        PlanSettings(model="mixtral-8x7b", traffic=TrafficSettings(load_factor=2))
    with pytest.raises(ConfigError, match="--window goes with --find fewest-gpus or figures"):
        PlanSettings(model="mixtral-8x7b", objectives=ObjectiveSettings(window=300))
    with pytest.raises(ConfigError, match="--gpus-per-engine is for an engine file"):
        PlanSettings(model="mixtral-8x7b", hardware=HardwareSettings(gpus_per_engine=2))
    with pytest.raises(ConfigError, match="is for an engine file"):
        PlanSettings(model="mixtral-8x7b", hardware=HardwareSettings(calibrated_gpu="h100", network="mixtral-8x7b"))
    settings = PlanSettings(
        model="mixtral-8x7b", search=PlanSearchSettings(find="figures"), traffic=TrafficSettings(dataset_path=None)
    )
    with pytest.raises(ConfigError, match="needs times"):
        read_load(settings)


# --- the answer -------------------------------------------------------------------------------------------------------


def test_the_answer_is_the_fewest_and_the_load_is_where_it_breaks(engine):
    settings = settings_of(engine)
    plan, (search, choice) = plan_of(settings), search_of(settings)
    best = plan.servers[0]
    held = [search.figures(choice, number).broken is None for number in range(1, best.num_servers + 1)]
    assert held == [False] * (best.num_servers - 1) + [True]
    assert search.figures(choice, best.num_servers, best.load_held).broken is None
    assert search.figures(choice, best.num_servers, best.load_broken).broken == best.broken_by
    broken = plan_of(settings_of(engine, num_gpus=best.num_servers, find="figures", load_factor=best.load_broken))
    assert not broken.servers[0].holds
    assert broken.servers[0].load_held < 1
    assert broken.commands == []


def test_the_peak_of_the_day_decides_and_not_its_mean(engine):
    """The same requests, spread evenly over the same time, need one engine."""
    search, choice = search_of(settings_of(engine))
    assert search.figures(choice, 1).broken is not None
    load = search.load
    even = replace(load, arrival_ns=np.linspace(0, load.arrival_ns[-1], len(load)).astype(np.int64))
    assert TimedSearch(search.settings, search.system, even).figures(choice, 1).broken is None


def test_twice_the_load_needs_more_and_half_the_engines_hold_less(engine):
    number = plan_of(settings_of(engine)).servers[0].num_servers
    search, choice = search_of(settings_of(engine, load_factor=2))
    assert search.figures(choice, number).broken is not None
    half = plan_of(settings_of(engine, num_gpus=number // 2, find="figures"))
    assert half.servers[0].num_servers == number // 2
    assert half.servers[0].load_held < 1


def test_another_gpu_changes_the_steps_by_the_ratio_of_two_rooflines(engine):
    def itl(hardware):
        search, choice = search_of(settings_of(engine, hardware=hardware))
        return search.figures(choice, 4).itl_ms

    same = {"gpu": "a100", "calibrated_gpu": "a100", "network": "qwen2-7b"}
    assert itl({**same, "gpu": "h200"}) < itl({}) == itl(same) < itl({**same, "calibrated_gpu": "h200"})
    search, choice = search_of(settings_of(engine, hardware={**same, "gpu": "h200"}))
    assert choice.engines.num_blocks > 900
    assert "--num-gpu-blocks-override" not in choice.commands(search.system, 1, search.settings)[0]


def test_an_engine_of_several_gpus_is_compared_as_such(engine):
    # On one GPU, the network would not fit at all.
    several = {"gpu": "h200", "calibrated_gpu": "h100", "network": "qwen3-235b-a22b", "gpus_per_engine": 8}
    vllm = ServingSettings(system="vllm", for_version="0.33.0")
    search, choice = search_of(settings_of(engine, hardware=several, serving=vllm))
    plain, same = search_of(settings_of(engine))
    assert choice.engines.num_blocks > 900
    assert search.figures(choice, 1).itl_ms < plain.figures(same, 1).itl_ms
    assert "--tensor-parallel-size 8" in choice.commands(search.system, 1, search.settings)[0]


def test_an_unknown_gpu_is_refused_and_no_reason_why_servers_do_not_fit():
    settings = settings_of("mixtral-8x7b", find="figures", hardware={"gpu": "h300"})
    with pytest.raises(ConfigError, match="no constants for GPU 'h300'"):
        plan_of(settings)


def test_limits_that_calibrate_did_not_identify_are_named_in_the_answer(engine):
    table = json.loads((engine.parent / "engine.json").read_text())
    names = [("max_num_seqs", "sequences of a step", None), ("block_size", "tokens of a KV block", 16)]
    names += [("max_num_batched_tokens", "tokens of a step", None), ("max_requests", "requests at once", None)]
    estimates = [{"name": name, "title": title, "value": value, "low": 4} for name, title, value in names]
    (engine.parent / "engine.json").write_text(json.dumps(table | {"about": {"estimates": estimates}}))
    (note,) = search_of(settings_of(engine))[1].notes
    assert "a bound or an assumption: sequences of a step (8), tokens of a step (256). The commands" in note
    (engine.parent / "engine.json").write_text(json.dumps(table | {"about": {"estimates": "none"}}))
    assert not search_of(settings_of(engine))[1].notes


def log_of(folder, rows):
    """A log of (seconds, tokens of a prompt, of an answer)."""
    path = folder / "log.jsonl"
    lines = [{"timestamp": 1e3 * at, "input_length": prompt, "output_length": output} for at, prompt, output in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_no_request_is_longer_than_the_longest_of_the_log(engine, tmp_path):
    # The longest prompt and the longest answer belong to different requests, and together exceed the engine's 1,024.
    settings = settings_of(engine, dataset_path=log_of(tmp_path, [(0, 900, 20), (1, 20, 900)]))
    assert read_load(settings).longest == 920
    plan = plan_of(settings)
    assert plan.servers[0].figures.num_refused == 0
    vllm = ServingSettings(system="vllm", for_version="0.33.0")
    log, hardware = settings.traffic.dataset_path, {"gpu": "h200"}
    network = settings_of("mixtral-8x7b", find="figures", dataset_path=log, hardware=hardware, serving=vllm)
    assert "--max-model-len 920 " in plan_of(network).commands[0]


@pytest.mark.parametrize("num_requests", [1, 30])
def test_requests_that_arrive_at_one_time_have_no_rate_and_no_higher_load(engine, tmp_path, num_requests):
    plan = plan_of(settings_of(engine, dataset_path=log_of(tmp_path, [(7, 100, 5)] * num_requests)))
    plural = "s" if num_requests > 1 else ""
    words = "all at one time, so they have no rate, and no load is higher"
    assert plan.requests == f"{num_requests} request{plural}, log.jsonl: {words}"
    assert plan.servers[0].load_held is None
    assert not any("times this load" in each for each in sentences(plan))


def test_objectives_that_no_load_holds_show_the_nearest_servers_and_that_more_do_not_help(engine, tmp_path):
    log = log_of(tmp_path, [(second, 100, 5) for second in range(30)])
    settings = settings_of(engine, num_gpus=2, dataset_path=log)
    plan = plan_of(replace(settings, objectives=ObjectiveSettings(max_ttft=2500, max_itl=10)))
    first, last = sentences(plan)
    assert first.startswith("The objectives do not hold with 2 x engine of engine.toml: mean ITL is")
    assert re.match(r"At 0.0156 times this load, mean ITL is .*: more of these servers do not help", last)
    vllm = ServingSettings(system="vllm", for_version="0.33.0")
    settings = settings_of("mixtral-8x7b", find="fewest-gpus", hardware={"gpu": "h200"}, serving=vllm, dataset_path=log)
    plan = plan_of(replace(settings, objectives=ObjectiveSettings(max_ttft=2500, max_itl=0.1)))
    itl = [each.figures.itl_ms for each in plan.servers]
    assert itl == sorted(itl)


def test_kinds_that_the_time_did_not_reach_are_named_where_others_miss_the_objectives():
    settings = settings_of("mixtral-8x7b", find="figures", hardware={"gpu": "h200"})
    settings = replace(settings, objectives=ObjectiveSettings(max_itl=0.1))
    left = iter([1.0, *[0.0] * 100])
    plan = plan_over_time(settings, lambda: next(left), lambda _: None)
    assert sentences(plan)[-1].startswith("The time did not suffice for 2 GPUs, EP 2")


def test_common_beginnings_of_a_trace_are_found_in_the_prefix_cache(engine):
    def hit_ratio():
        search, choice = search_of(settings_of(engine))
        return search.figures(choice, 2).hit_ratio

    assert hit_ratio() > 0.05
    engine.write_text(engine.read_text() + "enable_prefix_caching = false\n")
    assert hit_ratio() == 0


def test_a_record_of_a_server_is_a_load_with_its_times(engine, tmp_path):
    header = Header(
        model="m", device="cpu", num_engines=1, block_size=16, num_blocks=900, max_model_len=1024, limits={},
        route_policy="moestro", clocks=ClockPair(0, 0),
    )  # fmt: skip
    requests = [
        RecordedRequest(
            request_id=str(i), arrival_ns=NS_PER_S * (5 + 2 * i), admitted_ns=1, first_token_ns=1, last_token_ns=1,
            engine=0, num_prompt_tokens=100, num_output_tokens=20, num_hit_tokens=0, max_tokens=32, block_hashes=b"",
        )
        for i in range(30)
    ]  # fmt: skip
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"\n".join(msgspec.json.encode(each) for each in (header, *requests)) + b"\n")
    load = read_load(settings_of(engine, dataset_path=path))
    assert (len(load), load.arrival_ns[-1], load.longest, load.block_size) == (30, 58 * NS_PER_S, 132, 16)
    figures = plan_of(settings_of(engine, dataset_path=path)).servers[0].figures
    assert figures.num_requests == 30
    engine.write_text(engine.read_text().replace("block_size = 16", "block_size = 32"))
    with pytest.raises(ConfigError, match="a record with blocks of 16 tokens"):
        plan_of(settings_of(engine, dataset_path=path))


def test_the_time_ends_the_search_and_is_reported(engine):
    plan = plan_over_time(settings_of(engine), lambda: 0.0, lambda _: None)
    assert plan.servers[0].figures is None
    assert plan.commands == []


# --- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_windows_have_all_requests_once_in_order_and_none_has_few(seed):
    rng = np.random.default_rng(seed)
    number = int(rng.integers(1, 400))
    arrivals = np.sort(rng.integers(0, 5000, number))
    found = windows_of(arrivals, int(rng.integers(1, 2000)))
    assert [row for part in found for row in range(part.start, part.stop)] == list(range(number))
    assert number < 20 or min(part.stop - part.start for part in found) >= 20


def test_a_window_ends_where_its_time_is_over():
    arrivals = np.concatenate([np.arange(30), 100 + np.arange(30), 1000 + np.arange(5)])
    assert windows_of(arrivals, 100) == [slice(0, 30), slice(30, 65)]


def results_of(arrivals_s, ttft_ms):
    """Answers of three tokens with gaps of 100 ms."""
    results = Results(len(arrivals_s), 1)
    results.arrival_ns[:] = np.array(arrivals_s) * NS_PER_S
    results.first_token_ns[:] = results.arrival_ns + np.array(ttft_ms) * NS_PER_MS
    results.last_token_ns[:] = results.first_token_ns + 200 * NS_PER_MS
    results.num_tokens[:], results.num_prompt_tokens[:], results.status[:] = 3, 10, ANSWERED
    return results


def test_means_hold_in_each_window_and_not_only_over_the_day():
    results = results_of([*range(80), *range(1000, 1020)], [100] * 80 + [900] * 20)
    objectives = ObjectiveSettings(max_ttft=500, max_itl=100, window=100)
    found = figures_of(results, objectives)
    assert found.ttft_ms == 260
    assert (found.busiest.num_requests, found.busiest.ttft_ms) == (20, 900)
    assert found.broken == (
        "mean TTFT is 900 ms for requests that arrive from 0:16:40 to 0:16:59 (20 requests): --max-ttft is 500"
    )
    assert figures_of(results, replace(objectives, window=5000)).broken is None


def test_the_objective_that_is_missed_most_is_named_and_a_refusal_breaks_all():
    results = results_of(range(40), [100] * 39 + [10_000])
    objectives = ObjectiveSettings(max_itl=90, max_ttft_p99=1000)
    assert figures_of(results, objectives).broken == "P99 of TTFT is 6,139 ms: --max-ttft-p99 is 1000"
    assert figures_of(results, replace(objectives, max_ttft_p99=None)).broken.endswith("--max-itl is 90")
    assert figures_of(results, ObjectiveSettings(max_itl=100)).broken is None
    results.refused(3, "queue_full", "full")
    assert figures_of(results, ObjectiveSettings(max_itl=100)).broken == "1 of 40 requests are refused"
