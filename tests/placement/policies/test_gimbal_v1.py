"""Algorithm 3 of Gimbal v1 against a literal, slow twin; what the paper leaves open has examples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.gimbal_cases import Shape, random_pairs, random_view

from moestro.core.experts.expert_load import ExpertLoad, LayerPairs
from moestro.core.experts.expert_table import EMPTY
from moestro.errors import ConfigError
from moestro.placement.contract import PLACE_POLICIES, PlaceView
from moestro.placement.policies.gimbal import GimbalMilpPlacement, GimbalV1Placement


def affine_experts(view: PlaceView, policy: GimbalV1Placement, capacity: int) -> list[set[int]]:
    """The set M of each layer, or of the one map."""
    num_layers = view.load.tokens.shape[1]
    is_one_map = policy.scope == "model"
    weights: dict[tuple[int, int, int], float] = {}
    pairs = view.load.pairs
    for layer, j, k, count in zip(pairs.layer, pairs.expert, pairs.next_expert, pairs.count, strict=True):
        row = 0 if is_one_map else int(layer)  # equation 2 sums over layers
        first, second = int(j), int(k)
        if policy.cut == "literal" and not first < second:  # equation 11's index range
            continue
        if policy.cut == "symmetric" and is_one_map:
            if first == second:
                continue
            first, second = min(first, second), max(first, second)
        weights[row, first, second] = weights.get((row, first, second), 0.0) + float(count)
    rows = 1 if is_one_map else num_layers
    chosen: list[set[int]] = [set() for _ in range(rows)]
    taken, closed = [0] * rows, [False] * rows
    for (row, j, k), weight in sorted(weights.items(), key=lambda item: (-item[1], item[0])):
        if weight <= policy.min_tokens or closed[row] or taken[row] == policy.top_pairs:
            continue
        wider = [set(each) for each in chosen]
        wider[row].add(j)
        wider[row if is_one_map else row + 1].add(k)
        if max(map(len, wider)) > capacity:
            closed[row] = True  # "tightening the statistical threshold"
            continue
        chosen, taken[row] = wider, taken[row] + 1
    return chosen


def relocate(activation: list[float], affine: set[int], anchor: int, sizes: list[int]) -> list[set[int]]:
    """Exp-relocation(k)."""  # line 1
    held: list[set[int]] = [set() for _ in sizes]
    held[anchor] = set(affine)  # line 2
    loads = [0.0] * len(sizes)
    loads[anchor] = sum(activation[e] for e in affine)
    rest = [e for e in range(len(activation)) if e not in affine]
    for expert in sorted(rest, key=lambda e: (-activation[e], e)):  # line 3: by descending A
        open_gpus = [g for g in range(len(sizes)) if len(held[g]) < sizes[g]]  # equation 4
        gpu = min(open_gpus, key=lambda g: (loads[g], g))  # line 3: least loaded
        held[gpu].add(expert)
        loads[gpu] += activation[expert]
    return held  # line 4


def twin(view: PlaceView, policy: GimbalV1Placement) -> list[list[set[int]]]:
    """Experts of each device in each layer."""
    num_layers, num_experts = view.load.total.shape
    live = [g for g in range(view.devices.num_devices) if view.devices.is_alive[g]]
    sizes = [0] * view.devices.num_devices
    while sum(sizes) < num_experts:
        for g in live:
            if sizes[g] < view.devices.num_slots[g] and sum(sizes) < num_experts:
                sizes[g] += 1
    anchor = policy.anchor
    while anchor not in live:
        anchor = (anchor + 1) % len(sizes)
    affine = affine_experts(view, policy, sizes[anchor])
    total = view.load.total.tolist()
    if policy.scope == "model":
        summed = [sum(row[e] for row in total) for e in range(num_experts)]
        return [relocate(summed, affine[0], anchor, sizes)] * num_layers
    return [relocate(total[layer], affine[layer], anchor, sizes) for layer in range(num_layers)]


def random_case(seed: int) -> tuple[PlaceView, GimbalV1Placement]:
    rng = np.random.default_rng(seed)
    devices, layers, experts = (int(rng.integers(low, high)) for low, high in ((1, 6), (1, 5), (1, 20)))
    dead = (int(rng.integers(devices)),) if devices > 1 and rng.random() < 0.3 else ()
    needed = -(-experts // (devices - len(dead)))
    shape = Shape(experts, devices, needed + int(rng.integers(3)), layers)
    view = random_view(seed, shape, dead=dead)
    tokens = rng.integers(0, 12, view.load.tokens.shape).astype(np.float64)
    pairs = random_pairs(rng, layers, experts, int(rng.integers(0, 60)))
    load = ExpertLoad(tokens, view.load.variance, view.load.activated, 1.0, pairs)
    policy = GimbalV1Placement(
        anchor=int(rng.integers(devices)),
        top_pairs=int(rng.integers(0, 8)),
        min_tokens=float(rng.integers(0, 5)),
        scope=str(rng.choice(["layer", "model"])),
        cut=str(rng.choice(["literal", "symmetric"])),
    )
    return replace(view, load=load), policy


@pytest.mark.parametrize("first", range(0, 240, 40))
def test_algorithm_3_equals_its_literal_twin(first):
    for seed in range(first, first + 40):
        view, policy = random_case(seed)
        table = policy(view)
        found = [
            [{e for e in table.logical_of[g, layer].tolist() if e != EMPTY} for g in range(view.devices.num_devices)]
            for layer in range(view.load.tokens.shape[1])
        ]
        assert found == twin(view, policy), seed
        assert (table.num_copies.sum(axis=0) == 1).all()
        assert policy(view).logical_of.tolist() == table.logical_of.tolist()


def small_view(pairs: LayerPairs | None) -> PlaceView:
    view = random_view(0, Shape(6, 2, 3, layers=2))
    tokens = np.zeros((2, 2, 6))
    tokens[0] = [9.0, 8.0, 1.0, 1.0, 1.0, 0.0]
    return replace(view, load=ExpertLoad(tokens, np.zeros((2, 6)), np.ones((2, 6)), 1.0, pairs))


def pairs_of(*rows: tuple[int, int, int, float]) -> LayerPairs:
    layer, expert, partner, count = zip(*rows, strict=True)
    ids = (np.array(each, np.int32) for each in (layer, expert, partner))
    return LayerPairs(*ids, np.array(count))


def test_affine_experts_go_to_the_anchor_whatever_its_load():
    view = small_view(pairs_of((0, 0, 1, 5.0)))
    table = GimbalV1Placement(anchor=1)(view)
    assert table.num_copies[1, 0, 0] == 1
    assert table.num_copies[1, 1, 1] == 1


def test_the_threshold_tightens_until_the_affine_experts_fit_the_anchor():
    rows = [(0, e, 5 - e, 9.0 - e) for e in range(6)]
    view = small_view(pairs_of(*rows))
    table = GimbalV1Placement(anchor=0)(view)
    assert set(np.flatnonzero(table.num_copies[0, 0])) == {0, 1, 2}  # the three strongest pairs
    assert set(np.flatnonzero(table.num_copies[0, 1])) == {5, 4, 3}
    one_map = GimbalV1Placement(anchor=0, scope="model")(view)
    assert {0, 5} <= set(np.flatnonzero(one_map.num_copies[0, 0]))  # two of the next pair's experts do not fit
    assert one_map.num_copies[:, 0].tolist() == one_map.num_copies[:, 1].tolist()


def test_a_call_with_the_same_load_moves_nothing():
    view = small_view(pairs_of((0, 0, 1, 5.0)))
    table = GimbalV1Placement()(view)
    again = replace(view, table=table)
    assert GimbalV1Placement()(again) is table


@pytest.mark.parametrize("policy", [GimbalV1Placement(), GimbalMilpPlacement()])
def test_a_load_without_pairs_is_refused(policy):
    with pytest.raises(ValueError, match="needs pairs of experts"):
        policy(small_view(None))


def test_experts_that_do_not_fit_and_an_anchor_that_does_not_exist_are_refused():
    view = random_view(0, Shape(6, 2, 3), dead=(1,))
    view = replace(view, load=replace(view.load, pairs=random_pairs(np.random.default_rng(0), 1, 6, 4)))
    with pytest.raises(ValueError, match="do not fit"):
        GimbalV1Placement()(view)
    with pytest.raises(ValueError, match="there are 2 devices"):
        GimbalV1Placement(anchor=2)(small_view(pairs_of((0, 0, 1, 1.0))))


@pytest.mark.parametrize("setting", ["scope=both", "cut=half", "anchor=-1", "top_pairs=-1"])
def test_a_wrong_setting_is_refused(setting):
    with pytest.raises(ConfigError):
        PLACE_POLICIES.make(f"gimbal_v1:{setting}")


def test_the_policies_are_made_by_name():
    assert PLACE_POLICIES.make("gimbal_v1:anchor=1,scope=model,cut=literal") is not None
    assert PLACE_POLICIES.make("gimbal_v1_milp:alpha=2,beta=0.5") is not None


SHAPE = Shape(experts=12, devices=3, slots=8, layers=3)


def paired_view(seed: int, **how) -> PlaceView:
    view = random_view(seed, SHAPE, **how)
    pairs = random_pairs(np.random.default_rng(seed), SHAPE.layers, SHAPE.experts, 60)
    return replace(view, load=replace(view.load, pairs=pairs))


@pytest.mark.parametrize("scope", ["layer", "model"])
def test_a_group_keeps_the_set_m_of_its_first_plan(scope):
    """Later plans balance the other experts by the load of their time, and need no pairs."""
    policy = GimbalV1Placement(scope=scope, top_pairs=3)
    changed = 0
    for seed in range(20):
        view, later = paired_view(seed), paired_view(100 + seed)
        group = policy.for_group()
        assert group.needs_pairs
        assert (group(view).logical_of == policy(view).logical_of).all(), "the first plan is the algorithm's"
        assert not group.needs_pairs
        later = replace(later, table=view.table)
        expected = policy(replace(later, load=replace(later.load, pairs=view.load.pairs)))
        assert (group(later).logical_of == expected.logical_of).all()
        assert (group(replace(later, load=replace(later.load, pairs=None))).logical_of == expected.logical_of).all()
        changed += bool((policy(later).logical_of != expected.logical_of).any())
    assert changed > 10, "with its own pairs a later plan is another one"


def test_two_groups_have_a_set_of_their_own():
    policy = GimbalV1Placement()
    groups = [policy.for_group(), policy.for_group()]
    for group, view in zip(groups, (paired_view(1), paired_view(2)), strict=True):
        assert (group(view).logical_of == policy(view).logical_of).all()


def test_a_set_that_does_not_fit_the_anchor_any_more_is_its_strongest_part():
    """A device that dies changes the anchor and its room; the set is cut as the algorithm cuts it."""
    policy = GimbalV1Placement(top_pairs=50)
    view, dead = paired_view(3), paired_view(3, dead=(0,))
    group = policy.for_group()
    group(view)
    assert (group(dead).logical_of == policy(dead).logical_of).all()
