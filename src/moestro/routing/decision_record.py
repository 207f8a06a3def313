"""What a router was told and what it decided, entry by entry: it explains every choice, and replays to the same ones.

A record is JSON lines: a head, then every call that changes a router, in order. Prompts are in it by their block
hashes and lengths alone, never by their tokens. Whoever runs the router may add stories, which a replay passes over;
and may begin anew, with another head, in the same file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec

from moestro.core.clock import ClockPair
from moestro.core.load_figures import LoadFigures
from moestro.core.request import Request
from moestro.core.views import NEVER_NS
from moestro.errors import RequestError
from moestro.routing.candidates import Candidates, finite
from moestro.routing.indicators import batch_size, queued_prefill_tokens
from moestro.routing.policy_contract import Choice, RouteView
from moestro.routing.registry import policy_from
from moestro.routing.request_trace import Story
from moestro.routing.router import RouteDecision, Router
from moestro.routing.settings import ANY_ENGINE, EngineSpec, RouterSettings

_NUM_CANDIDATES = 4


class Head(msgspec.Struct, frozen=True, tag=True):
    """What the router was made of."""

    policy: str  # as `policy_from` reads it
    score: str | None
    settings: RouterSettings
    clocks: ClockPair | None = None  # when it was made; older records do not say


class EngineAdded(msgspec.Struct, frozen=True, tag=True):
    """`add_engine`, and its answer."""

    engine: int
    spec: EngineSpec


class SpecSet(msgspec.Struct, frozen=True, tag=True):
    """`set_spec`."""

    engine: int
    spec: EngineSpec


class EngineRemoved(msgspec.Struct, frozen=True, tag=True):
    """`remove_engine`."""

    engine: int
    now_ns: int


class RoutableSet(msgspec.Struct, frozen=True, tag=True):
    """`set_routable`."""

    engine: int
    routable: bool


class EngineWasLost(msgspec.Struct, frozen=True, tag=True):
    """`engine_lost`."""

    engine: int
    now_ns: int


class Candidate(msgspec.Struct, frozen=True):
    """An engine that could have been chosen, as it looked then. `score` None: it was no finite number."""

    engine: int
    score: float | None
    hit_tokens: int
    num_requests: int
    queued_prefill_tokens: float


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One choice and what was seen.

    Attributes:
        regret: see `Candidates`.
        candidates: the chosen one and the best others, by score.
        ages_ns: of the figures that the policy needs, on the chosen engine; one that it never said is left out.
        detail: the policy's own; None: no finite number, for which JSON has no word.
    """

    engine: int
    score: float | None
    reason: str
    hit_tokens: int
    regret: float | None
    candidates: tuple[Candidate, ...]
    ages_ns: dict[str, int]
    detail: dict[str, float | None]


