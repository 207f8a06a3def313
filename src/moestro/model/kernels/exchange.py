"""Exchanges the modules of a loaded network, by their types, for own kernels.

Every module is compared with its original on random rows. One that differs stays as it was, so that transformers'
definition of the network remains the truth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from moestro.model.attention import ATTENTION_FORM, AttentionForm, HeadProduct, LatentProjection
from moestro.model.experts.expert_slots import pack_experts
from moestro.model.experts.routed import PackedExperts, Routing, is_experts, retag, run_batches, tag_of
from moestro.model.kernels.library import ROW_MULTIPLE, KernelLibrary, KernelPacking
from moestro.model.kernels.matching import (
    MISFITS,
    NUM_CHECK_ROWS,
    is_close,
    is_elementwise,
    is_rowwise,
    random_rows,
)
from moestro.model.kernels.packing import PackedLinear, PackedSlots
from moestro.model.kernels.paged import exchange_attention
from moestro.model.kernels.plan import plan_layer
from moestro.model.kernels.rows import exchange_gate, exchange_norm, exchange_rotary, is_rotation_rowwise


class KernelExperts:
    """Computes experts whole; implements `model.packing.WholeExperts`.

    Args:
        library: The kernels.
        sizes: Hidden size, and half of the up weight's outputs.
        slots: As `PackedSlots.slots`.

    Attributes:
        num_experts: Number of slots.
    """

    def __init__(self, library: KernelLibrary, sizes: tuple[int, int], slots: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._library, self._sizes, self._slots = library, sizes, slots
        self.num_experts = len(slots)
        self._answers, self._routed = library.function["expert_answers"], library.function["routed_experts"]
        self._chosen, self._add = library.function["chosen_answers"], library.function["add_answers"]
        # The kernels read tables of addresses.
        self._tables = [np.array([pair[i].data_ptr() for pair in slots], np.uint64) for i in range(2)]
        self._addresses = [table.ctypes.data for table in self._tables]

    def rebound(self, slots: Sequence[tuple[Tensor, Tensor]]) -> KernelExperts:
        """Implement `WholeExperts.rebound`."""
        return KernelExperts(self._library, self._sizes, slots)

    def answers(self, batches: Sequence[tuple[int, int]], rows: Tensor, out: Tensor, start: int) -> int:
        """Implement `WholeExperts.answers`."""
        assert out.is_contiguous(), "answers are written row by row"
        columns = np.array(batches, np.int64).reshape(-1, 2).T.copy()
        rows = rows.contiguous()
        skipped = start * self._sizes[0] * rows.element_size()
        self._answers(
            rows.data_ptr() + skipped,
            columns[0].ctypes.data,
            columns[1].ctypes.data,
            len(batches),
            *self._addresses,
            out.data_ptr() + skipped,
            *self._sizes,
        )
        return start + int(columns[1].sum())

    def weighted_sum(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, counts: Tensor) -> Tensor:
        """Implement `WholeExperts.weighted_sum`."""
        num_tokens, num_chosen = topk_ids.shape
        hidden, topk_ids = hidden.contiguous(), topk_ids.contiguous()
        weights = topk_weights.to(torch.float32).contiguous()
        out = torch.empty_like(hidden)
        self._routed(
            hidden.data_ptr(),
            topk_ids.data_ptr(),
            weights.data_ptr(),
            *self._addresses,
            out.data_ptr(),
            counts.data_ptr(),
            num_tokens,
            num_chosen,
            self.num_experts,
            *self._sizes,
        )
        return out

    def chosen_answers(
        self, hidden: Tensor, topk_ids: Tensor, out: Tensor, counts: Tensor, begin: int, max_experts: int
    ) -> int:
        """Implement `WholeExperts.chosen_answers`."""
        num_tokens, num_chosen = topk_ids.shape
        assert all(each.is_contiguous() for each in (hidden, topk_ids, out)), "the kernel reads rows end to end"
        end: int = self._chosen(
            hidden.data_ptr(),
            topk_ids.data_ptr(),
            *self._addresses,
            out.data_ptr(),
            counts.data_ptr(),
            begin,
            max_experts,
            num_tokens,
            num_chosen,
            self.num_experts,
            *self._sizes,
        )
        return end

    def add_answers(self, answers: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Implement `WholeExperts.add_answers`."""
        num_tokens, num_chosen, hidden = answers.shape
        assert all(each.is_contiguous() for each in (answers, topk_ids)), "the kernel reads rows end to end"
        weights = topk_weights.to(torch.float32).contiguous()
        out = answers.new_empty(num_tokens, hidden)
        self._add(
            answers.data_ptr(),
            topk_ids.data_ptr(),
            weights.data_ptr(),
            out.data_ptr(),
            num_tokens,
            num_chosen,
            hidden,
        )
        return out


