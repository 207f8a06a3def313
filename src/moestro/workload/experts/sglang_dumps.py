"""Expert load from the dumps of SGLang's expert distribution recorder (0.5), in all four of its modes.

`stat` and `stat_approx` write one file, the sum over all ranks: `{rank, logical_count[steps, layers, experts], ...}`,
whose steps are a ring of which unused ones are zeros. `per_pass` and `per_token` write a file a rank: `{records,
last_physical_to_logical_map[layers, slots]}`, with `global_physical_count[layers, slots]` in each record and, in
`per_token`, `topk_ids_of_layer[layers, tokens, 8]`, all of them slots. A dense layer has a row of zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_load import ExpertLoad, LayerPairs
from moestro.errors import ConfigError
from moestro.workload.experts.expert_profile import ExpertProfile, without_dense_layers

# Load of experts from recorded gate choices or counts: means, variance, activation, and pairs of neighbouring layers.
#
# A step of a decoding engine has one token each of many sequences, but a recording holds one sequence after another. A
# recording without steps is therefore dealt to steps in turn, so that each step has tokens from all parts of it.

Floats = NDArray[np.float64]
Int64s = NDArray[np.int64]

NO_EXPERT = -1  # choice of a token that used fewer experts, or none
# Pairs are means over tokens, and a sample of 32,768 of them has each frequent pair within a few per cent. The kept
# ones are a multiple of the experts that a layer has, because an expert has a few frequent successors.
PAIR_SAMPLE_TOKENS, PAIRS_PER_EXPERT = 32_768, 8


@dataclass(frozen=True, slots=True, eq=False)
class TokenChoices:
    """Gate choices of the tokens of one source.

    Attributes:
        experts: int[tokens, layers, top_k], logical experts; NO_EXPERT for a choice that was not made.
        step: int64[tokens], step in which each token was computed, from 0.
    """

    experts: NDArray[Any]
    step: Int64s


def deal_to_steps(recordings: Sequence[NDArray[Any]], tokens_per_step: int) -> list[TokenChoices]:
    """Deal the tokens of each source to steps in turn.

    Args:
        recordings: int[tokens, layers, top_k] of each source.
        tokens_per_step: tokens of all sources in a step; fewer if there are not as many.
    """
    num_steps = max(1, sum(map(len, recordings)) // tokens_per_step)
    return [TokenChoices(experts, np.arange(len(experts), dtype=np.int64) % num_steps) for experts in recordings]


def load_of_tokens(sources: Sequence[TokenChoices], num_experts: int) -> ExpertLoad:
    """Count the load of experts from the choices of each token.

    Args:
        sources: choices of each source, with the same layers.
        num_experts: logical experts of a layer.
    """
    num_steps = 1 + max((int(source.step.max(initial=0)) for source in sources), default=0)
    num_layers = sources[0].experts.shape[1]
    tokens = np.empty((len(sources), num_layers, num_experts))
    variance, activated = np.empty((num_layers, num_experts)), np.empty((num_layers, num_experts))
    for layer in range(num_layers):
        of_all = np.zeros((num_steps, num_experts), np.int64)
        for s, source in enumerate(sources):
            counts = _counts_by_step(source, layer, (num_steps, num_experts))
            tokens[s, layer] = counts.sum(axis=0) / num_steps
            of_all += counts
        variance[layer], activated[layer] = of_all.var(axis=0), (of_all > 0).mean(axis=0)
    pairs = pairs_of_tokens([source.experts for source in sources], num_experts, num_steps)
    return ExpertLoad(tokens, variance, activated, float(num_steps), pairs)


def _counts_by_step(source: TokenChoices, layer: int, shape: tuple[int, int]) -> Int64s:
    num_steps, num_experts = shape
    chosen = source.experts[:, layer].astype(np.int64)
    places = (source.step[:, None] * num_experts + chosen)[chosen != NO_EXPERT]
    return np.bincount(places, minlength=num_steps * num_experts).reshape(shape)


def pairs_of_tokens(recordings: Sequence[NDArray[Any]], num_experts: int, num_steps: int) -> LayerPairs | None:
    """Return the most frequent pairs of experts in consecutive layers, from a sample of the tokens.

    Args:
        recordings: int[tokens, layers, top_k] of each source.
        num_experts: logical experts of a layer.
        num_steps: steps of the recordings, by which counts are divided.

    Returns:
        At most PAIRS_PER_EXPERT * num_experts pairs for each layer, the most frequent first. None for a single layer.
    """
    num_layers, num_tokens = recordings[0].shape[1], sum(map(len, recordings))
    every = max(1, -(-num_tokens // PAIR_SAMPLE_TOKENS))
    sample = np.concatenate([experts[::every] for experts in recordings]).astype(np.int64)
    if num_layers < 2 or not len(sample):
        return None
    scale = num_tokens / len(sample) / num_steps
    columns: list[tuple[NDArray[Any], ...]] = []
    for layer in range(num_layers - 1):
        before, after = sample[:, layer, :, None], sample[:, layer + 1, None, :]
        both = (before != NO_EXPERT) & (after != NO_EXPERT)
        counts = np.bincount((before * num_experts + after)[both], minlength=num_experts**2)
        best = np.argsort(-counts, kind="stable")[: PAIRS_PER_EXPERT * num_experts]
        best = best[counts[best] > 0]
        columns.append((np.full(len(best), layer), best, counts[best] * scale))
    layer_of, pair, count = (np.concatenate(column) for column in zip(*columns, strict=True))
    return LayerPairs(
        layer_of.astype(np.int32), (pair // num_experts).astype(np.int32), (pair % num_experts).astype(np.int32), count
    )


def load_of_steps(counts: NDArray[Any], pairs: LayerPairs | None = None) -> ExpertLoad:
    """Return the load of experts from their counts in each step.

    Args:
        counts: int[steps, sources, layers, experts], tokens.
        pairs: pairs that were counted in the same steps.
    """
    of_all = counts.sum(axis=1)
    return ExpertLoad(counts.mean(axis=0), of_all.var(axis=0), (of_all > 0).mean(axis=0), float(len(counts)), pairs)


def load_without_steps(counts: NDArray[Any], choices_per_step: float) -> ExpertLoad:
    """Estimate the load of experts from their total counts.

    Choices are taken as independent: an expert with the share p of its layer's choices is used in a part
    1 - (1 - p)**choices of the steps. The variance is unknown, and stays 0.

    Args:
        counts: int or float[sources, layers, experts], tokens of the whole recording.
        choices_per_step: tokens of a step times experts of a token, of all sources.
    """
    total = counts.sum(axis=0)
    in_layer = np.maximum(total.sum(axis=1, keepdims=True), 1e-300)
    activated = 1 - (1 - total / in_layer) ** choices_per_step
    num_steps = max(1.0, float(total.sum(axis=1).max(initial=0.0)) / choices_per_step)
    return ExpertLoad(counts / num_steps, np.zeros(total.shape), activated, num_steps)


_NOTHING = "no forward pass was recorded: send requests between start_ and stop_expert_distribution_record"


@dataclass(frozen=True, slots=True)
class SglangDump:
    """One file of the recorder.

    Attributes:
        path: Its name, for messages.
        fields: Its dictionary, with NumPy arrays in place of tensors.
    """

    path: Path
    fields: Mapping[str, Any]


def is_sglang_dump(found: object) -> bool:
    """Whether a file's contents have the fields of a dump."""
    return isinstance(found, dict) and ("logical_count" in found or "records" in found)


