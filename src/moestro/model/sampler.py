"""Samples tokens and log probabilities from logits, for all units of a step at once, after edits of the logits.

The order of edits is that of vLLM v1: biases, then the repetition, frequency and presence penalties, then temperature,
min_p, top_k and top_p. Bans and masks come last here and first there, which is equivalent: nothing lifts -inf.

A random token is drawn with noise that depends only on (seed, position): no other unit of the batch, no chunking and no
restart changes it. The last digits of its logits depend on the batch, and hardly ever change the token. For the same
reason filters cut by value and keep all tokens that tie with the last kept one, because an order among equals would
depend on the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from moestro.core.request import TokenLogprobs, TokenMask
from moestro.core.rng import GAMMA, MIX_1, MIX_2, mix64, stream_state, uniform
from moestro.core.work import Int32s, LogitEdits
from moestro.model.tensors import upload

_FIRST_LOOK = 1024  # likeliest tokens that a CPU sorts at first, where top_p alone may keep any number of them
_GROUPS, _FEW_CANDIDATES = 64, 4  # of numbers of a row; candidates for each number sought, beyond which they are cut
_NUMBERS_AT_ONCE = 1 << 19  # logits that a CPU works on at once, so that they stay in its caches
_GAMMA, _MIX_1, _MIX_2 = (int(constant.view(np.int64)) for constant in (GAMMA, MIX_1, MIX_2))  # as torch takes them
_SHORTEST_WAIT = 2.0**-60  # replaces a waiting time of 0, which noise of 0 would give


class Peaks(NamedTuple):
    """The largest logit of each row.

    Attributes:
        tokens: int64[n], the lowest of equal ids; undefined where the peak is not finite.
        is_finite: bool[n], false if a logit is NaN or +inf, or if all are -inf.
    """

    tokens: Tensor
    is_finite: Tensor


def find_peaks(logits: Tensor) -> Peaks:
    """Find the largest logit of each row, without waiting for an accelerator.

    Args:
        logits: float32 or float64 [n, vocabulary].
    """
    if logits.device.type != "cpu":
        return Peaks(logits.argmax(-1), logits.amax(-1).isfinite())
    # NumPy reads a row once, several times as fast as torch. As in torch, a NaN is the largest value.
    rows = logits.numpy()
    tokens = rows.argmax(-1)
    peaks = rows[np.arange(len(rows)), tokens]
    return Peaks(torch.from_numpy(tokens), torch.from_numpy(np.isfinite(peaks)))


def sample(
    logits: Tensor, sampling: NDArray[np.void], positions: NDArray[np.int64], tokens: Tensor | None = None
) -> Tensor:
    """Sample one token for each row, without waiting for an accelerator.

    With temperature 0 the choice is greedy, the lowest of equal ids. Otherwise logits are divided by the temperature.
    Tokens at least min_p times as likely as the likeliest remain; of these the top_k largest; of these the largest
    until their probability reaches top_p (at least one). The token is drawn among the rest. This is vLLM's order.

    Args:
        logits: float32 or float64 [n, vocabulary].
        sampling: SAMPLING_ROW[n].
        positions: int64[n], positions of the new tokens.
        tokens: int64[n], those of `find_peaks`, which are overwritten where a token is drawn. None means not known.

    Returns:
        int64[n]. A row without a finite peak gets any number, even one that is no token id.
    """
    if tokens is None:
        tokens = find_peaks(logits).tokens
    drawn = np.flatnonzero(sampling["temperature"] > 0)
    is_cpu, vocabulary = logits.device.type == "cpu", logits.shape[1]
    num_at_once = max(_NUMBERS_AT_ONCE // vocabulary, 1) if is_cpu else max(len(drawn), 1)
    for first in range(0, len(drawn), num_at_once):
        part = drawn[first : first + num_at_once]
        waits = _waiting_times(sampling["seed"][part], positions[part], vocabulary, logits.device)
        if len(part) == len(logits):
            return tokens.copy_(_draw(_filter(_scale(logits, sampling), sampling), waits))
        rows = upload(part, logits.device)
        tokens[rows] = _draw(_filter(_scale(logits[rows], sampling[part]), sampling[part]), waits)
    return tokens


def _group_size(vocabulary: int) -> int:
    """Consecutive token ids of a group: a power of two near the square root of the vocabulary, for the least noise."""
    size: int = 1 << round(np.log2(vocabulary) / 2)
    return size


def _waiting_times(
    seeds: NDArray[np.uint64], positions: NDArray[np.int64], vocabulary: int, device: torch.device
) -> Tensor:
    """float64[n, groups + tokens of a group], exponential, a function of each row's seed and position alone.

    An accelerator computes them from one number a row: on a host, they would take longer than all else of a step.
    """
    size = _group_size(vocabulary)
    num_waits = -(-vocabulary // size) + size
    keys = mix64(mix64(seeds) + positions.astype(np.uint64))
    if device.type == "cpu":
        noise = uniform(keys[:, None], np.arange(num_waits, dtype=np.uint64))
        return torch.from_numpy(np.maximum(-np.log1p(-noise), _SHORTEST_WAIT))
    streams = upload(stream_state(keys).view(np.int64), device)
    return uniform_there(streams, num_waits).neg_().log1p_().neg_().clamp_(min=_SHORTEST_WAIT)


def uniform_there(streams: Tensor, count: int) -> Tensor:
    """Draw `core.rng.uniform` of the counters 0 .. count - 1 on the device of `streams`, bit for bit.

    torch has no arithmetic of uint64. Sums and products of int64 wrap to the same bits, and a mask after a shift clears
    the copies of the sign.

    Args:
        streams: int64[n], bits of `core.rng.stream_state` of each row's seed.

    Returns:
        float64[n, count].
    """
    counters = torch.arange(count, device=streams.device) * _GAMMA
    state = _mix64_there(streams[:, None] + counters)
    return _shifted(state, 11).to(torch.float64).mul_(2.0**-53)


def _mix64_there(bits: Tensor) -> Tensor:
    """`core.rng.mix64` of the bits of int64, in place."""
    bits.bitwise_xor_(_shifted(bits, 30)).mul_(_MIX_1)
    bits.bitwise_xor_(_shifted(bits, 27)).mul_(_MIX_2)
    return bits.bitwise_xor_(_shifted(bits, 31))


def _shifted(bits: Tensor, by: int) -> Tensor:
    """int64, shifted to the right; zeros come from the left."""
    return (bits >> by).bitwise_and_((1 << 64 - by) - 1)


@dataclass(frozen=True, slots=True, eq=False)
class LogprobTensors:
    """Log probabilities of the raw distribution, one row a token.

    Attributes:
        token_ids, logprobs, ranks: [n], the given token; rank 1 is the most likely.
        top_ids, top_logprobs: [n, largest number of alternatives], most likely first or as the request lists them.
    """

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> LogprobTensors:
        """Apply `change` to each tensor, for instance a copy to the host."""
        return LogprobTensors(*(change(getattr(self, field.name)) for field in fields(self)))

    @staticmethod
    def join(parts: Sequence[LogprobTensors]) -> LogprobTensors:
        """Concatenate the rows of all `parts`, which report equally many alternatives."""
        names = [field.name for field in fields(LogprobTensors)]
        return LogprobTensors(*(torch.cat([getattr(part, name) for part in parts]) for name in names))

    def rows(self, num_top: NDArray[np.int32]) -> list[TokenLogprobs]:
        """Return the rows in host types. `num_top`: int32[n], alternatives that each row reports."""
        columns = (self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs)
        return [
            TokenLogprobs(token, logprob, rank, tuple(zip(ids[:count], values[:count], strict=True)))
            for token, logprob, rank, ids, values, count in zip(
                *(column.tolist() for column in columns), num_top.tolist(), strict=True
            )
        ]


def measure_logprobs(logits: Tensor, token_ids: Tensor, num_top: int, listed: Tensor | None = None) -> LogprobTensors:
    """Log probability and rank of a token a row, and of the `num_top` most likely ones, the lowest of equal ids first.

    Args:
        logits: [n, vocabulary].
        token_ids: int64[n].
        num_top: number of alternatives, limited to the vocabulary.
        listed: int64[n, k], tokens that are a row's alternatives in place of the most likely ones; -1 in the first
            column of rows without. None means that no row has any.
    """
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, token_ids[:, None])
    ranks = _num_above(logprobs, own) + 1
    top_ids = _most_likely(logprobs, min(num_top, logits.shape[1]))
    if listed is not None:
        top_ids = _with_listed(top_ids, listed)
    return LogprobTensors(token_ids, own[:, 0], ranks, top_ids, logprobs.gather(1, top_ids))


def _num_above(logprobs: Tensor, own: Tensor) -> Tensor:
    """Count the numbers of each row that are larger than its one of `own`, [n, 1]; int64[n]."""
    if logprobs.device.type != "cpu":
        return (logprobs > own).sum(-1)
    # torch widens each truth value to eight bytes before it adds, which takes four times as long.
    return torch.from_numpy(np.count_nonzero(logprobs.numpy() > own.numpy(), axis=1))


def _with_listed(top_ids: Tensor, listed: Tensor) -> Tensor:
    """Return `top_ids` with those of `listed` in the rows that have any; both get the width of the wider one."""
    missing = listed.shape[1] - top_ids.shape[1]
    pad = functional.pad
    top_ids, listed = pad(top_ids, (0, max(0, missing))), pad(listed, (0, max(0, -missing)))
    return top_ids.where(listed[:, :1] < 0, listed.clamp(min=0))


def _most_likely(logprobs: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest numbers of each row, int64[n, count]: equal ones by id, whatever `count` is.

    The order of `topk` among equals changes with `count`, which is the largest of the batch.
    """
    if not count:
        return logprobs.new_empty((len(logprobs), 0), dtype=torch.int64)
    if logprobs.device.type != "cpu":
        return _preferred(logprobs, logprobs.topk(count, dim=-1).values[:, -1:], count)
    rows, ids = _candidates(logprobs, count)
    # A row of candidates for each row, so that each is sorted by itself; their ids ascend already.
    place = np.arange(len(rows)) - np.searchsorted(rows, np.arange(len(logprobs)))[rows]
    size = len(logprobs), int(place.max(initial=0)) + 1
    negated, id_of = np.full(size, np.inf, logprobs.numpy().dtype), np.zeros(size, np.int64)
    negated[rows, place], id_of[rows, place] = -logprobs.numpy()[rows, ids], ids
    in_order = np.argsort(negated, axis=1, kind="stable")[:, :count]
    return torch.from_numpy(np.take_along_axis(id_of, in_order, 1))


