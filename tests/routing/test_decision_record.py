import msgspec
import numpy as np
import pytest
from support.routers import BLOCK_SIZE, request

from moestro.config.user_files import accept_user_code
from moestro.core.load_figures import LoadFigures
from moestro.errors import ConfigError, NoEngineError
from moestro.routing.decision_record import (
    Decision,
    PolicyText,
    RecordedRouter,
    Reported,
    RoutableSet,
    Submitted,
    decode_entry,
    encode_entry,
    replay,
)
from moestro.routing.registry import policy_from
from moestro.routing.router import Router
from moestro.routing.settings import RouterSettings

accept_user_code()

MS = 1_000_000
PROMPT = list(range(100))


def recorded(policy="lmetric", num_engines=3, score=None):
    lines: list[bytes] = []
    settings = RouterSettings(block_size=BLOCK_SIZE)
    made = RecordedRouter(PolicyText(policy, score), settings, lambda entry: lines.append(encode_entry(entry)))
    for _ in range(num_engines):
        made.set_routable(made.add_engine(), routable=True)
    return made, lines


def decisions(lines) -> list[Decision]:
    entries = [decode_entry(line) for line in lines]
    return [entry.decision for entry in entries if isinstance(entry, Submitted)]


def test_a_decision_says_what_was_seen_and_what_else_there_was():
    made, lines = recorded()
    fields = request("a", prompt=PROMPT)
    made.kv_stored(1, fields.block_hashes, 0)
    made.report(1, LoadFigures(queued_prefill_tokens=7), 2 * MS, 3 * MS)
    made.submit(fields, 5 * MS)
    (decision,) = decisions(lines)
    assert (decision.engine, decision.score, decision.hit_tokens, decision.regret) == (1, 4, 96, 4 - 100)
    assert decision.ages_ns == {"queued_prefill_tokens": 3 * MS}
    assert [(each.engine, each.score, each.hit_tokens) for each in decision.candidates] == [
        (1, 4, 96), (0, 100, 0), (2, 100, 0),
    ]  # fmt: skip


def test_an_affinity_that_passes_over_a_better_engine_has_regret():
    by_hash, lines = recorded("bounded_hash")
    for i in range(8):
        by_hash.submit(request(str(i), session_id="hot"), 0)
    assert any(each.regret > 0 for each in decisions(lines))


def test_a_score_that_is_no_number_is_written_as_none():
    made, lines = recorded(score="1 / batch_size")
    made.submit(request("a"), 0)
    (decision,) = decisions(lines)
    assert (decision.score, decision.regret) == (None, None)


def test_tokens_are_never_written():
    made, lines = recorded()
    secret = request("a", prompt=PROMPT)
    made.submit(msgspec.structs.replace(secret, token_ids=bytes(400), resumed_token_ids=b"\1" * 8), 0)
    written = decode_entry(lines[-1]).request
    assert (written.token_ids, written.resumed_token_ids) == (None, bytes(8)), "their number alone"


def test_a_refusal_is_written_and_replays():
    made, lines = recorded(num_engines=0)
    with pytest.raises(NoEngineError):
        made.submit(request("a"), 0)
    ((was, again),) = replay(lines)
    assert (was.refusal, was.decision, again) == ("NoEngineError", None, was)


INFINITE_DETAIL = """
from moestro.routing.policy_contract import Choice, Needs

class First:
    needs = Needs()
    def decide(self, view, rng):
        return Choice(int(view.engines.routable.argmax()), 0.0, "first", detail={"headroom": float("inf")})
    def observe(self, event): pass
"""


def test_an_infinite_detail_of_a_policy_does_not_spoil_the_record(tmp_path):
    (tmp_path / "mine.py").write_text(INFINITE_DETAIL)
    made, lines = recorded(f"{tmp_path / 'mine.py'}:First")
    made.submit(request("a"), 0)
    assert decisions(lines)[0].detail == {"headroom": None}
    assert [was == again for was, again in replay(lines)] == [True]


