"""Multi-head latent attention (MLA): the pools keep a token's compressed K and V, one row for all heads.

DeepSeek's attention makes K and V of every head from a latent of `kv_lora_rank` entries, and gives all heads the same
rotated part of K. transformers keeps both compressed between steps, and expands them in `expand_kv` before it attends:

    score(h) = q_nope(h) . (W_UK(h) c) + q_rope(h) . k_rope        out(h) = W_UV(h) sum(weight * c)

Here the first product is (W_UK(h)^T q_nope(h)) . c instead, and W_UV(h) multiplies the sum. So a query attends to rows
(c, k_rope) of the pools, which all heads share, and whose first entries are the values too. The sums are the same ones
in another order, at any length and in any chunk.

The module's forward stays transformers': only its `expand_kv` is replaced, and only for Moestro's attention functions.
A query's products with K and V take 2 (2 r + rope) operations a head and key in place of 2 (nope + rope + v).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from moestro.model.attention import LATENT
from moestro.model.float8 import Float8Linear
from moestro.model.kernels.matching import MISFITS, NUM_CHECK_ROWS, is_close, random_rows

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
