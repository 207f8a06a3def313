"""Views that policies read, their answers, and the contracts of policies that several rooms have.

Views are frozen tables, one NumPy column per figure, and never change in use.

Columns mostly have few rows, and there the fixed time of a call decides. Two arrays of one type are added in 0.3 us, an
array and a number of Python in 0.6, whatever the length, and a reduction takes 1 us. So hot paths take their constants
from here, and add up lists. `column[rows]` takes 0.12 us with int64 rows, and `column.take(rows)` 0.24; with two
dimensions or structured rows, `take` is the faster one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import FOREVER_NS
from moestro.core.load_figures import ROUTED_FIGURES

ZERO, ONE = np.array(0, np.int32), np.array(1, np.int32)
SHORT = 64  # rows up to which lists are faster; at 128 both ways take the same time


@lru_cache(maxsize=1024)
def int32(number: int) -> NDArray[np.int32]:
    """`number` as an array of shape (), for sums with columns. Callers must not write to it."""
    return np.array(number, np.int32)


def has_true(column: NDArray[np.bool_]) -> bool:
    """Whether any row of `column`, bool[n], is true. A search in its bytes takes a tenth of the time of `any`."""
    return 1 in column.tobytes()


def all_true(column: NDArray[np.bool_]) -> bool:
    """Whether all rows of `column`, bool[n], are true."""
    return 0 not in column.tobytes()


def all_nonzero(column: NDArray[np.integer[Any]]) -> bool:
    """Whether no row of `column`, int[n], is 0."""
    return all(column.tolist()) if len(column) <= SHORT else bool(np.count_nonzero(column) == len(column))


def true_rows(column: NDArray[np.bool_]) -> list[int]:
    """Rows of `column`, bool[n], that are true, ascending. Columns without a true row, the usual case, cost little."""
    rows: list[int] = column.nonzero()[0].tolist() if 1 in column.tobytes() else []
    return rows


def column_sum(column: NDArray[np.integer[Any]]) -> int:
    """Sum of `column`, int[n]. A list is summed faster than an array as long as it is short."""
    return sum(column.tolist()) if len(column) <= SHORT else int(np.add.reduce(column))


NEVER_NS = -(1 << 62)  # time of a figure that was never reported: far in the past, so that differences do not overflow
LS, BE = 0, 1  # `ServiceClass` as the views' columns have it
NUM_CLASSES = 2
UNKNOWN_KV_TOKENS = 1 << 50  # more than any cache holds; differences with it are exact in float64
ALONE = -1  # group of an engine that steps by itself
DEFAULT_COPY_PRICE = 0.1  # before any copy was timed; an engine copies only where that is cheaper than computing
TRAITS = ("speed", "decode_speed", "copy_price", "group")  # columns of what an engine is, not of what it has to do


@dataclass(frozen=True, slots=True, eq=False)
class Figure:
    """One reported figure of every engine, and its time.

    Attributes:
        values: float64[n], undefined where the figure was never reported.
        as_of_ns: int64[n], time of the figure on the router's clock. NEVER_NS means never reported.
        newest_ns: int64[1], no less than any of `as_of_ns`. None means unknown.
    """

    values: NDArray[np.float64]
    as_of_ns: NDArray[np.int64]
    newest_ns: NDArray[np.int64] | None = None

    def is_known(self, now_ns: int, max_age_ns: int) -> bool:
        """Whether the figure of any engine is at most `max_age_ns` old. Many figures are never reported."""
        if self.newest_ns is not None and self.newest_ns.item() < now_ns - max_age_ns:
            return False
        return has_true(self.known(now_ns, max_age_ns))

    def known(self, now_ns: int, max_age_ns: int) -> NDArray[np.bool_]:
        """bool[n], whether the figure is at most `max_age_ns` old."""
        return self.as_of_ns >= now_ns - max_age_ns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineTable:
    """Engines as a router knows them, one row each. Read-only; it shows the router's columns as they are now.

    The first columns are the router's own state: exact, of age zero, and about its own requests only. Counts and tokens
    are whole numbers in float64, as scores need them.

    Attributes:
        routable: bool[n], ready, not draining, and with room in the queue: the rows that may be chosen.
        num_in_flight: float64[n], requests sent and not ended.
        num_prefilling: float64[n], those of them without a first token.
        prefill_tokens: float64[n], prompt tokens of those, without tokens that the engine's cache is expected to hold.
        context_tokens: float64[n], prompt tokens of all requests in flight.
        num_unseen: float64[n], requests in flight that were sent after the time of `num_waiting`.
        reported_prefill_tokens: float64[n], `queued_prefill_tokens` and prompt tokens sent since; infinite if unknown.
        num_foreign: int64[n], other routers' requests at the time of `num_waiting` and `num_running`.
        num_kv_tokens: float64[n], capacity of the KV cache in tokens. UNKNOWN_KV_TOKENS means unknown.
        speed: float64[n], prompt tokens a second relative to the other engines, configured or learnt; 1 if unknown.
        decode_speed: float64[n], tokens of answers a second relative to the other engines, likewise.
        copy_price: float64[n], time to copy a prompt token from host memory over the time to compute it, 0 .. 1.
        group: int64[n], number of the group whose engines step together. ALONE means that the engine steps by itself.
            None means that all engines do.
        has_speeds: whether any `speed` or `decode_speed` may differ from 1.
        num_waiting, num_running, kv_usage, queued_prefill_tokens, num_tokens, expert_pressure, expert_local_share: as
            in `LoadFigures`.
    """

    routable: NDArray[np.bool_]
    num_in_flight: NDArray[np.float64]
    num_prefilling: NDArray[np.float64]
    prefill_tokens: NDArray[np.float64]
    context_tokens: NDArray[np.float64]
    num_unseen: NDArray[np.float64]
    num_foreign: NDArray[np.int64]
    num_kv_tokens: NDArray[np.float64]
    reported_prefill_tokens: NDArray[np.float64]
    speed: NDArray[np.float64]
    decode_speed: NDArray[np.float64]
    copy_price: NDArray[np.float64]
    group: NDArray[np.int64] | None
    num_waiting: Figure
    num_running: Figure
    kv_usage: Figure
    queued_prefill_tokens: Figure
    num_tokens: Figure
    expert_pressure: Figure
    expert_local_share: Figure
    has_speeds: bool = True

    def __len__(self) -> int:
        return len(self.routable)

    def without(self, rows: Collection[int]) -> EngineTable:
        """Return the same columns, where `rows` are not routable."""
        routable = self.routable.copy()
        routable[list(rows)] = False
        return replace(self, routable=routable)

    def unreported(self, figures: Collection[str]) -> EngineTable:
        """Return the same columns as if no engine had reported `figures`, nor anything that follows from them."""
        n = len(self)
        columns: dict[str, Any] = {name: Figure(np.zeros(n), np.full(n, NEVER_NS)) for name in figures}
        if "queued_prefill_tokens" in figures:
            columns["reported_prefill_tokens"] = np.full(n, np.inf)
        if not {"num_waiting", "num_running"}.isdisjoint(figures):
            columns["num_foreign"] = np.zeros(n, np.int64)
        return replace(self, **columns)

    @staticmethod
    def blank(num_engines: int) -> EngineTable:
        """Make a table of routable engines without requests and without reported figures."""
        columns: dict[str, Any] = {name: np.zeros(num_engines, COLUMN_TYPES[name]) for name in OWN_COUNTS}
        for name in ROUTED_FIGURES:
            columns[name] = Figure(np.zeros(num_engines), np.full(num_engines, NEVER_NS))
        columns["num_kv_tokens"][:] = UNKNOWN_KV_TOKENS
        return EngineTable(
            routable=np.ones(num_engines, np.bool_),
            reported_prefill_tokens=np.full(num_engines, np.inf),
            speed=np.ones(num_engines),
            decode_speed=np.ones(num_engines),
            copy_price=np.full(num_engines, DEFAULT_COPY_PRICE),
            group=None,
            **columns,
        )


# Columns that the router counts itself.
OWN_COUNTS = tuple(
    each.name
    for each in fields(EngineTable)
    if each.name not in {"routable", "reported_prefill_tokens", "has_speeds", *TRAITS, *ROUTED_FIGURES}
)
# Mostly no engine has foreign requests, and whether any has is found in a third of the time among integers.
COLUMN_TYPES = dict.fromkeys(OWN_COUNTS, np.float64) | {"num_foreign": np.int64}


class WaitingView(msgspec.Struct, frozen=True, eq=False, gc=False, kw_only=True):
    """Requests of one rank to be ordered, one row each: waiting ones, or running ones for eviction.

    Attributes:
        arrival_ns: int64[n], time of arrival.
        num_prompt_tokens: int32[n], length of the prompt.
        priority: int32[n], lower is earlier.
        serial: int64[n], unique, in order of `Rank.add`; the last key of a total order.
        service_class: uint8[n], LS or BE, as given by the client.
        user: int64[n], `core.hashing.name_key` of the user.
        num_uncached: int32[n], tokens to compute if the request were admitted now, after the cached prefix. Only the
            oldest `MAX_LOOKED_UP` rows are looked up; the others have all their known tokens. None means that the
            policy does not ask (`OrderPolicy.reads_cache`).
    """

    arrival_ns: NDArray[np.int64]
    num_prompt_tokens: NDArray[np.int32]
    priority: NDArray[np.int32]
    serial: NDArray[np.int64]
    service_class: NDArray[np.uint8]
    user: NDArray[np.int64]
    num_uncached: NDArray[np.int32] | None = None


class ShareView(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Clients that have sequences in one engine, waiting or running, one row each.

    Attributes:
        weight: float64[n], weight of each client; 1 unless the order policy has weights (`OrderPolicy.weight`).
    """

    weight: NDArray[np.float64]


