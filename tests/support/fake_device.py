"""A device without a network whose answers depend on every byte of KV bookkeeping.

Its "KV pool" stores which token was written at each (block, offset). To compute a unit it reads the whole sequence back
through the block table, and its next token is a hash of what it read: a wrong block, a lost write or a stale cached
block gives wrong tokens, which `expected_tokens`, the oracle, does not.
"""

from __future__ import annotations

from collections import deque
from hashlib import blake2b

import msgspec
import numpy as np
from support import plain_sampling

from moestro.core.hashing import hash_blocks, hash_key
from moestro.core.request import Request, SamplingParams, TokenLogprobs
from moestro.core.work import FROM_STEP_BEFORE, LOGITS_LAST, LOGITS_PROMPT, StepResult

VOCAB_SIZE = 50
NOTHING = -7


def scores(tokens) -> np.ndarray:
    """Pretended logits after `tokens`: float64[VOCAB_SIZE], -1 .. 1, that depend on all of them and their order."""
    digest = blake2b(np.asarray(tokens, np.int32).tobytes(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).uniform(-1, 1, VOCAB_SIZE)


def expected_tokens(request: Request) -> list[int]:
    """The oracle: one sequence, no blocks, no batches."""
    tokens = request.token_array().tolist()
    for _ in range(request.sampling.max_tokens):
        tokens.append(plain_sampling.next_token(scores(tokens), tokens, request))
        if tokens[-1] in request.sampling.stop_token_ids:
            break
    return tokens[request.num_prompt_tokens :]


def edited_scores(tokens, units, i: int) -> np.ndarray:
    """What unit `i` samples from: scores changed pair by pair, as `LogitEdits` says it."""
    logits, edits, row = scores(tokens), units.edits, units.sampling[i]
    if edits is None:
        return logits
    for (unit, token), bias in zip(edits.biased.T.tolist(), edits.bias.tolist(), strict=True):
        logits[token] += bias if unit == i else 0
    times = {
        token: num
        for (unit, token), num in zip(edits.counted.T.tolist(), edits.num_generated.tolist(), strict=True)
        if unit == i
    }
    if i in edits.uncounted.tolist():
        times[tokens[-1]] = times.get(tokens[-1], 0) + 1
    for token in times:
        by = float(row["repetition_penalty"])
        logits[token] = logits[token] / by if logits[token] > 0 else logits[token] * by
    for token in [token for token, num in times.items() if num]:
        logits[token] -= float(row["frequency_penalty"]) * times[token]
        logits[token] -= float(row["presence_penalty"])
    for unit, before, token in edits.banned_after.T.tolist():
        logits[token] = -np.inf if unit == i and tokens[-1] == before else logits[token]
    for unit, token in edits.banned.T.tolist():
        logits[token] = -np.inf if unit == i else logits[token]
    for words in (mask.words() for unit, mask in edits.masks if unit == i):
        if words is None:
            continue
        bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=min(32 * len(words), VOCAB_SIZE))
        logits[np.flatnonzero(np.pad(bits, (0, VOCAB_SIZE - len(bits))) == 0)] = -np.inf
    return logits


def late_masks_of(units, result: StepResult) -> StepResult:
    """The result, with the units whose masks were not ready."""
    late = [] if units.edits is None else [unit for unit, mask in units.edits.masks if mask.words() is None]
    return msgspec.structs.replace(result, unmasked=np.array(late, np.int64)) if late else result


def expected_prompt_logprobs(request: Request) -> list[tuple[int, float]]:
    tokens = request.token_array().tolist()
    return [(tokens[i], float(scores(tokens[:i])[tokens[i]])) for i in range(1, len(tokens))]


def copy_blocks(moves, of_device: np.ndarray, of_host: np.ndarray, axis: int = 0) -> None:
    """`moves` between two arrays of blocks, those out of the device first."""
    device, host = np.moveaxis(of_device, axis, 0), np.moveaxis(of_host, axis, 0)
    for (from_ids, to_ids), source, target in ((moves.kept, device, host), (moves.restored, host, device)):
        assert len(set(to_ids.tolist())) == len(to_ids), "two blocks are copied to one"
        target[to_ids] = source[from_ids]