def exchange_experts(module: nn.Module, library: KernelLibrary, packing: KernelPacking) -> bool:
    """Give a tagged experts module the kernels' products, and the whole kernel if its activation is a gated SiLU.

    Returns:
        Whether the batch no longer changes the bits of its answers.
    """
    tag, experts = tag_of(module), cast(PackedExperts, module)
    up, down = tag.layout[0], tag.layout[2]
    assert up is not None
    assert down is not None
    num_wide, hidden = up[0][::-1] if experts.is_transposed else up[0]
    inner = down[0][0] if experts.is_transposed else down[0][1]
    if tag.dtype is not torch.bfloat16 or hidden % 2 or inner % 2:
        return False
    pack_experts(module, packing)
    packed = tag_of(module).packed
    assert packed is not None
    if not packed.slots:
        return True
    # An expert that is here, or one of random weights where all slots are empty.
    one = next((pair for pair in packed.slots if pair[0].numel()), None)
    if one is None:
        drawn = random_rows(num_wide, hidden) * hidden**-0.5, random_rows(hidden, inner) * inner**-0.5
        one = packing.pack(drawn[0]), packing.pack(drawn[1])

    def run(rows: Tensor, whole: KernelExperts | None = None) -> Tensor:
        out = torch.empty_like(rows)
        run_batches(experts, [(0, len(rows))], rows, out, packed=PackedSlots(packing, (one,), whole))
        return out

    if not _has_plain_form(experts) or num_wide != 2 * inner or hidden % ROW_MULTIPLE or inner % ROW_MULTIPLE:
        return is_rowwise(run, hidden)
    rows = random_rows(NUM_CHECK_ROWS, hidden)
    if not is_close(run(rows, KernelExperts(library, (hidden, inner), (one,))), run(rows)):
        return is_rowwise(run, hidden)
    retag(module, packed=replace(packed, whole=KernelExperts(library, (hidden, inner), packed.slots)))
    return True


def _has_plain_form(experts: PackedExperts) -> bool:
    """Whether experts have two halves of up weights, no bias, and nothing behind the down weights."""
    return experts.has_gate and not experts.has_bias and not getattr(experts, "has_post_expert_norm", False)


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