class BatchView(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Sequences that may be in the next plan: running ones in order of admission, then candidates for admission.

    Attributes:
        num_left: int32[n], tokens to compute before the next token is sampled; 1 for a decode.
        is_waiting: bool[n], whether the sequence is not admitted yet.
        service_class: uint8[n], LS or BE. A promoted sequence counts as LS (`OrderPolicy.promotes_after_ns`).
        num_in_flight: running sequences without a row, because they have a unit in flight.
        client: int64[n], number of each sequence's client. None means that one client has all sequences.
        part: float64[clients], part of a plan that each client may claim, by number.
    """

    num_left: NDArray[np.int32]
    is_waiting: NDArray[np.bool_]
    service_class: NDArray[np.uint8]
    num_in_flight: int = 0
    client: NDArray[np.int64] | None = None
    part: NDArray[np.float64] | None = None

    @property
    def is_decode(self) -> NDArray[np.bool_]:
        """bool[n], whether the sequence runs with one token left.

        A single last prompt token counts too, because it costs the same.
        """
        is_decode: NDArray[np.bool_] = (self.num_left == ONE) & ~self.is_waiting
        return is_decode


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Bounds of one plan.

    Attributes:
        token_budget: tokens of the plan.
        max_chunk: tokens of one prefill chunk.
    """

    token_budget: int
    max_chunk: int

    def at_most(self, num_tokens: int) -> BatchLimits:
        """Return the same bounds for a plan of at most `num_tokens` tokens."""
        if num_tokens >= self.token_budget:
            return self
        return BatchLimits(token_budget=num_tokens, max_chunk=min(num_tokens, self.max_chunk))


class Victim(NamedTuple):
    """Answer of an evict policy.

    Attributes:
        row: row of the view whose sequence frees its KV.
        keeps: whether the KV is kept in host memory, if there is room, and copied back later. Otherwise the tokens are
            computed again.
    """

    row: int
    keeps: bool = True


class EvictView(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Running sequences that could free their KV now, one row each.

    They have no unit in flight, or one that could be recalled.

    Attributes:
        order_rank: int64[n], place in the order policy's order; 0 would be admitted first.
        num_computed_tokens: int32[n], tokens that would be computed again.
        service_class: uint8[n], as in `BatchView`.
        num_free_host_tokens: tokens whose KV has room in host memory; 0 without host memory.
    """

    order_rank: NDArray[np.int64]
    num_computed_tokens: NDArray[np.int32]
    service_class: NDArray[np.uint8]
    num_free_host_tokens: int


ATTENTION = 0  # group of a layer's attention; in layer `num_layers` the sampler
EVERY_EXPERT = -1  # group of a `Run`: all expert queues of the layer, one batch after another
EMPTY_QUEUE_NS = np.iinfo(np.int64).max


class QueueTable(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Micro-queues of one device: waiting tokens by class, layer and group.

    A group is the attention (`ATTENTION`) or a physical expert (its id plus 1). Layer `num_layers` has the sampler as
    its attention and no experts. Classes are `LS` and `BE`.

    Attributes:
        n: int32[classes, num_layers + 1, 1 + num_experts], number of tokens.
        oldest_ns: int64, shape of `n`, time at which the oldest token entered this queue. `EMPTY_QUEUE_NS` means that
            the queue is empty. A token that moves on to another queue starts anew there.
        passed_ns: int64, shape of `n`, the longest time for which a unit with tokens in this queue was passed over; 0
            in an empty queue. A unit is passed over while it could run and the device runs units of a higher class that
            entered the network later. The time is summed over all queues, from the unit's entry to its result. Bounds
            on starvation refer to this time.
        runnable: bool, shape of `n`, whether tokens of the class wait and some can run now. An attention also needs
            free places for its tokens, which other tokens release when they complete a layer.
        num_expert_tokens: int32[classes, num_layers + 1], sum of `n` over a layer's experts.
        num_free_places: tokens that could start on a layer's experts now.
        num_prefill_tokens: int32[classes, num_layers + 1], tokens that wait for each layer's attention and belong to
            units of more than one token. A prompt's last token alone counts as a decode.
    """

    n: NDArray[np.int32]
    oldest_ns: NDArray[np.int64]
    passed_ns: NDArray[np.int64]
    runnable: NDArray[np.bool_]
    num_expert_tokens: NDArray[np.int32]
    num_free_places: int
    num_prefill_tokens: NDArray[np.int32]


class Run(msgspec.Struct, frozen=True, gc=False):
    """Answer of a step policy: run this micro-queue next.

    Attributes:
        layer, group: a queue with runnable tokens of one of `classes`. Group `EVERY_EXPERT` means all expert queues of
            the layer in ascending order. They run expert by expert without asking again, unless new work arrives.
        max_rows: largest number of tokens. Attention takes whole units: those that fit, and always the first unit of
            the first class.
        until: for an attention, the layer before whose attention its units stop. Until then they continue stage by
            stage, as in a forward pass, unless new work arrives. `num_layers` means the sampler, a larger number means
            the end, and 0 means no further than the experts' queues.
        classes: classes that may run, in order of precedence. With (LS, BE), best-effort tokens fill the part of
            `max_rows` that latency-sensitive ones leave.
        ask_again_ns: time at which the policy chooses again even if these tokens are still in flight; the device then
            returns the parts that it has not begun. None means no such time.
        max_unit_tokens: for an attention, tokens of the longest unit that may run; 1 means decodes alone.
    """

    layer: int
    group: int
    max_rows: int
    classes: tuple[int, ...]
    until: int = 0
    ask_again_ns: int | None = None
    max_unit_tokens: int = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Wait:
    """Answer of a step policy: run nothing now. It chooses again at `until_ns`, or when work or a result arrives."""

    until_ns: int


class StepPolicy(Protocol):
    """Chooses what a device runs next."""

    @property
    def overlaps_prefill(self) -> bool:
        """Whether decodes enter the network again while prompts are inside, on a device that is alone."""
        ...

    def __call__(self, view: QueueTable, now_ns: int) -> Run | Wait:
        """Choose the tokens that run next; called only while tokens wait and the device has room."""
        ...


@dataclass(frozen=True, slots=True)
class StepFunction:
    """A step policy without state, made of a function; also a decorator.

    Attributes:
        choose: (view, now_ns) -> what runs next.
        overlaps_prefill: as in `StepPolicy`.
    """

    choose: Callable[[QueueTable, int], Run | Wait]
    overlaps_prefill: bool = False

    def __call__(self, view: QueueTable, now_ns: int) -> Run | Wait:
        """Implement `StepPolicy`."""
        return self.choose(view, now_ns)


# Order policies, in an engine's queue and in a router's.


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """A request left its queue for the first time: an engine gave it KV blocks, or a router sent it to an engine."""

    user: int  # `core.hashing.name_key`
    num_prompt_tokens: int


class Left(msgspec.Struct, frozen=True, tag=True):
    """A request is over, whatever its end was."""

    user: int
    num_generated_tokens: int


OrderEvent = Admitted | Left


class OrderPolicy(ABC):
    """Orders the waiting requests of one queue. A policy without state changes nothing below but `order`.

    Attributes:
        max_passed_over_ns: the bound on being passed over: a request that arrives so much later than another, or more,
            never comes before it. 0: no later arrival passes a request. None: there is no such bound in
            time, and the policy's own words say what holds instead.
        reads_cache: whether it looks at `WaitingView.num_uncached`, which costs look-ups in the prefix cache.
        promotes_after_ns: how long after its arrival a best-effort request counts as latency-sensitive, in the order
            and for the batch and the evict policy alike.
        puts_ls_first: whether every latency-sensitive request comes before every other, so that running best-effort
            sequences may be preempted for it without coming back before it.
        observes: whether `observe` does anything.
    """

    max_passed_over_ns: int | None = None
    reads_cache: bool = False
    promotes_after_ns: int = FOREVER_NS
    puts_ls_first: bool = False
    observes: bool = False

    @abstractmethod
    def order(self, view: WaitingView, now_ns: int) -> NDArray[np.int64]:
        """int64[n], indices of all rows, the first to be admitted first. Changes nothing."""

    def keys(self, view: WaitingView, now_ns: int) -> dict[str, NDArray[Any]]:
        """Columns by which `order` sorts before arrival, to explain it, the deciding one first; smaller is earlier."""
        return {}

    def next_change_ns(self, view: WaitingView, now_ns: int) -> int:
        """A time after `now_ns` until which `order` of these rows stays as it is, if nothing happens but time.

        From that time on it may differ. FOREVER_NS: it never will.
        """
        return FOREVER_NS

    def weight(self, user: int) -> float:
        """Weight of one user, `core.hashing.name_key` of its name; also that of a client with this name."""
        return 1.0

    def observe(self, event: OrderEvent) -> None:  # noqa: B027  most have no state
        """Take note; the only place where the policy's state changes."""
