"""Triton's interpreter, which runs kernels on a CPU in NumPy, made fit for tests of bfloat16 and of bits.

As of Triton 3.9 it differs from a GPU in four ways, which `correct` mends:

- `tl.dot` multiplies the raw bits of bfloat16 as integers. They are widened to float32 first.
- `tl.dot` is NumPy's matmul, whose BLAS rounds a row by its place in the tile, and adds the accumulator at the end.
  Here each element starts from its accumulator and adds groups of k in ascending order, as tensor cores do: neither
  place nor depth of a tile changes a bit.
- A conversion from float32 to bfloat16 truncates. Here it rounds to nearest even, as the hardware does.
- NaN of float8 becomes a number.

It cannot show races, sums whose order depends on a layout (`tl.sum`), or what a compiler makes of a kernel.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

GROUP = 8  # numbers of k that one instruction adds
_EXACT: dict[str, np.ufunc] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def interpret_without_gpu() -> None:
    """Choose the interpreter on a machine without a GPU. Triton reads the variable when it is first imported."""
    if not Path("/proc/driver/nvidia").exists():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def is_interpreting() -> bool:
    """Whether kernels run in the interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def widened(bits: np.ndarray) -> np.ndarray:
    """bfloat16 as uint16, in float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(numbers: np.ndarray) -> np.ndarray:
    """float32 in bfloat16 as uint16, to nearest even."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), nearest)


def float8_numbers() -> np.ndarray:
    """float32[256], the numbers of float8_e4m3fn by their bits."""
    bits = np.arange(128)
    exponent, mantissa = bits >> 3, bits & 7
    numbers = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    numbers[127] = np.nan
    return np.concatenate([numbers, -numbers]).astype(np.float32)


def multiply(x: np.ndarray, y: np.ndarray, total: np.ndarray) -> np.ndarray:
    """total + x @ y of matrices, in groups of k."""
    total = total.copy()
    for begin in range(0, x.shape[1], GROUP):
        products = x[:, begin : begin + GROUP, None] * y[None, begin : begin + GROUP]
        total += np.add.reduce(products, axis=1)
    return total


def overflows(operation: str, x: np.ndarray, y: np.ndarray) -> bool:
    """Whether a sum, difference or product of integers of at most 32 bits has a value that their type lacks."""
    exact = _EXACT[operation](x.astype(np.int64), y.astype(np.int64))
    bounds = np.iinfo(x.dtype)
    return exact.size > 0 and not bounds.min <= exact.min() <= exact.max() <= bounds.max


def correct() -> None:
    """Mend the interpreter of this process, and speed it up. A second call changes nothing."""
    import triton.language as tl  # noqa: PLC0415 the variable must be set first
    from triton.runtime import interpreter  # noqa: PLC0415

    builder: Any = interpreter.InterpreterBuilder
    if hasattr(builder, "plain_cast"):
        return
    builder.plain_cast = builder.cast_impl
    handle = interpreter.TensorHandle

    def numbers(tensor: Any, dtype: np.dtype) -> np.ndarray:
        return widened(tensor.data) if tensor.dtype.scalar == tl.bfloat16 else tensor.data.astype(dtype, copy=False)

    def create_dot(_: Any, x: Any, y: Any, total: Any, *__: Any) -> Any:
        kind = total.data.dtype
        return handle(multiply(numbers(x, kind), numbers(y, kind), total.data), total.dtype.scalar)

    def cast_impl(self: Any, source: Any, to: Any) -> Any:
        kinds = source.dtype.scalar, to.scalar
        if kinds == (tl.float32, tl.bfloat16):
            return handle(rounded(source.data), tl.bfloat16)
        if kinds == (tl.bfloat16, tl.float32):
            return handle(widened(source.data), tl.float32)
        if kinds == (tl.float8e4nv, tl.float32):
            return handle(numbers_of_float8[source.data.view(np.uint8)], tl.float32)
        return self.plain_cast(source, to)

    def create_fp_to_fp(self: Any, source: Any, to: Any, mode: Any) -> Any:
        if tl.bfloat16 in (source.dtype.scalar, to.scalar) or source.dtype.scalar == tl.float8e4nv:
            return self.cast_impl(source, to)
        return plain(self, source, to, mode)

    plain, numbers_of_float8 = builder.create_fp_to_fp, float8_numbers()
    builder.create_dot, builder.cast_impl, builder.create_fp_to_fp = create_dot, cast_impl, create_fp_to_fp
    _speed_up(interpreter, tl)


def _speed_up(interpreter: Any, tl: Any) -> None:
    """Do once what the interpreter does for each call of a function, and check integers in NumPy alone.

    Together they took two thirds of its time.
    """

    @cache
    def patch_once(function: Any) -> Any:
        patch_language(function)
        return interpreter._LangPatchScope()  # with nothing to restore

    def dtype_of(kind: Any) -> np.dtype:
        scalar = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return addresses if isinstance(scalar, tl.pointer_type) else dtype_of_scalar(scalar)

    def check_overflow(_: Any, x: Any, y: Any, operation: Any) -> None:
        if x.type.scalar.int_bitwidth < 64:
            name = operation.__name__
            assert not overflows(name, x.handle.data, y.handle.data), f"{x.type.scalar} overflows in {name}"

    patch_language, interpreter._patch_lang = interpreter._patch_lang, patch_once
    addresses, dtype_of_scalar = np.dtype(np.uint64), cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = dtype_of
    type(interpreter.interpreter_semantic).binary_op_sanitize_overflow_impl = check_overflow
