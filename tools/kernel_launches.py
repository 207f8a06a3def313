"""Every distinct launch of GPU kernels in layers of five models, recorded without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moestro.core.views import LS
from moestro.core.work import LOGITS_LAST, SAMPLING_ROW, Units
from moestro.model.attention import AttentionForm, Scoring
from moestro.model.cuda.functions import CudaExperts, CudaKernels, ExpertWeightTable, GateForm, HeadNorms, Norm, Product
from moestro.model.cuda.source.launches import FOUND
from moestro.model.cuda.tiles import Walk, replace_launcher
from moestro.model.pools import KVPools
from moestro.model.step import PagedStep
from moestro.model.tensors import FLOAT8, Float8Weight, ScaleBlock

# Compute capability, times ten -> bytes of shared memory that a program may have.
SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
_FIRST_FLOAT8 = 89
_FIRST_AHEAD = 90  # from which kernels start before those before them are done
_MOST_BY_ADDRESS = 128  # rows of a graph of one layer, whose weights are found by their addresses
ROWS = (1, 32, 64, 128, 512, 1024, 2048)  # so many that each tile is chosen
CONTEXT, BLOCK = 1024, 16
_HEAD_VALUE = 128  # of DeepSeek's heads
_TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
_TYPES |= {torch.uint64: "*u64", FLOAT8: "*fp8e4nv"}
_BLOCK = ScaleBlock(128, 128)  # of published checkpoints in float8


class Experts(NamedTuple):
    """Routed experts of a layer."""

    number: int
    chosen: int
    inner: int


@dataclass(frozen=True)
class Model:
    """Sizes of a network.

    Attributes:
        heads: query heads, KV heads, sizes of K and V.
        dense: (out, in) of products besides those of a canonical front, or of all where there is no such front.
        windows: of its attentions.
        has_biases: whether products and experts have biases, experts are clamped and attention has sinks.
        has_head_norms: whether heads have norms. None means that attention is latent, and the front not canonical.
        is_float8: whether weights are in float8, but for the head's and the gate's.
    """

    name: str
    hidden: int
    heads: tuple[int, int, int, int]
    experts: Experts
    dense: tuple[tuple[int, int], ...]
    windows: tuple[int | None, ...] = (None,)
    has_biases: bool = False
    has_head_norms: bool | None = False
    is_float8: bool = False


MODELS = (
    Model(
        "Qwen3-30B-A3B", 2048, (32, 4, 128, 128), Experts(128, 8, 768), ((151936, 2048),), has_head_norms=True
    ),
    Model(
        "GPT-OSS-20B", 2880, (64, 8, 64, 64), Experts(32, 4, 2880), ((201088, 2880),), (None, 128), has_biases=True
    ),
    Model(
        "DeepSeek-V2-Lite", 2048, (16, 1, 576, 512), Experts(64, 6, 1408),
        ((3072, 2048), (576, 2048), (102400, 2048)), has_head_norms=None,
    ),
    Model(
        "Qwen3-30B-A3B-FP8", 2048, (32, 4, 128, 128), Experts(128, 8, 768), (), has_head_norms=True, is_float8=True
    ),
    Model(
        "DeepSeek-V3", 7168, (128, 1, 576, 512), Experts(256, 8, 2048), ((1536, 7168), (24576, 1536), (576, 7168)),
        has_head_norms=None, is_float8=True,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """What Triton compiles for a launch.

    Attributes:
        model: name of the model that has it first.
        kernel: name of the kernel, and the module of `source` that has it.
        signature: (argument, type) of each argument; a constant has the type `constexpr`.
        constants: (argument, value) of compile-time arguments.
        aligned: arguments that 16 divides.
        options: number of warps and of stages.
    """

    model: str
    kernel: str
    module: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    options: tuple[tuple[str, int], ...]

    @property
    def key(self) -> str:
        """All that distinguishes it, the model apart."""
        sizes = " ".join(f"{name}={value}" for name, value in (*self.constants, *self.options))
        types = " ".join(f"{name}:{kind}{'/16' * (name in self.aligned)}" for name, kind in self.signature)
        return f"{self.kernel} {sizes} {types}"


def distinct_launches(target: int) -> list[Launch]:
    """Launches of all models at all numbers of rows on a GPU of compute capability `target` / 10, each once."""
    found: dict[str, Launch] = {}
    for model in MODELS:
        if model.is_float8 and target < _FIRST_FLOAT8:
            continue
        for launch in _record(model, target):
            found.setdefault(launch.key, launch)
    return list(found.values())


def _record(model: Model, target: int) -> list[Launch]:
    recorded: list[Launch] = []
    address = torch.empty(1, dtype=torch.uint64)

    def note(kernel: Any, _: object, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        options = {**options, "AHEAD": target >= _FIRST_AHEAD}
        recorded.append(_describe(model.name, kernel, args, options))
        if model.has_head_norms is not None and num_rows <= _MOST_BY_ADDRESS:
            names = FOUND.get(kernel.fn.__name__, {})
            found = (address if name in names else each for name, each in zip(kernel.arg_names, args, strict=False))
            recorded.append(_describe(f"{model.name} by address", kernel, tuple(found), options))

    before = replace_launcher(note)
    try:
        for num_rows in ROWS:
            _compute(model, num_rows, SHARED_BYTES[target])
    finally:
        replace_launcher(before)
    return recorded


def _describe(model: str, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Launch:
    """A launch as Triton specializes it: integers that are 1 become constants, others are aligned or not."""
    names = kernel.arg_names
    launch_options = {"num_warps": 4, "num_stages": 3} | {
        name: options[name] for name in ("num_warps", "num_stages") if name in options
    }
    constants = {name: value for name, value in options.items() if name in names}
    kinds, aligned = {}, []
    for name, value in zip(names, args, strict=False):
        if isinstance(value, Tensor):
            kinds[name] = _TYPES[value.dtype]
            aligned += [name]  # torch's memory is aligned, and kernels get whole tensors
        elif isinstance(value, float):
            kinds[name] = "fp32"
        elif value == 1:
            constants[name] = 1
        else:
            kinds[name] = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
            aligned += [name] if value % 16 == 0 else []
    signature = tuple((name, "constexpr" if name in constants else kinds[name]) for name in names)
    return Launch(
        model, kernel.fn.__name__, kernel.fn.__module__.rpartition(".")[2], signature, tuple(constants.items()),
        tuple(aligned), tuple(launch_options.items()),
    )  # fmt: skip


def _compute(model: Model, num_rows: int, shared_bytes: int) -> None:
    """Launch what layers of the model launch for so many decodes, or for one chunk from 512 rows up."""
    kernels = CudaKernels(torch.device("cpu"), torch.bfloat16)
    kernels.shared_bytes = shared_bytes
    for form in _forms(model):
        kernels.add_walk(Walk.of(form))
    hidden, norm = _empty(num_rows, model.hidden), Norm(_empty(model.hidden), 1e-6)
    kernels.rms_norm(hidden, norm)
    step = _step(num_rows)
    for product in _fronts(model, kernels, hidden, step):
        kernels.add_norm(hidden, product, norm)
    for num_out, num_in in model.dense:
        kernels.linear(_empty(num_rows, num_in), _weight(model, num_out, num_in))
    experts, is_gpt_oss = model.experts, model.has_biases
    logits = kernels.product(hidden, _empty(experts.number, model.hidden))
    bias = _empty(experts.number) if is_gpt_oss else None
    ids, weights = kernels.choose(
        logits, GateForm(experts.chosen, torch.bfloat16, is_sigmoid=False, normalizes=True, bias=bias)
    )
    own = CudaExperts(kernels, _expert_weights(model))
    own.weighted_sum(hidden, ids, weights, torch.empty(experts.number, dtype=torch.int64), hidden)
    own.answers([(0, num_rows)], hidden, torch.empty_like(hidden))


def _forms(model: Model) -> Iterator[AttentionForm]:
    for window in model.windows:
        sinks = _empty(model.heads[0]) if model.has_biases else None
        yield AttentionForm(*model.heads, Scoring(None, window, sinks, values_in_keys=model.has_head_norms is None))


def _fronts(model: Model, kernels: CudaKernels, hidden: Tensor, step: PagedStep) -> Iterator[Product]:
    """Launch the attentions of a step, behind the front's kernels where it is canonical. Yields the output products."""
    heads, kv_heads, size, value_size = model.heads
    num_rows = len(hidden)
    pools = _empty(1 << 12, kv_heads, size), _empty(1 << 12, kv_heads, value_size)
    for form in _forms(model):
        query = _empty(num_rows, heads, size)
        if model.has_head_norms is not None:
            num_out = (heads + 2 * kv_heads) * size
            qkv = kernels.product(
                hidden, _weight(model, num_out, model.hidden), _empty(num_out) if model.has_biases else None
            )
            norms = HeadNorms(_empty(size), _empty(size), 1e-6) if model.has_head_norms else None
            angles = _empty(num_rows, size), _empty(num_rows, size)
            query = kernels.heads(qkv, angles, norms, (*pools, step.write_slots), form)
        mixed = kernels.attend(query, pools, kernels.units_of(step), form, BLOCK)
        if model.has_head_norms is None:  # values of a head out of its latent
            mixed = kernels.linear_heads(mixed.transpose(0, 1)[None], _empty(heads, _HEAD_VALUE, value_size))[0]
            value_size = _HEAD_VALUE
        bias = _empty(model.hidden) if model.has_biases else None
        yield kernels.product(mixed.reshape(num_rows, -1), _weight(model, model.hidden, heads * value_size), bias)