def has_steps(dump: SglangDump) -> bool:
    """Whether a dump counts each forward pass apart."""
    return "records" in dump.fields or np.ndim(dump.fields["logical_count"]) > 2


def profile_of_dumps(dumps: Sequence[SglangDump], choices_per_step: float) -> ExpertProfile:
    """Make one profile of one or several dumps.

    Files of `stat` are windows one after another. Files of `per_pass` and `per_token` are ranks; each is a source.

    Args:
        dumps: Files of the same kind.
        choices_per_step: Tokens of a step times experts of a token, where a count has no steps.

    Raises:
        ConfigError: The files do not fit together, or hold no pass.
    """
    has_records = {"records" in dump.fields for dump in dumps}
    if len(has_records) > 1:
        raise ConfigError("the files mix dumps with records (per_pass, per_token) and dumps without them (stat)")
    try:
        return without_dense_layers(_of_records(dumps) if True in has_records else _of_counts(dumps, choices_per_step))
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        names = ", ".join(str(dump.path) for dump in dumps)
        raise ConfigError(f"{names}: not what SGLang's recorder writes: {type(error).__name__}: {error}") from error


def _of_counts(dumps: Sequence[SglangDump], choices_per_step: float) -> ExpertProfile:
    windows = [np.asarray(dump.fields["logical_count"]) for dump in dumps]
    if len({(window.ndim, window.shape[-2:]) for window in windows}) > 1 or windows[0].ndim not in (2, 3):
        shapes = ", ".join(f"{dump.path}: {list(window.shape)}" for dump, window in zip(dumps, windows, strict=True))
        raise ConfigError(f"logical_count must be [layers, experts] or [steps, layers, experts], alike; got {shapes}")
    for dump, window in zip(dumps, windows, strict=True):
        with np.errstate(over="ignore"):  # the sum of figures that are too large is infinite
            total = window.sum(dtype=np.float64)
        if (window < 0).any() or not np.isfinite(total):
            raise ConfigError(f"{dump.path}: logical_count has figures that are negative, too large or not finite")
    num_layers = windows[0].shape[-2]
    every = tuple(range(num_layers))
    if windows[0].ndim == 2:
        total = np.stack(windows).astype(np.float64).sum(axis=0, keepdims=True)
        if not total.any():
            raise ConfigError(f"{dumps[0].path}: {_NOTHING}")
        load = load_without_steps(total, choices_per_step)
        note = (
            "the counts have no steps: variance is taken as 0, and an expert with the share p of its layer's choices as"
            f" used in 1 - (1 - p)^{choices_per_step:g} of the steps"
        )
        return ExpertProfile(
            load=load, layers=every, num_model_layers=num_layers, origin="counts without steps", notes=(note,)
        )
    steps = np.concatenate(windows)
    steps = steps[steps.any(axis=(1, 2))]
    if not len(steps):
        raise ConfigError(f"{dumps[0].path}: {_NOTHING}")
    return ExpertProfile(
        load=load_of_steps(steps[:, None]),
        layers=every,
        num_model_layers=num_layers,
        origin=f"SGLang's recorder (stat), {len(steps)} forward passes, the sum of all ranks",
        notes=("the dump sums over ranks, so every device is taken to send equally many tokens to each expert",),
    )


