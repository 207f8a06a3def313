"""What policies look at: frozen tables, one NumPy column per figure. A view never changes while a policy holds it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

NEVER_NS = -(1 << 62)  # the age of what was never said: far in the past, and differences with it do not overflow
LS, BE = 0, 1  # `ServiceClass` as the views' columns have it
NUM_CLASSES = 2
UNKNOWN_KV_TOKENS = 1 << 50  # more than any cache holds, and differences with it are exact in float64


class Channel(StrEnum):
    """By which way figures come to a router."""

    PIGGYBACKED = "piggybacked"  # with an engine's outputs, whenever they change
    POLLED = "polled"  # read from the engine now and then, as from `/metrics`
    BROADCAST = "broadcast"  # said by somebody on behalf of many engines


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself, any part of it; None: not said this time.

    Attributes:
        num_waiting, num_running: requests without, with KV blocks.
        kv_usage: fraction of KV blocks held by sequences, 0 .. 1.
        queued_prefill_tokens: prompt tokens that it has yet to compute, of waiting and of running requests.
        num_tokens: context tokens of waiting and running requests (Gimbal's RunningLoad).
        expert_pressure: load of the busiest of the expert devices that its tokens go to over the mean, at least 1.
        channel: how this came.
    """

    num_waiting: int | None = None
    num_running: int | None = None
    kv_usage: float | None = None
    queued_prefill_tokens: int | None = None
    num_tokens: int | None = None
    expert_pressure: float | None = None
    channel: Channel = Channel.PIGGYBACKED


FIGURES = tuple(name for name in EngineFigures.__struct_fields__ if name != "channel")


@dataclass(frozen=True, slots=True, eq=False)
class Figure:
    """One reported figure of every engine, and how old it is.

    Attributes:
        values: float64[n]; without meaning where nothing was ever said.
        as_of_ns: int64[n], when it was true, on the router's clock; NEVER_NS: nothing was ever said.
    """

    values: NDArray[np.float64]
    as_of_ns: NDArray[np.int64]

    def known(self, now_ns: int, max_age_ns: int) -> NDArray[np.bool_]:
        """bool[n], said, and no longer than `max_age_ns` ago."""
        return self.as_of_ns >= now_ns - max_age_ns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineTable:
    """Engines as a router knows them, one row each. Read-only; it shows the router's columns as they are now.

    The first columns are the router's own books: exact, age zero, and of its own requests only.

    Attributes:
        routable: bool[n], ready, not draining, and with room in the queue: the rows that may be chosen.
        num_in_flight: int64[n], requests sent and not ended.
        num_prefilling: int64[n], of these, without a first token.
        prefill_tokens: int64[n], prompt tokens of those, less what their engine's cache was thought to hold.
        context_tokens: int64[n], prompt tokens of all in flight.
        num_unseen: int64[n], requests in flight that were sent after `num_waiting` was true.
        said_prefill_tokens: float64[n], `queued_prefill_tokens` and what was sent since; infinite: never said.
        num_foreign: int64[n], requests that are not this router's, when `num_waiting` and `num_running` were true.
        num_kv_tokens: int64[n], tokens that the KV cache holds; UNKNOWN_KV_TOKENS: not known.
        speed: float64[n], relative to the others', as the operator says; 1: as they are.
        num_waiting, num_running, kv_usage, queued_prefill_tokens, num_tokens, expert_pressure: as in `EngineFigures`.
    """

    routable: NDArray[np.bool_]
    num_in_flight: NDArray[np.int64]
    num_prefilling: NDArray[np.int64]
    prefill_tokens: NDArray[np.int64]
    context_tokens: NDArray[np.int64]
    num_unseen: NDArray[np.int64]
    num_foreign: NDArray[np.int64]
    num_kv_tokens: NDArray[np.int64]
    said_prefill_tokens: NDArray[np.float64]
    speed: NDArray[np.float64]
    num_waiting: Figure
    num_running: Figure
    kv_usage: Figure
    queued_prefill_tokens: Figure
    num_tokens: Figure
    expert_pressure: Figure

    def __len__(self) -> int:
        return len(self.routable)

    def without(self, rows: Collection[int]) -> EngineTable:
        """Return the same columns, where `rows` are not routable."""
        routable = self.routable.copy()
        routable[list(rows)] = False
        return replace(self, routable=routable)

    @staticmethod
    def blank(num_engines: int) -> EngineTable:
        """Routable engines without requests, of which nothing is known."""
        columns: dict[str, Any] = {name: np.zeros(num_engines, np.int64) for name in OWN_COUNTS}
        for name in FIGURES:
            columns[name] = Figure(np.zeros(num_engines), np.full(num_engines, NEVER_NS))
        columns["num_kv_tokens"][:] = UNKNOWN_KV_TOKENS
        return EngineTable(
            routable=np.ones(num_engines, np.bool_),
            said_prefill_tokens=np.full(num_engines, np.inf),
            speed=np.ones(num_engines),
            **columns,
        )


# The columns that a router counts itself.
OWN_COUNTS = tuple(
    each.name for each in fields(EngineTable) if each.name not in {"routable", "said_prefill_tokens", "speed", *FIGURES}
)


