"""Records read again: the same decisions made once more, and one decision explained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from moestro.cluster.record import (
    Decision,
    EngineAdded,
    EngineRemoved,
    EngineWasLost,
    Entry,
    FirstTokenCame,
    Head,
    KvCleared,
    KvLost,
    KvRemoved,
    KvStored,
    PolicyText,
    RecordedRouter,
    Reported,
    RequestEnded,
    RoutableSet,
    SpecSet,
    Submitted,
    decode_entry,
)
from moestro.errors import ConfigError, RequestError


def replay(lines: Iterable[bytes]) -> Iterator[tuple[Submitted, Submitted]]:
    """Make every decision of a record again.

    Args:
        lines: of the record, its head first; a policy of the user's own must still be where its file was.

    Yields:
        Each decision, or refusal, as it was written down and as it is made again: equal, unless the code, the policy's
        file or the record has changed.

    Raises:
        ConfigError: the record has no head, or its policy cannot be made.
    """
    remade: list[Entry] = []
    router: RecordedRouter | None = None
    for line in lines:
        entry = decode_entry(line)
        if isinstance(entry, Head):
            router = RecordedRouter(PolicyText(entry.policy, entry.score), entry.settings, remade.append)
            continue
        if router is None:
            raise ConfigError("the record does not begin with its head: it cannot be replayed from the middle")
        remade.clear()
        if isinstance(entry, Submitted):
            with contextlib.suppress(RequestError):  # which is in the record too
                router.submit(entry.request, entry.now_ns)
            (again,) = remade
            assert isinstance(again, Submitted)
            yield entry, again
        else:
            _apply(router, entry)


def _apply(router: RecordedRouter, entry: Entry) -> None:
    match entry:
        case EngineAdded():
            router.add_engine(entry.spec)
        case SpecSet():
            router.set_spec(entry.engine, entry.spec)
        case EngineRemoved():
            router.remove_engine(entry.engine, entry.now_ns)
        case RoutableSet():
            router.set_routable(entry.engine, routable=entry.routable)
        case EngineWasLost():
            router.engine_lost(entry.engine, entry.now_ns)
        case FirstTokenCame():
            router.first_token(entry.request_id, entry.now_ns)
        case RequestEnded():
            router.ended(entry.request_id, entry.now_ns, entry.num_output_tokens)
        case _:
            _apply_said(router, entry)


def _apply_said(router: RecordedRouter, entry: Entry) -> None:
    match entry:
        case Reported():
            router.report(entry.engine, entry.figures, entry.as_of_ns, entry.now_ns)
        case KvStored():
            router.kv_stored(entry.engine, entry.hashes, entry.now_ns)
        case KvRemoved():
            router.kv_removed(entry.engine, entry.hashes, entry.now_ns)
        case KvCleared():
            router.kv_cleared(entry.engine, entry.now_ns)
        case KvLost():
            router.kv_lost(entry.engine, entry.now_ns)
        case _:
            raise AssertionError(f"{entry} is no call")


def explain(lines: Iterable[bytes], request_id: str) -> str:
    """What a record says of one request: where it went, what else there was, and what became of it.

    Raises:
        ConfigError: the record has nothing of that request.
    """
    text: list[str] = []
    sent_ns = 0
    for line in lines:
        if request_id.encode() not in line:
            continue
        match decode_entry(line):
            case Submitted() as entry if entry.request.request_id == request_id:
                sent_ns = entry.now_ns
                text += _explain_submitted(entry)
            case FirstTokenCame() as entry if entry.request_id == request_id:
                text.append(f"first token after {(entry.now_ns - sent_ns) / 1e6:.1f} ms")
            case RequestEnded() as entry if entry.request_id == request_id:
                counted = "" if entry.num_output_tokens is None else f" with {entry.num_output_tokens} tokens"
                text.append(f"ended after {(entry.now_ns - sent_ns) / 1e6:.1f} ms{counted}")
            case _:
                pass
    if not text:
        raise ConfigError(f"the record has nothing of request {request_id!r}")
    return "\n".join(text)


def _explain_submitted(entry: Submitted) -> list[str]:
    if entry.decision is None:
        return [f"refused: {entry.refusal}"]
    decision = entry.decision
    lines = [f"to engine {decision.engine}: {decision.reason}", _regret(decision)]
    if decision.ages_ns:
        ages = ", ".join(f"{name} {age_ns / 1e6:.1f} ms" for name, age_ns in decision.ages_ns.items())
        lines.append(f"figures of that engine were old by: {ages}")
    lines.append(f"{'engine':>8} {'score':>12} {'hit tokens':>11} {'requests':>9} {'queued tokens':>14}")
    for each in decision.candidates:
        score = "-" if each.score is None else f"{each.score:.6g}"
        queued = f"{each.queued_prefill_tokens:.0f}"
        lines.append(f"{each.engine:>8} {score:>12} {each.hit_tokens:>11} {each.num_requests:>9} {queued:>14}")
    return lines


def _regret(decision: Decision) -> str:
    if decision.regret is None:
        return "no other engine was scored"
    if decision.regret > 0:
        return f"passed over an engine that scored better by {decision.regret:.6g}"
    return f"better than the next by {-decision.regret:.6g}"
