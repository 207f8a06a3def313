"""Sources of kernels: sums along the inner dimension of a product belong to the matrix units, which have one order.

The order of `tl.sum` depends on how a compiler spreads a tile over warps, so that a row of another tile has other bits.
Triton's interpreter does not show it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from moestro.model import cuda

SOURCES = Path(cuda.__file__).parent / "source"
REDUCTIONS = {"sum", "cumsum", "reduce", "associative_scan", "cumprod", "xor_sum"}
# Kernels that sum integers, or a row in a program whose shape knows no number of rows.
MAY_SUM = {
    "products.py": {"sort_pairs"},
    "rows.py": {"add_norm", "heads", "choose", "add_answers"},
}


def sums(source: str) -> Iterator[str]:
    """Yield the functions that reduce with `tl`, once for each call."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in REDUCTIONS:
                    yield function.name


@pytest.mark.parametrize("path", sorted(SOURCES.glob("*.py")), ids=lambda path: path.name)
def test_products_and_attention_sum_in_matrix_units_alone(path):
    assert set(sums(path.read_text())) <= MAY_SUM.get(path.name, set())


def test_the_check_notices_a_sum_of_weights_in_attention():
    source = (SOURCES / "attend.py").read_text()
    broken = source.replace('tl.max(tl.dot(weight, ones, input_precision="ieee"), 1)', "tl.sum(weight, 1)")
    assert broken != source
    assert list(sums(broken)) == ["_add_tile"]
