"""Weights in the layout of a CPU's matrix kernels, converted once at load instead of in every product.

With torch's kernels this shortens a decode step of a 640M network in bfloat16 by about a third
(`bench/micro/packing.py`) and changes no bit of a product. The unpacked weights are dropped, so memory use stays the
same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn


class WeightPacking(Protocol):
    """A layout of weights, and the product with them."""

    def fits(self, weight: Tensor) -> bool:
        """Whether a weight [out, in] can be packed."""
        ...

    def pack(self, weight: Tensor) -> Tensor:
        """Convert [out, in] to the layout, which only this object can read."""
        ...

    def unpack(self, packed: Tensor) -> Tensor:
        """Convert back, bit for bit."""
        ...

    def linear(self, rows: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute `functional.linear` with a packed weight. `rows`: [..., in], with the weight's dtype."""
        ...


class TorchPacking:
    """The layout of oneDNN, which comes with torch; implements `WeightPacking`."""

    def fits(self, weight: Tensor) -> bool:
        """Implement `WeightPacking.fits`."""
        return can_pack(weight.device, weight.dtype)

    def pack(self, weight: Tensor) -> Tensor:
        """Implement `WeightPacking.pack`."""
        return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()))

    def unpack(self, packed: Tensor) -> Tensor:
        """Implement `WeightPacking.unpack`."""
        return packed.to_dense()

    def linear(self, rows: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
        """Implement `WeightPacking.linear`."""
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], ""))


TORCH_PACKING = TorchPacking()


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch and this machine have packed kernels of torch's."""
    if device.type != "cpu" or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


class PackedLinear(nn.Module):
    """Replaces a linear layer.

    Args:
        linear: the layer.
        packing: layout of its weight.

    Attributes:
        weight: shape and dtype of the layer's weight, without memory, because networks read them.
        packing: as above.
    """

    def __init__(self, linear: nn.Linear, packing: WeightPacking) -> None:
        super().__init__()
        self.weight = torch.empty_like(linear.weight.data, device="meta")
        self.bias = linear.bias
        self.packing = packing
        self._packed = packing.pack(linear.weight.data)
        self._linear = packing.linear

    def forward(self, rows: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        return self._linear(rows, self._packed, self.bias)

    @property
    def packed_address(self) -> int:
        """Address of the packed weight."""
        return self._packed.data_ptr()

    def repack(self, packing: WeightPacking) -> None:
        """Change the layout of the weight."""
        self._packed = packing.pack(self.packing.unpack(self._packed))
        self.packing, self._linear = packing, packing.linear


def pack_linears(model: nn.Module) -> None:
    """Pack every linear layer of `model` for torch. A weight that an embedding shares stays unpacked there."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child, TORCH_PACKING))


def leave_files(model: nn.Module, *, packs_linears: bool) -> None:
    """Copy weights out of the mapped files of a checkpoint, on a CPU, as far as no packing copies them.

    A file stays mapped, with every page that was read once, while any tensor lies in it: a single norm keeps the pages
    of all experts, which are copies since transformers has stacked them. Kernels keep the tensors that they get, so
    this comes before they are exchanged.

    Args:
        model: the network. Its routed experts stay as they are.
        packs_linears: whether linear layers will be packed. A weight that an embedding shares is copied all the same.
    """
    left: set[int] = set()
    if packs_linears:
        left = {id(child.weight) for child in model.modules() if type(child) is nn.Linear}
        left -= {id(child.weight) for child in model.modules() if isinstance(child, nn.Embedding)}
    for parent in model.modules():
        if hasattr(parent, "is_transposed"):  # routed experts
            continue
        for parameter in parent.parameters(recurse=False):
            if id(parameter) not in left:
                parameter.data = parameter.data.clone()
                left.add(id(parameter))
        # A buffer may be a view, whose base would keep the file whatever its own data are.
        for name, buffer in parent.named_buffers(recurse=False):
            parent._buffers[name] = buffer.detach().clone()


class WholeExperts(Protocol):
    """Computes experts of a module whole: both products and the activation between them.

    Attributes:
        num_experts: number of slots.
    """

    num_experts: int

    def rebound(self, slots: Sequence[tuple[Tensor, Tensor]]) -> WholeExperts:
        """The same for other weights, as `PackedSlots.slots`."""
        ...

    def answers(self, batches: Sequence[tuple[int, int]], rows: Tensor, out: Tensor, start: int) -> int:
        """Write what some experts answer, not weighted; arguments and result as `experts.run_batches`."""
        ...

    def weighted_sum(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, counts: Tensor) -> Tensor:
        """[tokens, hidden size], the sums of `experts.routed_experts`.

        Args:
            hidden: [tokens, hidden size].
            topk_ids, topk_weights: [tokens, k].
            counts: int64[experts or more], to which the tokens of each expert are added.
        """
        ...

    def chosen_answers(
        self, hidden: Tensor, topk_ids: Tensor, out: Tensor, counts: Tensor, begin: int, max_experts: int
    ) -> int:
        """Write what the next experts with tokens answer, not weighted.

        Args:
            hidden, topk_ids, counts: as for `weighted_sum`; contiguous.
            out: [tokens, k, hidden size], the answers by token and choice; contiguous.
            begin: the first expert that may be computed.
            max_experts: experts with tokens to compute at most.

        Returns:
            The expert behind the last one; the number of experts if none with tokens is left.
        """
        ...

    def add_answers(self, answers: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """[tokens, hidden size], the sums of `experts.routed_experts`, from the answers [tokens, k, hidden size]."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PackedSlots:
    """Packed weights of an experts module.

    Attributes:
        packing: their layout.
        slots: up and down weights of each slot, without elements for an empty one.
        whole: computes experts whole. None means that their activation has no kernel.
    """

    packing: WeightPacking
    slots: tuple[tuple[Tensor, Tensor], ...]
    whole: WholeExperts | None = None

    def with_slot(self, slot: int, up: Tensor, down: Tensor) -> PackedSlots:
        """Return the same with other weights in a slot."""
        slots = (*self.slots[:slot], (up, down), *self.slots[slot + 1 :])
        return PackedSlots(self.packing, slots, None if self.whole is None else self.whole.rebound(slots))