class KernelExchange:
    """An exchange of modules, and what it came to.

    Args:
        library: The kernels.

    Attributes:
        library: As above.
        kept: Number of modules of each class whose results may depend on the batch, because no kernel computes them.
        num_planned: Number of layers whose front is one call.
    """

    def __init__(self, library: KernelLibrary) -> None:
        self.library = library
        self.kept: Counter[str] = Counter()
        self.num_planned = 0
        self._packing = KernelPacking(library)
        self._elementwise: dict[str, bool] = {}  # kind of activation -> whether it is

    @property
    def note(self) -> str:
        """A sentence for the operator."""
        kernels = f"CPU kernels: Moestro's own ({self.library.instruction_set})"
        if not self.kept:
            return f"{kernels}; a request's logits do not depend on the batch."
        kinds = ", ".join(f"{count} {name}" for name, count in sorted(self.kept.items()))
        return f"{kernels}; torch computes {kinds}, so logits may depend on the batch in their last bits."

    def exchange_modules(self, model: Any, routing: Routing | None) -> Iterator[int]:
        """Exchange everything but routed experts. Yields the bytes of weights of each module after its exchange.

        Args:
            model: transformers' network.
            routing: State of its experts; None for a dense network.
        """
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                yield self._exchange_child(parent, name, child)
        for module in model.modules():
            form = module.__dict__.get(ATTENTION_FORM)
            if form is not None:
                self._exchange_attention(module, form)
                yield 0
        for layer in getattr(model.get_decoder(), "layers", ()):
            self.num_planned += plan_layer(layer, routing, self.library)
            yield 0

    def exchange_experts(self, modules: list[tuple[int, Any]]) -> Iterator[int]:
        """Exchange routed experts. `modules`: as `Network.experts`. Yields as `exchange_modules`."""
        for _, module in modules:
            if not exchange_experts(module, self.library, self._packing):
                self._keep(module)
            packed = tag_of(module).packed
            yield 0 if packed is None else 2 * sum(up.numel() + down.numel() for up, down in packed.slots)

    def _exchange_child(self, parent: nn.Module, name: str, child: nn.Module) -> int:
        """Exchange one module. Returns the bytes of its weight."""
        if type(child) is nn.Linear or isinstance(child, PackedLinear):
            num_bytes, is_exchanged = 2 * child.weight.numel(), self._exchange_linear(parent, name, child)
        elif isinstance(child, LatentProjection):
            num_bytes = 2 * child.weight.numel()
            is_exchanged = exchange_projection(child, self.library, self._packing)
        else:
            num_bytes, is_exchanged = 0, self._exchange_in_place(child)
        if not is_exchanged:
            self._keep(child)
        return num_bytes

    def _exchange_in_place(self, child: nn.Module) -> bool:
        """Exchange what a module computes. Returns whether the batch changes no bit of its results."""
        weight = child._parameters.get("weight")
        if type(child).__name__.endswith("RMSNorm"):
            return exchange_norm(child, self.library) or _is_rowwise_norm(child)
        if is_experts(child) or isinstance(child, nn.Embedding):
            return True  # experts follow, and rows of an embedding are copied
        if not child._parameters:
            return next(child.children(), None) is not None or self._is_elementwise(child)
        if isinstance(child, nn.LayerNorm):
            return _is_rowwise_norm(child)
        if weight is not None and weight.dim() == 2:
            return exchange_gate(child, self._pack, self.library)
        # An attention has its sinks, and is exchanged with them; what else is added is added entry by entry.
        is_added = all(each is None or "bias" in name for name, each in child._parameters.items())
        return is_added or ATTENTION_FORM in child.__dict__

    def _exchange_linear(self, parent: nn.Module, name: str, child: nn.Linear | PackedLinear) -> bool:
        if child.weight.dtype is not torch.bfloat16 or child.weight.shape[1] % 2:
            return False
        rows = random_rows(NUM_CHECK_ROWS, child.weight.shape[1])
        wanted = child(rows)
        if isinstance(child, PackedLinear):
            before = child.packing
            child.repack(self._packing)
            if not is_close(child(rows), wanted):
                child.repack(before)
                return False
            return True
        made = PackedLinear(child, self._packing)
        if not is_close(made(rows), wanted):
            return False
        setattr(parent, name, made)
        return True

    def _exchange_attention(self, module: nn.Module, form: AttentionForm) -> None:
        exchange_rotary(module, form.key_size, self.library)
        if not exchange_attention(module, form, self.library) or not is_rotation_rowwise(module):
            self._keep(module)

    def _is_elementwise(self, function: nn.Module) -> bool:
        """Whether an activation knows no batch. A module that is no function of one tensor does not count as one."""
        kind = f"{type(function).__qualname__} {function!r}"
        if kind not in self._elementwise:
            try:
                self._elementwise[kind] = is_elementwise(function)
            except MISFITS:
                self._elementwise[kind] = True
        return self._elementwise[kind]

    def _pack(self, weight: torch.Tensor) -> torch.Tensor | None:
        return self._packing.pack(weight) if self._packing.fits(weight) else None

    def _keep(self, module: nn.Module) -> None:
        self.kept[type(module).__name__] += 1


def _is_rowwise_norm(norm: nn.Module) -> bool:
    """Whether a norm that stays torch's gives each row the same bits in any batch."""
    weight = norm._parameters.get("weight")
    try:
        return weight is not None and is_rowwise(norm, weight.numel())
    except MISFITS:
        return False