def _candidates(logprobs: Tensor, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(row, id) in ascending order, few for each row, the `count` largest of the row among them. A NaN is always one.

    At least `count` numbers of a row are as large as the `count`-th of the largest in groups, which is found sooner
    than the `count`-th of all.
    """
    num_rows, vocabulary = logprobs.shape
    groups = max(_GROUPS, 2 * count)
    if vocabulary >= groups:
        in_groups = logprobs[:, : vocabulary // groups * groups].reshape(num_rows, -1, groups)
        rows, ids = _not_below(logprobs, in_groups.amax(1).topk(count, dim=-1).values[:, -1:])
        if len(rows) <= _FEW_CANDIDATES * count * num_rows:
            return rows, ids
    return _not_below(logprobs, logprobs.topk(count, dim=-1).values[:, -1:])


def _not_below(logprobs: Tensor, least: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(row, id) of the numbers that are not below `least`, [n, 1]; sought in one dimension, four times as fast."""
    found = np.flatnonzero(~(logprobs.numpy() < least.numpy()))
    return np.divmod(found, logprobs.shape[1])


def _preferred(logprobs: Tensor, least: Tensor, count: int) -> Tensor:
    """As `_most_likely`, without waiting for an accelerator; rows with NaN get any ids.

    Args:
        least: [n, 1], the last number that is among the `count` largest of its row.
    """
    vocabulary = logprobs.shape[1]
    from_last = torch.arange(vocabulary, 0, -1, dtype=torch.float32, device=logprobs.device)
    equals = torch.where(logprobs == least, from_last, 0.0)
    preference = torch.where(logprobs > least, vocabulary + 1.0, equals)
    ids = preference.topk(count, dim=-1).indices.sort(dim=-1).values
    return ids.gather(1, logprobs.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices)


def _scale(logits: Tensor, sampling: NDArray[np.void]) -> Tensor:
    """Divide logits by temperature, each row's largest at 0, so that overflow gives -inf and never NaN."""
    temperature = upload(sampling["temperature"], logits.device).to(logits.dtype)
    return (logits - logits.amax(-1, keepdim=True)).div_(temperature[:, None])


def _filter(scaled: Tensor, sampling: NDArray[np.void]) -> Tensor:
    """Set tokens outside of min_p, top_k and top_p to -inf. Rows without the last two are not sorted."""
    _cut_unlikely(scaled, sampling)
    vocabulary = scaled.shape[1]
    top_k = np.where(sampling["top_k"] > 0, np.minimum(sampling["top_k"], vocabulary), vocabulary)
    narrow = top_k < vocabulary
    wide = ~narrow & (sampling["top_p"] < 1)
    for rows, least_kept in ((np.flatnonzero(narrow), _least_kept), (np.flatnonzero(wide), _least_in_nucleus)):
        if len(rows):
            at = upload(rows, scaled.device)
            kept = scaled[at]
            least = least_kept(kept, top_k[rows], sampling["top_p"][rows])
            scaled[at] = kept.masked_fill(kept < least, float("-inf"))
    return scaled


def _cut_unlikely(scaled: Tensor, sampling: NDArray[np.void]) -> None:
    """Set tokens less likely than min_p times the likeliest to -inf in place; the likeliest has scaled logit 0."""
    rows = np.flatnonzero(sampling["min_p"] > 0)
    if len(rows):
        at = upload(rows, scaled.device)
        least = upload(np.log(sampling["min_p"][rows].astype(np.float64)), scaled.device).to(scaled.dtype)
        kept = scaled[at]
        scaled[at] = kept.masked_fill(kept < least[:, None], float("-inf"))


def _least_in_nucleus(scaled: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float32]) -> Tensor:
    """`_least_kept` where `top_k` keeps all tokens. A CPU sorts few of them, and all only where those do not reach.

    Which way a row takes depends on that row alone.
    """
    if scaled.device.type != "cpu" or scaled.shape[1] <= _FIRST_LOOK:
        return _least_kept(scaled, top_k, top_p)
    largest = scaled.topk(_FIRST_LOOK, dim=-1).values
    total = scaled.exp().sum(-1, keepdim=True, dtype=torch.float64)
    least, is_reached = _cut_at(largest, largest.to(torch.float64).exp() / total, top_p)
    rest = (~is_reached).nonzero()[:, 0]
    if len(rest):
        at = rest.numpy()
        least[rest] = _least_kept(scaled[rest], top_k[at], top_p[at])
    return least


