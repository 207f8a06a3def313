"""Exchanges the modules of a loaded network on a GPU, by their types, for the kernels.

Every module is compared with its original on random rows. One that differs stays as it was, so that transformers'
definition of the network remains the truth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from inspect import signature
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from moestro.core.experts.expert_table import EMPTY
from moestro.model.attention import (
    ATTENTION_FORM,
    OWN_ATTENTION,
    AttentionForm,
    HeadProduct,
    LatentProjection,
    Scoring,
    attend_paged,
)
from moestro.model.cuda.functions import CudaExperts, CudaFront, CudaKernels, ExpertWeightTable, GateForm, Norm
from moestro.model.cuda.tiles import Walk
from moestro.model.experts.routed import (
    ExpertLayer,
    PackedExperts,
    Routing,
    is_experts,
    retag,
    run_each,
    tag_of,
    weights_of,
)
from moestro.model.kernels.matching import MISFITS as _MODULE_MISFITS
from moestro.model.kernels.matching import NUM_CHECK_ROWS, is_close, random_rows
from moestro.model.kernels.paged import CHECK_BLOCK_SIZE, make_check_units
from moestro.model.kernels.plan import make_forward, try_layer
from moestro.model.kernels.rows import NORM_EPSILON
from moestro.model.pools import KVPools
from moestro.model.staged.layer_stages import LAYER_FRONT
from moestro.model.step import PagedStep
from moestro.model.tensors import BLOCK, Float8Linear

# A kernel of an unforeseen shape may not compile, or need more memory than a multiprocessor has.
MISFITS = (*_MODULE_MISFITS, CompilationError, OutOfResources)
_MOST_EXPERTS, _MOST_CHOSEN = 1024, 32  # of a gate: one program has the scores of all
_CORRECTION = "e_score_correction_bias"  # of a gate's scores, for the choice alone
_LEAST_SAME_CHOICES = 0.6  # of the check's rows; in half precision two experts may tie for the last place


class CudaExchange:
    """An exchange of modules, and what it came to.

    Args:
        kernels: The kernels.

    Attributes:
        kernels: As above.
        kept: Number of modules of each class that torch computes, so that their results may depend on the batch.
        num_planned: Number of layers whose front is six launches.
    """

    def __init__(self, kernels: CudaKernels) -> None:
        self.kernels = kernels
        self.kept: Counter[str] = Counter()
        self.num_planned = 0

    @property
    def note(self) -> str:
        """A sentence for the operator."""
        if not self.kept:
            return "GPU kernels: Moestro's own; a request's logits do not depend on the batch."
        kinds = ", ".join(f"{count} {name}" for name, count in sorted(self.kept.items()))
        return f"GPU kernels: Moestro's own; torch computes {kinds}, so logits may depend on the batch."

    def exchange_modules(self, model: Any, routing: Routing | None) -> Iterator[int]:
        """Exchange everything but routed experts. Yields the bytes of weights of each module after its exchange."""
        for module in list(model.modules()):
            yield self._exchange(module)
        for module in model.modules():
            form = module.__dict__.get(ATTENTION_FORM)
            if form is not None and not self._exchange_attention(module, form):
                self._keep(module)
        for layer in getattr(model.get_decoder(), "layers", ()):
            self.num_planned += self._plan_layer(layer, routing)
            yield 0

    def exchange_experts(self, modules: list[tuple[int, Any]]) -> Iterator[int]:
        """Exchange routed experts. `modules`: as `Network.experts`. Yields as `exchange_modules`."""
        for _, module in modules:
            if not exchange_experts(module, self.kernels):
                self._keep(module)
            yield 0

    def _exchange(self, module: nn.Module) -> int:
        """Exchange one module by its type. Returns the bytes of its weight."""
        weight = module._parameters.get("weight")
        if type(module) is nn.Linear or isinstance(module, Float8Linear):
            done = self._exchange_linear(module)
        elif type(module).__name__.endswith("RMSNorm"):
            done = exchange_norm(module, self.kernels)
        elif isinstance(module, LatentProjection):
            done = exchange_projection(module, self.kernels)
        elif is_experts(module) or isinstance(module, nn.Embedding) or weight is None or weight.dim() != 2:
            return 0
        else:
            done = exchange_gate(module, self.kernels)
        if not done:
            self._keep(module)
        return 0 if weight is None else weight.numel() * weight.element_size()

    def _exchange_linear(self, module: nn.Linear | Float8Linear) -> bool:
        kernels, original, bias = self.kernels, module.forward, module.bias
        weight = module.stored if isinstance(module, Float8Linear) else module.weight
        if isinstance(weight, Tensor) and weight.dtype is not kernels.dtype:
            return False

        def forward(rows: Tensor) -> Tensor:
            if rows.dtype is not kernels.dtype:
                return original(rows)
            return kernels.linear(rows, weight, bias)

        return _exchange_forward(module, forward, _rows_for(kernels, weight.shape[1]))

    def _exchange_attention(self, module: nn.Module, form: AttentionForm) -> bool:
        attention = CudaAttention(self.kernels, form)
        self.kernels.add_walk(attention.walk)
        try:
            is_exchanged = attention.agrees()
        except MISFITS:
            is_exchanged = False
        if is_exchanged:
            module.__dict__[OWN_ATTENTION] = attention
        return is_exchanged

    def _plan_layer(self, layer: Any, routing: Routing | None) -> bool:
        """Give a layer the short front, in its own forward and in stages. Returns whether it computes the same."""
        form = getattr(layer, "self_attn", layer).__dict__.get(ATTENTION_FORM)
        if form is None:
            return False
        # Most families repeat the cosines of half a head, GPT-OSS does not. Others rotate only a part of a head.
        return any(self._try_front(layer, form, routing, width) for width in (form.key_size, form.key_size // 2))

    def _try_front(self, layer: Any, form: AttentionForm, routing: Routing | None, angle_width: int) -> bool:
        original = layer.forward
        with suppress(*MISFITS, KeyError, IndexError):
            wanted, pools = try_layer(layer, form, original, routing, angle_width)
            front = CudaFront(layer, form, self.kernels, angle_width)
            forward = make_forward(layer, front, original)
            found, own_pools = try_layer(layer, form, forward, routing, angle_width)
            pairs = zip(own_pools.blocks(), pools.blocks(), strict=True)
            if is_close(found, wanted) and all(is_close(mine, theirs) for mine, theirs in pairs):
                layer.__dict__["forward"] = forward
                layer.__dict__[LAYER_FRONT] = front
                return True
        return False

    def _keep(self, module: nn.Module) -> None:
        self.kept[type(module).__name__] += 1


class CudaAttention:
    """Attention of one layer; implements `attention.OwnAttention`.

    Args:
        kernels: The kernels.
        form: Form of the attention.

    Attributes:
        walk: How its queries walk over their keys.
    """

    def __init__(self, kernels: CudaKernels, form: AttentionForm) -> None:
        self._kernels, self._form = kernels, form
        self.walk = Walk.of(form)

    def __call__(
        self, step: PagedStep, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Implement `OwnAttention`."""
        new = (each[0].transpose(0, 1) for each in (key, value))
        pools = step.pools.write(layer, step.write_slots, *new, values_in_keys=scoring.values_in_keys)
        rows, units = query[0].transpose(0, 1), self._kernels.units_of(step)
        return self._kernels.attend(rows, pools, units, self._form, step.pools.block_size)[None]

    def agrees(self) -> bool:
        """Whether it computes what `attend_paged` does, over pools with random K and V of earlier tokens."""
        form, device, dtype = self._form, self._kernels.device, self._kernels.dtype
        units = make_check_units(form.scoring.window)
        num_tokens = int(units.num_tokens.sum())
        shapes = [(form.num_heads, form.key_size), (form.num_kv_heads, form.key_size)]
        shapes.append((form.num_kv_heads, form.value_size))
        rows = [
            random_rows(1, heads, num_tokens, size, seed=seed).to(device, dtype)
            for seed, (heads, size) in enumerate(shapes)
        ]
        results = []
        query, key, value = rows
        if form.scoring.values_in_keys:
            value = key[..., : form.value_size]
        for attend in (self.__call__, attend_paged):
            pools = KVPools(int(units.block_tables.max()) + 1, CHECK_BLOCK_SIZE)
            new = (each[0].transpose(0, 1) for each in (key, value))
            for pool in pools.of_layer(0, *new, values_in_keys=form.scoring.values_in_keys):
                pool[: pools.scratch_slot] = random_rows(*pool[: pools.scratch_slot].shape, seed=3).to(device, dtype)
            results.append(attend(PagedStep(units, pools, device), 0, query, key, value, form.scoring))
        return is_close(results[0], results[1])


