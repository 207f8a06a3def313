"""Triton's interpreter as these tests correct it: bfloat16 is a number, and a product has one order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from support import triton_interpreter


def test_bfloat16_is_read_and_rounded_as_torch_does():
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    numbers[:4] = torch.tensor([0.0, float("inf"), 1 + 2**-8, 1 + 3 * 2**-8])  # the last two are ties
    bits = numbers.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert (triton_interpreter.rounded(numbers.numpy()) == bits).all()
    assert (triton_interpreter.widened(bits) == numbers.to(torch.bfloat16).float().numpy()).all()
    assert np.isnan(triton_interpreter.widened(triton_interpreter.rounded(np.array([np.nan], np.float32)))).all()


def test_a_product_does_not_depend_on_rows_columns_or_depth_of_a_tile():
    draw = np.random.default_rng(0)
    x, y, total = (draw.normal(size=shape).astype(np.float32) for shape in ((16, 64), (64, 32), (16, 32)))
    whole = triton_interpreter.multiply(x, y, total)
    assert np.allclose(whole, total + x @ y, atol=1e-4)
    in_two = triton_interpreter.multiply(x[:, :32], y[:32], total)
    assert (triton_interpreter.multiply(x[:, 32:], y[32:], in_two) == whole).all()
    assert (triton_interpreter.multiply(x[3:5], y[:, 7:9], total[3:5, 7:9]) == whole[3:5, 7:9]).all()


def test_float8_has_the_numbers_of_torch():
    wanted = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    assert torch.equal(torch.from_numpy(triton_interpreter.float8_numbers()).nan_to_num(1e9), wanted.nan_to_num(1e9))


@pytest.mark.parametrize(
    ("operation", "x", "y", "is_wrong"),
    [
        ("add", [2**31 - 1, 0], [0, 5], False),
        ("add", [2**31 - 1, 0], [1, 5], True),
        ("sub", [-(2**31)], [1], True),
        ("mul", [2**16, 3], [2**15, 3], True),
        ("mul", [2**16, 3], [-(2**15), 3], False),
    ],
)
def test_integers_that_overflow_are_found(operation, x, y, is_wrong):
    assert triton_interpreter.overflows(operation, np.array(x, np.int32), np.array(y, np.int32)) == is_wrong


def test_a_kernel_whose_integers_overflow_fails(device):
    if device.type == "cuda":
        pytest.skip("a GPU checks no integers")
    with pytest.raises(Exception, match="int32 overflows in mul"):
        _square[(1,)](torch.zeros(1, dtype=torch.int32), 1 << 16)


@triton.jit
def _square(out, number):
    tl.store(out, number * number)