class KvDevice:
    """`delay` polls pass before a result is ready, so that units stay in flight."""

    def __init__(self, num_blocks: int, block_size: int, delay: int = 0, num_host_blocks: int = 0) -> None:
        self.kv = np.full((num_blocks, block_size), NOTHING, np.int64)
        self.host = np.full((num_host_blocks, block_size), NOTHING, np.int64)
        self.delay = delay
        self.num_launched_tokens = 0
        self.largest_step = 0
        self._pending: deque[list] = deque()
        self._sampled: dict[int, int] = {}  # by slot, in the step launched last

    def launch(self, item, now_ns: int) -> None:
        units = item.units
        self.num_launched_tokens += int(units.num_tokens.sum())
        self.largest_step = max(self.largest_step, int(units.num_tokens.sum()))
        assert len(set(units.slot.tolist())) == len(units), "a sequence is twice in one plan"
        bounds = np.concatenate([[0], np.cumsum(units.num_tokens)])
        for i in range(len(units)):  # all writes come before all reads, as on a real device
            self._write(units, i, self._known(units, i, units.token_ids[bounds[i] : bounds[i + 1]]))
        result = self._read_all(units)
        self._sampled = dict(zip(units.slot.tolist(), result.token_ids.tolist(), strict=True))
        self._pending.append([self.delay, result])

    def _known(self, units, i: int, tokens) -> np.ndarray:
        """The tokens of unit `i`, with the one that the step before has sampled."""
        if tokens[0] != FROM_STEP_BEFORE:
            return tokens
        return np.array([max(self._sampled[int(units.slot[i])], 0)], np.int32)

    def move_blocks(self, moves, now_ns: int) -> None:
        copy_blocks(moves, self.kv, self.host)

    def _write(self, units, i: int, tokens) -> None:
        size = self.kv.shape[1]
        for position, token in enumerate(tokens.tolist(), start=int(units.start[i])):
            if position >= units.write_start[i]:
                self.kv[units.block_tables[i, position // size], position % size] = token

    def _read_all(self, units) -> StepResult:
        result = StepResult(units.slot, np.full(len(units), -1, np.int32))
        following = iter([] if units.next_token_ids is None else units.next_token_ids.tolist())
        for i in range(len(units)):
            start, end = int(units.start[i]), int(units.start[i] + units.num_tokens[i])
            tokens = self.kv[units.block_tables[i]].reshape(-1)[:end].tolist()
            row = units.sampling[i]
            if units.logits[i] & LOGITS_LAST:
                result.token_ids[i] = plain_sampling.choose(edited_scores(tokens, units, i), row, len(tokens))
                if row["num_logprobs"] >= 0:
                    result.logprobs[i] = TokenLogprobs(int(result.token_ids[i]), 0.0, 1)
            if units.logits[i] & LOGITS_PROMPT:
                result.prompt_logprobs[i] = tuple(
                    TokenLogprobs(token, float(scores(tokens[: p + 1])[token % VOCAB_SIZE]), 1)
                    for p, token in zip(range(start, end), following, strict=False)
                )
        return late_masks_of(units, result)

    def poll(self, now_ns: int) -> list[StepResult]:
        if self._pending and self._pending[0][0] <= 0:
            return [self._pending.popleft()[1]]
        if self._pending:
            self._pending[0][0] -= 1
        return []

    def ready_at_ns(self) -> None:
        return None


def make_request(
    request_id: str, tokens, *, block_size: int = 4, salt: str | None = None, arrival_ns: int = 0, **sampling
):
    """A request with its block hashes, as the API server makes it; greedy unless `sampling` says otherwise."""
    ids = np.asarray(tokens, np.int32)
    key = hash_key("fake", None, salt)
    return Request(
        request_id=request_id,
        num_prompt_tokens=len(ids),
        sampling=SamplingParams(**{"temperature": 0.0, **sampling}),
        arrival_ns=arrival_ns,
        token_ids=ids.tobytes(),
        block_hashes=hash_blocks(key, ids, block_size),
        hash_key=key,
        cache_salt=salt,
    )
