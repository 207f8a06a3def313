"""The compiled CPU kernels as functions of tensors, the layout of weights that they read, and the search for them.

A kernel checks nothing: its caller has checked shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

import torch
from torch import Tensor

from moestro.native.compiler import (
    AMX_BF16,
    AVX2,
    AVX512,
    AVX512_BF16,
    CPU_KERNELS,
    PLAIN,
    InstructionSet,
    instruction_set_of,
)
from moestro.native.library_search import FLOAT, INT, POINTER, LibrarySearch, load_functions

# The kernels compute rows in whole vectors, the widest of which has 16 entries. A head is rotated in two halves.
ROW_MULTIPLE, HEAD_MULTIPLE = 16, 32
_ARGUMENTS: dict[str, tuple[type, ...]] = {
    "set_threads": (INT,),
    "pack": (POINTER, POINTER, INT, INT),
    "unpack": (POINTER, POINTER, INT, INT),
    "linear": (*[POINTER] * 4, *[INT] * 3),
    "linear_heads": (POINTER, INT, INT, *[POINTER] * 3, *[INT] * 4),
    "linear_float": (*[POINTER] * 4, *[INT] * 3),
    "expert_answers": (*[POINTER] * 3, INT, *[POINTER] * 3, *[INT] * 2),
    "chosen_answers": (*[POINTER] * 6, *[INT] * 7),
    "add_answers": (*[POINTER] * 4, *[INT] * 3),
    "routed_experts": (*[POINTER] * 7, *[INT] * 5),
    "write_slots": (POINTER, INT, INT, POINTER, *[INT] * 3, POINTER),
    "attend": (POINTER, INT, INT, *[POINTER] * 7, *[INT] * 9, FLOAT),
    "rms_norm": (*[POINTER] * 3, *[INT] * 2, FLOAT),
    "sigmoid": (POINTER, POINTER, INT),
    "layer_front": (POINTER,) * 9,
    "rotate": (POINTER, INT, INT, *[POINTER] * 3, *[INT] * 3),
}
_RESULTS = {"chosen_answers": INT}  # the others return nothing


class KernelLibrary:
    """The kernels of a compiled file.

    Args:
        path: The file.
        instruction_set: Name of its instruction set.

    Raises:
        OSError: The file is no library of the kernels.

    Attributes:
        path, instruction_set: As above.
        function: The kernels by name; arguments are addresses, whole numbers and floats as the sources name them.
    """

    def __init__(self, path: Path, instruction_set: str) -> None:
        self.path, self.instruction_set = path, instruction_set
        # The operating system lends tile registers to a process that asks for them; others end at their first use.
        if instruction_set == AMX_BF16.name and not torch.cpu._init_amx():
            raise OSError("this process may not use AMX")
        self.function = load_functions(path, _ARGUMENTS, _RESULTS)
        self._linear, self._linear_float = self.function["linear"], self.function["linear_float"]
        self._linear_heads = self.function["linear_heads"]
        self._rms_norm, self._rotate = self.function["rms_norm"], self.function["rotate"]
        self.function["set_threads"](torch.get_num_threads())

    def linear(self, rows: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute `functional.linear` with a packed weight [out, in]. `rows`: bfloat16 [..., in]."""
        return _multiply(self._linear, rows, packed, bias)

    def linear_heads(self, rows: Tensor, packed: Tensor, num_out: int) -> Tensor:
        """Multiply the rows of each head with the head's own weight.

        Args:
            rows: bfloat16 [1, heads, tokens, in] in any layout whose last dimension is dense.
            packed: weights [out, in] of the heads from `KernelPacking.pack_heads`.
            num_out: number of outputs.

        Returns:
            [1, heads, tokens, out], in memory [tokens, heads, out].
        """
        _, num_heads, num_tokens, num_in = rows.shape
        out = rows.new_empty(1, num_tokens, num_heads, num_out)
        self._linear_heads(
            rows.data_ptr(),
            rows.stride(2),
            rows.stride(1),
            packed.data_ptr(),
            None,
            out.data_ptr(),
            num_tokens,
            num_heads,
            num_out,
            num_in,
        )
        return out.transpose(1, 2)

    def linear_float(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute `functional.linear` in float32 with a contiguous weight that is not packed."""
        return _multiply(self._linear_float, rows, weight, bias)

    def rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Compute weight * rows / root mean square of each row. `rows`: bfloat16 [..., size]; a size of whole 16s."""
        rows = rows.contiguous()
        out = torch.empty_like(rows)
        size = weight.shape[0]
        self._rms_norm(rows.data_ptr(), weight.data_ptr(), out.data_ptr(), rows.numel() // size, size, epsilon)
        return out

    def sigmoid(self, values: Tensor) -> Tensor:
        """Compute the sigmoid of each float32."""
        values = values.contiguous()
        out = torch.empty_like(values)
        self.function["sigmoid"](values.data_ptr(), out.data_ptr(), values.numel())
        return out

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate heads by position, the first half of each paired with the second.

        Args:
            heads: bfloat16 [1, heads, tokens, size] in any layout whose last dimension is dense; a size of whole 32s.
            cos, sin: contiguous bfloat16 [1, tokens, size].

        Returns:
            The same shape, in memory [tokens, heads, size].
        """
        _, num_heads, num_tokens, size = heads.shape
        out = heads.new_empty(1, num_tokens, num_heads, size)
        self._rotate(
            heads.data_ptr(),
            heads.stride(2),
            heads.stride(1),
            cos.data_ptr(),
            sin.data_ptr(),
            out.data_ptr(),
            num_tokens,
            num_heads,
            size,
        )
        return out.transpose(1, 2)


def _multiply(kernel: Callable[..., None], rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    num_out, num_in = weight.shape
    rows = rows.contiguous()
    out = rows.new_empty(*rows.shape[:-1], num_out)
    bias_address = None if bias is None else bias.data_ptr()
    num_rows = rows.numel() // num_in
    kernel(rows.data_ptr(), weight.data_ptr(), bias_address, out.data_ptr(), num_rows, num_out, num_in)
    return out


# The layout of weights.

_BLOCK = 64  # outputs of a block, as in `source/linear.h`


class KernelPacking:
    """The kernels' layout; implements `model.packing.WeightPacking`.

    A packed weight is a tensor of the weight's shape. Its entries are in another order, and its memory is filled up to
    a whole block.

    Args:
        library: The kernels.
    """

    def __init__(self, library: KernelLibrary) -> None:
        self.linear = library.linear
        self._pack, self._unpack = library.function["pack"], library.function["unpack"]

    def fits(self, weight: Tensor) -> bool:
        """Implement `WeightPacking.fits`."""
        return weight.dtype is torch.bfloat16 and weight.device.type == "cpu" and weight.shape[1] % 2 == 0

    def pack(self, weight: Tensor) -> Tensor:
        """Implement `WeightPacking.pack`."""
        num_out, num_in = weight.shape
        weight = weight.contiguous()
        memory = weight.new_empty(-(-num_out // _BLOCK) * _BLOCK * num_in)
        self._pack(weight.data_ptr(), memory.data_ptr(), num_out, num_in)
        return memory[: num_out * num_in].view(num_out, num_in)

    def pack_heads(self, weights: Tensor) -> Tensor:
        """Convert the weights [heads, out, in] of `KernelLibrary.linear_heads` to [heads, out in whole blocks, in]."""
        num_heads, num_out, num_in = weights.shape
        memory = weights.new_empty(num_heads, -(-num_out // _BLOCK) * _BLOCK, num_in)
        for weight, packed in zip(weights, memory, strict=True):
            dense = weight.contiguous()
            self._pack(dense.data_ptr(), packed.data_ptr(), num_out, num_in)
        return memory

    def unpack(self, packed: Tensor) -> Tensor:
        """Implement `WeightPacking.unpack`."""
        weight = torch.empty_like(packed)
        self._unpack(packed.data_ptr(), weight.data_ptr(), *packed.shape)
        return weight


# The search for the kernels, and the instruction set that this machine gets.


def _has_amx() -> bool:
    # The second asks the operating system for the tile registers, for all threads of this process.
    return torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()


_IS_USABLE: dict[InstructionSet, Callable[[], bool]] = {
    PLAIN: lambda: True,
    AVX2: torch.cpu._is_avx2_supported,
    AVX512: torch.cpu._is_avx512_supported,
    AVX512_BF16: torch.cpu._is_avx512_bf16_supported,
    AMX_BF16: _has_amx,
}


def usable_sets() -> tuple[InstructionSet, ...]:
    """Return the instruction sets that this machine has, the least first."""
    return tuple(takewhile(lambda each: _IS_USABLE[each](), CPU_KERNELS.built_sets()))


class KernelBuild(LibrarySearch[KernelLibrary]):
    """A search for the CPU kernels. If they are absent, a background thread compiles them.

    Args:
        chosen: Instruction set. None means the best of this machine that can be compiled.
        prebuilt: Folder of the wheel's kernels. None means that of the package.
        cache: Folder of compiled kernels. None means `cache_folder()`.
    """

    def __init__(
        self, chosen: InstructionSet | None = None, prebuilt: Path | None = None, cache: Path | None = None
    ) -> None:
        *lesser, best = usable_sets() if chosen is None else (chosen,)
        super().__init__(CPU_KERNELS, best, _load, prebuilt, cache, lesser[::-1])


def _load(path: Path) -> KernelLibrary:
    return KernelLibrary(path, instruction_set_of(path))
