"""Replay of decision records: makes the same decisions again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import msgspec

from moestro.core.scheduling_events import ExpertsMoved
from moestro.errors import ConfigError, RequestError
from moestro.routing.decision_record import (
    ElsewhereForgotten,
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
    ScheduledOn,
    SentElsewhere,
    SpecSet,
    Submitted,
    decode_entry,
    is_entry,
)
from moestro.routing.request_trace import RequestTrace


def replay(lines: Iterable[bytes]) -> Iterator[tuple[Submitted, Submitted]]:
    """Replay every decision of a record.

    Args:
        lines: lines of the record, its head first. A policy of the user's own must still be at its recorded path.

    Yields:
        Each decision or refusal, as recorded and as replayed. The two are equal unless the code, the policy's file or
        the record has changed.

    Raises:
        ConfigError: the record has no head, is damaged elsewhere than at the end of a run, or its policy cannot be
            made.
    """
    remade: list[Entry] = []
    router: RecordedRouter | None = None
    damage = "it does not begin with a header"
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            if not is_entry(line):
                continue
            entry = decode_entry(line)
        except msgspec.MsgspecError as error:
            router, damage = None, f"line {number} is not an entry of a record: {error}"
            continue
        if isinstance(entry, RequestTrace | ScheduledOn | ExpertsMoved):
            continue
        if isinstance(entry, Head):
            router = RecordedRouter(PolicyText(entry.policy, entry.score), entry.settings, remade.append)
            continue
        if router is None:
            raise ConfigError(f"the record cannot be replayed from line {number}: {damage}")
        remade.clear()
        if isinstance(entry, Submitted):
            with contextlib.suppress(RequestError):  # the record contains refusals too
                router.submit(entry.request, entry.now_ns, entry.exclude)
            again = remade[-1]  # the reports before it are written with it
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
            router.ended(entry.request_id, entry.now_ns, entry.num_output_tokens, entry.cached_share)
        case SentElsewhere():
            router.sent_elsewhere(entry.engine, entry.hashes, entry.now_ns)
        case ElsewhereForgotten():
            router.forget_elsewhere(entry.engine)
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
            raise AssertionError(f"{entry} is not a call")
