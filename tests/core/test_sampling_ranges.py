"""Sampling parameters that are plain numbers: ranges, and the row that reaches the sampler."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moestro.core.request import SAMPLING_RANGES, SamplingDefaults, SamplingParams
from moestro.core.work import SAMPLING_ROW


def test_each_is_a_column_of_the_row_of_its_kind():
    for name in SAMPLING_RANGES:
        kind = np.int32 if isinstance(getattr(SamplingParams(), name), int) else np.float32
        assert SAMPLING_ROW[name] == kind


def test_defaults_are_in_their_ranges_and_neutral_ones_agree():
    for name, allowed in SAMPLING_RANGES.items():
        assert getattr(SamplingParams(), name) in allowed
    for name in SamplingDefaults.__struct_fields__:
        assert getattr(SamplingDefaults(), name) == getattr(SamplingParams(), name)


@pytest.mark.parametrize(
    ("name", "inside", "outside", "text"),
    [
        ("temperature", (0, 2), (-0.1, 2.1, math.nan), "between 0 and 2"),
        ("top_p", (1e-9, 1), (0, 1.1, math.nan), "above 0 and at most 1"),
        ("top_k", (-1, 2**31 - 1), (-2, 2**31), "between -1 and 2147483647"),
        ("repetition_penalty", (0.01, 100), (0, 101), "between 0.01 and 100"),
    ],
)
def test_a_range_has_its_bounds_and_says_so(name, inside, outside, text):
    allowed = SAMPLING_RANGES[name]
    assert all(value in allowed for value in inside)
    assert not any(value in allowed for value in outside)
    assert str(allowed) == text
