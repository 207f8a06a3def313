"""The log of a server joins the events of all levels, writes each trace once, and never ends a request."""

from __future__ import annotations

import io
import json
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from rich.console import Console
from support.fake_device import make_request

from moestro.cli.recorded.explain import find_trace, tell, write_perfetto
from moestro.core.request import FinishReason, ServiceClass
from moestro.core.scheduling_events import (
    BatchPassed,
    ExpertMove,
    ExpertsMoved,
    ExpertVisits,
    OrderDecision,
    PoliciesStarted,
    SequenceAdmitted,
    SequenceLeft,
    SequencePreempted,
    SequenceQueued,
)
from moestro.errors import ConfigError, MoestroError
from moestro.routing import decision_log
from moestro.routing.decision_log import RequestTrace, ServerFacts
from moestro.routing.decision_record import ScheduledOn, decode_entry, encode_entry
from moestro.routing.router import Candidates, RouteDecision
from moestro.server.engines.engine_reports import RequestLog

EP = ServerFacts(mode="ep", order="qllm", evict="x", num_experts=16, expert_workers=("engine 0", "engine 1"))


def request(name: str):
    made = make_request(name, [1, 2, 3], max_tokens=4)
    return msgspec.structs.replace(made, service_class=ServiceClass.BE)


def decision(engine: int = 0) -> RouteDecision:
    candidates = Candidates(engine, 2, np.array([0, 1]), np.array([2.0, 3.0]), np.array([0, 16]))
    return RouteDecision(engine, 2.0, "least loaded", 0, candidates)


class Recorded:
    """A log of two engines, and what it wrote."""

    def __init__(self, server: ServerFacts = EP, *, observes: bool = False) -> None:
        self.entries: list = []
        self.log = RequestLog("least_loaded", 2, self.entries.append)
        self.log.describe(server)
        for engine in range(2):
            self.log.took(engine, [PoliciesStarted("qllm", "x", observes)])

    @property
    def traces(self) -> list[RequestTrace]:
        return [entry for entry in self.entries if isinstance(entry, RequestTrace)]

    def text(self, request_id: str) -> str:
        trace = self.log.trace(request_id)
        assert trace is not None
        out = io.StringIO()
        tell(trace, Console(file=out, width=200))
        return out.getvalue()


def lived(recorded: Recorded, name: str = "cmpl-a-0") -> None:
    """A request that was passed, preempted, and had its experts on two ranks while one of them moved."""
    log = recorded.log
    log.routed(request(name), decision(), "")
    now = log.trace(name).arrival_ns
    key, first = {"class (0 is ls or aged)": 1.0}, {"class (0 is ls or aged)": 0.0}
    log.took(
        0,
        [
            SequenceQueued(name, now, 1, 2, key, "cmpl-b-0", first),
            SequenceAdmitted(name, now, 16, key, 3),
            BatchPassed(now, ("cmpl-b-0",), (name,)),
            SequencePreempted(name, now, "cmpl-b-0", is_for_class=True, num_computed=40),
            SequenceQueued(name, now, 0, 1, key, was_preempted=True),
            SequenceAdmitted(name, now, is_first=False),
        ],
    )
    log.moved(ExpertsMoved(now + 1, 4, (2,), 1, ((2, ExpertMove(5, 0, 1)),)))
    visits = (ExpertVisits(3, (1, 3), ((6, 0), (5, 7))), ExpertVisits(4, (1, 3), ((1, 1), (0, 2))))
    log.took(0, [SequenceLeft(name, 0, 4, visits)])
    log.ended(request(name), 0, FinishReason.LENGTH, 4)


def test_a_trace_tells_queue_preemption_experts_and_moves():
    recorded = Recorded()
    lived(recorded)
    text = recorded.text("cmpl-a")
    for words in (
        "to engine 0: least loaded",
        "queue by qllm; class be",
        "waits at place 2 of 2, class (0 is ls or aged): 1; cmpl-b-0 before it has class (0 is ls or aged): 0",
        "admitted; 16 tokens need no computation; admissions of others while it waited: 3",
        "yielded the device to cmpl-b-0, and kept its KV",
        "preempted by cmpl-b-0, which waits and is latency-sensitive; 40 tokens were computed, and its KV is computed",
        "waits again at place 1 of 1",
        "admitted again",
        "pairs of engine 0 by table version 3",
        "1 to 2",
        "table version 4: expert 5 of layer 2 from engine 0 to engine 1",
        "answered 200",
    ):
        assert words in text, text
    assert "never preempted" not in text
    assert [trace.request_id for trace in recorded.traces] == ["cmpl-a-0"]


def test_a_written_trace_is_read_and_described_alike(tmp_path):
    recorded = Recorded()
    lived(recorded)
    path = tmp_path / "record.jsonl"
    lines = [b'{"format":"moestro-requests-1"}', *map(encode_entry, recorded.entries), b'{"request_id":"cmpl-a-0"}']
    path.write_bytes(b"\n".join(lines) + b"\n")
    found = find_trace("cmpl-a", admin_url="", admin_api_key=None, record=path)
    assert found == recorded.log.trace("cmpl-a-0") == decode_entry(encode_entry(recorded.traces[0]))
    out = io.StringIO()
    tell(found, Console(file=out, width=20), as_json=True)
    assert msgspec.json.decode(out.getvalue(), type=RequestTrace) == found
    with pytest.raises(ConfigError, match="request cmpl-c is not in"):
        find_trace("cmpl-c", admin_url="", admin_api_key=None, record=path)


