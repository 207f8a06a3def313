"""What-if: a server's record, replayed under another policy."""

from __future__ import annotations

import json
import math

import msgspec
import numpy as np
import pytest

from moestro.core.clock import ClockPair
from moestro.core.hashing import HASH_BYTES
from moestro.core.request import ServiceClass
from moestro.core.scheduling_events import SequenceAdmitted, SequencePreempted, SequenceQueued
from moestro.errors import ConfigError
from moestro.routing.decision_log import EngineEvent, RequestTrace
from moestro.routing.decision_record import encode_entry
from moestro.sim.figures import shown_figures
from moestro.sim.replay import RECORDED, WhatIfSettings
from moestro.sim.replay import what_if as _what_if
from moestro.sim.verb import RunAnswer, write_request_table
from moestro.workload.traces.request_record import FORMAT, UNKNOWN, Header, RecordedRequest, read_request_record

HEADER = Header(
    model="qwen3-30b-a3b",
    device="paced:h20",
    num_engines=2,
    block_size=16,
    num_blocks=4000,
    max_model_len=4096,
    limits={"max_num_seqs": 16, "max_num_batched_tokens": 512, "scheduling_policy": "fcfs", "max_num_queued_reqs": 64},
    route_policy="round_robin",
)


def what_if(record, policies=(), cost=None, **more):
    return _what_if(record, WhatIfSettings(policies=policies, cost=cost, **more))


