"""Decision record: the calls that change a router and its decisions, to explain and to replay each choice.

A record consists of JSON lines: a head, then every call that changes the router, in order. Prompts are recorded by
their lengths and by keyed hashes of their blocks' names (`keyed_entry`), never by their tokens. The router's owner may
add request traces, and what the router in use did beside a shadow, which a replay skips. A new head in the same file
starts a new record.

A replay makes the same decisions again, or those of another policy.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import msgspec

from moestro.core.clock import ClockPair
from moestro.core.hashing import keyed_names
from moestro.core.load_figures import ROUTED_FIGURES, LoadFigures
from moestro.core.request import Request, SamplingParams
from moestro.core.scheduling_events import ExpertsMoved, SchedulingEvent
from moestro.core.views import NEVER_NS
from moestro.errors import ConfigError, RequestError
from moestro.routing.decision_log import RequestTrace
from moestro.routing.in_flight import PeerRequest
from moestro.routing.policy_contract import Choice, RouteInputs, RoutePolicy, RouteView
from moestro.routing.registry import ANY_INPUTS, policy_from
from moestro.routing.router import Candidates, RouteDecision, Router, finite
from moestro.routing.scoring import batch_size, fresh, queued_prefill_tokens
from moestro.routing.scrape import EngineTotals, FiguresReport
from moestro.routing.settings import ANY_ENGINE, EngineSpec, RouterSettings

logger = logging.getLogger(__name__)


_NUM_CANDIDATES = 4


class Head(msgspec.Struct, frozen=True, tag=True):
    """Entry: how the router was made."""

    policy: str  # text form, as `policy_from` takes it
    score: str | None
    settings: RouterSettings
    clocks: ClockPair | None = None  # time of its creation; older records have none
    key_id: str = ""  # fingerprint of the key of all block hashes; older records have the names themselves


class EngineAdded(msgspec.Struct, frozen=True, tag=True):
    """Entry: a call of `Router.add_engine` and its result."""

    engine: int
    spec: EngineSpec


class SpecSet(msgspec.Struct, frozen=True, tag=True):
    """Entry: a call of `Router.set_spec`."""

    engine: int
    spec: EngineSpec


class EngineRemoved(msgspec.Struct, frozen=True, tag=True):
    """Entry: a call of `Router.remove_engine`."""

    engine: int
    now_ns: int


class RoutableSet(msgspec.Struct, frozen=True, tag=True):
    """Entry: a call of `Router.set_routable`."""

    engine: int
    routable: bool


class EngineWasLost(msgspec.Struct, frozen=True, tag=True):
    """Entry: a call of `Router.engine_lost`."""

    engine: int
    now_ns: int


class Candidate(msgspec.Struct, frozen=True):
    """State of a candidate engine at the decision.

    Attributes:
        engine: number of the engine.
        score: None means that it was not a finite number.
        hit_tokens, num_requests, queued_prefill_tokens: as the policy saw them.
        expert_pressure: None means that no report was fresh; the policy then took 1.
        host_tokens: those of `hit_tokens` that host memory alone holds.
        speed, decode_speed: as the policy saw them.
    """

    engine: int
    score: float | None
    hit_tokens: int
    num_requests: int
    queued_prefill_tokens: float
    expert_pressure: float | None = None
    host_tokens: int = 0
    speed: float = 1.0
    decode_speed: float = 1.0


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A decision and the policy's view of its candidates.

    Attributes:
        regret: the value of `Candidates.regret`.
        candidates: the chosen engine and the best others, by score.
        ages_ns: age of each figure that the policy needs, on the chosen engine; figures never reported are absent.
        detail: the policy's own figures. None replaces infinity and NaN, which JSON cannot represent.
        not_compared: the value of `Candidates.not_compared`.
    """

    engine: int
    score: float | None
    reason: str
    hit_tokens: int
    regret: float | None
    candidates: tuple[Candidate, ...]
    ages_ns: dict[str, int]
    detail: dict[str, float | None]
    not_compared: dict[str, list[int]] = {}