def _least_kept(scaled: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float32]) -> Tensor:
    """[n, 1], smallest value of each row that both filters keep."""
    largest = scaled.topk(int(top_k.max()), dim=-1).values
    outside = torch.arange(largest.shape[1], device=scaled.device) >= upload(top_k, scaled.device)[:, None]
    largest = largest.masked_fill(outside, float("-inf"))
    return _cut_at(largest, largest.softmax(-1, dtype=torch.float64), top_p)[0]


def _cut_at(largest: Tensor, shares: Tensor, top_p: NDArray[np.float32]) -> tuple[Tensor, Tensor]:
    """Find the smallest value of each row with which the shares reach top_p, and whether they do.

    Args:
        largest: [n, k], values in descending order.
        shares: float64[n, k], probability of each.

    Returns:
        [n, 1], the last value where they do not; bool[n].
    """
    reached, wanted = shares.cumsum(-1), upload(top_p, shares.device).to(torch.float64)[:, None]
    # A token stays while those before it have not reached top_p, so the first token always stays.
    before = torch.cat([torch.zeros_like(reached[:, :1]), reached[:, :-1]], dim=-1)
    count = ((before < wanted) & (shares > 0)).sum(-1).clamp(min=1)
    return largest.gather(1, count[:, None] - 1), reached[:, -1] >= wanted[:, 0]