class WaitingView(msgspec.Struct, frozen=True, eq=False, gc=False, kw_only=True):
    """Requests of one engine to be ordered, one row each: those that wait, or (for eviction) those that run.

    Attributes:
        arrival_ns: int64[n].
        num_prompt_tokens: int32[n].
        priority: int32[n], lower is earlier.
        serial: int64[n], unique, in order of `Rank.add`: the last key of a total order.
        service_class: uint8[n], LS or BE, as the client said it.
        user: int64[n], `core.hashing.name_key` of the user.
        num_uncached: int32[n], tokens that would have to be computed if it entered now, after the cached prefix; all
            known tokens where nobody looked, which is beyond the oldest `MAX_LOOKED_UP` rows. None: the policy does not
            ask (`OrderPolicy.reads_cache`).
    """

    arrival_ns: NDArray[np.int64]
    num_prompt_tokens: NDArray[np.int32]
    priority: NDArray[np.int32]
    serial: NDArray[np.int64]
    service_class: NDArray[np.uint8]
    user: NDArray[np.int64]
    num_uncached: NDArray[np.int32] | None = None


class BatchView(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Sequences that may enter the next plan: the running ones in order of admission, then the next to be admitted.

    Attributes:
        num_left: int32[n], tokens to compute before the next token is sampled (decode: 1).
        is_decode: bool[n], one token is left (a prompt's last token on its own counts too: it costs the same), and it
            is admitted.
        is_waiting: bool[n], not admitted yet.
        service_class: uint8[n], LS or BE; LS too if the order policy has promoted it (`OrderPolicy.promotes_after_ns`).
        num_in_flight: running sequences that are not here, for they have a unit in flight.
    """

    num_left: NDArray[np.int32]
    is_decode: NDArray[np.bool_]
    is_waiting: NDArray[np.bool_]
    service_class: NDArray[np.uint8]
    num_in_flight: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Bounds of one plan: tokens in all, and tokens of one prefill chunk."""

    token_budget: int
    max_chunk: int


class Victim(NamedTuple):
    """An evict policy's answer.

    Attributes:
        row: of the view: who frees its KV.
        keeps: whether that is kept in host memory, if there is any and it has room, to be copied back; else it is
            computed again.
    """

    row: int
    keeps: bool = True


class EvictView(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Running sequences whose KV could be freed now (with no unit in flight, or one to be recalled), one row each.

    Attributes:
        order_rank: int64[n], place in the order policy's order; 0 would be admitted first.
        num_computed_tokens: int32[n], what recomputing would cost.
        service_class: uint8[n], as in `BatchView`.
        num_free_host_tokens: tokens whose KV host memory has room for; 0 where there is none.
    """

    order_rank: NDArray[np.int64]
    num_computed_tokens: NDArray[np.int32]
    service_class: NDArray[np.uint8]
    num_free_host_tokens: int


ATTENTION = 0  # the group of a layer's attention; of layer `num_layers`, the sampler
EVERY_EXPERT = -1  # in a `Run`: all expert queues of the layer, one batch after another
NOBODY_WAITS_NS = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class QueueTable:
    """The micro-queues of one device: tokens that wait, by class, layer and group.

    A group is the attention (`ATTENTION`) or a physical expert (1 more than its id). Layer `num_layers` has the sampler
    as its attention and no experts. Classes are `LS` and `BE`.

    Attributes:
        n: int32[classes, num_layers + 1, 1 + num_experts], tokens.
        oldest_ns: int64, as `n`: when the token that has waited longest came into this queue; `NOBODY_WAITS_NS`: the
            queue is empty. The age of a queue; a token that goes on to another queue starts anew there.
        passed_ns: int64, as `n`: the longest time for which a unit with tokens in this queue was passed over; 0 in an
            empty queue. A unit is passed over while it could run and the device runs units of a higher class that
            entered the network later; the time is summed over all queues from its entering to its result. Bounds on
            starvation are about this time.
        runnable: bool, as `n`. Tokens of the class wait, and some can run now: an attention also wants places for its
            tokens, which come free when other tokens complete a layer.
        num_expert_tokens: int32[classes, num_layers + 1], sum of `n` over a layer's experts.
        num_free_places: tokens that could start on a layer's experts now.
    """

    n: NDArray[np.int32]
    oldest_ns: NDArray[np.int64]
    passed_ns: NDArray[np.int64]
    runnable: NDArray[np.bool_]
    num_expert_tokens: NDArray[np.int32]
    num_free_places: int


@dataclass(frozen=True, slots=True)
class Run:
    """A step policy's answer: run this micro-queue next.

    Attributes:
        layer, group: a queue with runnable tokens of one of `classes`; group `EVERY_EXPERT`: all expert queues of the
            layer, ascending.
            These run without asking again, expert by expert, unless new work comes to the device in between.
        max_rows: tokens at most. Attention takes whole units: those that fit, and the first of the first class always.
        until: of an attention: its units go on, stage by stage as in a forward pass, until they stand before the
            attention of this layer (`num_layers`: the sampler; more: until they are done) or new work comes to the
            device. 0: no further than their experts' queues.
        classes: who may run, the first ones first: with (LS, BE), best-effort tokens fill what latency-sensitive ones
            leave of `max_rows`.
        ask_again_ns: when the policy wants to choose again although these tokens are still under way: the device gives
            back what it has not begun by then. None means no such time.
    """

    layer: int
    group: int
    max_rows: int
    classes: tuple[int, ...]
    until: int = 0
    ask_again_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """A step policy's answer: nothing now; ask again at `until_ns`, or when work or a result comes."""

    until_ns: int


# (view, now_ns) -> what runs next. Asked only while something waits and the device has room.
StepPolicy = Callable[[QueueTable, int], Run | Wait]
