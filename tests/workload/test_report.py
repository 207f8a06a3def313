"""The report against a slow, plain reading of the same requests, one dict each."""

from __future__ import annotations

import math
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.errors import ConfigError
from moestro.workload.run_records import Outcome, RecordBook, Slos, make_report, parse_slos

MS = 1_000_000
REQUEST = st.fixed_dictionaries(
    {
        "arrival": st.integers(0, 5000),
        "gaps": st.lists(st.integers(0, 300), min_size=1, max_size=6),
        "extra_tokens": st.integers(0, 2),
        "failure": st.sampled_from([None, None, None, "http_503", "no_usage"]),
        "late": st.integers(0, 3),
    }
)


def record(requests, requested=3, stalls=()):
    book = RecordBook(np.full(len(requests), requested, np.int64))
    for row, request in enumerate(requests):
        book.sent(row, request["arrival"] * MS, request["late"] * MS)
        times = [request["arrival"] + sum(request["gaps"][: i + 1]) for i in range(len(request["gaps"]))]
        outcome = Outcome(
            delivery_ns=array("q", [time * MS for time in times]),
            num_prompt_tokens=10,
            num_output_tokens=len(times) + request["extra_tokens"],
            num_cached_tokens=4,
        )
        failed = Outcome(failure=request["failure"], message="why")
        book.ended(row, (times[-1] + 1) * MS, failed if request["failure"] else outcome)
    return book.freeze([stall * MS for stall in stalls])


def plain_percentile(values, q):
    """Linear interpolation between the two nearest ranks."""
    ranked = sorted(values)
    position = (len(ranked) - 1) * q / 100
    low = math.floor(position)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (position - low)


def assert_spread(spread, values):
    if not values:
        assert spread is None
        return
    assert spread.mean == pytest.approx(sum(values) / len(values))
    for q in (50, 90, 95, 99):
        assert getattr(spread, f"p{q}") == pytest.approx(plain_percentile(values, q))


@given(st.lists(REQUEST, min_size=1, max_size=20))
def test_the_report_equals_its_plain_twin(requests):
    slos = Slos(ttft_ms=150, tpot_ms=100, e2e_ms=700)
    report = make_report(record(requests), slos)
    answered = [each for each in requests if each["failure"] is None]
    tokens = [len(each["gaps"]) + each["extra_tokens"] for each in answered]
    ttft = [each["gaps"][0] for each in answered]
    e2e = [sum(each["gaps"]) for each in answered]
    tpot = [(whole - first) / (n - 1) if n > 1 else None for whole, first, n in zip(e2e, ttft, tokens, strict=True)]
    assert_spread(report.ttft_ms, ttft)
    assert_spread(report.e2e_ms, e2e)
    assert_spread(report.tpot_ms, [value for value in tpot if value is not None])
    assert_spread(report.itl_ms, [gap for each in answered for gap in each["gaps"][1:]])
    duration = max(each["arrival"] + sum(each["gaps"]) + 1 for each in requests) - min(r["arrival"] for r in requests)
    assert report.duration_s == pytest.approx(duration / 1000)
    met = sum(a <= 150 and (b or 0) <= 100 and c <= 700 for a, b, c in zip(ttft, tpot, e2e, strict=True))
    assert (report.goodput.num_met, report.goodput.share) == (met, met / len(requests))
    assert report.goodput.requests_per_s == pytest.approx(met / duration * 1000)
    assert report.output_tokens_per_s == pytest.approx(sum(tokens) / duration * 1000)
    assert report.input_tokens_per_s == pytest.approx(10 * len(answered) / duration * 1000)
    assert report.cached_share == pytest.approx(0.4 if answered else 0)
    assert report.num_wrong_length == sum(n != 3 for n in tokens)
    assert report.num_ok + sum(failure.count for failure in report.failures.values()) == len(requests)


def one(late=0, failure=None):
    return {"arrival": 0, "gaps": [10, 10, 10], "extra_tokens": 0, "failure": failure, "late": late}


@pytest.mark.parametrize(("num_late", "is_valid"), [(1, True), (2, False), (100, False)])
def test_a_run_is_invalid_once_the_clients_p99_lateness_is_over_5_ms(num_late, is_valid):
    requests = [one(late=6) for _ in range(num_late)] + [one() for _ in range(101 - num_late)]
    report = make_report(record(requests))
    assert report.is_valid == is_valid
    assert report.send_lateness.max == 6


def test_a_client_that_stands_still_makes_a_run_invalid_too():
    assert make_report(record([one()], stalls=[0, 1, 5])).is_valid
    report = make_report(record([one()], stalls=[0] * 90 + [80] * 10))
    assert not report.is_valid
    assert report.client_stalls.p99 == 80


def test_exactly_5_ms_is_in_time():
    assert make_report(record([one(late=5)])).is_valid


def test_failures_are_counted_by_word_with_an_example_each():
    report = make_report(record([one(failure="timeout"), one(failure="http_503"), one(failure="timeout")]))
    assert {word: (each.count, each.example) for word, each in report.failures.items()} == {
        "http_503": (1, "why"),
        "timeout": (2, "why"),
    }
    assert report.ttft_ms is None
    assert report.requests_per_s == 0


def test_objectives_are_named_as_vllm_names_them():
    assert parse_slos(["ttft:500", "tpot:2.5", "e2el:9000"]) == Slos(ttft_ms=500, tpot_ms=2.5, e2e_ms=9000)
    assert parse_slos(["e2e:9000"]) == Slos(e2e_ms=9000)
    assert parse_slos([]) is None


@pytest.mark.parametrize("pair", ["ttft", "ttft:", "itl:5", "ttft:-1", "ttft:nan", "ttft:inf", "tpot:0"])
def test_an_objective_that_is_none_is_refused(pair):
    with pytest.raises(ConfigError, match="--goodput"):
        parse_slos([pair])