def _draw(scaled: Tensor, waits: Tensor) -> Tensor:
    """int64[n], a token of each row drawn by its probability in two races: of groups of tokens, then inside the winner.

    In a race each runner has an exponential waiting time with its probability as rate, and the first to arrive wins.
    Logits that differ in their last digits, as those of another batch do, change the winner only where two arrive at
    almost the same time. Inverting the cumulative distribution would be cheaper, but any such difference among unlikely
    tokens would change its result.

    Args:
        scaled: [n, vocabulary], logarithms of weights.
        waits: float64[n, groups + tokens of a group], exponential waiting times of rate 1, in that order.
    """
    size = _group_size(scaled.shape[1])
    weights = functional.pad(scaled.softmax(-1), (0, -scaled.shape[1] % size))
    groups = weights.view(len(weights), -1, size)
    num_groups = groups.shape[1]
    group = (groups.sum(-1, dtype=torch.float64) / waits[:, :num_groups]).argmax(-1)
    inside = groups[torch.arange(len(group), device=group.device), group] / waits[:, num_groups:]
    return group * size + inside.argmax(-1)


def edit_logits(
    logits: Tensor,
    edits: LogitEdits,
    units: NDArray[np.int64],
    sampling: NDArray[np.void],
    before: Tensor | None = None,
) -> Tensor:
    """Return an edited copy of `logits`; log probabilities still need the raw ones.

    Args:
        logits: float32 or float64 [n, vocabulary].
        units: int64[n], ascending: unit of the step to which each row belongs.
        sampling: SAMPLING_ROW[n].
        before: int64[n], the token of each row that the step before has sampled; negative where the host had all
            tokens. None means that it had those of all rows.
    """
    logits = logits.clone(memory_format=torch.contiguous_format)
    flat = logits.view(-1)
    if edits.biased.size:
        at = _places(np.searchsorted(units, edits.biased[0]), edits.biased[1], logits)
        flat[at] += upload(edits.bias, logits.device)
    if edits.counted.size or edits.uncounted.size:
        _penalise(logits, _count(edits, units, before, logits), sampling)
    if edits.banned_after.size:
        assert before is not None, "bans depend on tokens of the step before, of which there is none"
        _ban_after(logits, edits.banned_after, np.searchsorted(units, edits.banned_after[0]), before)
    if edits.banned.size:
        # Not an assignment: torch would copy the number to an accelerator, and wait there for all that was launched.
        flat.index_fill_(0, _places(np.searchsorted(units, edits.banned[0]), edits.banned[1], logits), float("-inf"))
    if edits.masks:
        _forbid(logits, np.searchsorted(units, [unit for unit, _ in edits.masks]), [mask for _, mask in edits.masks])
    return logits


