"""The products of latent attention with each head's own weight, on own kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from moestro.model.kernels.layout import KernelPacking
from moestro.model.kernels.library import KernelLibrary
from moestro.model.kernels.matching import NUM_CHECK_ROWS, is_close, random_rows
from moestro.model.latent import HeadProduct, LatentProjection


def exchange_projection(projection: LatentProjection, library: KernelLibrary, packing: KernelPacking) -> bool:
    """Give a projection the kernel for both of its products. Returns whether they agree with torch's."""
    weights = projection.head_weights()
    if weights[0].dtype is not torch.bfloat16 or any(weight.shape[2] % 2 for weight in weights):
        return False
    products = []
    for weight in weights:
        product = _product(library, packing.pack_heads(weight), weight.shape[1])
        rows = random_rows(1, len(weight), NUM_CHECK_ROWS, weight.shape[2])
        if not is_close(product(rows), torch.matmul(rows, weight.transpose(1, 2))):
            return False
        products.append(product)
    projection.use(*products)
    return True


def _product(library: KernelLibrary, packed: Tensor, num_out: int) -> HeadProduct:
    return lambda rows: library.linear_heads(rows if rows.stride(3) == 1 else rows.contiguous(), packed, num_out)