class Submitted(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Entry: a call of `Router.submit`, and its decision or the name of its refusal."""

    request: Request
    now_ns: int
    decision: Decision | None
    refusal: str | None = None
    exclude: tuple[int, ...] = ()
    making_room: tuple[int, ...] = ()


class SentElsewhere(msgspec.Struct, frozen=True, tag=True):
    """Entry: a call of `Router.sent_elsewhere`."""

    engine: int
    hashes: bytes
    now_ns: int


class BeganElsewhere(msgspec.Struct, frozen=True, tag=True):
    """Entry: a call of `Router.began_elsewhere`."""

    key: str
    engine: int
    request: PeerRequest
    now_ns: int


class FirstTokenElsewhere(msgspec.Struct, frozen=True, tag=True):
    """Entry: a call of `Router.first_token_elsewhere`."""

    key: str
    now_ns: int


class EndedElsewhere(msgspec.Struct, frozen=True, tag=True):
    """Entry: a call of `Router.ended_elsewhere`."""

    key: str
    now_ns: int


class FirstTokenCame(msgspec.Struct, frozen=True, tag=True):
    """Entry: a call of `Router.first_token`."""

    request_id: str
    now_ns: int


class RequestEnded(msgspec.Struct, frozen=True, tag=True):
    """Entry: a call of `Router.ended`."""

    request_id: str
    now_ns: int
    num_output_tokens: int | None
    cached_share: float | None = None
    host_share: float | None = None


class Reported(msgspec.Struct, frozen=True, tag=True):
    """Entry: a call of `Router.report`."""

    engine: int
    figures: LoadFigures
    as_of_ns: int
    now_ns: int


class KvStored(msgspec.Struct, frozen=True, tag=True):
    """Entry: a call of `Router.kv_stored`."""

    engine: int
    hashes: bytes
    now_ns: int


class KvHosted(msgspec.Struct, frozen=True, tag=True):
    """Entry: a call of `Router.kv_hosted`."""

    engine: int
    hashes: bytes
    now_ns: int


class KvRemoved(msgspec.Struct, frozen=True, tag=True):
    """Entry: a call of `Router.kv_removed`."""

    engine: int
    hashes: bytes
    now_ns: int


class KvCleared(msgspec.Struct, frozen=True, tag=True):
    """Entry: a call of `Router.kv_cleared`."""

    engine: int
    now_ns: int


class KvIncomplete(msgspec.Struct, frozen=True, tag=True):
    """Entry: a call of `Router.kv_incomplete`."""

    engine: int
    now_ns: int


class KvLost(msgspec.Struct, frozen=True, tag=True):
    """Entry: a call of `Router.kv_lost`."""

    engine: int
    now_ns: int


class Served(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Entry of a shadow: what the router in use did with a request, by its access log.

    Attributes:
        engine: number of the engine that answered.
        seconds: time from the request's arrival to the end of its answer, seconds.
        first_s: time to the first byte of the answer's body, seconds. None means that the log does not say.
        status: status of the answer.
        num_answer_bytes: bytes of the answer's body.
        is_stream: whether the answer was a stream of events.
    """

    request_id: str
    engine: int
    seconds: float
    first_s: float | None
    status: int
    num_answer_bytes: int
    is_stream: bool


class EngineCounted(msgspec.Struct, frozen=True, tag=True):
    """Entry of a shadow: what an engine has counted since its start."""

    engine: int
    totals: EngineTotals
    now_ns: int


class Uncopied(msgspec.Struct, frozen=True, tag=True):
    """Entry of a shadow: answers in the access log since its start that have no copy of their request."""

    num_answers: int
    now_ns: int


class Gap(msgspec.Struct, frozen=True, tag=True):
    """Entry: lines before it are missing, so that decisions up to the next head cannot be replayed."""

    num_lost: int
    clocks: ClockPair


class ScheduledOn(msgspec.Struct, frozen=True, tag=True):
    """Entry: what the scheduler of an engine did. A replay makes the decisions in it again."""

    engine: int
    event: SchedulingEvent


Entry = (
    Head | EngineAdded | SpecSet | EngineRemoved | RoutableSet | EngineWasLost | Submitted | FirstTokenCame
    | RequestEnded | BeganElsewhere | FirstTokenElsewhere | EndedElsewhere | SentElsewhere | Reported | KvStored
    | KvHosted | KvRemoved | KvCleared | KvIncomplete | KvLost | RequestTrace | ScheduledOn | ExpertsMoved | Gap
    | Served | EngineCounted | Uncopied
)  # fmt: skip


class _Tag(msgspec.Struct):
    type: str = ""


encode_entry = msgspec.json.Encoder().encode
decode_entry = msgspec.json.Decoder(Entry).decode
_decode_tag = msgspec.json.Decoder(_Tag).decode


def is_entry(line: bytes) -> bool:
    """Whether a line is an entry of a decision record. `moestro serve` also has lines of its answered requests.

    Raises:
        msgspec.MsgspecError: the line is damaged.
    """
    return bool(_decode_tag(line).type)


def keyed_entry(secret: bytes, entry: Entry) -> Entry:
    """Return the form of an entry that is written: block hashes are keyed, and the key of their names is left out."""
    match entry:
        case Submitted():
            request = entry.request
            hashes = keyed_names(secret, request.block_hashes)
            return msgspec.structs.replace(
                entry, request=msgspec.structs.replace(request, block_hashes=hashes, hash_key=b"")
            )
        case BeganElsewhere():
            hashes = keyed_names(secret, entry.request.block_hashes)
            return msgspec.structs.replace(entry, request=msgspec.structs.replace(entry.request, block_hashes=hashes))
        case SentElsewhere() | KvStored() | KvHosted() | KvRemoved():
            return msgspec.structs.replace(entry, hashes=keyed_names(secret, entry.hashes))
        case _:
            return entry


@dataclass(frozen=True, slots=True)
class PolicyText:
    """A policy in text form, as `policy_from` takes it, and what its router can supply."""

    policy: str
    score: str | None = None
    inputs: RouteInputs = ANY_INPUTS

    def make(self) -> RoutePolicy:
        """Make the policy. Raises ConfigError as `policy_from` does."""
        return policy_from(self.policy, self.score, self.inputs)


class RecordedRouter(Router):
    """A router that records every call that changes it.

    Args:
        policy: the policy in text form, so that a replay can make it again.
        settings: settings of the router.
        write: callback for each entry, in order, beginning with the head.
        clocks: current time on both clocks, for the head.
        key_id: fingerprint of the key under which `write` records block hashes, for the head.
    """

    def __init__(
        self,
        policy: PolicyText,
        settings: RouterSettings,
        write: Callable[[Entry], None],
        clocks: ClockPair | None = None,
        key_id: str = "",
    ) -> None:
        self._chosen_by = policy.make()
        super().__init__(self._chosen_by, settings)
        self._write_now = write
        self._reports: dict[int, Reported] = {}  # by engine, the last one that is not written
        self.keeps_candidates = True
        self._decision: Decision | None = None
        self._write(Head(policy.policy, policy.score, settings, clocks, key_id))

    def _write(self, entry: Entry) -> None:
        if self._reports:
            for report in self._reports.values():
                self._write_now(_routed_part(report))
            self._reports.clear()
        self._write_now(entry)

    def add_engine(self, spec: EngineSpec = ANY_ENGINE) -> int:
        """Do what `Router.add_engine` does, and record the call."""
        engine = super().add_engine(spec)
        self._write(EngineAdded(engine, spec))
        return engine

    def set_spec(self, engine: int, spec: EngineSpec) -> None:
        """Do what `Router.set_spec` does, and record the call."""
        super().set_spec(engine, spec)
        self._write(SpecSet(engine, spec))

    def remove_engine(self, engine: int, now_ns: int) -> None:
        """Do what `Router.remove_engine` does, and record the call."""
        super().remove_engine(engine, now_ns)
        self._write(EngineRemoved(engine, now_ns))

    def set_routable(self, engine: int, *, routable: bool) -> None:
        """Do what `Router.set_routable` does, and record the call if it changes anything; a server repeats it."""
        is_new = self.is_routable(engine) != routable
        super().set_routable(engine, routable=routable)
        if is_new:
            self._write(RoutableSet(engine, routable))

    def engine_lost(self, engine: int, now_ns: int) -> None:
        """Do what `Router.engine_lost` does, and record the call."""
        super().engine_lost(engine, now_ns)
        self._write(EngineWasLost(engine, now_ns))

    def submit(
        self, request: Request, now_ns: int, exclude: Collection[int] = (), making_room: Collection[int] = ()
    ) -> RouteDecision:
        """Do what `Router.submit` does, and record the decision or refusal."""
        # The decision depends on the number of resumed tokens; their values are private content.
        resumed = bytes(len(request.resumed_token_ids))
        sampling = SamplingParams(max_tokens=request.sampling.max_tokens)
        bare = msgspec.structs.replace(
            request, token_ids=None, resumed_token_ids=resumed, cache_salt=None, sampling=sampling
        )
        try:
            answer = super().submit(request, now_ns, exclude, making_room)
        except RequestError as refusal:
            self._write(Submitted(bare, now_ns, None, type(refusal).__name__, tuple(exclude), tuple(making_room)))
            raise
        self._write(Submitted(bare, now_ns, self._decision, exclude=tuple(exclude), making_room=tuple(making_room)))
        return answer

    def first_token(self, request_id: str, now_ns: int) -> None:
        """Do what `Router.first_token` does, and record the call."""
        super().first_token(request_id, now_ns)
        self._write(FirstTokenCame(request_id, now_ns))

    def ended(
        self,
        request_id: str,
        now_ns: int,
        num_output_tokens: int | None = None,
        cached_share: float | None = None,
        host_share: float | None = None,
    ) -> None:
        """Do what `Router.ended` does, and record the call."""
        super().ended(request_id, now_ns, num_output_tokens, cached_share, host_share)
        self._write(RequestEnded(request_id, now_ns, num_output_tokens, cached_share, host_share))

    def sent_elsewhere(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """Do what `Router.sent_elsewhere` does, and record the call."""
        super().sent_elsewhere(engine, hashes, now_ns)
        self._write(SentElsewhere(engine, hashes, now_ns))

    def began_elsewhere(self, key: str, engine: int, request: PeerRequest, now_ns: int) -> None:
        """Do what `Router.began_elsewhere` does, and record the call."""
        super().began_elsewhere(key, engine, request, now_ns)
        self._write(BeganElsewhere(key, engine, request, now_ns))

    def first_token_elsewhere(self, key: str, now_ns: int) -> None:
        """Do what `Router.first_token_elsewhere` does, and record the call."""
        super().first_token_elsewhere(key, now_ns)
        self._write(FirstTokenElsewhere(key, now_ns))

    def ended_elsewhere(self, key: str, now_ns: int) -> None:
        """Do what `Router.ended_elsewhere` does, and record the call."""
        super().ended_elsewhere(key, now_ns)
        self._write(EndedElsewhere(key, now_ns))

    def report(self, engine: int, figures: LoadFigures, as_of_ns: int, now_ns: int) -> None:
        """Do what `Router.report` does, and record the call.

        An engine reports every step. Of reports without another call between them, the last one alone has an effect.
        """
        super().report(engine, figures, as_of_ns, now_ns)
        report = Reported(engine, figures, as_of_ns, now_ns)
        earlier = self._reports.pop(engine, None)
        if earlier is not None and not _figures_of(report).replaces(_figures_of(earlier)):
            self._write_now(_routed_part(earlier))
        self._reports[engine] = report

    # Calls about caches do not depend on reports, which therefore stay unwritten: engines make both at every step.

    def kv_stored(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """Do what `Router.kv_stored` does, and record the call."""
        super().kv_stored(engine, hashes, now_ns)
        self._write_now(KvStored(engine, hashes, now_ns))

    def kv_hosted(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """Do what `Router.kv_hosted` does, and record the call."""
        super().kv_hosted(engine, hashes, now_ns)
        self._write_now(KvHosted(engine, hashes, now_ns))

    def kv_removed(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """Do what `Router.kv_removed` does, and record the call."""
        super().kv_removed(engine, hashes, now_ns)
        self._write_now(KvRemoved(engine, hashes, now_ns))

    def kv_cleared(self, engine: int, now_ns: int) -> None:
        """Do what `Router.kv_cleared` does, and record the call."""
        super().kv_cleared(engine, now_ns)
        self._write_now(KvCleared(engine, now_ns))

    def kv_incomplete(self, engine: int, now_ns: int) -> None:
        """Do what `Router.kv_incomplete` does, and record the call."""
        super().kv_incomplete(engine, now_ns)
        self._write_now(KvIncomplete(engine, now_ns))

    def kv_lost(self, engine: int, now_ns: int) -> None:
        """Do what `Router.kv_lost` does, and record the call."""
        super().kv_lost(engine, now_ns)
        self._write_now(KvLost(engine, now_ns))

    def _decided(self, view: RouteView, choice: Choice, candidates: Candidates) -> None:
        try:
            self._decision = _described(view, choice, candidates, self._chosen_by.needs.figures)
        except Exception:  # A user's policy may answer with details that no record can hold; the request goes on.
            self._decision = None
            logger.exception("the decision for request %s is recorded without its figures", view.request.request_id)


def _routed_part(report: Reported) -> Reported:
    """Return a report with the figures that a router keeps."""
    figures = LoadFigures(**{name: getattr(report.figures, name) for name in ROUTED_FIGURES})
    return msgspec.structs.replace(report, figures=figures)


def _figures_of(report: Reported) -> FiguresReport:
    return FiguresReport(report.engine, report.figures, report.as_of_ns)


def _described(view: RouteView, choice: Choice, candidates: Candidates, figures: tuple[str, ...]) -> Decision:
    """Make the record of a decision, with the ages of `figures`."""
    engine = choice.engine
    places = candidates.ranked()
    chosen = next(at for at in places if candidates.rows[at] == engine)
    others = [at for at in places if at != chosen and candidates.score(at) is not None][: _NUM_CANDIDATES - 1]
    load, queued = batch_size(view), queued_prefill_tokens(view)
    pressure, has_pressure = view.engines.expert_pressure.values, fresh(view, view.engines.expert_pressure)
    as_of_ns = {name: int(getattr(view.engines, name).as_of_ns[engine]) for name in figures}
    return Decision(
        engine=engine,
        score=finite(choice.score),
        reason=choice.reason,
        hit_tokens=int(view.hit_tokens[engine]),
        regret=candidates.regret,
        candidates=tuple(
            Candidate(
                engine=(row := int(candidates.rows[at])),
                score=candidates.score(at),
                hit_tokens=int(candidates.hit_tokens[at]),
                num_requests=int(load[row]),
                queued_prefill_tokens=float(queued[row]),
                expert_pressure=float(pressure[row]) if has_pressure[row] else None,
                host_tokens=candidates.host_tokens_at(at),
                speed=candidates.speed_at(at),
                decode_speed=candidates.decode_speed_at(at),
            )
            for at in (chosen, *others)
        ),
        ages_ns={name: view.now_ns - as_of for name, as_of in as_of_ns.items() if as_of != NEVER_NS},
        detail={name: finite(float(value)) for name, value in choice.detail.items()},
        not_compared=candidates.not_compared,
    )


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
        if isinstance(entry, RequestTrace | ScheduledOn | ExpertsMoved | Served | EngineCounted | Uncopied):
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
