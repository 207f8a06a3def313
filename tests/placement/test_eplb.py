"""`placement/eplb.py` against outputs of DeepSeek's EPLB and of vLLM, which `tools/eplb_cases.py` stored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from moestro.placement.eplb import keep_slots, rebalance_experts, rebalance_experts_vllm

STORED = np.load(Path(__file__).with_name("eplb_cases.npz"))
SCALE = 1 / 3


@dataclass
class Case:
    weight: np.ndarray
    num_replicas: int
    num_groups: int
    num_nodes: int
    num_gpus: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.num_replicas, self.num_groups, self.num_nodes, self.num_gpus

    @property
    def is_hierarchical(self) -> bool:
        return self.num_nodes > 1 and self.num_groups % self.num_nodes == 0


class Reader:
    """Takes the arrays of one case after another off the stored ones."""

    def __init__(self) -> None:
        self.at: dict[str, int] = {}
        self.arrays = {name: STORED[name] for name in STORED.files}

    def take(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        start = self.at.get(name, 0)
        self.at[name] = start + int(np.prod(shape))
        return self.arrays[name][start : self.at[name]].reshape(shape)

    def take_case(self, prefix: str) -> Case:
        num_layers, num_experts, *sizes, is_scaled = self.take(f"{prefix}_sizes", (7,)).tolist()
        weight = self.take(f"{prefix}_weight", (num_layers, num_experts))
        return Case(weight * (SCALE if is_scaled else 1.0), *sizes)

    def check_end(self, prefix: str) -> None:
        for name, array in self.arrays.items():
            assert not name.startswith(prefix) or self.at[name] == len(array)


def test_the_example_of_deepseeks_readme():
    weight = [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
    physical, logical, count = rebalance_experts(weight, 16, 4, 2, 8)
    assert physical.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    assert count[0].tolist() == [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1]
    assert logical[0, 1].tolist() == [15, 13]
    assert logical[0, 0].tolist() == [12, -1]


def test_five_hundred_cases_equal_deepseeks_tensors():
    reader, cases = Reader(), []
    for _ in range(500):
        case = reader.take_case("deepseek")
        found = rebalance_experts(case.weight, *case.sizes)
        count = reader.take("deepseek_count", case.weight.shape)
        shapes = (len(case.weight), case.num_replicas), (*case.weight.shape, int(count.max())), case.weight.shape
        physical = reader.take("deepseek_physical", shapes[0])
        expected = physical, reader.take("deepseek_logical", shapes[1]), count
        for own, peers, shape in zip(found, expected, shapes, strict=True):
            assert own.dtype == np.int64
            assert own.shape == shape
            np.testing.assert_array_equal(own, peers, err_msg=str(case))
        cases.append(case)
    reader.check_end("deepseek")
    # The cases have all kinds.
    assert sum(case.is_hierarchical for case in cases) > 150
    assert sum(not case.is_hierarchical for case in cases) > 150
    assert sum(case.num_replicas == case.weight.shape[1] for case in cases) > 50
    assert sum((case.weight == 0).any() for case in cases) > 50


def test_one_hundred_cases_equal_vllms_maps():
    reader = Reader()
    for _ in range(100):
        case = reader.take_case("vllm")
        shape = len(case.weight), case.num_replicas
        old = reader.take("vllm_old", shape) if reader.take("vllm_has_old", (1,))[0] else None
        found = rebalance_experts_vllm(case.weight, *case.sizes, old)
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, reader.take("vllm_physical", shape), err_msg=str(case))
    reader.check_end("vllm")


@pytest.mark.parametrize("sizes", [(64, 4, 4, 8), (80, 1, 1, 16)])
@pytest.mark.parametrize("place", [lambda *args: rebalance_experts(*args)[0], rebalance_experts_vllm])
def test_few_layers_are_placed_as_among_many(place, sizes):
    weight = np.random.default_rng(4).integers(0, 40, (60, 64)) * SCALE  # with equal ones
    together = place(weight, *sizes)
    assert np.array_equal(together, np.concatenate([place(layer[None], *sizes) for layer in weight]))


def test_a_tensor_is_taken_through_its_array_interface():
    class Tensor:
        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            return np.array([[4.0, 3.0, 2.0, 1.0]])

    assert rebalance_experts(Tensor(), 4, 1, 1, 2)[0].tolist() == [[0, 3, 1, 2]]


def test_experts_that_stay_on_a_device_keep_their_slots():
    """A second copy of expert 4 comes to the second device; it takes the slot that 5 leaves."""
    old = np.array([[0, 1, 2, 3, 4, 5]])
    new = np.array([[2, 7, 0, 4, 3, 4]])
    assert keep_slots(new, old, 2).tolist() == [[0, 7, 2, 3, 4, 4]]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((16, 4, 2, 7), "7 devices cannot be divided among 2 nodes"),
        ((17, 4, 2, 8), "17 slots cannot be divided among 8 devices"),
        ((8, 4, 2, 8), "12 experts do not fit into 8 slots"),
        ((16, 8, 2, 8), "12 experts cannot be divided into 8 groups"),
        ((16, 4, 0, 8), "must be at least 1"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        rebalance_experts(np.ones((2, 12)), *sizes)


@pytest.mark.parametrize("figure", [-1.0, np.nan, np.inf])
def test_a_load_without_meaning_is_refused(figure):
    with pytest.raises(ValueError, match="negative or not finite"):
        rebalance_experts([[1.0, figure]], 2, 1, 1, 2)


def test_an_old_table_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="old table has the shape"):
        rebalance_experts_vllm(np.ones((1, 4)), 4, 1, 1, 2, np.zeros((1, 6), np.int64))
