"""Law: a recorder changes nothing, tells each request's life in order, and its decisions can be made again."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laws.test_schedule_never_changes_tokens import BLOCK_SIZE, POLICIES, random_requests, serve
from support.examples import num_examples
from support.fake_device import KvDevice
from support.policy_text import policy_text

from moestro.core.scheduling_events import (
    EvictDecision,
    OrderDecision,
    PoliciesStarted,
    SchedulingEvent,
    SequenceAdmitted,
    SequenceLeft,
    SequencePreempted,
    SequenceQueued,
)
from moestro.engine.event_recorder import DecisionReplay
from moestro.engine.rank import build_rank, recorder_of
from moestro.engine.settings import SchedulerSettings


def history(
    seed: int, policies: tuple[str, str, str], *, host: int = 0, is_recorded: bool = True, runs_ahead: bool = False
):
    """Serve random requests.

    Returns:
        What `serve` returns, the events, and the number of preemptions.
    """
    rng = np.random.default_rng(seed)
    order, batch, evict = policies
    num_blocks = int(rng.integers(8, 20))
    rank = build_rank(
        SchedulerSettings(
            num_blocks=num_blocks,
            num_host_blocks=host,
            block_size=BLOCK_SIZE,
            max_model_len=32,
            max_num_seqs=int(rng.integers(1, 6)),
            max_num_batched_tokens=24,
            scheduling_policy=policy_text(
                order, {"theta_age_s": 30e-9} if order in ("sjf", "prefill_aware", "qllm") else {}
            ),
            batch_policy=policy_text(batch, {"max_batch": 3} if "qllm" in batch else {}),
            evict_policy=evict,
        ),
        KvDevice(num_blocks, BLOCK_SIZE, 1, host),
        runs_ahead=runs_ahead,
    )
    recorder = recorder_of(rank) if is_recorded else None
    requests = random_requests(rng, 20, 30)
    answers = serve(rank, requests, rng, abort_share=0.1)
    assert recorder is None or not recorder.has_failed
    return answers, () if recorder is None else recorder.take(), rank.scheduler.counts.num_preemptions


def as_read(events) -> list[SchedulingEvent]:
    """The events as a file has them."""
    return msgspec.json.decode(msgspec.json.encode(events), type=list[SchedulingEvent])


@settings(max_examples=num_examples(15, thorough=40))
@given(
    seed=st.integers(0, 2**32), policies=st.sampled_from(POLICIES), host=st.sampled_from([0, 10]), ahead=st.booleans()
)
def test_recorded_decisions_are_made_again_and_nothing_else_changes(seed, policies, host, ahead):
    answers, events, num_preemptions = history(seed, policies, host=host, runs_ahead=ahead)
    assert answers == history(seed, policies, host=host, is_recorded=False, runs_ahead=ahead)[0]
    replay = DecisionReplay()
    made = [decision for event in as_read(events) if (decision := replay.take(event)) is not None]
    assert all(each.recorded == each.replayed for each in made)
    assert sum(isinstance(event, OrderDecision | EvictDecision) for event in events) == len(made)
    assert sum(isinstance(event, SequencePreempted) for event in events) == num_preemptions
    assert isinstance(events[0], PoliciesStarted)


@settings(max_examples=num_examples(10, thorough=25))
@given(seed=st.integers(0, 2**32), policies=st.sampled_from(POLICIES), ahead=st.booleans())
def test_each_request_queues_then_is_admitted_then_leaves(seed, policies, ahead):
    _, events, _ = history(seed, policies, runs_ahead=ahead)
    state: dict[str, str] = {}
    for event in events:
        match event:
            case SequenceQueued():
                assert state.get(event.request_id, "new") == ("preempted" if event.was_preempted else "new")
                assert 0 <= event.place < event.num_waiting
                assert (event.ahead == "") == (event.place == 0)
                assert tuple(event.ahead_key.values()) <= tuple(event.key.values())
                state[event.request_id] = "queued"
            case SequenceAdmitted():
                assert state[event.request_id] == "queued"
                state[event.request_id] = "running"
            case SequencePreempted():
                assert state[event.request_id] == "running"
                assert state[event.by] == ("queued" if event.is_for_class else "running")
                state[event.request_id] = "preempted"
            case SequenceLeft():
                state[event.request_id] = "gone"
    assert set(state.values()) <= {"gone"}


def test_a_replay_notices_another_order_and_another_victim():
    _, events, _ = history(14, ("qllm", "decode_first", "least_computed_be_first"))  # one with several victims
    events = as_read(events)
    replay = DecisionReplay()
    replay.take(events[0])
    one = next(event for event in events if isinstance(event, OrderDecision))
    columns = {name: value for name, value in msgspec.structs.asdict(one).items() if isinstance(value, tuple)}
    decision = replay.take(msgspec.structs.replace(one, **{name: value[::-1] for name, value in columns.items()}))
    assert decision is not None
    assert decision.recorded == f"order {', '.join(one.request_ids[::-1])}"
    assert decision.replayed == f"order {', '.join(one.request_ids)}"
    victims = [event for event in events if isinstance(event, EvictDecision) and len(event.order_rank) > 1]
    wrong = msgspec.structs.replace(victims[0], row=(victims[0].row + 1) % len(victims[0].order_rank))
    decision = replay.take(wrong)
    assert decision is not None
    assert decision.recorded != decision.replayed


def test_an_error_ends_the_notes_and_no_request(monkeypatch, caplog):
    monkeypatch.setattr("moestro.engine.waiting.WaitingQueue.last_order", lambda *_: 1 / 0)
    rank = build_rank(
        SchedulerSettings(num_blocks=20, block_size=BLOCK_SIZE, max_model_len=32, max_num_batched_tokens=64),
        KvDevice(20, BLOCK_SIZE, 1),
    )
    recorder = recorder_of(rank)
    rng = np.random.default_rng(3)
    tokens, _, reasons, aborted = serve(rank, random_requests(rng, 8, 30), rng)
    assert len(reasons) == 8
    assert not aborted
    assert tokens
    assert recorder.has_failed
    assert sum("no longer recorded" in line for line in caplog.text.splitlines()) == 1


def test_events_before_the_policies_are_no_record():
    with pytest.raises(Exception, match="before its policies"):
        DecisionReplay().take(SequenceLeft("r0"))