def request(i: int, rng: np.random.Generator, stems: list[bytes]) -> RecordedRequest:
    """The i-th. Every third begins like the one 21 before it, which round robin gives to the other engine."""
    num_prompt = 640
    own = bytes(rng.bytes(num_prompt // 16 * HASH_BYTES))
    shared = stems[i // 3 % 7] if i % 3 == 0 else b""
    arrival_ns = 10**15 + i * 300_000_000
    return RecordedRequest(
        request_id=f"cmpl-{i}",
        arrival_ns=arrival_ns,
        admitted_ns=arrival_ns + 1_000_000,
        first_token_ns=arrival_ns + 80_000_000,
        last_token_ns=arrival_ns + 900_000_000,
        engine=i % 2,
        num_prompt_tokens=num_prompt,
        num_output_tokens=40,
        num_hit_tokens=0,
        max_tokens=64,
        block_hashes=shared + own[len(shared) :],
        service_class=ServiceClass.BE if i % 4 == 0 else ServiceClass.LS,
        user=i % 5,
        session=i % 6,
    )


@pytest.fixture
def path(tmp_path):
    rng = np.random.default_rng(0)
    stems = [bytes(rng.bytes(38 * HASH_BYTES)) for _ in range(7)]
    # Requests are written in the order of their ends, which is not that of their arrivals.
    entries = [HEADER, *(request(i, rng, stems) for i in rng.permutation(60).tolist())]
    (tmp_path / "record.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(entries))
    return tmp_path / "record.jsonl"


def test_what_is_written_is_read_in_order_of_arrival(path):
    record = read_request_record(path)
    assert record.header == HEADER
    assert [each.request_id for each in record.requests] == [f"cmpl-{i}" for i in range(60)]
    assert record.arrival_ns.tolist() == [i * 300_000_000 for i in range(60)]
    made, script = record.make(8, 2_400_000_000)
    assert (made.num_prompt_tokens, made.sampling.max_tokens, made.arrival_ns) == (640, 64, 2_400_000_000)
    assert made.service_class is ServiceClass.BE
    assert (made.user, made.session_id) == ("user-3", "session-2")
    assert record.make(30, 0)[0].session_id is None, "it named none"
    assert script.num_output_tokens == 40


def test_another_policy_is_compared_with_the_simulation_of_the_recorded_one(path):
    answer = what_if(read_request_record(path), ("lmetric",), None)
    titles = [outcome.title for outcome in answer.report.outcomes]
    assert titles == [RECORDED, "round_robin (simulated)", "lmetric (simulated)"]
    recorded, as_it_was, other = answer.report.outcomes
    assert recorded.report.ttft_ms.mean == pytest.approx(80)
    assert [outcome.report.num_ok for outcome in answer.report.outcomes] == [60] * 3
    assert other.report.cached_share > as_it_was.report.cached_share, "the shared beginnings go where they are cached"
    moved = float((answer.runs[2][1].engine != answer.runs[1][1].engine).mean())
    assert answer.moved == {"lmetric (simulated)": moved}
    assert moved > 0
    (sentence,) = answer.sentences()
    assert sentence.startswith(
        f"Under lmetric (simulated): {moved:.1%} of the requests would have gone to another engine"
    )


@pytest.mark.parametrize(("factor", "says_ttft"), [(1, True), (70, False)])
def test_a_mean_that_the_simulation_misses_is_not_compared(path, factor, says_ttft):
    """A simulation 70 times off once printed "+13.4 %"."""
    simulated = what_if(read_request_record(path), (), None).report.outcomes[1].report.ttft_ms.mean
    lines = path.read_bytes().splitlines(keepends=True)
    took_ns = int(simulated * factor * 1e6)
    rows = [msgspec.json.decode(line, type=RecordedRequest) for line in lines[1:]]
    rows = [
        msgspec.structs.replace(each, first_token_ns=each.arrival_ns + took_ns, last_token_ns=each.arrival_ns + took_ns)
        for each in rows
    ]
    path.write_bytes(b"".join([lines[0], *(msgspec.json.encode(each) + b"\n" for each in rows)]))
    answer = what_if(read_request_record(path), ("lmetric",), None)
    (sentence,) = answer.sentences()
    assert ("mean TTFT" in sentence) == says_ttft
    assert any(warning.startswith("The mean TTFT is not compared") for warning in answer.warnings()) != says_ttft
    assert "hit ratio" in sentence


def test_a_scored_prompt_has_no_latency_and_is_replayed_all_the_same(path):
    """`max_tokens` 0: its record has no time of a token, and none is made of it."""
    before = what_if(read_request_record(path), (), None)
    lines = path.read_bytes().splitlines(keepends=True)
    rows = [msgspec.json.decode(line, type=RecordedRequest) for line in lines[1:]]
    scored = {"first_token_ns": 0, "last_token_ns": 0, "num_output_tokens": 0, "max_tokens": 0}
    rows[:6] = [msgspec.structs.replace(each, **scored) for each in rows[:6]]
    path.write_bytes(b"".join([lines[0], *(msgspec.json.encode(each) + b"\n" for each in rows)]))
    answer = what_if(read_request_record(path), (), None)
    recorded, simulated = answer.report.outcomes
    for outcome in (recorded, simulated):
        assert outcome.report.num_ok == 60
        assert outcome.report.duration_s == pytest.approx(before.report.outcomes[0].report.duration_s, rel=0.1)
    assert recorded.report.ttft_ms == before.report.outcomes[0].report.ttft_ms
    assert recorded.report.e2e_ms == before.report.outcomes[0].report.e2e_ms
    assert recorded.ls_ttft_ms.mean == pytest.approx(80)
    assert recorded.load_imbalance == pytest.approx(1, abs=0.2)
    (_, results), (_, replayed) = answer.runs
    assert len(results.records().answered) == len(replayed.records().answered) == 54


def test_a_record_does_not_tell_prefill(path):
    recorded, simulated = what_if(read_request_record(path), (), None).report.outcomes
    assert recorded.prefill is None
    assert simulated.prefill.most_s > 0


def test_the_recorded_policy_alone_is_replayed_too(path):
    answer = what_if(read_request_record(path), ("round_robin",), None)
    assert len(answer.report.outcomes) == 2
    assert answer.sentences() == []


def rewritten(path, **changes):
    first, *rest = path.read_bytes().splitlines(keepends=True)
    header = msgspec.structs.replace(msgspec.json.decode(first, type=Header), **changes)
    path.write_bytes(msgspec.json.encode(header) + b"\n" + b"".join(rest))
    return path


def test_a_record_of_a_dilated_server_is_read_in_modelled_time(path):
    plain = read_request_record(path).requests
    dilated = read_request_record(rewritten(path, pace_dilation=4.0))
    assert dilated.arrival_ns.tolist() == [i * 75_000_000 for i in range(60)]
    for before, after in zip(plain, dilated.requests, strict=True):
        assert after.last_token_ns - after.arrival_ns == (before.last_token_ns - before.arrival_ns) / 4


def test_a_preemptive_server_is_replayed_in_its_mode(path):
    """The latency-sensitive three quarters of the requests are answered earlier than step by step."""
    limits = HEADER.limits | {"scheduling_policy": "qllm", "max_num_seqs": 4}
    stepping = {"mode": "preemptive", "step_policy": "qllm", "pass_decodes": False, "max_be_wait": math.inf}
    found = {}
    for mode, chosen in (("fused", {}), ("preemptive", stepping)):
        changes = {"device": "paced:qllm", "model": "mixtral-8x7b", "limits": limits, "stepping": chosen}
        answer = what_if(read_request_record(rewritten(path, **changes)), (), None)
        found[mode] = answer.report.outcomes[1]
        assert found[mode].report.num_ok == 60
    assert found["preemptive"].ls_ttft_ms.mean < found["fused"].ls_ttft_ms.mean


@pytest.mark.parametrize("mode", ["ep", "async"])
def test_a_record_of_a_group_is_refused_with_the_way_to_simulate_it(path, mode):
    record = read_request_record(rewritten(path, stepping={"mode": mode}))
    with pytest.raises(ConfigError, match=r"a file with a table \[group\]"):
        what_if(record, (), None)


def test_the_host_memory_of_a_server_is_replayed_and_no_table_prices_it(path):
    record = read_request_record(rewritten(path, num_blocks=100, max_model_len=1600, kv_offloading_size=1.0))
    assert what_if(record, (), None).runs[1][1].is_answered.all()
    with pytest.raises(ConfigError, match="a table does not price these copies: give --cost GPU/NETWORK"):
        what_if(record, (), "table.json")


def test_the_cost_of_a_real_server_s_steps_has_to_be_given(path):
    record = read_request_record(rewritten(path, device="cpu"))
    with pytest.raises(ConfigError, match="give --cost with the table"):
        what_if(record, (), None)
    with pytest.raises(ConfigError, match="neither GPU/NETWORK nor a table"):
        what_if(record, (), "h20")
    assert len(what_if(record, (), "a100/mixtral-8x7b-mqa").runs) == 2


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda lines: [b"{}\n", *lines[1:]], "is no record of `moestro serve --record`"),
        (lambda lines: [lines[0].replace(FORMAT.encode(), b"other"), *lines[1:]], "of format 'other'"),
        (lambda lines: [lines[0], lines[1][:50] + b"\n", *lines[2:]], "line 2"),
        (lambda lines: [lines[0], b"{}\n"], "line 2"),
        (lambda lines: [lines[0], b"{]\n"], "holds no requests"),
        (lambda lines: lines[1:], "line 1 comes before a header"),
        (lambda lines: lines[:1], "holds no requests"),
        (lambda lines: [], "is no record"),
    ],
)
def test_what_is_no_record_is_refused(path, spoil, words):
    path.write_bytes(b"".join(spoil(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(ConfigError, match=words):
        read_request_record(path)


S = 1_000_000_000
CLOCKS = ClockPair(wall_ns=1_700_000_000 * S, monotonic_ns=10**15)
REBOOTED = ClockPair(wall_ns=1_700_000_100 * S, monotonic_ns=5 * S)  # 100 s later, on a machine that was started anew


def record_of(path, *parts: tuple[Header, list[RecordedRequest]]):
    """A file to which one server after the other has appended, as `RecordFile` does."""
    encode = msgspec.json.Encoder().encode_lines
    path.write_bytes(b"\n".join(encode([header, *requests]) for header, requests in parts))
    return path


def later(requests, by_ns: int) -> list[RecordedRequest]:
    names = ("arrival_ns", "admitted_ns", "first_token_ns", "last_token_ns")
    return [msgspec.structs.replace(each, **{name: getattr(each, name) + by_ns for name in names}) for each in requests]


def test_records_of_a_server_that_was_started_again_are_joined_on_the_wall_clock(path):
    header = msgspec.structs.replace(HEADER, clocks=CLOCKS)
    requests = read_request_record(path).requests
    again = later(requests[:20], 5 * S - 10**15)  # the same 20 requests, 0 s to 6 s after the second start
    scored = msgspec.structs.replace(again[0], request_id="cmpl-x", first_token_ns=0, last_token_ns=0)
    second = msgspec.structs.replace(HEADER, clocks=REBOOTED)
    joined = read_request_record(record_of(path, (header, requests), (second, [*again, scored])))
    assert len(joined) == 81
    gaps_s = [i * 0.3 for i in range(60)] + [100 + i * 0.3 for i in (0, *range(20))]
    assert joined.arrival_ns.tolist() == [round(gap * S) for gap in gaps_s]
    assert joined.requests[0].arrival_ns == CLOCKS.wall_ns
    assert {each.first_token_ns for each in joined.requests if each.request_id == "cmpl-x"} == {0}
    assert what_if(joined, (), None).runs[1][1].is_answered.all()


def test_a_line_that_a_killed_server_cut_off_is_passed_over(path):
    header = msgspec.structs.replace(HEADER, clocks=CLOCKS)
    requests = read_request_record(path).requests
    record_of(path, (header, requests))
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    assert len(read_request_record(path)) == 59
    again = msgspec.json.Encoder().encode_lines([header, requests[-1]])
    path.write_bytes(whole[:-40] + b"\n" + again)
    assert len(read_request_record(path)) == 60


def test_a_cut_off_line_is_noted_whichever_it_is(path):
    whole, trace = path.read_bytes(), traced(read_request_record(path).requests[0], 1)
    assert what_if(read_request_record(path)).report.notes == ()
    for cut in (whole[:-40], whole + b'{"type":"Submit', whole + trace[:-40]):
        path.write_bytes(cut)
        (note,) = what_if(read_request_record(path)).report.notes
        assert note.startswith(f"{path}, line {len(cut.splitlines())} is cut off")


def traced(record, num_preempted, num_omitted=0) -> bytes:
    """The trace of a request as the server writes it, which was preempted and for which others made way."""
    events = [SequenceQueued(record.request_id, 1, 0, 1), SequenceAdmitted(record.request_id, 2)]
    events += [SequencePreempted(record.request_id, 3, "other")] * num_preempted
    events += [SequencePreempted("other", 4, record.request_id)]
    trace = RequestTrace(
        request_id=record.request_id,
        time=0.0,
        policy="",
        prompt_tokens=1,
        attempts=[],
        status=200,
        seconds=1.0,
        usage={},
        events=[EngineEvent("engine 0", event) for event in events],
        num_omitted_events=num_omitted,
    )
    return encode_entry(trace) + b"\n"


def test_preemptions_are_counted_from_the_events_of_a_record(path, tmp_path):
    """They once were 0 in every record."""
    requests, whole = read_request_record(path).requests, path.read_bytes()
    traces = [traced(each, i % 3) for i, each in enumerate(requests)]
    for lines, known in ((traces, True), (traces[:-1], False), ([*traces[:-1], traced(requests[-1], 1, 4)], False)):
        path.write_bytes(whole + b"".join(lines))
        record = read_request_record(path)
        assert record.num_preemptions.tolist() == [i % 3 if known or i < 59 else UNKNOWN for i in range(60)]
        answer = what_if(record)
        outcome = answer.report.outcomes[0]
        assert outcome.num_preemptions == (60 if known else None)
        assert shown_figures([outcome])[0]["preempted"] == (60 if known else None)
        rows = tmp_path / "rows.jsonl"
        write_request_table(rows, [RunAnswer(RECORDED, 0, answer.runs[0][1], None, None, ())])
        last = json.loads(rows.read_text().splitlines()[-1])
        assert last["preemptions"] == (59 % 3 if known else None)


def test_a_start_that_answered_nothing_is_passed_over(path):
    older = msgspec.structs.replace(HEADER, num_engines=7)
    assert len(read_request_record(record_of(path, (older, []), (HEADER, read_request_record(path).requests)))) == 60


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"clocks": REBOOTED, "num_engines": 3},
            "line 63: .* begins here, with another num_engines: replay it on its own",
        ),
        ({"clocks": None}, "lacks its wall-clock time"),
    ],
)
def test_records_that_cannot_be_joined_are_refused_and_the_line_is_named(path, changes, words):
    requests = read_request_record(path).requests
    header = msgspec.structs.replace(HEADER, clocks=CLOCKS)
    record_of(path, (header, requests), (msgspec.structs.replace(header, **changes), requests))
    with pytest.raises(ConfigError, match=words):
        read_request_record(path)


def test_engines_report_their_figures_as_in_a_server(path):
    """Gimbal v1 goes by the user only where every engine has reported its KV use; without it sends in turn."""
    answer = what_if(read_request_record(path), ("gimbal-v1",), None)
    engine = answer.runs[2][1].engine
    late = {user: {int(engine[i]) for i in range(20, 60) if i % 5 == user} for user in range(1, 5)}
    assert all(len(engines) == 1 for engines in late.values()), late
