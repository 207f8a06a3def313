"""Work that a scheduler gives to an executor and an executor to a device, and its results. Struct-of-arrays, no torch.

A *unit* is the atom of work: consecutive tokens of one sequence in one pass (decode: one token; prefill: a chunk).
A *device* does work; an *executor* decides in which pieces.

A token's key names it in any engine, slot, batch and mode, for routing that is drawn and not computed. It holds the
source domain, the request and the position. A request's key is the key of its position 0, and a token's key is that
plus its position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from operator import itemgetter
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.load_figures import PassCounts
from moestro.core.request import MAX_LISTED_TOKENS, SAMPLING_RANGES, SamplingParams, TokenLogprobs, TokenMask

Int32s = NDArray[np.int32]
Slots = NDArray[np.int64]  # NumPy's index width; a narrower type would be converted at every look-up

# Wanted logits of a unit, a sum of flags. LAST means those of the last token, to sample the next one.
# PROMPT means those of every token, to report the log probability of the prompt token after it.
LOGITS_NONE, LOGITS_LAST, LOGITS_PROMPT = 0, 1, 2

# Token id of a unit that computes the token which the step launched before it samples for the same slot. The device
# knows the token; the host may not yet.
FROM_STEP_BEFORE = -1

_NO_UNITS, _NO_TRIPLES = np.empty(0, np.int32), np.empty((3, 0), np.int32)
_DEFAULTS = SamplingParams()
# Sampling parameters of one sequence as a row; -1 in a logprobs column means that none are wanted.
SAMPLING_ROW = np.dtype(
    [
        *((name, np.int32 if type(getattr(_DEFAULTS, name)) is int else np.float32) for name in SAMPLING_RANGES),
        ("num_logprobs", np.int32),
        ("num_prompt_logprobs", np.int32),
        ("num_listed", np.int32),  # tokens in `listed` that are reported in place of the most likely ones; 0 means none
        ("listed", np.int32, (MAX_LISTED_TOKENS,)),
        ("lists_prompt", np.int32),  # 0 or 1: a narrower type would break the strides that torch reads
        ("seed", np.uint64),
    ]
)


class LogitEdits(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Changes to the last logits of some units before a token is chosen.

    Stored as flat (unit, token) pairs, because counts differ per unit. A pair is a column (index into the units, token
    id), and only units with LOGITS_LAST occur. `Units.sampling` holds the strength of the penalties.

    Attributes:
        counted: int32[2, n], known tokens of the units with penalties, each pair once, by unit. They are the generated
            tokens, and with a repetition penalty also the prompt's.
        num_generated: int32[n], how often each of `counted` was generated; 0 for a token of the prompt alone.
        biased: int32[2, n], each pair at most once.
        bias: float32[n], added to the logits of `biased`.
        banned: int32[2, n], tokens that must not be sampled yet.
        masks: pairs (index into the units, mask of its tokens), by unit, each unit at most once. The masks are
            computed beside the step; the sampler takes those that are ready.
        uncounted: int32[k], ascending, units with penalties whose token is FROM_STEP_BEFORE. `counted` lacks it, and
            the device adds it as generated once more.
        banned_after: int32[3, m], by unit: (unit whose token is FROM_STEP_BEFORE, a token, a token that must not follow
            it).
    """

    counted: Int32s
    num_generated: Int32s
    biased: Int32s
    bias: NDArray[np.float32]
    banned: Int32s
    masks: tuple[tuple[int, TokenMask], ...] = ()
    uncounted: Int32s = _NO_UNITS
    banned_after: Int32s = _NO_TRIPLES


