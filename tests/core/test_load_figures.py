"""Load figures: what follows from the struct's metadata."""

from __future__ import annotations

import msgspec
import pytest

from moestro.core.load_figures import (
    FIGURES,
    IDLE,
    ROUTED_FIGURES,
    LoadFigures,
    LockStepCounts,
    PaceCounts,
    PassCounts,
    figure_values,
)
from moestro.core.views import EngineTable, Figure


def test_every_field_has_a_spec():
    parts = {"pass_counts": PassCounts, "lock_step": LockStepCounts, "pace": PaceCounts}
    fields = {
        *LoadFigures.__struct_fields__,
        *(name for part in parts.values() for name in part.__struct_fields__),
    } - parts.keys()
    assert fields == FIGURES.keys()


def test_no_two_figures_have_one_metric():
    metrics = [spec.metric for spec in FIGURES.values() if spec.metric is not None]
    assert len(set(metrics)) == len(metrics)


def test_every_routed_figure_is_a_column_of_routers():
    table = EngineTable.blank(1)
    columns = {name for name in EngineTable.__dataclass_fields__ if isinstance(getattr(table, name), Figure)}
    assert columns == set(ROUTED_FIGURES)


@pytest.mark.parametrize("encoding", [msgspec.json, msgspec.msgpack])
def test_a_report_is_the_same_after_the_wire_and_omits_what_it_does_not_contain(encoding):
    for report in (IDLE, LoadFigures(), LoadFigures(num_running=0, pass_counts=PassCounts(num_passes=1))):
        assert encoding.decode(encoding.encode(report), type=LoadFigures) == report
    assert encoding.decode(encoding.encode(LoadFigures(num_running=0))) == {"num_running": 0}


def test_values_are_zero_where_a_report_has_none():
    values = figure_values(LoadFigures(num_running=3, pass_counts=PassCounts(passed_over_ns=7)))
    assert {name: value for name, value in values.items() if value} == {"num_running": 3, "passed_over_ns": 7}
    assert values.keys() == FIGURES.keys()