def test_a_trace_becomes_spans_of_each_level_that_follow_one_another(tmp_path):
    recorded = Recorded()
    lived(recorded)
    trace = recorded.log.trace("cmpl-a-0")
    file = tmp_path / "trace.json"
    write_perfetto(trace, file)
    events = json.loads(file.read_bytes())["traceEvents"]
    tracks = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert list(tracks.values()) == ["request", "1 route", "3, 4 experts", "2 engine 0"]
    shown = [(tracks[each["tid"]], each["name"]) for each in events if each["ph"] != "M"]
    assert shown == [
        ("request", "request"),
        ("1 route", "to engine 0"),
        ("2 engine 0", "waits"),
        ("2 engine 0", "yields the device"),
        ("2 engine 0", "preempted by cmpl-b-0"),
        ("2 engine 0", "runs"),
        ("2 engine 0", "waits"),
        ("2 engine 0", "waits"),
        ("2 engine 0", "runs"),
        ("3, 4 experts", "experts by engine 0"),
        ("3, 4 experts", "experts move: table version 4"),
    ]
    whole = next(each for each in events if each["name"] == "request")
    assert whole["dur"] == trace.seconds * 1e6
    assert whole["args"]["completion_tokens"] == 4
    spans = [each for each in events if each["ph"] == "X" and tracks[each["tid"]] == "2 engine 0"]
    for before, after in pairwise(spans):
        assert before["ts"] + before["dur"] == after["ts"]
    with pytest.raises(MoestroError, match="cannot be written"):
        write_perfetto(trace, tmp_path / "missing" / "trace.json")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 0, "expert_workers": (), "mode": "fused"}, "none: the network is dense"),
        ({"expert_workers": (), "mode": "fused"}, "its engine computed all of them: in mode fused each engine has all"),
        ({"expert_workers": (), "is_paced": True}, "not computed: the devices are modelled"),
        ({}, "not counted: its engine tells of them when the request has left it"),
        ({}, "no expert moved meanwhile"),
        ({}, "the engine has not looked at it yet"),
    ],
)
def test_a_level_without_anything_says_so(changes, words):
    recorded = Recorded(msgspec.structs.replace(EP, **changes))
    recorded.log.routed(request("cmpl-a-0"), decision(), "")
    assert words in recorded.text("cmpl-a-0")
    assert "still running" in recorded.text("cmpl-a-0")


def test_a_trace_waits_for_the_engines_last_word_and_no_longer():
    recorded = Recorded()
    for name in ("a", "b", "c"):
        recorded.log.routed(request(name), decision(), "")
        recorded.log.ended(request(name), 0, FinishReason.STOP, 2)  # a stop string: the engine learns of it later
    assert not recorded.traces
    recorded.log.took(0, [SequenceLeft("a", visits=(ExpertVisits(0, (2,), ((4, 4),)),))])
    assert [trace.request_id for trace in recorded.traces] == ["a"]
    assert recorded.traces[0].visits[0].visits[0].num_pairs == ((4, 4),)
    recorded.log.engine_lost(0)
    assert [trace.request_id for trace in recorded.traces] == ["a", "b", "c"]
    recorded.log.close()
    assert len(recorded.traces) == 3


def test_a_request_that_moves_to_another_engine_is_one_trace():
    recorded = Recorded()
    log = recorded.log
    log.routed(request("a"), decision(0), "")
    log.engine_lost(0)
    log.routed(request("a"), decision(1), "engine 0 ended")
    log.took(1, [SequenceAdmitted("a", 5), SequenceLeft("a")])
    log.ended(request("a"), 1, FinishReason.LENGTH, 4)
    (trace,) = recorded.traces
    assert [attempt.because for attempt in trace.attempts] == ["", "engine 0 ended"]
    assert [event.engine for event in trace.events] == ["engine 1"]


def test_what_a_replay_needs_is_written_and_no_more():
    decided = OrderDecision(1, 2, ("a", "b"), (0, 1), (3, 3), (0, 0), (0, 1), (1, 1), (0, 0))
    for observes in (False, True):
        recorded = Recorded(observes=observes)
        recorded.log.took(1, [decided, SequenceAdmitted("a", 1, user=3), SequenceLeft("a", 3, 4)])
        kinds = [type(entry.event) for entry in recorded.entries if isinstance(entry, ScheduledOn)]
        assert kinds[2:] == [OrderDecision, SequenceAdmitted, SequenceLeft][: 3 if observes else 1]


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(decision_log, "MOST_UNWRITTEN", 5)
    monkeypatch.setattr("moestro.server.engines.engine_reports.REMEMBERED", 3)
    recorded = Recorded()
    for i in range(20):
        recorded.log.routed(request(f"r{i}"), decision(), "")
        recorded.log.took(0, [SequenceAdmitted(f"r{i}", t) for t in range(100)])
        recorded.log.ended(request(f"r{i}"), 0, FinishReason.ABORT, 0)
    assert [trace.request_id for trace in recorded.traces] == [f"r{i}" for i in range(15)]
    assert {len(trace.events) for trace in recorded.traces} == {decision_log.MOST_EVENTS}
    assert {trace.num_omitted_events for trace in recorded.traces} == {100 - decision_log.MOST_EVENTS}
    assert recorded.log.trace("r0") is None
    assert "events more" in recorded.text("r19")


def test_an_error_ends_the_log_and_not_the_request(caplog):
    def fail(entry):
        raise OSError(28, "No space left on device")

    log = RequestLog("least_loaded", 1, fail)
    log.took(0, [PoliciesStarted("fcfs", "x")])
    for _ in range(3):
        log.routed(request("a"), decision(), "")
        log.ended(request("a"), 0, FinishReason.LENGTH, 4)
        log.close()
    assert log.has_failed
    assert sum("no longer explained" in line for line in caplog.text.splitlines()) == 1
