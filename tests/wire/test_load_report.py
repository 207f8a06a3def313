"""The header of a server's load: what is written is read, and nothing else is."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.core.load_figures import ROUTED_FIGURES, LoadFigures
from moestro.wire.load_report import LoadReport, merged_load, read, written

COUNTS = st.one_of(st.none(), st.integers(0, 2**53))
SHARES = st.one_of(st.none(), st.floats(0, 1))
LOADS = st.builds(
    LoadFigures,
    num_running=COUNTS,
    num_waiting=COUNTS,
    kv_usage=SHARES,
    queued_prefill_tokens=COUNTS,
    num_tokens=COUNTS,
)


@given(LOADS, st.integers(0, 60_000_000))
def test_law_what_is_written_is_read(load, age_us):
    report = LoadReport(age_us, load)
    text = written(report)
    assert text.isascii()
    assert text.isprintable()
    assert read(text.encode()) == report


def test_engines_behind_one_port_are_summed_and_fractions_are_their_mean():
    first = LoadFigures(num_running=1, num_waiting=2, kv_usage=0.5, queued_prefill_tokens=10, num_tokens=100)
    second = LoadFigures(num_running=3, num_waiting=0, kv_usage=0.1, queued_prefill_tokens=5)
    merged = merged_load([first, second])
    assert (merged.num_running, merged.num_waiting, merged.queued_prefill_tokens) == (4, 2, 15)
    assert merged.kv_usage == pytest.approx(0.3)
    assert merged.num_tokens is None, "an engine does not report it"


def test_only_figures_that_routers_keep_are_written():
    load = LoadFigures(num_running=1, num_preemptions=7, num_stored_bytes=9)
    assert json.loads(written(LoadReport(0, merged_load([load])))) == {"age_us": 0, "load": {"num_running": 1}}


@pytest.mark.parametrize(
    "value",
    [
        *(b"", b"{", b"[]", b"1", b'{"age_us": 1}', b'{"load": {}}', b"\xff\xfe", b"TEXT named_metrics.x=1"),
        *(b'{"age_us": -1, "load": {}}', b'{"age_us": 1e300, "load": {}}', b'{"age_us": "1", "load": {}}'),
        *(b'{"age_us": 60000001, "load": {}}', b'{"age_us": 0, "load": {"num_running": -1}}'),
        *(b'{"age_us": 0, "load": {"num_running": 1.5}}', b'{"age_us": 0, "load": {"kv_usage": NaN}}'),
        *(b'{"age_us": 0, "load": {"num_tokens": 9007199254740993}}', b'{"age_us": 0, "load": {"kv_usage": -0.1}}'),
        *(b'{"age_us": 0, "load": {"kv_usage": 1e400}}', b"[" * 1000, b'{"age_us": 0, "load": {}}' + b" " * 1024),
    ],
)
def test_what_is_no_report_is_ignored(value):
    assert read(value) is None


@given(st.binary(max_size=200))
def test_law_no_value_raises(value):
    report = read(value)
    assert report is None or all(
        each is None or each >= 0 for each in (getattr(report.load, name) for name in ROUTED_FIGURES)
    )
