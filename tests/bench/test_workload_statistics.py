"""Figures of a workload against a slow, plain reading of the same requests."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.core.hashing import split_hashes
from moestro.workload.generated.sessions import CHAT, steady_rows
from moestro.workload.rows import RequestForm, RequestMaker, Rows, equal_rows
from moestro.workload.traces.reading import read_trace

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from shared.workload_statistics import measure

SHARED = Path(__file__).parents[3] / "shared" / "traces"


@given(st.integers(2, 60), st.integers(0, 5), st.sampled_from([16, 64]))
def test_reuse_is_what_a_slow_reading_of_the_prompts_finds(count, seed, block_size):
    rows = steady_rows(CHAT, count, 0.2, seed)
    maker = RequestMaker(rows, RequestForm(block_size=block_size))
    last_used, times_used = {}, {}
    num_found = num_own = 0
    again = []
    for i in range(count):
        request, _ = maker.make(i, 0)
        for name in split_hashes(request.block_hashes):
            if name in last_used:
                num_found += 1
                num_own += rows.session[last_used[name]] == rows.session[i]
                again.append((rows.timestamp_ns[i] - rows.timestamp_ns[last_used[name]]) / 1e9)
            last_used[name] = i
            times_used[name] = times_used.get(name, 0) + 1
    reuse = measure(rows, block_size).reuse
    assert reuse.hit_share == pytest.approx(num_found * block_size / rows.num_prompt_tokens.sum())
    assert reuse.reused_share == pytest.approx(np.mean([each > 1 for each in times_used.values()] or [0]))
    if num_found:
        assert reuse.own_session_share == pytest.approx(num_own / num_found)
        assert reuse.again_s.p50 == pytest.approx(np.median(again))


def test_turns_and_times_are_counted():
    rows = Rows(
        num_prompt_tokens=np.array([10, 20, 30, 40]),
        num_output_tokens=np.array([1, 2, 3, 4]),
        timestamp_ns=np.array([0, 1, 4, 10]) * 10**9,
        session=np.array([0, 1, 0, 0]),
    )
    found = measure(rows)
    assert (found.turns.num_sessions, found.turns.single_share, found.turns.follow_up_share) == (2, 0.5, 0.5)
    assert found.turns.gap_s.mean == 5
    assert found.rate == pytest.approx(0.3)
    assert found.peak_over_mean == pytest.approx(3 / 2)
    assert found.reuse is None
    assert found.prompt_tokens.mean == 25


def test_what_is_not_known_is_none():
    found = measure(equal_rows(3, 10, 5))
    assert (found.rate, found.gap_cv, found.peak_over_mean, found.reuse, found.turns) == (None,) * 5


def published(name):
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"needs the trace {name}, which is not beside this checkout")
    return read_trace(path)


@pytest.mark.parametrize(
    ("name", "mean_output", "duration_s", "hit_share"),
    [
        ("mooncake_conversation.jsonl.zst", 343, 3537, 0.374),
        ("mooncake_synthetic.jsonl.zst", 149, 1022, 0.651),
    ],
)
def test_mooncakes_traces_have_their_published_figures(name, mean_output, duration_s, hit_share):
    rows = published(name)
    assert rows.num_output_tokens.mean() == pytest.approx(mean_output, abs=0.5)
    assert (rows.timestamp_ns[-1] - rows.timestamp_ns[0]) / 1e9 == pytest.approx(duration_s, abs=1)
    assert measure(rows, 512).reuse.hit_share == pytest.approx(hit_share, abs=0.001)


def test_azures_code_trace_is_as_bursty_as_reported():
    assert measure(published("azure2023_code.csv.zst")).peak_over_mean == pytest.approx(12.7, abs=0.2)
