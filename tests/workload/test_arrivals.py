import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.errors import ConfigError
from moestro.workload.generated.draws import at_rate, constant, faster, gamma, poisson, replay, spread, weibull

S = 1_000_000_000


def rng(seed=0):
    return np.random.default_rng(seed)


@given(st.integers(1, 300), st.floats(0.01, 1000), st.floats(0.1, 20), st.integers(0, 5))
def test_every_process_is_ordered_and_offers_exactly_the_requested_rate(count, rate, burstiness, seed):
    for offsets in (
        constant(count, rate),
        poisson(count, rate, rng(seed)),
        gamma(count, rate, burstiness, rng(seed)),
        weibull(count, rate, burstiness, rng(seed)),
    ):
        assert offsets.dtype == np.int64
        assert len(offsets) == count
        assert (np.diff(offsets) >= 0).all()
        assert offsets[0] >= 0
        assert offsets[-1] == pytest.approx(count / rate * S, abs=1)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_vary_as_their_shape_says(burstiness):
    gaps = np.diff(gamma(20_000, 5, burstiness, rng())) / S
    assert gaps.mean() == pytest.approx(0.2, rel=0.01)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


@pytest.mark.parametrize(("shape", "cv"), [(0.5, 5**0.5), (1.0, 1.0), (2.0, 0.5227)])
def test_weibull_gaps_vary_as_their_shape_says(shape, cv):
    gaps = np.diff(weibull(20_000, 5, shape, rng())) / S
    assert gaps.mean() == pytest.approx(0.2, rel=0.01)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_poisson_arrivals_are_independent():
    counts = np.histogram(poisson(20_000, 10, rng()), 1000, (0, 2000 * S))[0]
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.15), "a count's variance is its mean"


def test_the_same_seed_gives_the_same_arrivals_and_another_gives_others():
    assert (poisson(50, 3, rng(1)) == poisson(50, 3, rng(1))).all()
    assert (poisson(50, 3, rng(1)) != poisson(50, 3, rng(2))).any()


def test_a_replay_starts_at_zero_and_keeps_exact_stamps():
    stamps = np.array([7, 7, 9, 30, 31, 50], np.int64) * S
    assert replay(stamps, rng()).tolist() == [0, 0, 2 * S, 23 * S, 24 * S, 43 * S]


def test_a_replay_can_be_faster_or_brought_to_a_rate():
    offsets = np.array([0, 2, 8], np.int64) * S
    assert faster(offsets, 4).tolist() == [0, S // 2, 2 * S]
    assert at_rate(offsets, 3).tolist() == [0, S // 4, S]


def test_a_trace_of_one_stamp_has_no_rate():
    with pytest.raises(
        ConfigError, match=r"drop the rate, or give Poisson arrivals \(--arrivals poisson of moestro bench"
    ):
        at_rate(np.zeros(3, np.int64), 1)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(3, 30)), min_size=2, max_size=40), st.integers(0, 3))
def test_coarse_stamps_are_spread_over_the_gap_that_follows_and_no_further(groups, seed):
    stamps = np.cumsum([gap for gap, _ in groups]) * 3 * S
    sizes = [size for _, size in groups]
    coarse = np.repeat(stamps, sizes)
    usual = np.median(np.diff(stamps))
    fine = spread(coarse, rng(seed))
    assert (np.diff(fine) >= 0).all()
    starts = np.cumsum([0, *sizes])
    for i, stamp in enumerate(stamps):
        group = fine[starts[i] : starts[i + 1]]
        room = usual if i + 1 == len(stamps) else min(usual, stamps[i + 1] - stamp)
        assert stamp <= group.min()
        assert group.max() < stamp + room


def test_spreading_fills_the_gap_evenly():
    fine = spread(np.repeat(np.arange(400, dtype=np.int64) * 3 * S, 10), rng())
    counts = np.histogram(fine % (3 * S), 6, (0, 3 * S))[0]
    assert counts.min() > 0.85 * 4000 / 6
