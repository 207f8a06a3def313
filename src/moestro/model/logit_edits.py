"""Biases, penalties, bans and masks, applied to the logits of all units of a step at once.

The order is that of vLLM v1: biases, then the repetition, frequency and presence penalties, then (in `sampler`)
temperature, min_p, top_k and top_p. Bans and masks come last here and first there, which is equivalent: nothing lifts
-inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moestro.core.grammar import TokenMask
from moestro.core.work import Int32s, LogitEdits
from moestro.model.upload import upload


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
