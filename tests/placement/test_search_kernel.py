"""Plans of the compiled kernel are those of NumPy's code, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.expert_loads import (
    LONG,
    PRICES,
    drifted,
    even_load,
    first_view,
    random_table,
    random_view,
    sticky_load,
    zipf_shares,
)

from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import ExpertTable
from moestro.native.compiler import PLACEMENT_KERNEL
from moestro.placement.contract import PlaceLimits, PlaceView, even_devices, origins_of
from moestro.placement.kernel.choice import placement_kernel
from moestro.placement.policies.moestro import MoestroPlacement
from moestro.placement.search import search
from moestro.placement.search.problem import present_packing, problem_of
from moestro.placement.search.replicas import _exponentials, copy_counts, share_out

# Slots up to which a problem gets several starts in `small_bound`; with the 2,048 of the product plain plans take long.
SMALL = 256


@contextmanager
def small_bound() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "SMALL", SMALL)
        yield


def need_kernel() -> None:
    """Wait for the kernel, in the user's cache afterwards; the test is skipped where no compiler is."""
    if placement_kernel.search().wait() is None:
        pytest.skip(f"no placement kernel: {placement_kernel.search().failure}")


def check(view: PlaceView, policy: MoestroPlacement | None = None) -> ExpertTable:
    """Plan with the kernel and without it; returns the plan."""
    need_kernel()
    policy = policy or MoestroPlacement()
    found = policy(view)
    with placement_kernel.left_out():
        assert placement_kernel.look() is None
        expected = policy(view)
    assert placement_kernel.look() is not None
    assert np.array_equal(found.logical_of, expected.logical_of)
    assert (found.shares is None) == (expected.shares is None)
    assert found.shares is None or np.array_equal(found.shares, expected.shares)
    return found


@st.composite
def large_views(draw) -> PlaceView:
    """Views of groups that are too large for several starts, with what a search has to respect."""
    num_devices, per_device = draw(st.integers(2, 12)), draw(st.integers(1, 10))
    num_experts = num_devices * per_device - draw(st.integers(0, min(4, per_device * (num_devices - 1))))
    num_slots = per_device + draw(st.sampled_from([0, 0, 1, 3]))
    num_layers = SMALL // (num_devices * num_slots) + 1
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shares = zipf_shares(num_layers, num_experts, draw(st.sampled_from([0.0, 0.4, 0.8, 1.5])), int(rng.integers(1000)))
    if draw(st.booleans()):  # many equal loads, so that ties decide
        shares = np.ceil(shares * 2 * num_experts) / 65536
    nodes = draw(st.sampled_from([each for each in (1, 2, 3) if num_devices % each == 0]))
    load = sticky_load(shares, num_devices, nodes) if draw(st.booleans()) else even_load(shares, num_devices)
    limits = draw(
        st.sampled_from(
            [
                LONG,
                PlaceLimits(horizon_steps=20.0),
                replace(LONG, max_bytes=7 * num_layers * PRICES.expert_bytes),
                replace(LONG, max_receives=2),
                replace(LONG, max_layers=num_layers // 2),
            ]
        )
    )
    prices = replace(PRICES, expert_s=draw(st.sampled_from([0.0, 1e-5, 1e-3])))
    devices = even_devices(num_devices, num_slots, nodes)
    table = random_table(rng, devices, num_layers, num_experts)
    if draw(st.booleans()):
        devices = replace(devices, speed=rng.choice([1.0, 0.5, 1.7], num_devices))
    num_dead = draw(st.sampled_from([0, 0, 1]))
    if (num_devices - num_dead) * num_slots >= num_experts:
        devices = replace(devices, is_alive=np.arange(num_devices) >= num_dead)
    return PlaceView(load, table, devices, prices, limits)


@settings(max_examples=40)
@given(large_views(), st.sampled_from([0, 1]), st.booleans())
@small_bound()
def test_plans_are_equal(view, weighted, has_drifted):
    policy = MoestroPlacement(weighted=weighted)
    table = check(view, policy)
    if has_drifted:  # and from a level placement with shares
        load = view.load
        tokens = drifted(load.tokens.sum(axis=0), 0.1) * load.tokens.sum(axis=(0, 2))[:, None] / len(load.tokens)
        later = np.repeat(tokens[None], len(load.tokens), axis=0)
        check(replace(view, table=table, load=replace(load, tokens=later)), policy)


@pytest.mark.parametrize("seed", range(40))
def test_plans_of_small_problems_are_equal(seed):
    check(random_view(seed))


@pytest.mark.parametrize(("num_experts", "num_slots"), [(64, 16), (64, 18), (512, 130)])
def test_plans_with_many_slots_are_equal(num_experts, num_slots):
    check(first_view(even_load(zipf_shares(6, num_experts, 0.8), 4), num_slots))


@pytest.mark.parametrize("num_slots", [5, 4])
@small_bound()
def test_plans_for_many_devices_are_equal(num_slots):
    num_layers = SMALL // (32 * num_slots) + 1  # too large for several starts
    view = first_view(sticky_load(zipf_shares(num_layers, 128, 0.6), 32, 8), num_slots, 8)
    check(replace(view, table=check(view), load=even_load(zipf_shares(num_layers, 128, 0.6), 32)))


@pytest.mark.parametrize("seed", range(20))
def test_shares_and_numbers_of_copies_are_equal_where_experts_idle(seed):
    need_kernel()
    rng = np.random.default_rng(seed)
    num_devices, num_slots = int(rng.integers(2, 20)), int(rng.integers(3, 12))
    num_experts = int(rng.integers(num_slots, num_devices * num_slots))
    load = even_load(zipf_shares(5, num_experts, rng.uniform(0.2, 1.4), seed), num_devices, 4.0 * num_experts)
    load = replace(load, activated=1 - np.exp(-load.total * rng.choice([0.1, 1.0, 30.0], load.total.shape)))
    devices = even_devices(num_devices, num_slots)
    devices = replace(devices, speed=rng.choice([1.0, 0.5], num_devices))
    prices = replace(PRICES, expert_s=1e-5)
    view = PlaceView(load, random_table(rng, devices, 5, num_experts), devices, prices, LONG)
    problem = problem_of(view, origins_of(load, devices), 0.0)
    found = []
    for leaves_out in (nullcontext, placement_kernel.left_out):
        packing = present_packing(view, problem)
        with leaves_out():
            share_out(problem, packing, problem.even_load(packing.work), 3)
            found.append((packing.share, packing.work, copy_counts(problem)))
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one, other)


def test_exponentials_are_right_within_two_units_in_the_last_place():
    x = -np.random.default_rng(0).exponential(20, 10_000)
    assert np.allclose(_exponentials(x), np.exp(x), rtol=5e-16, atol=0.0)


def test_the_kernel_has_one_entry():
    sources = [path.read_text() for path in PLACEMENT_KERNEL.files()]
    assert sum(text.count('visibility("default")') for text in sources) == 1


def test_no_load_makes_equal_plans():
    load = even_load(np.zeros((40, 64)), 8)
    check(first_view(ExpertLoad(load.tokens, load.variance, load.activated, 0.0), 9))


def test_the_search_for_the_kernel_begins_once():
    assert placement_kernel.search() is placement_kernel.search()