class Units(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Columns of n units, in the order in which a device concatenates their tokens.

    Attributes:
        slot: int64[n], the sequence's row in its scheduler, which identifies the unit until its result is taken.
        serial: int64[n], the sequence's number from `Rank.add`; unlike a slot it is never reused.
        service_class: uint8[n], LS or BE.
        start: int32[n], position of the first token.
        num_tokens: int32[n], at least 1.
        write_start: int32[n], the first position whose K and V are written. It exceeds `start` only where a full prefix
            hit computes its last token again, because that token's block is shared and never written. It is `start`
            where a hashed trace is replayed, whose device has no memory.
        logits: uint8[n], a sum of LOGITS_LAST and LOGITS_PROMPT, or LOGITS_NONE.
        block_tables: int32[n, width], block ids; columns past a sequence's last block are arbitrary valid ids. The
            width is 0 where a hashed trace is replayed.
        sampling: SAMPLING_ROW[n]. Rows are arbitrary where a hashed trace is replayed.
        token_ids: int32[sum of num_tokens], FROM_STEP_BEFORE in units of one token that follow a step in flight. None
            means that a hashed trace is replayed.
        next_token_ids: int32, the token after each token of the LOGITS_PROMPT units, concatenated. The value is 0 after
            the last known token, whose entry the scheduler drops. None means that no unit has LOGITS_PROMPT.
        edits: changes to the logits. None means that no unit asks for any, as in the usual step.
    """

    slot: Slots
    serial: NDArray[np.int64]
    service_class: NDArray[np.uint8]
    start: Int32s
    num_tokens: Int32s
    write_start: Int32s
    logits: NDArray[np.uint8]
    block_tables: Int32s
    sampling: NDArray[np.void]
    token_ids: Int32s | None
    next_token_ids: Int32s | None = None
    edits: LogitEdits | None = None

    def __len__(self) -> int:
        return len(self.slot)


class BlockMoves(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Copies of KV blocks between a device and its host's memory: all of `kept`, then all of `restored`.

    Attributes:
        kept: int64[2, n], from the device blocks of the first row to the host blocks of the second.
        restored: int64[2, m], from the host blocks of the first row to the device blocks of the second.
    """

    kept: Slots
    restored: Slots

    @property
    def num_blocks(self) -> int:
        """Number of copied blocks."""
        return len(self.kept[0]) + len(self.restored[0])


class Plan(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Work of one step.

    Attributes:
        step: number of the plan within its scheduler.
        units: units to compute.
        moves: KV copies to do first. None means no copy.
    """

    step: int
    units: Units
    moves: BlockMoves | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens in all units."""
        return int(self.units.num_tokens.sum())


class PlanWanted(NamedTuple):
    """The plan that an executor would take now.

    Attributes:
        max_tokens: most tokens of the plan. None means no bound but the scheduler's.
        service_class: class of its units. None means all classes.
        follows: whether it is launched behind the step in flight, with FROM_STEP_BEFORE for the tokens of that step.
    """

    max_tokens: int | None = None
    service_class: int | None = None
    follows: bool = False


MOST_RANGES = 4  # of layers, for which the workers of a unit's experts are listed apart


def range_ends(num_layers: int) -> tuple[int, ...]:
    """First layer behind each of at most `MOST_RANGES` equal ranges of layers."""
    num_ranges = min(MOST_RANGES, num_layers)
    return tuple(num_layers * (i + 1) // num_ranges for i in range(num_ranges))


class StepVisits(NamedTuple):
    """Workers that computed the experts of the units of a step.

    Attributes:
        version: version of the expert table that was in use.
        ends: first layer behind each range of layers.
        num_pairs: int64[units, ranges, workers], (token, expert) pairs.
    """

    version: int
    ends: tuple[int, ...]
    num_pairs: NDArray[np.int64]


class StepResult(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Results of some units: those of one plan, or fewer when others were preempted meanwhile.

    Attributes:
        slot: int64[n], the units' slots.
        token_ids: int32[n], the sampled token, -1 without LOGITS_LAST. None means a priced device.
        non_finite: int64[m], indices into `slot` of units whose wanted logits hold NaN or have no finite maximum. They
            have no token, and their other fields are undefined. None means that there is no such unit.
        excluded: int64[k], those of `non_finite` whose logits are finite until the unit's own edits are applied. None
            means that there is no such unit.
        unmasked: int64[m], indices into `slot` of units whose token mask was not ready. They have no token; their last
            position is computed again. None means that there is no such unit.
        logprobs: log probabilities of the sampled token, by index into `slot`.
        prompt_logprobs: one entry per token of a LOGITS_PROMPT unit, for the token after it, by index into `slot`.
        block_hashes: HASH_BYTES for each completed block of generated tokens (hashed traces), by index into `slot`.
        expert_counts: int64[num_layers, num_experts], tokens that each logical expert computed. None for dense models.
        expert_choices: int32[layers with experts, sampled tokens, chosen], logical experts of some tokens of a step
            that is sampled. None means that the step is not.
        visits: workers that computed each unit's experts. None means that they are not counted, or that there is one.
        failed: copies of the units' plan that failed, so that none of the units was computed. None means no failure.
    """

    slot: Slots
    token_ids: Int32s | None = None
    non_finite: NDArray[np.int64] | None = None
    excluded: NDArray[np.int64] | None = None
    unmasked: NDArray[np.int64] | None = None
    logprobs: dict[int, TokenLogprobs] = msgspec.field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = msgspec.field(default_factory=dict)
    block_hashes: dict[int, bytes] = msgspec.field(default_factory=dict)
    expert_counts: NDArray[np.int64] | None = None
    expert_choices: NDArray[np.int32] | None = None
    visits: StepVisits | None = None
    failed: BlockMoves | None = None

    def select(self, rows: NDArray[np.int64]) -> StepResult:
        """Select rows of the result. What experts did belongs to the whole step and stays unchanged."""
        row_of = {old: new for new, old in enumerate(rows.tolist())}
        return StepResult(
            slot=self.slot[rows],
            token_ids=None if self.token_ids is None else self.token_ids[rows],
            non_finite=_select(self.non_finite, rows),
            excluded=_select(self.excluded, rows),
            unmasked=_select(self.unmasked, rows),
            logprobs={row_of[i]: v for i, v in self.logprobs.items() if i in row_of},
            prompt_logprobs={row_of[i]: v for i, v in self.prompt_logprobs.items() if i in row_of},
            block_hashes={row_of[i]: v for i, v in self.block_hashes.items() if i in row_of},
            expert_counts=self.expert_counts,
            expert_choices=self.expert_choices,
            failed=self.failed,
            visits=None if self.visits is None else self.visits._replace(num_pairs=self.visits.num_pairs[rows]),
        )


def _select(rows: NDArray[np.int64] | None, selected: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return which of `selected` are among `rows`, as indices into `selected`."""
    return None if rows is None else np.flatnonzero(np.isin(selected, rows))


class Forward(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Work item: the whole network over these units, and the sampler."""

    units: Units


class Device(Protocol):
    """Computes work items in the order in which they are launched."""

    def launch(self, item: Forward, now_ns: int) -> None:
        """Start `item`; the call may return before it is done."""
        ...

    def move_blocks(self, moves: BlockMoves, now_ns: int) -> None:
        """Copy KV after all items launched before and before all items launched later. There is no result.

        Raises:
            CopyError: the copies failed, some of them perhaps.
        """
        ...

    def poll(self, now_ns: int) -> list[StepResult]:
        """Take the ready results, each exactly once, in launch order. Never blocks where `ready_at_ns` is known."""
        ...

    def ready_at_ns(self) -> int | None:
        """Time at which the oldest unfinished item is ready. None means nothing runs, or only the hardware knows."""
        ...


# Whether a caller wants control back: it has something else to do, or the given time has come. None means no time.
IsWanted = Callable[[int | None], bool]


def never_wanted(until_ns: int | None) -> bool:
    """Want no control back; an `IsWanted`."""
    return False


class Executor(Protocol):
    """Divides plans into work items for a device, and joins their results into step results."""

    def submit(self, plan: Plan, now_ns: int) -> None:
        """Start a plan."""
        ...

    def start(self, now_ns: int) -> None:
        """Launch as much as the device has room for; called after all plans known now were submitted."""
        ...

    def poll(self, now_ns: int, is_wanted: IsWanted = ...) -> StepResult | None:
        """Take the units that are done, or None. Every submitted unit that is not recalled returns exactly once.

        Args:
            is_wanted: whether the caller wants control back. An executor that computes while it is polled asks it
                regularly and then returns.
        """
        ...

    def recall(self, slots: Slots, now_ns: int) -> Slots:
        """Withdraw units in flight as if they had never been submitted. Returns the slots of the withdrawn units."""
        ...

    def wanted_plan(self) -> PlanWanted | None:
        """The plan that would be welcome now. None means that no plan is."""
        ...

    @property
    def pass_counts(self) -> PassCounts:
        """Totals of passed plans; all zero where no plan passes another."""
        ...

    @property
    def num_pieces(self) -> int:
        """Number of pieces of work begun since the start; it does not grow when nothing can be computed."""
        ...

    def ready_at_ns(self) -> int | None:
        """Time of the next result, or of the next question to a policy.

        None means that only the hardware knows, and FOREVER_NS that nothing happens before a plan or a message comes.
        """
        ...


Int64s = NDArray[np.int64]
_COLUMNS = ("slot", "serial", "service_class", "start", "num_tokens", "write_start", "logits", "sampling")


def select_units(units: Units, index: Int64s) -> Units:
    """Select the units at `index`, which are distinct, in that order."""
    spans = _spans(units.num_tokens, index)
    following = units.next_token_ids
    if following is not None:
        asks = units.logits & LOGITS_PROMPT != 0
        following = following[_spans(np.where(asks, units.num_tokens, 0), index)]
        following = following if len(following) else None
    return Units(
        **{name: getattr(units, name)[index] for name in _COLUMNS},
        block_tables=units.block_tables[index],
        token_ids=None if units.token_ids is None else units.token_ids[spans],
        next_token_ids=following,
        edits=None if units.edits is None else select_edits(units.edits, index, len(units)),
    )


def token_spans(first: NDArray[np.integer], num_tokens: NDArray[np.integer]) -> Int64s:
    """int64[sum of num_tokens], for each i the num_tokens[i] integers from first[i] on."""
    ends = num_tokens.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    spans: Int64s = np.arange(total) + np.repeat(first - (ends - num_tokens), num_tokens)
    return spans


def _spans(num_tokens: Int32s, index: Int64s) -> Int64s:
    """Positions of the tokens of the units at `index` among the tokens of all units."""
    return token_spans((num_tokens.cumsum() - num_tokens)[index], num_tokens[index])


def select_edits(edits: LogitEdits, index: Int64s, num_units: int) -> LogitEdits | None:
    """Select the edits of the units at `index` of `num_units` units. None means that they ask for none."""
    new = np.full(num_units, -1, np.int32)
    new[index] = np.arange(len(index))

    def keep(columns: Int32s) -> tuple[Int32s, Int64s]:
        """Keep columns of selected units, with their new index and sorted by unit. Returns also their old positions."""
        kept = np.flatnonzero(new[columns[0]] >= 0)
        kept = kept[np.argsort(new[columns[0, kept]], kind="stable")]
        return np.concatenate([new[columns[:1, kept]], columns[1:, kept]]), kept

    counted, counted_at = keep(edits.counted)
    biased, biased_at = keep(edits.biased)
    (banned, _), (banned_after, _) = keep(edits.banned), keep(edits.banned_after)
    uncounted = keep(edits.uncounted[None])[0][0]
    kept_masks = sorted(((int(new[unit]), mask) for unit, mask in edits.masks if new[unit] >= 0), key=itemgetter(0))
    if not (kept_masks or any(each.size for each in (counted, biased, banned, banned_after, uncounted))):
        return None
    return LogitEdits(
        counted=counted,
        num_generated=edits.num_generated[counted_at],
        biased=biased,
        bias=edits.bias[biased_at],
        banned=banned,
        masks=tuple(kept_masks),
        uncounted=uncounted,
        banned_after=banned_after,
    )


def join_edits(parts: Sequence[tuple[LogitEdits | None, int]]) -> LogitEdits | None:
    """Join the edits of neighbouring sets of units. A part is the set's edits, if any, and its number of units."""
    shifted = []
    offset = 0
    for edits, num_units in parts:
        if edits is not None:
            shifted.append((edits, np.array([[offset], [0], [0]], np.int32)))
        offset += num_units
    if not shifted:
        return None
    return LogitEdits(
        counted=np.concatenate([edits.counted + by[:2] for edits, by in shifted], axis=1),
        num_generated=np.concatenate([edits.num_generated for edits, _ in shifted]),
        biased=np.concatenate([edits.biased + by[:2] for edits, by in shifted], axis=1),
        bias=np.concatenate([edits.bias for edits, _ in shifted]),
        banned=np.concatenate([edits.banned + by[:2] for edits, by in shifted], axis=1),
        masks=tuple((unit + int(by[0, 0]), mask) for edits, by in shifted for unit, mask in edits.masks),
        uncounted=np.concatenate([edits.uncounted + by[0] for edits, by in shifted]),
        banned_after=np.concatenate([edits.banned_after + by for edits, by in shifted], axis=1),
    )


Keys = NDArray[np.uint64]

_POSITION_BITS, _REQUEST_BITS, _DOMAIN_BITS = 24, 32, 8
MAX_DOMAINS = 1 << _DOMAIN_BITS
DOMAIN_SHIFT = _REQUEST_BITS + _POSITION_BITS  # a key's bits below those of its domain


def request_key(number: int, domain: int = 0) -> int:
    """Make the key of a request from its number in the workload.

    Args:
        number: row of a trace, at least 0; numbers that differ by a multiple of 2**32 get the same key.
        domain: source domain of the request, below `MAX_DOMAINS`.
    """
    assert 0 <= domain < MAX_DOMAINS, f"domain {domain} is not in 0 .. {MAX_DOMAINS - 1}"
    return ((domain << _REQUEST_BITS) + (number & ((1 << _REQUEST_BITS) - 1))) << _POSITION_BITS


def request_keys(numbers: NDArray[np.int64]) -> Keys:
    """uint64[n], `request_key` of each of `numbers`, all from domain 0."""
    keys: Keys = (numbers & ((1 << _REQUEST_BITS) - 1)).astype(np.uint64) << np.uint64(_POSITION_BITS)
    return keys


def named_request_key(request_id: str, domain: int = 0) -> int:
    """Make the key of a request that has no number in a workload, from its id.

    Two of n requests get the same key with a chance of n**2 / 2**33. They then visit the same experts.
    """
    digest = blake2b(request_id.encode(), digest_size=_REQUEST_BITS // 8).digest()
    return request_key(int.from_bytes(digest, "little"), domain)


def token_keys(request_keys: Keys, start: NDArray[np.int32], num_tokens: NDArray[np.int32]) -> Keys:
    """uint64[sum of num_tokens], the key of each token of n units in order.

    Args:
        request_keys: uint64[n], request of each unit.
        start: int[n], position of each unit's first token.
        num_tokens: int[n], tokens of each unit, at least 1.
    """
    if int(num_tokens.sum()) == len(start):  # all decode: one addition
        keys: Keys = request_keys + start.astype(np.uint64)
        return keys
    spread: Keys = np.repeat(request_keys, num_tokens) + token_spans(start, num_tokens).astype(np.uint64)
    return spread


def domains_of(keys: Keys) -> NDArray[np.int64]:
    """int64[n], source domain of each token."""
    domains: NDArray[np.int64] = (keys >> np.uint64(DOMAIN_SHIFT)).astype(np.int64)
    return domains


def requests_of(keys: Keys) -> Keys:
    """uint64[n], key of each token's request without its position."""
    requests: Keys = keys >> np.uint64(_POSITION_BITS)
    return requests


def positions_of(keys: Keys) -> NDArray[np.int64]:
    """int64[n], position of each token in its request."""
    positions: NDArray[np.int64] = (keys & np.uint64((1 << _POSITION_BITS) - 1)).astype(np.int64)
    return positions