def _of_records(dumps: Sequence[SglangDump]) -> ExpertProfile:
    slots = np.asarray(dumps[0].fields["last_physical_to_logical_map"], np.int64)
    if any(not np.array_equal(slots, dump.fields["last_physical_to_logical_map"]) for dump in dumps):
        raise ConfigError("the dumps have different physical_to_logical_maps: give those of one recording")
    records = [record for dump in dumps for record in dump.fields["records"]]
    _refuse_repeated_ranks(dumps)
    ranks = sorted({int(record["rank"]) for record in records})
    passes = sorted({int(record["forward_pass_id"]) for record in records})
    if not records:
        raise ConfigError(f"{dumps[0].path}: {_NOTHING}")
    counts = np.zeros((len(passes), len(ranks), *slots.shape), np.int64)
    rank_of = [ranks.index(int(record["rank"])) for record in records]
    step_of = np.searchsorted(passes, [int(record["forward_pass_id"]) for record in records])
    for record, rank, step in zip(records, rank_of, step_of, strict=True):
        counts[step, rank] = record["global_physical_count"]
    sees_all, receives = _meaning(counts, ranks)
    used = [0] if sees_all else list(range(len(ranks)))
    kind = "per_token" if "topk_ids_of_layer" in records[0] else "per_pass"
    if kind == "per_token":
        own = [i for i, rank in enumerate(rank_of) if rank in used]
        sources = _choices([records[i] for i in own], [rank_of[i] for i in own], step_of[own], slots)
        load = load_of_tokens(sources, int(slots.max()) + 1)
    else:
        logical = _logical(counts[:, used], slots)
        load = load_of_steps(logical.sum(axis=1, keepdims=True) if receives else logical)
    return ExpertProfile(
        load=load,
        layers=tuple(range(len(slots))),
        num_model_layers=len(slots),
        origin=f"SGLang's recorder ({kind}), {len(passes)} forward passes, {len(ranks)} ranks",
        notes=_notes(sees_all=sees_all, receives=receives, num_ranks=len(ranks)),
        ranks=tuple(ranks),
    )


