import numpy as np

from moestro.core.rng import uniform


def draws(seed, counters):
    return uniform(np.full(len(counters), seed, np.uint64), np.asarray(counters, np.uint64))


def test_draws_are_uniform_and_unrelated_between_positions_and_between_seeds():
    grid = uniform(np.arange(300, dtype=np.uint64)[:, None], np.arange(300, dtype=np.uint64)[None])
    counts, _ = np.histogram(grid, 64, (0, 1))
    expected = grid.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 120, "chi-square with 63 degrees of freedom"
    along, across = grid[:, :-1] * grid[:, 1:], grid[:-1] * grid[1:]
    assert abs(along.mean() - 0.25) < 0.005
    assert abs(across.mean() - 0.25) < 0.005


def test_a_draw_depends_on_its_own_key_alone():
    together = draws(7, range(10))
    assert [draws(7, [i])[0] for i in reversed(range(10))] == together[::-1].tolist()


def test_draws_lie_in_the_half_open_unit_interval_for_extreme_keys():
    values = uniform(np.array([0, 2**64 - 1], np.uint64)[:, None], np.array([0, 2**64 - 1], np.uint64)[None])
    assert ((values >= 0) & (values < 1)).all()