def exchange_norm(module: nn.Module, kernels: CudaKernels) -> bool:
    """Give an RMS norm the kernel. Returns whether it computes what the kernel does."""
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or weight.dtype is not kernels.dtype:
        return False
    if not isinstance(epsilon, float):
        return False
    original, norm = module.forward, Norm(weight.data, epsilon)

    def forward(hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype is not kernels.dtype:
            return cast(Tensor, original(hidden_states))
        return kernels.rms_norm(hidden_states, norm)

    is_exchanged = _exchange_forward(module, forward, _rows_for(kernels, len(weight)))
    if is_exchanged:
        module.__dict__[NORM_EPSILON] = epsilon
    return is_exchanged


def _exchange_forward(module: nn.Module, forward: Callable[[Tensor], Tensor], rows: Tensor) -> bool:
    """Give a module another forward, if it computes the same for `rows`. Returns whether it does."""
    try:
        is_exchanged = is_close(forward(rows), module(rows))
    except MISFITS:
        return False
    if is_exchanged:
        module.__dict__["forward"] = forward
    return is_exchanged


def exchange_projection(projection: LatentProjection, kernels: CudaKernels) -> bool:
    """Give a projection of latents the kernel for both of its products. Returns whether they agree with torch's."""
    weights = tuple(weight.contiguous() for weight in projection.head_weights())
    if projection.weight.dtype is not kernels.dtype:
        return False
    products: list[HeadProduct] = []
    for weight in weights:
        rows = random_rows(1, len(weight), NUM_CHECK_ROWS, weight.shape[2]).to(kernels.device, kernels.dtype)
        try:
            is_right = is_close(kernels.linear_heads(rows, weight), torch.matmul(rows, weight.transpose(1, 2)))
        except MISFITS:
            is_right = False
        if not is_right:
            return False
        products.append(partial(_multiply_heads, kernels, weight))
    projection.use(*products)
    return True


def _multiply_heads(kernels: CudaKernels, weight: Tensor, rows: Tensor) -> Tensor:
    return kernels.linear_heads(rows, weight)


def exchange_gate(module: nn.Module, kernels: CudaKernels) -> bool:
    """Give a gate that returns (logits, weights, choices) the kernels. Its logits are not returned any more.

    A gate with weights in float32 computes in float32, whatever the network does.
    """
    weight, num_chosen = cast(Tensor, module.weight), getattr(module, "top_k", None)
    if weight.dtype not in (kernels.dtype, torch.float32) or not isinstance(num_chosen, int):
        return False
    if len(weight) > _MOST_EXPERTS or num_chosen > _MOST_CHOSEN:
        return False
    arguments = [_rows_for(kernels, weight.shape[1])]
    if _CORRECTION in signature(module.forward).parameters:  # the gate is given its correction with each call
        arguments += [random_rows(1, len(weight))[0].to(kernels.device)]
    with suppress(*MISFITS):
        _, wanted, ids = module(*arguments)
        for gate in _likely_gates(module, weight.dtype, num_chosen):
            forward = _GateForward(kernels, weight, gate)
            if _is_same_choice(forward(*arguments)[:0:-1], (ids, wanted)):
                module.__dict__["forward"] = forward
                return True
    return False


def _likely_gates(module: Any, dtype: torch.dtype, num_chosen: int) -> Iterator[GateForm]:
    """Forms that a gate's parts suggest, of which the comparison decides for one."""
    statics = getattr(module, "moe_statics", module)
    correction = getattr(statics, _CORRECTION, None)
    groups = getattr(module, "num_group", 1), getattr(module, "topk_group", 1)
    if correction is not None:
        correction = correction.detach().flatten().to(torch.float32)
    for precision, is_sigmoid, normalizes in product((dtype, torch.float32), (False, True), (True, False)):
        yield GateForm(
            num_chosen,
            precision,
            is_sigmoid=is_sigmoid,
            normalizes=normalizes,
            factor=float(getattr(module, "routed_scaling_factor", 1.0)),
            bias=module._parameters.get("bias"),
            correction=correction,
            num_groups=groups[0],
            num_kept_groups=groups[1],
        )


class _GateForward:
    """The forward of an exchanged gate."""

    def __init__(self, kernels: CudaKernels, weight: Tensor, gate: GateForm) -> None:
        self._kernels, self._weight, self._gate = kernels, weight, gate

    def __call__(
        self, hidden_states: Tensor, e_score_correction_bias: Tensor | None = None
    ) -> tuple[None, Tensor, Tensor]:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        if rows.dtype is not self._weight.dtype:
            rows = rows.to(self._weight.dtype)
        logits, gate = self._kernels.product(rows, self._weight, dtype=self._gate.dtype), self._gate
        if e_score_correction_bias is not None:
            gate = gate._replace(correction=e_score_correction_bias.to(torch.float32))
        ids, weights = self._kernels.choose(logits, gate)
        return None, weights, ids


def _is_same_choice(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> bool:
    """Whether two gates choose the same experts in nearly all rows, and weigh them alike."""
    if found[0].shape != wanted[0].shape:
        return False
    ids, order = found[0].sort(1)
    wanted_ids, wanted_order = wanted[0].sort(1)
    is_same = (ids == wanted_ids).all(1)
    if float(is_same.to(torch.float32).mean()) < _LEAST_SAME_CHOICES:
        return False
    weights, theirs = found[1].gather(1, order), wanted[1].to(torch.float32).gather(1, wanted_order)
    return is_close(weights[is_same], theirs[is_same])


def exchange_experts(module: nn.Module, kernels: CudaKernels) -> bool:
    """Give a tagged experts module the kernels. Returns whether they compute what the module does."""
    tag, experts = tag_of(module), cast(PackedExperts, module)
    if tag.dtype is not kernels.dtype or getattr(experts, "has_post_expert_norm", False) or not experts.has_gate:
        return False
    is_relaid = experts.is_transposed or _clamp_of(experts) is not None
    if is_relaid and tag.logical_of is not None:
        return False  # experts that move are read and written in the layout of the module
    table = _relay(experts)
    if not len(table.up):
        return True  # a worker without experts has nothing to compute
    own = CudaExperts(kernels, table)
    rows = _rows_for(kernels, table.hidden)
    counts, slot = torch.zeros(len(table.up), dtype=torch.int64), _filled_slot(tag)
    counts[slot] = len(rows)
    found = torch.empty_like(rows)
    try:
        own.answers([(slot, len(rows))], rows, found)
        is_right = is_close(found, run_each(experts, rows, counts))
    except MISFITS:
        is_right = False
    if not is_right:
        return False
    if is_relaid:  # only the kernels read the weights from here on
        for weight in (weights_of(experts).up, experts.down_proj):
            weight.data = weight.data.new_empty(0)
    retag(module, in_place=own)
    return True


def _filled_slot(tag: ExpertLayer) -> int:
    """Return a slot that has an expert, whose weights are not all zero; 0 if none has."""
    return 0 if tag.logical_of is None else int((tag.logical_of != EMPTY).argmax())


def _clamp_of(experts: Any) -> tuple[float, float] | None:
    """(limit, alpha) of GPT-OSS's activation, whose gates and ups alternate; None for any other."""
    limit, alpha = getattr(experts, "limit", None), getattr(experts, "alpha", None)
    return None if limit is None or alpha is None else (float(limit), float(alpha))


def _relay(experts: PackedExperts) -> ExpertWeightTable:
    """Weights in the kernels' layout: those of the module where they have it."""
    up, up_bias, down, down_bias, up_scales, down_scales = weights_of(experts)
    clamp, block = _clamp_of(experts), getattr(experts, BLOCK, None)
    is_interleaved = clamp is not None
    if experts.is_transposed or is_interleaved:
        first = up.data.transpose(1, 2) if experts.is_transposed else up.data
        first = _separate(first, 1) if is_interleaved else first.contiguous()
        second = down.data.transpose(1, 2).contiguous() if experts.is_transposed else down.data
    else:
        first, second = up.data, down.data
    biases = [None if each is None else each.data for each in (up_bias, down_bias)]
    if is_interleaved and biases[0] is not None:
        biases[0] = _separate(biases[0], 1)
    return ExpertWeightTable(first, second, biases[0], biases[1], clamp, up_scales, down_scales, block)


def _separate(weights: Tensor, axis: int) -> Tensor:
    """Gates, then ups, of weights in which they alternate."""
    even = torch.arange(0, weights.shape[axis], 2, device=weights.device)
    return torch.cat([weights.index_select(axis, even), weights.index_select(axis, even + 1)], axis)


def _rows_for(kernels: CudaKernels, size: int) -> Tensor:
    return random_rows(NUM_CHECK_ROWS, size).to(kernels.device, kernels.dtype)