def _refuse_repeated_ranks(dumps: Sequence[SglangDump]) -> None:
    """Refuse two dumps of one rank.

    Raises:
        ConfigError: Two files have passes of the same rank.
    """
    first: dict[int, Path] = {}
    for dump in dumps:
        for rank in sorted({int(record["rank"]) for record in dump.fields["records"]}):
            if rank in first:
                raise ConfigError(
                    f"rank {rank} is in {first[rank]} and in {dump.path}: give one dump a rank, all of one recording"
                )
            first[rank] = dump.path


def _meaning(counts: Int64s, ranks: list[int]) -> tuple[bool, bool]:
    """Find what the ranks counted: whether each saw all tokens, and whether each counted what its own slots received.

    Without an all-to-all backend SGLang's ranks all see all tokens. With DeepEP in low-latency mode a rank counts what
    its own slots receive, whichever rank sent it. Otherwise a rank counts what its own tokens chose.
    """
    num_ranks, num_slots = counts.shape[1], counts.shape[-1]
    if num_ranks == 1 or not counts.any():
        return False, False
    sees_all = bool((counts == counts[:, :1]).all())
    num_local = num_slots // (max(ranks) + 1)
    is_own = np.arange(num_slots) // max(1, num_local) == np.array(ranks)[:, None]
    receives = not (counts.sum(axis=(0, 2)) * ~is_own).any()
    return sees_all, receives and not sees_all


def _notes(*, sees_all: bool, receives: bool, num_ranks: int) -> tuple[str, ...]:
    if sees_all:
        return (f"all {num_ranks} ranks counted the same tokens, so one of them is used, without sources",)
    if receives:
        return ("the ranks counted what their own experts received, so the senders are unknown",)
    return ()


def _logical(counts: Int64s, slots: Int64s) -> Int64s:
    """Sum counts of slots, int64[steps, ranks, layers, slots], to counts of logical experts."""
    found = np.zeros((*counts.shape[:3], int(slots.max()) + 1), np.int64)
    for layer, experts in enumerate(slots):
        for slot, expert in enumerate(experts):
            found[:, :, layer, expert] += counts[:, :, layer, slot]
    return found


def _choices(
    records: Sequence[Mapping[str, Any]], rank_of: Sequence[int], step_of: Int64s, slots: Int64s
) -> list[TokenChoices]:
    """Translate the slots that tokens used to logical experts, rank by rank."""
    experts: dict[int, list[NDArray[Any]]] = {}
    steps: dict[int, list[Int64s]] = {}
    for record, rank, step in zip(records, rank_of, step_of, strict=True):
        used = np.asarray(record["topk_ids_of_layer"], np.int64)  # [layers, tokens, 8]
        logical = np.take_along_axis(slots[:, None, :], np.maximum(used, 0).reshape(len(slots), 1, -1), axis=2)
        chosen = np.where(used >= 0, logical.reshape(used.shape), NO_EXPERT)
        experts.setdefault(rank, []).append(chosen.swapaxes(0, 1))
        steps.setdefault(rank, []).append(np.full(used.shape[1], step, np.int64))
    return [TokenChoices(np.concatenate(experts[rank]), np.concatenate(steps[rank])) for rank in sorted(experts)]
