"""The examples, as a reader would run them; and what `moestro sim` says of files that it cannot honour."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moestro.cli import main
from moestro.errors import ConfigError
from moestro.sim.settings import read_settings

PAGE = Path(__file__).parents[2] / "docs" / "simulator.md"
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))


def sim(*arguments) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["sim", *map(str, arguments)])
    return ended.value.code or 0


@pytest.fixture(scope="module", params=EXAMPLES, ids=lambda path: path.stem)
def example(request, tmp_path_factory):
    """What one of them leaves behind: its JSON, and the directory of its plots."""
    directory = tmp_path_factory.mktemp(request.param.stem)
    assert sim(request.param, "--json", directory / "out.json", "--plot", directory / "plots") == 0
    return request.param.stem, json.loads((directory / "out.json").read_text()), directory / "plots"


def test_there_are_five():
    names = ["experts_on_workers", "late_signals", "orders_under_load", "straggler", "three_routers"]
    assert [path.stem for path in EXAMPLES] == names


def test_an_example_answers_every_request_and_draws_five_pictures(example):
    _, report, plots = example
    assert report["kind"] == "simulated"
    assert report["is_generated"]
    for outcome in report["outcomes"]:
        assert outcome["report"]["num_ok"] == outcome["report"]["num_requests"]
        assert outcome["load_imbalance"] >= 1
    different = [
        outcome["digest"] for outcome in report["outcomes"] if outcome["title"] != "ep-overlap"
    ]  # may be as ep
    assert len(set(different)) == len(different)
    assert sorted(path.stem for path in plots.iterdir()) == ["hits", "latencies", "load", "prefill", "queues"]
    assert all(path.stat().st_size > 1000 for path in plots.iterdir())


def mean(outcome, latency="ttft_ms") -> float:
    source = outcome if latency in outcome else outcome["report"]
    return source[latency]["mean"]


def check_groups(outcomes) -> None:
    """No mode exceeds its bound; lock-step waits, and `async` works nearly all the time."""
    groups = {outcome["title"]: outcome["group"] for outcome in outcomes}
    stalls = {title: sum(group["stall_shares"]) / len(group["stall_shares"]) for title, group in groups.items()}
    *others, flow = stalls
    assert flow.startswith("async")
    assert all(stalls[flow] < 0.6 * stalls[title] for title in others)
    assert all(group["share_of_bound"] < 1 for group in groups.values())
    assert groups[flow]["num_messages"] > 0
    if "ep, published stalls" in stalls:
        assert stalls["ep, published stalls"] == pytest.approx(0.7, abs=0.02)


def test_an_example_shows_what_its_text_promises(example):
    name, report, _ = example
    if name in {"experts_on_workers", "straggler"}:
        check_groups(report["outcomes"])
        return
    first, second, third, *rest = report["outcomes"]
    if name == "three_routers":
        assert mean(third) < mean(second) < mean(first)
        assert third["report"]["cached_share"] > 1.3 * second["report"]["cached_share"]
        (fourth,) = rest
        assert mean(fourth) < mean(second)
        for outcome in report["outcomes"]:
            assert 0.9 * 8 < outcome["report"]["requests_per_s"] <= 8, "the load lasts from the first to the last"
    elif name == "orders_under_load":
        assert mean(second) < mean(first), "short prompts first"
        assert mean(third, "ls_ttft_ms") < mean(first, "ls_ttft_ms")
        assert mean(third, "be_ttft_ms") > mean(first, "be_ttft_ms")
    else:
        assert mean(first) < mean(second) < mean(third), "later is worse"
        assert mean(rest[0]) < mean(first), "and what is never late is best"


def percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def promised(name: str, outcomes: list[dict]) -> list[str]:
    """Parts of docs/simulator.md with the figures of an example."""
    if name == "three_routers":
        first, *others = map(mean, outcomes)
        return [f"{first:,.1f}", *(f"{each:.1f} ({each / first:.3f})" for each in others)]
    if name == "orders_under_load":
        first, *_, edf = outcomes
        urgent = f"from {mean(first, 'ls_ttft_ms'):.0f} to {mean(edf, 'ls_ttft_ms'):.0f} ms"
        return [f"{urgent}, and costs the others {percent(mean(edf, 'be_ttft_ms') / mean(first, 'be_ttft_ms') - 1)}"]
    if name == "late_signals":
        return [f"a second late make a policy {mean(outcomes[2]) / mean(outcomes[0]):.1f} times as slow"]
    lock_step, flow = outcomes[0], outcomes[-1]
    tokens = [f"{outcome['report']['output_tokens_per_s']:,.0f}" for outcome in (flow, lock_step)]
    slower = f"slower ({tokens[0]} tokens/s, not {tokens[1]})"
    stalls = [
        sum(outcome["group"]["stall_shares"]) / len(outcome["group"]["stall_shares"]) for outcome in (flow, lock_step)
    ]
    if name == "straggler":
        return [f"all wait {percent(stalls[1])} of the time in lock-step, {percent(stalls[0])} in `async`", slower]
    return [f"busy for {percent(1 - stalls[0])} of the time, lock-step for {percent(1 - stalls[1])}", slower]


def test_the_page_has_the_figures_of_an_example(example):
    name, report, _ = example
    page = PAGE.read_text()
    assert [part for part in promised(name, report["outcomes"]) if part not in page] == []


# --- what cannot be


def refused(tmp_path, capsys, text: str) -> str:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    assert sim(path) == 2
    return capsys.readouterr().err


EQUAL = "prompt_tokens = 10\noutput_tokens = 5\nnum_requests = 3\nrate = 1.0\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[workload]\n" + EQUAL + "colour = 1", "unknown field `colour` in [workload]"),
        ("[workload]\n" + EQUAL + "[engines]\nnum_gpus = 1", "unknown field `num_gpus` in [engines]"),
        ("[workload]\n" + EQUAL + "[[policies]]\nrout = 'x'", "unknown field `rout` in [policies[0]]"),
        ("[workload]\n" + EQUAL + "[slos]\nttfb_ms = 1", "unknown field `ttfb_ms` in [slos]"),
        ("[workload]\n" + EQUAL + "[signals]\nspeed = 1", "unknown field `speed` in [signals]"),
        ("[workload]\nrate = 1.0", "exactly one of trace, sessions, and prompt_tokens"),
        ("[workload]\n" + EQUAL.replace("rate = 1.0", ""), "num_requests and rate"),
        ("[workload]\n" + EQUAL + "arrivals = 'trace'", "needs a trace"),
        ("[workload]\nsessions = 'choir'\nnum_requests = 3\nrate = 1.0", "unknown sessions 'choir'"),
        ("[workload]\ntrace = 'nowhere.jsonl'", "nowhere.jsonl cannot be read"),
        ("[workload]\n" + EQUAL + "[engines]\ngpu = 'abacus'", "no constants for GPU 'abacus'"),
        ("[workload]\n" + EQUAL + "[engines]\ncount = 0", "count must be at least 1"),
        ("[workload]\n" + EQUAL + "[engines]\ntable = 'x.json'", "needs num_blocks and ep_ranks 1"),
        ("[workload]\n" + EQUAL + "[[policies]]\nroute = 'dice'", "dice"),
        ("[workload]\n" + EQUAL + "[[policies]]\n[[policies]]\n", "must be one or more with distinct names"),
        ("[workload\n", "bad.toml: "),
    ],
)
def test_a_file_that_cannot_be_honoured_is_refused_by_name(tmp_path, capsys, text, words):
    assert words in refused(tmp_path, capsys, text)


def test_a_scenario_or_a_record_has_to_be_given(capsys):
    assert sim() == 2
    assert "exactly one of them" in capsys.readouterr().err


EQUAL = "[workload]\nprompt_tokens = 8\noutput_tokens = 2\nnum_requests = 3\nrate = 1\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed = -1\n" + EQUAL, "seed must be at least 0, got -1"),
        (EQUAL.replace("= 8", "= 0"), r"\[workload\] prompt_tokens must be at least 1, got 0"),
        (EQUAL + "burstiness = -1\narrivals = 'gamma'", "burstiness must be above 0"),
        (EQUAL + "burstiness = 0.5", "burstiness shapes arrivals = 'gamma' and 'weibull'"),
        ("[workload]\nsessions = 'chat'\nshape = 'central'\nnum_requests = 3\nrate = 1", "shape draws the lengths"),
        (EQUAL + "[engines]\nhost_step_us = -1e6", "host_step_us must be at least 0"),
        (EQUAL + "[engines]\nnum_blocks = 0", "num_blocks must be at least 1"),
        (EQUAL + "[engines]\ntable = 't.json'\nnum_blocks = 9\nhost_step_us = 5", "a table has the host's time in it"),
        (
            EQUAL + "[engines]\nmax_num_seq = 8\nmax_num_batched_tokens = 100",
            r"unknown field `max_num_seq` in \[engines\]; known: .*max_num_seqs",
        ),
        (EQUAL + "seed = 3", r"unknown field `seed` in \[workload\]; known: .*num_requests"),
        (EQUAL + "[slos]\nttft_ms = -1", r"\[slos\] ttft_ms must be above 0, got -1"),
    ],
)
def test_what_a_file_may_not_say_is_named(tmp_path, text, words):
    path = tmp_path / "scenario.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_settings(path)


LENGTHS = '{"input_length": 20, "output_length": 4}\n{"input_length": 70, "output_length": 9}\n'


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("", "1 of 2 requests never fit into an engine, whose limit is 78 tokens"),
        ("", "The longest, row 1, has a prompt of 70 and asks for up to 9 more. Raise [engines] max_model_len"),
        ("max_tokens = 60\n", "2 of 2 requests never fit"),
    ],
)
def test_a_request_that_can_never_fit_is_reported_before_anything_runs(tmp_path, capsys, more, words):
    (tmp_path / "lengths.jsonl").write_text(LENGTHS)
    text = f"[workload]\ntrace = 'lengths.jsonl'\nrate = 1.0\n{more}[engines]\nmax_model_len = 78\n"
    assert words in refused(tmp_path, capsys, text)


def test_requests_that_just_fit_are_all_answered(tmp_path, capsys):
    (tmp_path / "lengths.jsonl").write_text(LENGTHS)
    path = tmp_path / "fits.toml"
    path.write_text("[workload]\ntrace = 'lengths.jsonl'\nrate = 1.0\n[engines]\nmax_model_len = 79\n")
    out = tmp_path / "out.json"
    assert sim(path, "--json", out) == 0
    assert json.loads(out.read_text())["outcomes"][0]["report"]["num_ok"] == 2
