"""The compiled kernels as functions of tensors. A kernel checks nothing: its caller has checked shapes and dtypes."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from moestro.native.compiler import AMX_BF16

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
# Name of each kernel without its prefix -> types of its arguments.
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "set_threads": (_INT,),
    "pack": (_POINTER, _POINTER, _INT, _INT),
    "unpack": (_POINTER, _POINTER, _INT, _INT),
    "linear": (*[_POINTER] * 4, *[_INT] * 3),
    "linear_float": (*[_POINTER] * 4, *[_INT] * 3),
    "expert_answers": (*[_POINTER] * 3, _INT, *[_POINTER] * 3, *[_INT] * 2),
    "chosen_answers": (*[_POINTER] * 6, *[_INT] * 7),
    "add_answers": (*[_POINTER] * 4, *[_INT] * 3),
    "routed_experts": (*[_POINTER] * 7, *[_INT] * 5),
    "write_slots": (_POINTER, _INT, _INT, _POINTER, *[_INT] * 3, _POINTER),
    "attend": (_POINTER, _INT, _INT, *[_POINTER] * 7, *[_INT] * 8, _FLOAT),
    "rms_norm": (*[_POINTER] * 3, *[_INT] * 2, _FLOAT),
    "sigmoid": (_POINTER, _POINTER, _INT),
    "layer_front": (_POINTER,) * 9,
    "rotate": (_POINTER, _INT, _INT, *[_POINTER] * 3, *[_INT] * 3),
}
_RESULTS = {"chosen_answers": _INT}  # the others return nothing


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
        loaded = ctypes.CDLL(str(path))
        self.function: dict[str, ctypes._NamedFuncPointer] = {}
        for name, types in _SIGNATURES.items():
            try:
                function = loaded[f"moestro_{name}"]
            except AttributeError as error:
                raise OSError(f"{path} has no kernel {name}") from error
            function.argtypes, function.restype = types, _RESULTS.get(name)
            self.function[name] = function
        self._linear, self._linear_float = self.function["linear"], self.function["linear_float"]
        self._rms_norm, self._rotate = self.function["rms_norm"], self.function["rotate"]
        self.function["set_threads"](torch.get_num_threads())

    def linear(self, rows: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute `functional.linear` with a packed weight [out, in]. `rows`: bfloat16 [..., in]."""
        num_out, num_in = packed.shape
        rows = rows.contiguous()
        out = rows.new_empty(*rows.shape[:-1], num_out)
        num_rows = rows.numel() // num_in
        self._linear(
            rows.data_ptr(), packed.data_ptr(), _address(bias), out.data_ptr(), num_rows, num_out, num_in
        )  # fmt: skip
        return out

    def linear_float(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute `functional.linear` in float32 with a contiguous weight that is not packed."""
        num_out, num_in = weight.shape
        rows = rows.contiguous()
        out = rows.new_empty(*rows.shape[:-1], num_out)
        num_rows = rows.numel() // num_in
        self._linear_float(
            rows.data_ptr(), weight.data_ptr(), _address(bias), out.data_ptr(), num_rows, num_out, num_in
        )
        return out

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


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