class Submitted(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """`submit`, and what became of it: a decision, or the refusal's name."""

    request: Request
    now_ns: int
    decision: Decision | None
    refusal: str | None = None
    exclude: tuple[int, ...] = ()


class SentElsewhere(msgspec.Struct, frozen=True, tag=True):
    """`sent_elsewhere`."""

    engine: int
    hashes: bytes
    now_ns: int


class ElsewhereForgotten(msgspec.Struct, frozen=True, tag=True):
    """`forget_elsewhere`."""

    engine: int


class FirstTokenCame(msgspec.Struct, frozen=True, tag=True):
    """`first_token`."""

    request_id: str
    now_ns: int


class RequestEnded(msgspec.Struct, frozen=True, tag=True):
    """`ended`."""

    request_id: str
    now_ns: int
    num_output_tokens: int | None


class Reported(msgspec.Struct, frozen=True, tag=True):
    """`report`."""

    engine: int
    figures: LoadFigures
    as_of_ns: int
    now_ns: int


class KvStored(msgspec.Struct, frozen=True, tag=True):
    """`kv_stored`."""

    engine: int
    hashes: bytes
    now_ns: int


class KvRemoved(msgspec.Struct, frozen=True, tag=True):
    """`kv_removed`."""

    engine: int
    hashes: bytes
    now_ns: int


class KvCleared(msgspec.Struct, frozen=True, tag=True):
    """`kv_cleared`."""

    engine: int
    now_ns: int


class KvLost(msgspec.Struct, frozen=True, tag=True):
    """`kv_lost`."""

    engine: int
    now_ns: int


Entry = (
    Head | EngineAdded | SpecSet | EngineRemoved | RoutableSet | EngineWasLost | Submitted | FirstTokenCame
    | RequestEnded | SentElsewhere | ElsewhereForgotten | Reported | KvStored | KvRemoved | KvCleared | KvLost | Story
)  # fmt: skip

encode_entry = msgspec.json.Encoder().encode
decode_entry = msgspec.json.Decoder(Entry).decode


@dataclass(frozen=True, slots=True)
class PolicyText:
    """A policy as it is written down: what `policy_from` takes."""

    policy: str
    score: str | None = None


class RecordedRouter(Router):
    """A router that writes down every call.

    Args:
        policy: by text, so that a replay can make it again.
        settings: see there.
        write: takes each entry, in order; the head at once.
        clocks: the present moment, for the head.
    """

    def __init__(
        self,
        policy: PolicyText,
        settings: RouterSettings,
        write: Callable[[Entry], None],
        clocks: ClockPair | None = None,
    ) -> None:
        self._chosen_by = policy_from(policy.policy, policy.score)
        super().__init__(self._chosen_by, settings)
        self._write = write
        self.keeps_candidates = True
        self._decision: Decision | None = None
        write(Head(policy.policy, policy.score, settings, clocks))

    def add_engine(self, spec: EngineSpec = ANY_ENGINE) -> int:
        """See `Router`."""
        engine = super().add_engine(spec)
        self._write(EngineAdded(engine, spec))
        return engine

    def set_spec(self, engine: int, spec: EngineSpec) -> None:
        """See `Router`."""
        super().set_spec(engine, spec)
        self._write(SpecSet(engine, spec))

    def remove_engine(self, engine: int, now_ns: int) -> None:
        """See `Router`."""
        super().remove_engine(engine, now_ns)
        self._write(EngineRemoved(engine, now_ns))

    def set_routable(self, engine: int, *, routable: bool) -> None:
        """See `Router`."""
        super().set_routable(engine, routable=routable)
        self._write(RoutableSet(engine, routable))

    def engine_lost(self, engine: int, now_ns: int) -> None:
        """See `Router`."""
        super().engine_lost(engine, now_ns)
        self._write(EngineWasLost(engine, now_ns))

    def submit(self, request: Request, now_ns: int, exclude: Collection[int] = ()) -> RouteDecision:
        """See `Router`."""
        # The number of resumed tokens is part of the decision; which ones they are is part of a conversation.
        resumed = bytes(len(request.resumed_token_ids))
        bare = msgspec.structs.replace(request, token_ids=None, resumed_token_ids=resumed, cache_salt=None)
        try:
            answer = super().submit(request, now_ns, exclude)
        except RequestError as refusal:
            self._write(Submitted(bare, now_ns, None, type(refusal).__name__, tuple(exclude)))
            raise
        self._write(Submitted(bare, now_ns, self._decision, exclude=tuple(exclude)))
        return answer

    def first_token(self, request_id: str, now_ns: int) -> None:
        """See `Router`."""
        super().first_token(request_id, now_ns)
        self._write(FirstTokenCame(request_id, now_ns))

    def ended(self, request_id: str, now_ns: int, num_output_tokens: int | None = None) -> None:
        """See `Router`."""
        super().ended(request_id, now_ns, num_output_tokens)
        self._write(RequestEnded(request_id, now_ns, num_output_tokens))

    def sent_elsewhere(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """See `Router`."""
        super().sent_elsewhere(engine, hashes, now_ns)
        self._write(SentElsewhere(engine, hashes, now_ns))

    def forget_elsewhere(self, engine: int) -> None:
        """See `Router`."""
        super().forget_elsewhere(engine)
        self._write(ElsewhereForgotten(engine))

    def report(self, engine: int, figures: LoadFigures, as_of_ns: int, now_ns: int) -> None:
        """See `Router`."""
        super().report(engine, figures, as_of_ns, now_ns)
        self._write(Reported(engine, figures, as_of_ns, now_ns))

    def kv_stored(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """See `Router`."""
        super().kv_stored(engine, hashes, now_ns)
        self._write(KvStored(engine, hashes, now_ns))

    def kv_removed(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """See `Router`."""
        super().kv_removed(engine, hashes, now_ns)
        self._write(KvRemoved(engine, hashes, now_ns))

    def kv_cleared(self, engine: int, now_ns: int) -> None:
        """See `Router`."""
        super().kv_cleared(engine, now_ns)
        self._write(KvCleared(engine, now_ns))

    def kv_lost(self, engine: int, now_ns: int) -> None:
        """See `Router`."""
        super().kv_lost(engine, now_ns)
        self._write(KvLost(engine, now_ns))

    def _decided(self, view: RouteView, choice: Choice, candidates: Candidates) -> None:
        self._decision = _described(view, choice, candidates, self._chosen_by.needs.figures)


def _described(view: RouteView, choice: Choice, candidates: Candidates, figures: tuple[str, ...]) -> Decision:
    """The decision as it is written down. `figures`: whose ages matter."""
    engine = choice.engine
    places = candidates.ranked()
    chosen = next(at for at in places if candidates.rows[at] == engine)
    others = [at for at in places if at != chosen and candidates.score(at) is not None][: _NUM_CANDIDATES - 1]
    load, queued = batch_size(view), queued_prefill_tokens(view)
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
            )
            for at in (chosen, *others)
        ),
        ages_ns={name: view.now_ns - as_of for name, as_of in as_of_ns.items() if as_of != NEVER_NS},
        detail={name: finite(float(value)) for name, value in choice.detail.items()},
    )
