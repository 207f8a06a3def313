"""Attention of a step over paged K and V, registered with transformers' attention interface; latent attention (MLA).

transformers calls these functions from its own network definitions, with one "batch" row that holds all units end to
end. Keyword arguments of the network's call arrive here too, and carry the step. No mask function is registered on
purpose: transformers builds no mask for a name that it does not know.

DeepSeek's latent attention makes K and V of every head from a latent of `kv_lora_rank` entries, and gives all heads the
same rotated part of K. transformers keeps both compressed between steps, and expands them in `expand_kv` before it
attends:

    score(h) = q_nope(h) . (W_UK(h) c) + q_rope(h) . k_rope        out(h) = W_UV(h) sum(weight * c)

Here the first product is (W_UK(h)^T q_nope(h)) . c instead, and W_UV(h) multiplies the sum. So a query attends to rows
(c, k_rope) of the pools, one for each token, which all heads share, and whose first entries are the values too. The
sums are the same ones in another order, at any length and in any chunk.

The module's forward stays transformers': only its `expand_kv` is replaced, and only for Moestro's attention functions.
A query's products with K and V take 2 (2 r + rope) operations a head and key in place of 2 (nope + rope + v).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from moestro.errors import UnsupportedModelError
from moestro.model.kernels.matching import MISFITS, NUM_CHECK_ROWS, is_close, random_rows
from moestro.model.step import DecodeView, PagedStep, PieceView, Reach
from moestro.model.tensors import Float8Linear

PAGED, PLAIN = "moestro", "moestro_plain"  # names in the registry: the fast path, and its plain twin
STEP_ARGUMENT = "paged_step"  # keyword of the network's call that carries the step
# Attributes of an attention module, in its `__dict__` because modules look up others slowly.
OWN_ATTENTION = "moestro_attention"  # an `OwnAttention` that replaces torch's
ATTENTION_FORM = "moestro_form"  # its `AttentionForm`, from its first step
LATENT = "moestro_latent"  # the `UpProjection` of its K and V, which its pools keep compressed
_WINDOWED_BY_CONFIG = ("PhimoeAttention",)  # modules of which transformers windows the mask alone, by the config


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """How one layer turns queries and keys into weights.

    Attributes:
        scaling: factor of the dot product; None means 1 / sqrt(head size).
        window: tokens that a query attends to, itself included; None means all before it.
        sinks: [query heads], score of one extra key whose value is zero; None means no such key.
        values_in_keys: whether a token's value is the first entries of its key, so that one pool holds both.
    """

    scaling: float | None
    window: int | None
    sinks: Tensor | None
    values_in_keys: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class AttentionForm:
    """Shape of a layer's attention.

    Attributes:
        num_heads, num_kv_heads: heads of the queries, and of K and V.
        key_size, value_size: entries of a head.
        scoring: how it scores keys.
    """

    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    scoring: Scoring


class UpProjection(Protocol):
    """Up-projection of compressed K and V, applied to queries and results instead (multi-head latent attention)."""

    def absorb(self, query: Tensor) -> Tensor:
        """Map queries of K [1, query heads, tokens, K size] to queries of the rows that the pools keep."""
        ...

    def expand(self, attended: Tensor) -> Tensor:
        """Map weighted sums of latents [1, tokens, query heads, latent size] to those of V."""
        ...


class OwnAttention(Protocol):
    """Replaces torch's attention in a layer."""

    def __call__(
        self, step: PagedStep, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Return the result of `attend_paged` with the same arguments."""
        ...


def paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute one layer's attention of a step: padded calls for one-token units, one call a piece for longer ones.

    The step's K and V are first written to the layer's pool.

    Args:
        module: the attention module; `layer_idx` names its layer.
        query: [1, query heads, tokens, K size], after rotary, as key.
        key: [1, KV heads, tokens, K size]; with an `UpProjection`, the rows that the pools keep.
        value: [1, KV heads, tokens, V size]; with an `UpProjection`, the first entries of these rows.
        attention_mask: None; a network that builds its own mask is refused.
        kwargs: `paged_step`, and the interface's `scaling`, `sliding_window` and `s_aux` (sinks).

    Returns:
        [1, tokens, query heads, V size], and no weights.

    Raises:
        UnsupportedModelError: a mask or softcapped scores.
    """
    step, scoring = _read_arguments(module, attention_mask, kwargs)
    latent: UpProjection | None = module.__dict__.get(LATENT)
    if latent is not None:
        query, scoring = _absorb(latent, query, scoring)
    own: OwnAttention | None = module.__dict__.get(OWN_ATTENTION)
    if own is None and ATTENTION_FORM not in module.__dict__:
        sizes = (query.shape[1], key.shape[1], key.shape[3], value.shape[3])
        module.__dict__[ATTENTION_FORM] = AttentionForm(*sizes, scoring)
    attend = attend_paged if own is None else own
    attended = attend(step, _layer_of(module), query, key, value, scoring)
    return attended if latent is None else latent.expand(attended), None


def attend_paged(step: PagedStep, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """[1, tokens, query heads, V size], attention of a layer by torch, after its K and V are written to the pools.

    Args:
        step: the step.
        layer: the layer.
        query, key, value: as for `paged_attention`.
        scoring: how the layer scores keys.
    """
    pools = _write(step, layer, key, value, scoring)
    view = step.view(Reach(scoring.window, has_sink=scoring.sinks is not None))
    rows = query[0].transpose(0, 1)
    out = rows.new_empty(*rows.shape[:2], value.shape[-1])
    for group in view.decode:
        if group.rows is None:
            return _attend_decode(rows, pools, group, scoring)[None]
        out.index_copy_(0, group.rows, _attend_decode(rows.index_select(0, group.rows), pools, group, scoring))
    for piece in view.pieces:
        queries = query[:, :, piece.first_row : piece.end_row]
        out[piece.first_row : piece.end_row] = _attend_piece(queries, pools, piece, scoring)
    return out[None]


def plain_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute the result of `paged_attention` plainly, one call a unit, nothing shared between layers: its oracle."""
    step, scoring = _read_arguments(module, attention_mask, kwargs)
    latent: UpProjection | None = module.__dict__.get(LATENT)
    if latent is not None:
        query, scoring = _absorb(latent, query, scoring)
    pools = _write(step, _layer_of(module), key, value, scoring)
    size, window = step.pools.block_size, scoring.window or 1 << 40
    done = []
    for unit, (first, end) in enumerate(zip(step.first_row_of.tolist(), step.end_row_of.tolist(), strict=True)):
        length = int(step.length_of[unit])
        table = torch.from_numpy(step.units.block_tables[unit]).to(query.device, torch.int64)
        keys = torch.arange(length, device=query.device)
        slots = table[keys // size] * size + keys % size
        queries = torch.arange(length - (end - first), length, device=query.device)[:, None]
        allowed = ((keys <= queries) & (keys > queries - window))[None, None]
        bias = torch.zeros_like(allowed, dtype=query.dtype).masked_fill(~allowed, float("-inf"))
        k, v = (pool[slots].transpose(0, 1)[None] for pool in pools)
        if scoring.sinks is not None:
            k, v = functional.pad(k, (0, 0, 0, 1)), functional.pad(v, (0, 0, 0, 1))
            column = scoring.sinks.to(query.dtype).view(1, -1, 1, 1).expand(-1, -1, end - first, -1)
            bias = torch.cat([bias.expand(-1, query.shape[1], -1, -1), column], -1)
        out = _attend(query[:, :, first:end], k, v, bias, scoring.scaling)
        done.append(out[0].transpose(0, 1))
    attended = torch.cat(done)[None]
    return attended if latent is None else latent.expand(attended), None


def register_attention() -> None:
    """Register both functions with transformers. A second call is harmless."""
    AttentionInterface.register(PAGED, paged_attention)
    AttentionInterface.register(PLAIN, plain_attention)


def _read_arguments(
    module: nn.Module, attention_mask: Tensor | None, kwargs: dict[str, Any]
) -> tuple[PagedStep, Scoring]:
    if attention_mask is not None:
        raise UnsupportedModelError("The network passes its attention a mask of its own, which a paged step ignores.")
    if kwargs.get("softcap") is not None:
        raise UnsupportedModelError("The network softcaps its attention scores, which Moestro does not support.")
    step = kwargs.get(STEP_ARGUMENT)
    if not isinstance(step, PagedStep):
        raise UnsupportedModelError("The network does not pass its keyword arguments on to its attention.")
    return step, Scoring(kwargs.get("scaling"), _window_of(module, kwargs) or None, kwargs.get("s_aux"))


def _window_of(module: Any, kwargs: dict[str, Any]) -> int | None:
    """Return the window of a layer's mask in transformers, which some families do not pass to their attention."""
    if "sliding_window" in kwargs:
        window: int | None = kwargs["sliding_window"]
    elif type(module).__name__ in _WINDOWED_BY_CONFIG:
        window = module.config.sliding_window
    else:
        window = module.__dict__.get("sliding_window")  # Qwen2-MoE's layers
    if window is not None and window < 0:
        raise UnsupportedModelError(f"config.json: sliding_window must be at least 1, or null for none, got {window}.")
    return window


def _absorb(latent: UpProjection, query: Tensor, scoring: Scoring) -> tuple[Tensor, Scoring]:
    """Turn queries of K into queries of latents. The factor of their products stays that of K's size."""
    scaling = query.shape[-1] ** -0.5 if scoring.scaling is None else scoring.scaling
    return latent.absorb(query), replace(scoring, scaling=scaling, values_in_keys=True)


def _write(step: PagedStep, layer: int, key: Tensor, value: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    rows = (each[0].transpose(0, 1) for each in (key, value))
    return step.pools.write(layer, step.write_slots, *rows, values_in_keys=scoring.values_in_keys)


def _layer_of(module: nn.Module) -> int:
    layer = module.layer_idx
    assert isinstance(layer, int)
    return layer


def _attend_decode(rows: Tensor, pools: tuple[Tensor, Tensor], view: DecodeView, scoring: Scoring) -> Tensor:
    """[units, query heads, V size], attention of one query for each unit.

    Query heads that share a KV head are arranged as that head's queries, so no backend needs grouped heads. In bfloat16
    on a CPU this is several times faster than `enable_gqa`.
    """
    (num_units, num_heads, size), width = rows.shape, view.slots.shape[1]
    k, v = _read(pools, view.slots.view(-1), scoring)
    k, v = (each.view(num_units, width, *each.shape[1:]).transpose(1, 2) for each in (k, v))
    num_kv_heads = k.shape[1]
    grouped = rows.reshape(num_units, num_kv_heads, num_heads // num_kv_heads, size)
    sinks = None if scoring.sinks is None else scoring.sinks.view(1, num_kv_heads, -1, 1)
    out = _attend(grouped, k, v, _mask(view.allowed, sinks, rows.dtype), scoring.scaling)
    return out.reshape(num_units, num_heads, -1)


def _attend_piece(queries: Tensor, pools: tuple[Tensor, Tensor], view: PieceView, scoring: Scoring) -> Tensor:
    """[queries, query heads, V size], attention of consecutive queries of one unit."""
    k, v = (each.transpose(0, 1)[None] for each in _read(pools, view.slots, scoring))
    sinks = None if scoring.sinks is None else scoring.sinks.view(1, -1, 1, 1)
    return _attend(queries, k, v, _mask(view.allowed, sinks, queries.dtype), scoring.scaling)[0].transpose(0, 1)


def _read(pools: tuple[Tensor, Tensor], slots: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Copy K and V of some slots out of the pools, once where they share rows."""
    keys, values = pools
    read = keys.index_select(0, slots)
    return read, read[..., : values.shape[-1]] if scoring.values_in_keys else values.index_select(0, slots)


def _mask(allowed: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return `allowed`, or with sinks the additive scores [1, heads, queries or 1, 1], the sinks' at the last key."""
    if sinks is None:
        return allowed
    bias = torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, float("-inf"))
    bias = bias + torch.zeros_like(sinks, dtype=dtype)  # one copy for each head
    bias[..., -1:] = sinks
    return bias


def _attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    shape = queries.shape
    if shape[1] > 1 and keys.shape[1] == 1:
        # All heads' queries as those of one: grouped heads would copy K and V for each. The mask is as large as scores.
        queries = queries.reshape(shape[0], 1, -1, shape[3])
        mask = mask.expand(-1, shape[1], -1, -1).reshape(shape[0], 1, -1, mask.shape[3])
    attended = functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, scale=scaling, enable_gqa=queries.shape[1] != keys.shape[1]
    )
    return attended.view(*shape[:3], -1)


_THEIRS = ("eager", "sdpa")  # attention functions of transformers', which take expanded K and V
HeadProduct = Callable[[Tensor], Tensor]  # [1, heads, tokens, in] -> [1, heads, tokens, out], a weight for each head


class LatentProjection(nn.Module):
    """Replaces `kv_b_proj`, the up-projection of an MLA module; implements `attention.UpProjection`.

    Args:
        linear: the projection, whose weight [heads * (K size + V size), latent size] it takes.
        num_heads: number of query heads.
        key_size: entries of a head's K that are made of the latent.

    Attributes:
        weight: the weight; without memory after `use`.
    """

    def __init__(self, linear: nn.Linear, num_heads: int, key_size: int) -> None:
        super().__init__()
        self.weight: Tensor = linear.weight
        self._num_heads, self._key_size = num_heads, key_size
        self._of_queries: HeadProduct | None = None
        self._of_values: HeadProduct | None = None

    def head_weights(self) -> tuple[Tensor, Tensor]:
        """Views of W_UK^T [heads, latent size, K size], and of W_UV [heads, V size, latent size]."""
        heads = self.weight.view(self._num_heads, -1, self.weight.shape[1])
        return heads[:, : self._key_size].transpose(1, 2), heads[:, self._key_size :]

    def use(self, of_queries: HeadProduct, of_values: HeadProduct) -> None:
        """Let other products multiply with the two weights from here on, and drop the weight."""
        self._of_queries, self._of_values = of_queries, of_values
        shape = torch.empty_like(self.weight.data, device="meta")
        del self.weight
        self.weight = shape  # no parameter

    def forward(self, latents: Tensor) -> Tensor:
        """[..., heads * (K size + V size)] of latents, for transformers' own attention functions."""
        return functional.linear(latents, self.weight)

    def absorb(self, query: Tensor) -> Tensor:
        """Implement `UpProjection.absorb`."""
        query_of_key, rotated = query[..., : self._key_size], query[..., self._key_size :]
        if self._of_queries is None:
            weight, _ = self.head_weights()
            return torch.cat((torch.matmul(query_of_key, weight.transpose(1, 2)), rotated), dim=-1)
        return torch.cat((self._of_queries(query_of_key), rotated), dim=-1)

    def expand(self, attended: Tensor) -> Tensor:
        """Implement `UpProjection.expand`."""
        rows = attended.transpose(1, 2)
        if self._of_values is None:
            _, weight = self.head_weights()
            return torch.matmul(rows, weight.transpose(1, 2)).transpose(1, 2)
        return self._of_values(rows).transpose(1, 2)


def compress_attention(model: Any) -> str:
    """Let every MLA module of a loaded network keep its K and V compressed.

    A module whose `expand_kv` computes anything else on random rows than the up-projection keeps expanded K and V.

    Returns:
        A sentence for the operator if there are such modules; else nothing.
    """
    modules = [module for module in model.modules() if hasattr(module, "expand_kv")]
    kept = sum(not _compress(module, model.dtype) for module in modules)
    if not kept:
        return ""
    return (
        f"{kept} of {len(modules)} modules of latent attention keep K and V expanded, which takes several times the"
        " memory: their parts are not those of DeepSeek-V2."
    )


@torch.inference_mode()
def _compress(module: Any, dtype: torch.dtype) -> bool:
    linear: Any = getattr(module, "kv_b_proj", None)
    if isinstance(linear, Float8Linear):  # it becomes two weights, of which one is transposed
        linear = module.kv_b_proj = linear.dequantised(dtype)
    if type(linear) is not nn.Linear or linear._parameters["bias"] is not None:
        return False
    expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = module.expand_kv
    try:
        projection = LatentProjection(linear, module.num_heads, module.qk_nope_head_dim)
        if not _expands_latents(expand, projection, module.qk_rope_head_dim):
            return False
    except MISFITS:
        return False
    size = linear.weight.shape[1]

    def join(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows of the pools, and their values. `latents`, `rotated`: [1, 1, tokens, size]."""
        if module.config._attn_implementation in _THEIRS:
            return expand(latents, rotated)
        rows = torch.cat((latents, rotated), dim=-1)
        return rows, rows[..., :size]

    module.kv_b_proj = projection
    module.__dict__["expand_kv"] = join
    module.__dict__[LATENT] = projection
    return True


def _expands_latents(
    expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], projection: LatentProjection, rotated_size: int
) -> bool:
    """Whether K and V of random latents are those that absorbed products assume."""
    of_queries, of_values = projection.head_weights()
    latents, rotated = (
        random_rows(1, 1, NUM_CHECK_ROWS, size, seed=seed).to(of_queries.device, of_queries.dtype)
        for seed, size in enumerate((of_queries.shape[1], rotated_size))
    )
    key, value = expand(latents, rotated)
    wanted_key = torch.cat((latents @ of_queries, rotated.expand(-1, len(of_queries), -1, -1)), dim=-1)
    return is_close(key, wanted_key) and is_close(value, latents @ of_values.transpose(1, 2))
