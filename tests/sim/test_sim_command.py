"""`moestro sim` as a researcher uses it: load, seeds, windows, closed loops, requests one by one, all cores."""

from __future__ import annotations

import csv
import json
from collections import Counter

import numpy as np
import pytest
from sim.test_closed_loop_traces import trace

from moestro.cli import main
from moestro.sim.figures import intervals
from moestro.sim.scenario import middle_rate
from moestro.sim.settings import read_settings
from moestro.sim.verb import COLUMNS, simulate

SCENARIO = """
seed = 3
[workload]
sessions = "chat"
num_requests = 60
rate = 4.0
ls_share = 0.5
[engines]
count = 2
gpu = "h20"
[[policies]]
route = "round_robin"
[[policies]]
route = "lmetric"
"""


@pytest.fixture
def scenario(tmp_path):
    path = tmp_path / "scenario.toml"
    path.write_text(SCENARIO)
    return path


def sim(*arguments) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["sim", *map(str, arguments)])
    return ended.value.code or 0


def test_seeds_give_means_with_intervals(scenario, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert sim(scenario, "--seeds", 3, "--json", out) == 0
    text = capsys.readouterr().out
    assert "Mean and 95 % interval over 3 seeds, 3 to 5" in text
    assert "TTFT p50" in text
    assert "±" in text
    report = json.loads(out.read_text())
    assert [(each["title"], each["seed"]) for each in report["outcomes"]] == [
        (title, seed) for seed in (3, 4, 5) for title in ("round_robin", "lmetric")
    ]
    by_seed = {(each["title"], each["seed"]): each["report"]["ttft_ms"]["mean"] for each in report["outcomes"]}
    found = report["intervals"]["lmetric"]["TTFT mean"]
    ratios = [by_seed["lmetric", seed] / by_seed["round_robin", seed] for seed in (3, 4, 5)]
    assert found["ratio"] == pytest.approx(np.mean(ratios))
    assert found["ratio_half_width"] == pytest.approx(4.30265 * np.std(ratios, ddof=1) / 3**0.5, rel=1e-4)
    one = simulate(read_settings(scenario), tmp_path).report
    digests = [each["digest"] for each in report["outcomes"][:2]]
    assert digests == [each.digest for each in one.outcomes], "the first seed's runs are those of a single seed"
    assert one.intervals == {}


@pytest.mark.parametrize("num_seeds", [1, 2])
def test_many_policies_are_shown_in_several_tables(tmp_path, capsys, monkeypatch, num_seeds):
    """In 80 columns a table of 16 policies had a character of each figure."""
    monkeypatch.setenv("COLUMNS", "80")
    path, names = tmp_path / "many.toml", [f"policy_{i}" for i in range(16)]
    policies = "".join(f'[[policies]]\nname = "{name}"\nroute = "least_loaded"\n' for name in names)
    path.write_text("[workload]\nprompt_tokens = 64\noutput_tokens = 4\nnum_requests = 3\nrate = 9\n" + policies)
    assert sim(path, "--seeds", num_seeds) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    words = Counter(shown.split())
    assert [words[name] for name in names[1:]] == [1] * 15
    assert words["policy_0"] == shown.count("max queue") > 1, (
        "each table has the policy that the others are compared with"
    )


def test_what_of_a_trace_is_not_simulated_is_named(scenario, tmp_path, capsys):
    row = {"input_length": 64, "output_length": 4, "chat_id": 1}
    lines = [row | {"timestamp": 2000 * number} for number in range(4)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace_of = 'trace = "t.jsonl"\n[engines]'
    scenario.write_text(SCENARIO[: SCENARIO.index("sessions")] + trace_of + SCENARIO.partition("[engines]")[2])
    out = tmp_path / "out.json"
    assert sim(scenario, "--json", out) == 0
    assert "[workload] trace: fields of the file that have no effect beside its other fields: chat_id" in " ".join(
        capsys.readouterr().out.split()
    )
    assert json.loads(out.read_text())["outcomes"][0]["report"]["duration_s"] > 6


def test_processes_change_no_result(scenario, tmp_path):
    settings = read_settings(scenario)
    one, two = (simulate(settings, tmp_path, num) for num in (1, 2))
    assert [each.digest for each in one.report.outcomes] == [each.digest for each in two.report.outcomes]
    assert one.report == two.report


def test_an_error_in_a_process_is_reported_as_without(scenario, tmp_path, capsys):
    scenario.write_text(SCENARIO.replace('"lmetric"', '"bailian:hit_weight=nan"'))
    assert sim(scenario, "--jobs", 2) == 2
    assert "hit_weight" in capsys.readouterr().err


@pytest.mark.parametrize("workload", ["sessions", "equal", "trace"])
def test_a_load_is_a_share_of_what_the_engines_answer_at_most(tmp_path, capsys, workload):
    trace(tmp_path / "trace.jsonl", num_sessions=12)
    sources = {
        "sessions": 'sessions = "chat"\nnum_requests = 60',
        "equal": "prompt_tokens = 500\noutput_tokens = 30\nnum_requests = 60",
        "trace": 'trace = "trace.jsonl"\nclosed_loop = true',
    }
    path = tmp_path / "load.toml"
    path.write_text(f"[workload]\n{sources[workload]}\nload = 0.3\n[engines]\ngpu = 'h20'\nmax_num_seqs = 8\n")
    out = tmp_path / "out.json"
    found = {}
    for load in (0.3, 0.9):
        assert sim(path, *(["--load", load] if load != 0.3 else []), "--json", out) == 0
        report = json.loads(out.read_text())
        saturation = report["saturation"]
        assert saturation["rate"] == pytest.approx(load * saturation["requests_per_s"])
        assert f"load {load:g} is {saturation['rate']:.4g} requests/s" in capsys.readouterr().out.replace("\n", " ")
        assert report["settings"]["workload"]["load"] == load
        found[load] = report["outcomes"][0]["report"]["ttft_ms"]["mean"], saturation["requests_per_s"]
    if workload != "sessions":  # others are generated for another rate
        assert found[0.9][0] > found[0.3][0]
        assert found[0.9][1] == found[0.3][1]


@pytest.mark.parametrize("rate", ["", "rate = 3.0\n", "load = 0.2\n"])
def test_a_load_of_the_command_line_needs_none_in_the_file(tmp_path, rate):
    """A file without rate and load was refused before the flag was looked at."""
    path, out = tmp_path / "load.toml", tmp_path / "out.json"
    path.write_text(
        f"[workload]\nprompt_tokens = 500\noutput_tokens = 30\nnum_requests = 60\n{rate}[engines]\nmax_num_seqs = 8\n"
    )
    assert sim(path, "--load", 0.5, "--json", out) == 0
    assert json.loads(out.read_text())["saturation"]["load"] == 0.5


def test_saturation_is_the_rate_of_a_flood(tmp_path):
    """Twice the saturation is not answered any faster than it."""
    path = tmp_path / "load.toml"
    text = (
        "[workload]\nprompt_tokens = 500\noutput_tokens = 30\nnum_requests = 300\nload = 2.0\n[engines]\ngpu = 'h20'\n"
    )
    path.write_text(text + "max_num_seqs = 8\n")
    answer = simulate(read_settings(path), tmp_path)
    rate = middle_rate(answer.runs[0].results.last_token_ns)
    assert rate == pytest.approx(answer.report.saturation.requests_per_s, rel=0.05)


def test_too_few_requests_tell_no_saturation(tmp_path, capsys):
    path = tmp_path / "load.toml"
    path.write_text("[workload]\nprompt_tokens = 5\noutput_tokens = 3\nnum_requests = 5\nload = 0.5\n")
    assert sim(path) == 2
    assert "load needs 20 answers to find a rate, and got 5" in capsys.readouterr().err


def test_requests_that_are_all_computed_at_once_tell_no_saturation(tmp_path, capsys):
    """The ends of the first and of the last tenth were the same step, and the rate was divided by 0."""
    path = tmp_path / "load.toml"
    path.write_text("[workload]\nprompt_tokens = 64\noutput_tokens = 4\nnum_requests = 20\nload = 0.5\n")
    assert sim(path) == 2
    words = " ".join(capsys.readouterr().err.split())
    assert "17 of 20 end in the same step: give more requests than the engines compute at once" in words


@pytest.mark.parametrize(("num_seqs", "was_full"), [(256, False), (8, True)])
def test_a_saturation_without_a_queue_is_called_too_high(tmp_path, capsys, num_seqs, was_full):
    """All requests were one batch, whose answers end in a burst: the rate was over twice what the engine can do."""
    path, out = tmp_path / "load.toml", tmp_path / "out.json"
    path.write_text(
        "[workload]\nprompt_tokens = 500\noutput_tokens = 50\nnum_requests = 100\nload = 0.5\n"
        f"[engines]\nmax_num_seqs = {num_seqs}\n"
    )
    assert sim(path, "--json", out) == 0
    assert json.loads(out.read_text())["saturation"]["was_full"] is was_full
    assert ("too high" in " ".join(capsys.readouterr().out.split())) is not was_full


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_each_request_has_a_row(scenario, tmp_path, form):
    out = tmp_path / f"requests.{form}"
    assert sim(scenario, "--seeds", 2, "--requests", out) == 0
    if form == "csv":
        with out.open(newline="") as file:
            texts = list(csv.DictReader(file))
        rows = [
            {key: each if key in TEXTS else json.loads(each or "null") for key, each in row.items()} for row in texts
        ]
    else:
        rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [tuple(row) for row in rows] == [COLUMNS] * 240
    answer = simulate(read_settings(scenario), tmp_path)
    assert {(row["policy"], row["seed"]) for row in rows} == {
        (p, s) for p in ("round_robin", "lmetric") for s in (3, 4)
    }
    mine = [row for row in rows if (row["policy"], row["seed"]) == ("lmetric", 3)]
    results, report = answer.runs[1].results, answer.report.outcomes[1].report
    assert [row["row"] for row in mine] == list(range(60))
    assert [row["session"] for row in mine] == answer.runs[1].session.tolist()
    assert [row["engine"] for row in mine] == results.engine.tolist()
    assert np.mean([row["ttft_ms"] for row in mine]) == pytest.approx(report.ttft_ms.mean)
    assert np.median([row["tpot_ms"] for row in mine if row["tpot_ms"] is not None]) == pytest.approx(
        report.tpot_ms.p50
    )
    assert np.mean([row["e2e_ms"] for row in mine]) == pytest.approx(report.e2e_ms.mean)
    assert sum(row["hit_tokens"] for row in mine) == pytest.approx(report.cached_share * report.num_input_tokens)
    assert sum(row["output_tokens"] for row in mine) == report.num_output_tokens
    assert {row["class"] for row in mine} == {"ls", "be"}
    assert {row["status"] for row in mine} == {"answered"}
    assert all(0 <= row["queue_ms"] <= row["ttft_ms"] for row in mine)


TEXTS = {"policy", "class", "status"}


def test_a_refused_request_has_no_times_and_the_setting_is_named(tmp_path, capsys):
    path, out = tmp_path / "full.toml", tmp_path / "rows.jsonl"
    path.write_text(
        "[workload]\nprompt_tokens = 50\noutput_tokens = 30\nnum_requests = 40\nrate = 1e6\n"
        "[engines]\ngpu = 'h20'\nmax_num_seqs = 2\nmax_num_queued_reqs = 3\n"
    )
    assert sim(path, "--requests", out) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "raise [engines] max_num_queued_reqs." in text
    assert "--max" not in text, "a simulation has no flags of a server"
    refused = [row for row in map(json.loads, out.read_text().splitlines()) if row["status"] == "refused"]
    assert refused
    for name in ("engine", "queue_ms", "ttft_ms", "tpot_ms", "e2e_ms"):
        assert {row[name] for row in refused} == {None}


@pytest.mark.parametrize("source", ['sessions = "chat"', "prompt_tokens = 5\noutput_tokens = 3"])
def test_a_rate_beyond_all_time_is_refused(tmp_path, capsys, source):
    """Arrival times overflowed and were negative."""
    path = tmp_path / "slow.toml"
    path.write_text(f"[workload]\n{source}\nnum_requests = 100\nrate = 1e-10\n")
    assert sim(path) == 2
    assert "requests/s is too low: the last of" in " ".join(capsys.readouterr().err.split())


def test_a_window_and_a_closed_loop_are_stated_in_the_title(tmp_path, capsys):
    trace(tmp_path / "trace.jsonl")
    path = tmp_path / "window.toml"
    path.write_text(
        '[workload]\ntrace = "trace.jsonl"\nstart_s = 30.0\nduration_s = 40\nclosed_loop = true\nthink_s = 2\n'
    )
    assert sim(path) == 0
    assert "trace.jsonl, 30 s to 70 s, closed loop (recorded), 12 requests" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("window", "what"), [("", "the trace has 24"), ("start_s = 30.0\n", "the part of the trace has")]
)
def test_a_trace_with_fewer_requests_than_requested_is_noted(tmp_path, capsys, window, what):
    trace(tmp_path / "trace.jsonl")
    path = tmp_path / "many.toml"
    path.write_text(f'[workload]\ntrace = "trace.jsonl"\nnum_requests = 99999\n{window}')
    assert sim(path) == 0
    assert f"note: [workload] num_requests = 99,999, and {what}" in " ".join(capsys.readouterr().out.split())
    path.write_text('[workload]\ntrace = "trace.jsonl"\nnum_requests = 5\n')
    assert sim(path) == 0
    assert "note: [workload]" not in capsys.readouterr().out


GROUP = """
[workload]
prompt_tokens = 64
output_tokens = 16
num_requests = 60
rate = 40
[engines]
gpu = "h100"
network = "mixtral-8x7b"
[group]
num_workers = 4
workers_per_machine = 2
link_across = "efa-p4d"
[popularity]
family = "exponential"
skew = 0.53
[[policies]]
mode = "ep"
"""


@pytest.mark.parametrize(
    ("policy", "steps", "words"),
    [
        ("moestro", 50, "placement plans paid, so no expert moved"),
        ("moestro", 100_000, "the run ended before its first placement plan was due"),
        ("eplb", 50, None),
    ],
)
def test_placement_while_serving_is_counted(tmp_path, capsys, policy, steps, words):
    """Runs without a plan and runs whose plans did not pay looked alike."""
    path, out = tmp_path / "group.toml", tmp_path / "out.json"
    gate = "" if policy == "moestro" else "place_payback_steps = 0\n"
    place = f"place = '{policy}'\nplace_interval_steps = {steps}\nnum_spare_slots = 1\n{gate}"
    path.write_text(f"{GROUP}[[policies]]\nname = 'placed'\nmode = 'ep'\n{place}")
    assert sim(path, "--json", out) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "copies moved" in text
    assert "note: placed: " not in text if words is None else words in text
    without, placed = (each["group"]["plans"] for each in json.loads(out.read_text())["outcomes"])
    assert without is None
    assert (placed["num_plans"] > 0) == (steps == 50)
    assert (placed["num_moves"] > 0) == (placed["num_moving_plans"] > 0) == (policy == "eplb")


def test_placement_plans_that_all_failed_are_not_called_plans_that_never_came(tmp_path, capsys):
    (tmp_path / "own.py").write_text("def own(view):\n    return view.table if view.table.num_experts == 4 else None\n")
    path, out = tmp_path / "group.toml", tmp_path / "out.json"
    path.write_text(f"{GROUP}place = '{tmp_path}/own.py:own'\nplace_interval_steps = 50\n")
    assert sim(path, "--json", out) == 0
    (outcome,) = json.loads(out.read_text())["outcomes"]
    num_failed = outcome["group"]["plans"]["num_failed_plans"]
    assert num_failed > 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"note: ep: all {num_failed} placement plans failed, as the log says, so no expert moved" in text


def test_a_policy_without_its_names_is_noted(tmp_path, capsys):
    path = tmp_path / "plain.toml"
    text = "[workload]\nprompt_tokens = 50\noutput_tokens = 3\nnum_requests = 4\nrate = 1\n"
    path.write_text(f"{text}[[policies]]\nroute = 'session_affinity'\n")
    assert sim(path) == 0
    assert "note: session_affinity goes by session_id, which no request names" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--requests", "x.parquet"], "ends in .csv or .jsonl"),
        (["--load", "0"], "--load must be above 0"),
        (["--seeds", "0"], "--seeds must be at least 1"),
        (["--policy", "lmetric"], "need --replay with a record"),
        (["--closed-loop"], "need --replay with a record"),
        (["--requests", "/nowhere/x.csv"], "--requests /nowhere/x.csv cannot be written: there is no folder /nowhere"),
        (["--json", "/nowhere/x.json"], "--json /nowhere/x.json cannot be written: there is no folder /nowhere"),
        (["--json", "."], "--json . cannot be written: it is a folder"),
        (["--plot", "/dev/null/x"], "--plot /dev/null/x cannot be written: /dev/null is no folder"),
    ],
)
def test_options_that_have_no_effect_or_no_sense_are_refused_before_the_run(scenario, capsys, arguments, words):
    assert sim(scenario, *arguments) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert not printed.out


def test_a_replay_takes_no_choices_of_runs(tmp_path, capsys):
    assert sim("--replay", tmp_path / "x", "--seeds", 2) == 2
    assert "belong to a scenario" in capsys.readouterr().err


def test_intervals_leave_out_what_a_run_lacks():
    base = [{"a": 2.0, "b": None, "c": 0.0}, {"a": 4.0, "b": None, "c": 1.0}]
    ours = [{"a": 1.0, "b": 3.0, "c": 5.0}, {"a": 4.0, "b": None, "c": 5.0}]
    found = intervals(ours, base)
    assert (found["a"].mean, found["a"].ratio, found["a"].num_seeds) == (2.5, 0.75, 2)
    assert found["a"].half_width == pytest.approx(12.706 * (4.5**0.5) / 2**0.5, rel=1e-4)
    assert (found["b"].mean, found["b"].half_width, found["b"].ratio, found["b"].num_seeds) == (3.0, None, None, 1)
    assert (found["c"].ratio, found["c"].ratio_half_width) == (5.0, None), "no ratio to 0"
    assert "d" not in found
