from __future__ import annotations

import numpy as np
import pytest
import torch

from moestro.model.check import paged_units
from moestro.model.pools import KVPools
from moestro.model.staged.arena import ColumnForm, LayerArguments
from moestro.model.step import PagedStep

CPU = torch.device("cpu")
CONSTANT = torch.ones(4)


def make_step(num_tokens: int) -> PagedStep:
    units = paged_units([(0, np.arange(num_tokens, dtype=np.int32))], np.array([[0, 1, 2]], np.int32))
    return PagedStep(units, KVPools(3, 4), CPU)


def record(num_tokens: int, **more: object):
    """Arguments of four layers: two kinds of rotary tables, one of them with its tokens in the last axis."""
    step = make_step(num_tokens)
    local = tuple(torch.rand(1, num_tokens, 8) for _ in range(2))
    whole = [torch.rand(3, 2, num_tokens, dtype=torch.float64)]
    common = {"position_ids": step.position_ids, "paged_step": step, "mask": None, "use_cache": False, **more}
    tables = [{"local": local}, {"global": whole}, {"global": whole}, {"local": local}]
    return [{"tables": table, "constant": CONSTANT, **common} for table in tables], step


def make_arguments(**more: object) -> tuple[LayerArguments, list]:
    first, second = record(8, **more)[0], record(5, **more)[0]
    return LayerArguments(first, second, (8, 5)), first


def test_a_tensor_that_layers_share_is_one_column():
    arguments, _ = make_arguments()
    assert arguments.columns == [
        ColumnForm((1, 8), torch.float32),
        ColumnForm((1, 8), torch.float32),
        ColumnForm((1,), torch.int64),
        ColumnForm((3, 2), torch.float64),
    ]
    assert [column.num_bytes for column in arguments.columns] == [32, 32, 8, 48]


def test_layers_with_the_same_arguments_are_of_one_kind():
    assert make_arguments()[0].kind_of == (0, 1, 1, 0)


def test_filled_arguments_are_the_recorded_ones_at_these_tokens():
    arguments, _ = make_arguments()
    recording, _ = record(7)
    columns = arguments.split(recording)
    assert [column.shape[1:] for column in columns] == [torch.Size(form.sizes) for form in arguments.columns]
    rows, step = torch.tensor([6, 0, 3]), make_step(3)
    for layer, kind in enumerate(arguments.kind_of):
        filled = arguments.fill(kind, lambda column: columns[column][rows], step)
        known = recording[layer]
        assert filled.keys() == known.keys()
        assert filled["paged_step"] is step
        assert filled["constant"] is CONSTANT
        assert filled["mask"] is None
        assert torch.equal(filled["position_ids"], known["position_ids"][:, rows])
        ((name, tables),) = filled["tables"].items()
        assert type(tables) is type(known["tables"][name])
        axis = 1 if name == "local" else 2
        for ours, theirs in zip(tables, known["tables"][name], strict=True):
            assert torch.equal(ours, theirs.index_select(axis, rows))


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (torch.zeros(8, 8), torch.zeros(5, 5), "no single token axis"),
        (torch.zeros(16), torch.zeros(10), "no single token axis"),
        (torch.zeros(3), torch.ones(3), "other values"),
        (torch.zeros(8), torch.zeros(5, 1), "no single token axis"),
        (8, 5, "8 in one step and 5 in another"),
        (None, 5, "another type"),
        ((torch.zeros(2), None), (torch.zeros(2), 1), "another type"),
    ],
)
def test_an_argument_that_depends_on_the_step_but_not_by_token_is_refused(first, second, why):
    with pytest.raises(ValueError, match=f"more.* of layer 0 .*{why}|more.* of layer 0 is {why}"):
        LayerArguments(record(8, more=first)[0], record(5, more=second)[0], (8, 5))