def test_a_run_that_ended_in_the_middle_of_a_line_is_replayed_to_there_and_the_next_from_its_head():
    first, lines = recorded()
    first.submit(request("a"), 0)
    first.submit(request("b"), 0)
    second, more = recorded()
    second.submit(request("c"), 0)
    torn = [*lines[:-1], lines[-1][:50], b"\n", *more]
    assert [was.request.request_id for was, again in replay(torn) if was == again] == ["a", "c"]


def test_a_record_that_is_damaged_in_the_middle_is_refused_from_there():
    made, lines = recorded()
    made.submit(request("a"), 0)
    made.submit(request("b"), 0)
    lines[-2] = b'{"type": "Unheard"}'
    with pytest.raises(ConfigError, match=f"from line {len(lines)}: line {len(lines) - 1} is not an entry of a record"):
        list(replay(lines))


def test_a_record_without_its_head_is_refused():
    _, lines = recorded()
    with pytest.raises(ConfigError, match="head"):
        list(replay(lines[1:]))


def test_an_exclusion_is_written_and_replays():
    made, lines = recorded("least_loaded", num_engines=2)
    made.submit(request("a"), 0, exclude=[0])
    made.submit(request("b"), 0, exclude=[0])
    with pytest.raises(NoEngineError):
        made.submit(request("c"), 0, exclude=[0, 1])
    assert [was.engine for was in decisions(lines)[:2]] == [1, 1]
    assert [was.exclude for was, again in replay(lines) if was == again] == [(0,), (0,), (0, 1)]


def test_of_reports_in_a_row_the_last_is_written_and_decisions_stay_the_same():
    rng = np.random.default_rng(2)
    for policy in ("moestro", "lmetric", "least_loaded", "gimbal-v1"):
        made, lines = recorded(policy)
        plain = Router(policy_from(policy), RouterSettings(block_size=BLOCK_SIZE))
        for _ in range(3):
            plain.set_routable(plain.add_engine(), routable=True)
        num_reports, in_flight = 0, []
        for step in range(300):
            now_ns = step * MS
            for _ in range(int(rng.integers(0, 6))):
                engine, num_reports = int(rng.integers(3)), num_reports + 1
                figures = LoadFigures(
                    num_running=int(rng.integers(9)),
                    num_waiting=int(rng.integers(5)),
                    kv_usage=float(rng.random()) if rng.random() < 0.8 else None,
                    queued_prefill_tokens=int(rng.integers(900)),
                    num_preemptions=step,
                )
                as_of_ns = now_ns - int(rng.integers(3)) * MS
                for router in (made, plain):
                    router.report(engine, figures, as_of_ns, now_ns)
            fields = request(str(step), prompt=rng.integers(0, 9, 60).tolist())
            assert made.submit(fields, now_ns).engine == plain.submit(fields, now_ns).engine
            in_flight.append(fields.request_id)
            if rng.random() < 0.9:
                ended = in_flight.pop(int(rng.integers(len(in_flight))))
                for router in (made, plain):
                    router.first_token(ended, now_ns)
                    router.ended(ended, now_ns)
            made.set_routable(0, routable=True)  # a server says so twenty times a second
        entries = [decode_entry(line) for line in lines]
        assert sum(isinstance(entry, RoutableSet) for entry in entries) == 3
        assert 0 < sum(isinstance(entry, Reported) for entry in entries) < 0.95 * num_reports
        assert all(was == again for was, again in replay(lines))


WORDY = """
from moestro.routing.policy_contract import Choice, Needs

class Wordy:
    needs = Needs()
    def decide(self, view, draws):
        return Choice(0, 0.0, "first", None, {"why": "a detail that is no number"})
    def observe(self, event):
        pass
"""


def test_a_detail_that_cannot_be_recorded_ends_no_request(tmp_path, caplog):
    (tmp_path / "wordy.py").write_text(WORDY)
    made, lines = recorded(f"{tmp_path / 'wordy.py'}:Wordy")
    assert made.submit(request("a"), 0).engine == 0
    assert decode_entry(lines[-1]).decision is None
    assert "recorded without its figures" in caplog.text
