"""The plain twin of editing logits and of sampling: one sequence, one token at a time, each step by its definition."""

from __future__ import annotations

from collections import Counter

import numpy as np
from support import plain_grammar

from moestro.core.request import Request, SamplingParams, packed_tokens
from moestro.core.rng import mix64, uniform
from moestro.core.work import SAMPLING_ROW


def next_token(logits: np.ndarray, tokens: list[int], request: Request) -> int:
    """The token after `tokens`, the first of which are the request's prompt."""
    changed = edited(logits, tokens, request.num_prompt_tokens, request.sampling)
    return choose(changed, row_of(request.sampling), len(tokens))


def row_of(sampling: SamplingParams) -> np.void:
    """The parameters as 32-bit columns hold them."""
    row = np.zeros((), SAMPLING_ROW)
    for name in ("temperature", "top_p", "top_k", "min_p", "seed"):
        row[name] = getattr(sampling, name)
    return row


def edited(logits: np.ndarray, tokens: list[int], num_prompt: int, sampling: SamplingParams) -> np.ndarray:
    """Biases, penalties and bans, each by its definition."""
    logits = logits.copy()
    generated = Counter(tokens[num_prompt:])
    for token, bias in sampling.logit_bias:
        logits[token] += _rounded(bias)
    for token in set(tokens) if sampling.repetition_penalty != 1 else ():
        by = _rounded(sampling.repetition_penalty)
        logits[token] = logits[token] / by if logits[token] > 0 else logits[token] * by
    for token, times in generated.items():
        logits[token] -= _rounded(sampling.frequency_penalty) * times
        logits[token] -= _rounded(sampling.presence_penalty)
    if sampling.allowed_tokens:
        bits = np.unpackbits(np.frombuffer(sampling.allowed_tokens, np.uint8), bitorder="little")
        logits[np.setdiff1d(np.arange(len(logits)), np.flatnonzero(bits))] = -np.inf
    answer = tokens[num_prompt:]
    for *before, last in sampling.bad_words:
        if len(before) <= len(answer) and answer[len(answer) - len(before) :] == before:
            logits[last] = -np.inf
    if sampling.grammar is not None:
        logits[~plain_grammar.allowed(answer, sampling, len(logits))] = -np.inf
    elif generated.total() < sampling.min_tokens:
        logits[list(sampling.stop_token_ids)] = -np.inf
    return logits


def _rounded(value: float) -> float:
    return float(np.float32(value))


def choose(logits: np.ndarray, row: np.void, position: int) -> int:
    """Greedy, or the draw that belongs to (seed, position)."""
    if row["temperature"] == 0:
        return int(logits.argmax())
    scaled = (logits - logits.max()) / row["temperature"]
    if row["min_p"] > 0:
        scaled = np.where(scaled < np.log(row["min_p"].astype(np.float64)).astype(scaled.dtype), -np.inf, scaled)
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    if row["top_k"]:
        order = order[: row["top_k"]]
    weights = np.exp(scaled[order].astype(np.float64))
    kept, mass, total = 0, 0.0, weights.sum()
    while kept < len(order) and (kept == 0 or mass / total < row["top_p"]):
        mass += weights[kept]
        kept += 1
    least = scaled[order[kept - 1]]
    weights = np.where(scaled >= least, np.exp(scaled.astype(np.float64)), 0)
    size = 2 ** round(np.log2(len(weights)) / 2)
    groups = [weights[start : start + size] for start in range(0, len(weights), size)]
    key = mix64(mix64(np.array([row["seed"]], np.uint64)) + np.uint64(position))
    waits = -np.log1p(-uniform(key, np.arange(len(groups) + size, dtype=np.uint64)))
    group = int(np.argmax([tokens.sum() / wait for tokens, wait in zip(groups, waits, strict=False)]))
    arrivals = [weight / wait for weight, wait in zip(groups[group], waits[len(groups) :], strict=False)]
    return group * size + int(np.argmax(arrivals))


def random_wishes(rng: np.random.Generator, vocabulary: int, max_tokens: int) -> dict[str, object]:
    """Some of the parameters that edit logits, for a request of so many tokens; often none."""
    wishes = {
        "presence_penalty": float(rng.uniform(-2, 2)),
        "frequency_penalty": float(rng.uniform(-2, 2)),
        "repetition_penalty": float(rng.uniform(0.5, 2)),
        "min_p": float(rng.uniform(0, 0.5)),
        "min_tokens": int(rng.integers(max_tokens + 1)),
        "allowed_tokens": packed_tokens(rng.permutation(vocabulary)[: vocabulary * 3 // 4].tolist()),
        "bad_words": tuple(tuple(rng.integers(0, vocabulary, n).tolist()) for n in (1, 2, 2, 3)),
        "logit_bias": tuple((int(token), float(rng.uniform(-3, 3))) for token in rng.permutation(vocabulary)[:3]),
    }
    return {name: value for name, value in wishes.items() if rng.random() < 0.3}
