"""Replay of decision records: makes the same decisions again, or those of another policy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import msgspec

from moestro.core.scheduling_events import ExpertsMoved
from moestro.errors import ConfigError, RequestError
from moestro.routing.record.decision_record import (
    BeganElsewhere,
    EndedElsewhere,
    EngineAdded,
    EngineCounted,
    EngineRemoved,
    EngineWasLost,
    Entry,
    FirstTokenCame,
    FirstTokenElsewhere,
    Gap,
    Head,
    KvCleared,
    KvHosted,
    KvIncomplete,
    KvLost,
    KvRemoved,
    KvStored,
    PolicyText,
    RecordedRouter,
    Reported,
    RequestEnded,
    RoutableSet,
    ScheduledOn,
    SentElsewhere,
    Served,
    SpecSet,
    Submitted,
    decode_entry,
    is_entry,
)
from moestro.routing.record.request_trace import RequestTrace


def replay(lines: Iterable[bytes], policy: PolicyText | None = None) -> Iterator[tuple[Submitted, Submitted]]:
    """Replay every decision of a record.

    Another policy decides with a router of its own, which counts each request on the engine that it chose. Its
    requests begin and end when the recorded ones did, and engines report what they reported.

    Args:
        lines: lines of the record, its head first. A policy of the user's own must still be at its recorded path.
        policy: policy that decides in place of the recorded one; None means the recorded one.

    Yields:
        Each decision or refusal, as recorded and as replayed. With the recorded policy the two are equal unless the
        code, the policy's file or the record has changed.

    Raises:
        ConfigError: the record has no head, is damaged elsewhere than at the end of a run, or its policy cannot be
            made.
    """
    remade: list[Entry] = []
    router: RecordedRouter | None = None
    refused: set[str] = set()  # requests that the other policy's router refused, whose recorded end means nothing to it
    for entry in _entries(lines):
        if isinstance(entry, Head):
            text = policy or PolicyText(entry.policy, entry.score)
            router = RecordedRouter(text, entry.settings, remade.append)
            refused.clear()
            continue
        assert router is not None, "a run begins with its head"
        remade.clear()
        if isinstance(entry, Submitted):
            with contextlib.suppress(RequestError):  # the record contains refusals too
                router.submit(entry.request, entry.now_ns, entry.exclude, entry.making_room)
            again = remade[-1]  # the reports before it are written with it
            assert isinstance(again, Submitted)
            yield entry, again
            _settle(router, entry, again, refused)
        elif isinstance(entry, RequestEnded) and entry.request_id in refused:
            refused.discard(entry.request_id)
        else:
            _apply(router, entry)


def _entries(lines: Iterable[bytes]) -> Iterator[Entry]:
    """Yield the router's calls of each run, its head first; a run may be cut off, and ends at its first gap."""
    damage: str | None = "it does not begin with a header"
    is_behind_gap = False
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            if not is_entry(line):
                continue
            entry = decode_entry(line)
        except msgspec.MsgspecError as error:
            damage = f"line {number} is not an entry of a record: {error}"
            continue
        if isinstance(entry, RequestTrace | ScheduledOn | ExpertsMoved | Served | EngineCounted):
            continue
        if isinstance(entry, Head):
            damage, is_behind_gap = None, False
        elif is_behind_gap or isinstance(entry, Gap):
            is_behind_gap = True  # calls are missing up to the next head
            continue
        elif damage is not None:
            raise ConfigError(f"the record cannot be replayed from line {number}: {damage}")
        yield entry


def _settle(router: RecordedRouter, entry: Submitted, again: Submitted, refused: set[str]) -> None:
    """Let a request that only one of the two routers refused be in flight in neither."""
    if again.decision is None and entry.decision is not None:
        refused.add(entry.request.request_id)
    elif entry.decision is None and again.decision is not None:
        router.ended(entry.request.request_id, entry.now_ns)


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
            shares = (entry.cached_share, entry.host_share)
            router.ended(entry.request_id, entry.now_ns, entry.num_output_tokens, *shares)
        case _:
            _apply_elsewhere(router, entry)


def _apply_elsewhere(router: RecordedRouter, entry: Entry) -> None:
    match entry:
        case BeganElsewhere():
            router.began_elsewhere(entry.key, entry.engine, entry.request, entry.now_ns)
        case FirstTokenElsewhere():
            router.first_token_elsewhere(entry.key, entry.now_ns)
        case EndedElsewhere():
            router.ended_elsewhere(entry.key, entry.now_ns)
        case SentElsewhere():
            router.sent_elsewhere(entry.engine, entry.hashes, entry.now_ns)
        case _:
            _apply_report(router, entry)


def _apply_report(router: RecordedRouter, entry: Entry) -> None:
    match entry:
        case Reported():
            router.report(entry.engine, entry.figures, entry.as_of_ns, entry.now_ns)
        case KvStored():
            router.kv_stored(entry.engine, entry.hashes, entry.now_ns)
        case KvHosted():
            router.kv_hosted(entry.engine, entry.hashes, entry.now_ns)
        case KvRemoved():
            router.kv_removed(entry.engine, entry.hashes, entry.now_ns)
        case KvCleared():
            router.kv_cleared(entry.engine, entry.now_ns)
        case KvIncomplete():
            router.kv_incomplete(entry.engine, entry.now_ns)
        case KvLost():
            router.kv_lost(entry.engine, entry.now_ns)
        case _:
            raise AssertionError(f"{entry} is not a call")