def unmasked_units(edits: LogitEdits | None) -> NDArray[np.int64] | None:
    """Return the units whose masks are not ready, once the masks were applied; None means that there are none."""
    found = [unit for unit, mask in edits.masks if mask.words() is None] if edits is not None else []
    return np.array(found, np.int64) if found else None


def _forbid(logits: Tensor, rows: NDArray[np.int64], masks: Sequence[TokenMask]) -> None:
    """Exclude the tokens that masks forbid, in place. Tokens beyond the end of a mask are excluded.

    A mask travels with one bit for each token. A row whose mask is not ready keeps its logits; its token is dropped.

    Args:
        rows: int64[masks], row of `logits` that each mask belongs to.
    """
    vocabulary = logits.shape[1]
    packed = np.zeros((len(masks), -(-vocabulary // 32)), np.int32)
    for own, mask in zip(packed, masks, strict=True):
        words = mask.words()
        if words is None:
            own[:] = -1
        else:
            own[: len(words)] = words[: len(own)]
    if logits.device.type == "cpu":  # one call unpacks the bits
        forbidden = np.unpackbits(~packed.view(np.uint8), axis=1, count=vocabulary, bitorder="little").view(np.bool_)
        for row, excluded in zip(rows, forbidden, strict=True):
            np.putmask(logits[row].numpy(), excluded, -np.inf)
        return
    at = upload(rows, logits.device)
    logits[at] = logits[at].masked_fill(_forbidden(packed, logits), float("-inf"))


def _forbidden(packed: NDArray[np.int32], like: Tensor) -> Tensor:
    """bool[masks, vocabulary], tokens that int32[masks, words] exclude, unpacked on the device of `like`."""
    of_byte = 1 << torch.arange(8, dtype=torch.uint8, device=like.device)
    bits = upload(packed.view(np.uint8), like.device)[:, :, None] & of_byte
    return bits.flatten(1)[:, : like.shape[1]] == 0


class _EarlierTokens(NamedTuple):
    """Earlier tokens of rows of logits.

    Attributes:
        rows, tokens: int64[n]; a pair that occurs twice has the same count in both places.
        times: [n], in the type of the logits: how often each was generated.
    """

    rows: Tensor
    tokens: Tensor
    times: Tensor


def _count(edits: LogitEdits, units: NDArray[np.int64], before: Tensor | None, logits: Tensor) -> _EarlierTokens:
    """Count the tokens to which penalties apply: those that the host had, and those of the step before."""
    rows, tokens = (
        upload(each, logits.device) for each in (np.searchsorted(units, edits.counted[0]), edits.counted[1])
    )
    times = upload(edits.num_generated, logits.device).to(logits.dtype)
    if not edits.uncounted.size:
        return _EarlierTokens(rows, tokens.to(torch.int64), times)
    assert before is not None, "the device counts tokens of the step before, of which there is none"
    own_rows = upload(np.searchsorted(units, edits.uncounted), logits.device)
    is_own = tokens == before[rows]
    # At most one pair of a row is its own token, so that no sum depends on an order.
    known = times.new_zeros(len(logits)).index_add_(0, rows, times * is_own)[own_rows]
    return _EarlierTokens(
        torch.cat((rows, own_rows)),
        torch.cat((tokens.to(torch.int64), before[own_rows])),
        torch.cat((times + is_own, known + 1)),
    )


def _penalise(logits: Tensor, earlier: _EarlierTokens, sampling: NDArray[np.void]) -> None:
    """Penalise the logits of earlier tokens, in place.

    Each earlier token has one entry or two, however often it occurs, so a row's work is bounded by the vocabulary.

    Args:
        sampling: SAMPLING_ROW[n], of the rows of `logits`.
    """
    rows, tokens, times = earlier
    repetition, frequency, presence = (
        upload(sampling[f"{name}_penalty"], logits.device).to(logits.dtype)[rows]
        for name in ("repetition", "frequency", "presence")
    )
    flat, at = logits.view(-1), rows * logits.shape[1] + tokens
    values = flat[at]
    values = torch.where(values > 0, values / repetition, values * repetition)
    flat.scatter_(0, at, values - frequency * times - presence * (times > 0))


def _ban_after(logits: Tensor, triples: Int32s, rows: NDArray[np.int64], before: Tensor) -> None:
    """Ban tokens that must not follow those of the step before, in place.

    Args:
        triples: as in `LogitEdits.banned_after`.
        rows: int64, row of `logits` to which each of them belongs.
    """
    holds = before[upload(rows, logits.device)] == upload(triples[1], logits.device)
    most = torch.full(holds.shape, float("inf"), dtype=logits.dtype, device=logits.device)
    most.masked_fill_(holds, float("-inf"))
    # The least of several has no order, unlike an assignment where one of two equal places is banned.
    logits.view(-1).scatter_reduce_(0, _places(rows, triples[2], logits), most, "amin")


def _places(rows: NDArray[np.int64], token_ids: Int32s, like: Tensor) -> Tensor:
    """int64[n], flat index of each (row, token id) in a matrix as wide as `like`."""
    return upload(rows * like.shape[1] + token_ids, like.device)
