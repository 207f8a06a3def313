import msgspec
import pytest
from routers import BLOCK_SIZE, request

from moestro.cluster.record import Decision, PolicyText, RecordedRouter, Submitted, decode_entry, encode_entry
from moestro.cluster.replay import explain, replay
from moestro.cluster.settings import RouterSettings
from moestro.core.views import EngineFigures
from moestro.errors import ConfigError, NoEngineError

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
    asked = request("a", prompt=PROMPT)
    made.kv_stored(1, asked.block_hashes, 0)
    made.report(1, EngineFigures(queued_prefill_tokens=7), 2 * MS, 3 * MS)
    made.submit(asked, 5 * MS)
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
    made.submit(msgspec.structs.replace(secret, token_ids=bytes(400)), 0)
    assert decode_entry(lines[-1]).request.token_ids is None


def test_a_refusal_is_written_and_replays():
    made, lines = recorded(num_engines=0)
    with pytest.raises(NoEngineError):
        made.submit(request("a"), 0)
    ((was, again),) = replay(lines)
    assert (was.refusal, was.decision, again) == ("NoEngineError", None, was)
    assert explain(lines, "a") == "refused: NoEngineError"


def test_one_request_is_explained():
    made, lines = recorded()
    made.kv_stored(2, request(prompt=PROMPT).block_hashes, 0)
    made.report(2, EngineFigures(queued_prefill_tokens=0), 0, 0)
    made.submit(request("chatcmpl-1", prompt=PROMPT), 10 * MS)
    made.first_token("chatcmpl-1", 35 * MS)
    made.ended("chatcmpl-1", 110 * MS, 12)
    text = explain(lines, "chatcmpl-1").splitlines()
    assert text[:3] == [
        "to engine 2: P-token * batch 4",
        "better than the next by 96",
        "figures of that engine were old by: queued_prefill_tokens 10.0 ms",
    ]
    assert [line.split() for line in text[4:7]] == [
        ["2", "4", "96", "0", "0"], ["0", "100", "0", "0", "0"], ["1", "100", "0", "0", "0"],
    ]  # fmt: skip
    assert text[7:] == ["first token after 25.0 ms", "ended after 100.0 ms with 12 tokens"]
    with pytest.raises(ConfigError, match="nothing of request 'chatcmpl-2'"):
        explain(lines, "chatcmpl-2")


def test_a_record_without_its_head_is_refused():
    _, lines = recorded()
    with pytest.raises(ConfigError, match="head"):
        list(replay(lines[1:]))
