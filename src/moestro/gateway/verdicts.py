"""Verdicts: what an answer says about its engine, by its status, its first bytes and its usage, at each port."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable

from moestro.core.request import Request
from moestro.gateway.clients.http_headers import LOOP_HEADER, LOOP_STATUS, Named
from moestro.gateway.engines.fleet import Fleet, RoutedEngine
from moestro.routing.health.engine_health import Condition
from moestro.routing.health.evidence import Origin
from moestro.routing.router import RouteDecision

FIRST_ERROR = 400
_RATE_LIMITED = 429  # Concerns the client (RFC 6585).
_OVERLOADED = frozenset({503, 529})  # 529 comes from Dynamo and Anthropic.
_FAILED = frozenset({500, 502, 504})
# First event of a stream that has failed before its first token, in OpenAI's or Anthropic's form.
_ERROR_EVENT = re.compile(rb'\s*(?:event: ?error\r?\n)?data: ?\{"(?:error"|(?:type|object)": ?"error")')
_ERROR_OF_REQUEST = re.compile(rb'"code": ?4\d\d\b')  # Such an event stands for a 4xx.
_DIGEST_BYTES = 4096  # Bytes at each end of a body by which bodies differ; a failure must not hash 32 MiB.

_TAIL_BYTES = 4096  # Kept end of an answer, which contains its usage.
_MAX_TAIL_BYTES = 4 * _TAIL_BYTES  # The tail is cut only beyond this size, not at every piece.
_LAST_BYTES = 256  # Longest end of a stream in which the last event is looked for.
# Many clients close the connection after this event, of OpenAI's or of Anthropic's API.
_LAST_EVENT = re.compile(rb'(?:data: \[DONE\]|data: ?\{"type": ?"message_stop"[^\n]*)\s*\Z')

Originator = Callable[[], Origin]  # Names the client and the body of a request, only when a failure counts.


class AnswerTail(bytearray):
    """The last bytes of an answer."""

    def add(self, data: bytes) -> None:
        """Append a piece, and drop what is too old to contain the usage."""
        if len(self) > _MAX_TAIL_BYTES:
            del self[:-_TAIL_BYTES]
        self += data

    @property
    def has_last_event(self) -> bool:
        """Whether a stream has sent its last event, and lacks only its last chunk."""
        return _LAST_EVENT.search(self, max(0, len(self) - _LAST_BYTES)) is not None


def origin_of(client: Hashable, body: bytes) -> Origin:
    """Return the client and the digest of a body, by which failures of one request are known as one."""
    return Origin(client, hash((len(body), body[:_DIGEST_BYTES], body[-_DIGEST_BYTES:])))


def blame(fleet: Fleet, engine: RoutedEngine, origin: Origin, sent_ns: int, now_ns: int) -> None:
    """Count a failure that may be the engine's or the request's own."""
    engine.health.breaker.failed(origin, sent_ns, now_ns)
    fleet.look(engine, now_ns)


def judge_status(
    fleet: Fleet, engine: RoutedEngine, head: tuple[int, Named], originator: Originator, sent_ns: int, now_ns: int
) -> bool:
    """Count a failure status, and return whether the engine leads back to this router.

    Args:
        head: Status and headers of the answer.
        sent_ns: Time at which the request was sent.
    """
    status, named = head
    if status == LOOP_STATUS and named.get(LOOP_HEADER) == fleet.pseudonym:
        fleet.looped(engine, now_ns)
        return True
    if status in _FAILED:
        blame(fleet, engine, originator(), sent_ns, now_ns)
    elif status in _OVERLOADED or status == _RATE_LIMITED:
        is_overloaded = status in _OVERLOADED
        client = originator().client
        engine.health.refused(client, _retry_after_ns(named), now_ns, is_overloaded=is_overloaded)
        fleet.look(engine, now_ns)
    return False


def begins_with_error(data: bytes) -> bool:
    """Return whether the first bytes of an event stream are an error, although its status is 200."""
    return _ERROR_EVENT.match(data) is not None


def judge_error_event(
    fleet: Fleet, engine: RoutedEngine, data: bytes, originator: Originator, sent_ns: int, now_ns: int
) -> None:
    """Count a stream that begins with an error, unless the error stands for a 4xx."""
    if not _ERROR_OF_REQUEST.search(data):
        blame(fleet, engine, originator(), sent_ns, now_ns)


def judge_success(fleet: Fleet, engine: RoutedEngine, sent_ns: int, now_ns: int) -> None:
    """Count an answer that begins well."""
    engine.health.succeeded(sent_ns, now_ns)
    if engine.condition is not Condition.UP:
        fleet.look(engine, now_ns)


def count_hits(engine: RoutedEngine, request: Request, decision: RouteDecision, usage: dict[bytes, int]) -> None:
    """Count the prompt tokens of an answer, and those that were predicted and reported as cached."""
    num_prompt_tokens = usage.get(b"prompt_tokens", 0)
    if not num_prompt_tokens:
        return
    counts = engine.counts
    counts.num_prompt_tokens += num_prompt_tokens
    counts.num_hit_tokens += usage.get(b"cached_tokens", 0)
    counts.num_host_hit_tokens += usage.get(b"host_cached_tokens", 0)
    share = min(1.0, decision.hit_tokens / request.num_prompt_tokens)
    counts.num_predicted_tokens += share * num_prompt_tokens


def cached_shares(usage: dict[bytes, int]) -> tuple[float | None, float | None]:
    """Return the part of the prompt that the engine had cached, and that it copied from host memory; None: unknown."""
    num_prompt_tokens = usage.get(b"prompt_tokens", 0)
    num_cached, num_copied = usage.get(b"cached_tokens"), usage.get(b"host_cached_tokens")
    if not num_prompt_tokens or num_cached is None:
        return None, None
    share = min(num_cached / num_prompt_tokens, 1.0)
    return share, None if num_copied is None else min(num_copied / num_prompt_tokens, share)


def _retry_after_ns(named: Named) -> int | None:
    """Return the delay in `Retry-After`; None if it is absent or a date."""
    value = named.get(b"retry-after", b"")
    return int(value) * 1_000_000_000 if value.isdigit() and len(value) <= 6 else None