def _step(num_rows: int) -> PagedStep:
    num_new = np.ones(num_rows, np.int32) if num_rows < 512 else np.array([num_rows], np.int32)
    start = np.full(len(num_new), CONTEXT - 1, np.int32)
    blocks = -(-int(start[0] + num_new[0]) // BLOCK)
    units = Units(
        slot=np.arange(len(start), dtype=np.int32), serial=np.arange(len(start)),
        service_class=np.full(len(start), LS, np.uint8), start=start, num_tokens=num_new, write_start=start,
        logits=np.full(len(start), LOGITS_LAST, np.uint8), block_tables=np.zeros((len(start), blocks), np.int32),
        sampling=np.zeros(len(start), SAMPLING_ROW), token_ids=np.zeros(num_rows, np.int32),
    )  # fmt: skip
    return PagedStep(units, KVPools(blocks, BLOCK), torch.device("cpu"))


def _expert_weights(model: Model) -> ExpertWeightTable:
    number, _, inner = model.experts
    shapes = (number, 2 * inner, model.hidden), (number, model.hidden, inner)
    if model.is_float8:
        scales = [torch.empty(number, *_BLOCK.grid(*shape)) for _, *shape in shapes]
        up, down = (torch.empty(shape, dtype=FLOAT8) for shape in shapes)
        return ExpertWeightTable(up, down, up_scales=scales[0], down_scales=scales[1], block=_BLOCK)
    up, down = (_empty(*shape) for shape in shapes)
    if not model.has_biases:
        return ExpertWeightTable(up, down)
    return ExpertWeightTable(up, down, _empty(number, 2 * inner), _empty(number, model.hidden), (7.0, 1.702))


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)  # memory that nothing touches takes no place


def _weight(model: Model, num_out: int, num_in: int) -> Tensor | Float8Weight:
    if not model.is_float8:
        return _empty(num_out, num_in)
    numbers, scales = torch.empty(num_out, num_in, dtype=FLOAT8), torch.empty(_BLOCK.grid(num_out, num_in))
    return Float8Weight(numbers, scales, _BLOCK)
