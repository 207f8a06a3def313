"""Check at load: the paged steps of an untested family must equal transformers' own forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moestro.core.rng import uniform
from moestro.core.views import LS
from moestro.core.work import LOGITS_LAST, LOGITS_PROMPT, SAMPLING_ROW, Int32s, Units
from moestro.errors import MoestroError, UnsupportedModelError
from moestro.model.experts.routed import EXPERTS
from moestro.model.loading.refuse import TESTED_FAMILIES
from moestro.model.network import Network
from moestro.model.pools import KVPools
from moestro.model.step import PagedStep

_BLOCK_SIZE = 4
# Tokens of the first step, whose logits must be finite: positions and attention matter from the second on, and several
# visit more experts.
_FIRST_TOKENS = 8
_SHORTEST, _LONGEST, _PAST_WINDOW = 24, 1024, 8
# Largest error of a row of logits, relative to their spread. In half precision a gate near a tie may choose another
# expert in some rows, so the median row decides there; the faults that this check finds appear in nearly every row.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.15}


def check_network(network: Network, max_model_len: int, block_size: int) -> tuple[KVPools, int]:
    """Run a network for the first time.

    Returns:
        The result of `Network.probe`.

    Raises:
        UnsupportedModelError: the network fails, a layer keeps no K and V, logits are not finite, or answers differ
            from transformers' own.
    """
    try:
        found = network.probe(block_size, min(_FIRST_TOKENS, block_size, max_model_len))
        check_against_reference(network, max_model_len)
    except (MoestroError, AssertionError):
        raise
    except Exception as error:  # a network may raise anything on inputs that it was not written for
        raise UnsupportedModelError(f"{type(network.model).__name__} cannot run a paged step: {error!r}") from error
    return found


def check_against_reference(network: Network, max_model_len: int) -> None:
    """Compare a prompt in two chunks, beside another sequence, with the logits of transformers' single pass.

    Raises:
        UnsupportedModelError: the logits differ, or a window cannot be checked.
    """
    if network.model.config.model_type in TESTED_FAMILIES:
        return
    name = type(network.model).__name__
    length = min(_prompt_length(network.config), max_model_len)
    tokens = (uniform(np.ones(1, np.uint64), np.arange(length, dtype=np.uint64)) * network.config.vocab_size).astype(
        np.int32
    )
    ours, windows = _run_in_chunks(network, tokens)
    _refuse_unseen_window(network.config, windows, max_model_len)
    theirs = reference_logits(network, tokens)[len(tokens) - len(ours) :]
    spread = theirs.std(-1).clamp(min=torch.finfo(torch.float32).tiny)
    errors = (ours - theirs).abs().amax(-1) / spread
    error = float(errors.median() if network.dtype in (torch.float16, torch.bfloat16) else errors.max())
    if not error <= _TOLERANCE[network.dtype]:
        raise UnsupportedModelError(
            f"{name} is not a tested family, and its paged steps differ from transformers' own pass: relative error"
            f" {error:.2g}, allowed {_TOLERANCE[network.dtype]:.2g}. Its answers would be wrong."
        )


@torch.inference_mode()
def reference_logits(network: Network, tokens: Int32s) -> Tensor:
    """[tokens, vocabulary], logits of transformers' own attention and experts in one pass over the same weights."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None].to(network.device)
    with use_own_functions(network.model):
        logits: Tensor = network.model(input_ids=ids, use_cache=False).logits[0]
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@contextmanager
def use_own_functions(model: Any, experts: str = "eager") -> Iterator[None]:
    """Let a network that is not packed run on transformers' functions. `experts`: name in its experts interface."""
    attention = model.config._attn_implementation
    # `eager` takes the softmax in float32 even in float64; where sdpa exists it is the more precise reference.
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    model.set_experts_implementation(experts)
    try:
        yield
    finally:
        model.set_attn_implementation(attention)
        model.set_experts_implementation(EXPERTS)


def _prompt_length(config: Any) -> int:
    """Length of a prompt that exceeds the window, where that is affordable."""
    window = _window_of(config) or 0
    return max(_SHORTEST, window + _PAST_WINDOW) if window + _PAST_WINDOW <= _LONGEST else _SHORTEST


def _window_of(config: Any) -> int | None:
    if not getattr(config, "use_sliding_window", True):
        return None
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window


def _refuse_unseen_window(config: Any, windows: set[int | None], max_model_len: int) -> None:
    """Refuse a window that the config names but that never reaches the attention function, unless it cannot matter."""
    window = _window_of(config)
    if window is not None and window < max_model_len and window not in windows:
        raise UnsupportedModelError(
            f"The config names a sliding window of {window}, but the network does not pass it to its attention:"
            f" set --max-model-len {window} or less."
        )


def _run_in_chunks(network: Network, tokens: Int32s) -> tuple[Tensor, set[int | None]]:
    """Logits of the second chunk, and the windows that the network requested."""
    first, num_blocks = len(tokens) // 2, -(-len(tokens) // _BLOCK_SIZE)
    pools = KVPools(2 * num_blocks, _BLOCK_SIZE)
    # Blocks from the highest down. The other sequence has the rest: the same tokens, reversed.
    tables = np.arange(2 * num_blocks, dtype=np.int32)[::-1].reshape(2, num_blocks)
    network.logits(PagedStep(paged_units([(0, tokens[:first])], tables[:1]), pools, network.device))
    both = paged_units([(0, tokens[::-1][: first + 1]), (first, tokens[first:])], tables[::-1])
    step = PagedStep(both, pools, network.device)
    return network.logits(step)[first + 1 :], step.windows


def paged_units(parts: list[tuple[int, Int32s]], tables: Int32s) -> Units:
    """Build units that request all logits, from pairs (first position, tokens)."""
    start = np.array([first for first, _ in parts], np.int32)
    return Units(
        slot=np.arange(len(parts), dtype=np.int32),
        serial=np.arange(len(parts)),
        service_class=np.full(len(parts), LS, np.uint8),
        start=start,
        num_tokens=np.array([len(tokens) for _, tokens in parts], np.int32),
        write_start=start,
        logits=np.full(len(parts), LOGITS_LAST | LOGITS_PROMPT, np.uint8),
        block_tables=tables,
        sampling=np.zeros(len(parts), SAMPLING_ROW),
        token_ids=np.concatenate([tokens for _, tokens in parts]),
    )
