"""A running group as policies see it: only workers with room, in any place of the group's table."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.expert_loads import PRICES

from moestro.config.serve_settings import ProcessSettings, ServeSettings
from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.core.request import ModelInfo
from moestro.cost.settings import PacedSettings
from moestro.errors import ConfigError
from moestro.flow.settings import SteppingSettings
from moestro.model.settings import ModelSettings
from moestro.placement.contract import PLACE_POLICIES, PlaceLimits, PlacementError, in_slots_of
from moestro.placement.live.plan import (
    GroupPlaces,
    GroupView,
    PlaceableGroup,
    PlanRequest,
    ask_policy,
    group_places,
    part_of,
    whole_of,
)
from moestro.placement.score import score
from moestro.placement.settings import LivePlacementSettings
from moestro.server.engines.engine_reports import ExpertLoads
from moestro.server.experts.expert_signals import ELSEWHERE
from moestro.server.experts.live_placement import open_placement
from moestro.server.experts.placement_views import live_prices

NUM_LAYERS, NUM_EXPERTS, NUM_SLOTS = 3, 8, 6
HOLDERS = (1, 2, 4)  # of five workers; the others have no room


def random_rows(rng: np.random.Generator, num_workers: int) -> np.ndarray:
    """int32[workers, layers, slots]: each expert once, and a few copies more."""
    rows = np.full((num_workers, NUM_LAYERS, NUM_SLOTS), EMPTY, np.int32)
    for layer in range(NUM_LAYERS):
        owner = rng.integers(0, num_workers, NUM_EXPERTS)
        owner[rng.permutation(NUM_EXPERTS)] = np.arange(NUM_EXPERTS) % num_workers
        for worker in range(num_workers):
            held = set(np.flatnonzero(owner == worker).tolist()) | {int(rng.integers(NUM_EXPERTS))}
            slots = rng.permutation(NUM_SLOTS)[: len(held)]
            rows[worker, layer, slots] = sorted(held)
    return rows


def random_table(seed: int, *, has_shares: bool = False) -> ExpertTable:
    rows = random_rows(np.random.default_rng(seed), len(HOLDERS))
    table = ExpertTable(0, rows, NUM_EXPERTS, np.ones(len(HOLDERS), np.bool_))
    return replace(table, shares=table.slot_parts) if has_shares else table


def in_group(part: ExpertTable) -> ExpertTable:
    rows = np.full((5, NUM_LAYERS, NUM_SLOTS), EMPTY, np.int32)
    rows[list(HOLDERS)] = part.logical_of
    return ExpertTable(part.version, rows, NUM_EXPERTS, np.isin(np.arange(5), HOLDERS))


def view_of(sources=HOLDERS, *, has_shares: bool = True) -> GroupView:
    places = group_places(HOLDERS, sources)
    return GroupView(placeable(places, has_shares=has_shares), PRICES, PlaceLimits())


def placeable(places: GroupPlaces, *, has_shares: bool = True) -> PlaceableGroup:
    return PlaceableGroup(
        migration=None,
        places=lambda: places,
        layers=lambda: tuple(range(NUM_LAYERS)),
        is_complete=lambda: True,
        has_shares=has_shares,
    )


def random_load(seed: int, num_sources: int = 3) -> ExpertLoad:
    tokens = np.random.default_rng(seed).lognormal(4, 1, (num_sources, NUM_LAYERS, NUM_EXPERTS))
    return ExpertLoad(tokens, np.zeros(tokens.shape[1:]), np.ones(tokens.shape[1:]), 100.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_copy_that_stays_keeps_its_slot_and_its_share(seed):
    old, new = random_table(seed), random_table(seed + 100, has_shares=seed % 2 == 0)
    found = in_slots_of(old, new)
    np.testing.assert_array_equal(found.num_copies, new.num_copies)
    np.testing.assert_allclose(found.parts, new.parts)
    stays = (old.logical_of != EMPTY) & np.take_along_axis(new.num_copies > 0, np.maximum(old.logical_of, 0), axis=2)
    np.testing.assert_array_equal(found.logical_of[stays], old.logical_of[stays])


@pytest.mark.parametrize("seed", range(5))
def test_a_table_of_the_group_has_the_rows_of_its_holders(seed):
    places, table = group_places(HOLDERS, HOLDERS), in_group(random_table(seed))
    part = random_table(seed + 50, has_shares=True)
    whole = whole_of(part, table, places)
    np.testing.assert_array_equal(part_of(whole, places).num_copies, part.num_copies)
    assert (whole.logical_of[[0, 3]] == EMPTY).all()
    assert whole.version == table.version + 1
    np.testing.assert_array_equal(whole.is_alive, table.is_alive)


def test_engines_that_hold_experts_are_the_sources_where_they_are():
    view = view_of((4, 1, 2)).view(random_load(1), in_group(random_table(1)), group_places(HOLDERS, (4, 1, 2)))
    assert view.devices.source_on.tolist() == [2, 0, 1]
    assert view.prices == PRICES


def test_engines_without_experts_send_every_row_whatever_the_placement():
    group, places = view_of((0, 0)), group_places(HOLDERS, (0, 3))
    load = random_load(2, num_sources=2)
    rows = []
    for seed in range(4):
        view = group.view(load, in_group(random_table(seed)), places)
        np.testing.assert_allclose(view.load.total, load.total)
        priced = score(view.load, view.table, view.devices, view.prices)
        rows.append(priced.rows @ np.array(view.prices.row_s))
        assert view.prices.row_s[0] == view.prices.row_s[1]
    np.testing.assert_allclose(rows, rows[0])


@pytest.mark.parametrize("seed", range(5))
def test_the_tokens_of_an_engine_count_as_those_of_the_holders_on_its_machine(seed):
    rng = np.random.default_rng(seed)
    engine_machines = [str(each) for each in rng.integers(0, 3, 4)]
    holders = list(zip(rng.permutation(HOLDERS).tolist(), ("0", "1", "1"), strict=True))
    places = group_places(
        [holder for holder, _ in holders], (ELSEWHERE,) * 4, ([machine for _, machine in holders], engine_machines)
    )
    load, machine_of = random_load(seed, num_sources=4), dict(holders)
    expected = np.zeros((len(HOLDERS), *load.tokens.shape[1:]))
    for tokens, machine in zip(load.tokens, engine_machines, strict=True):
        near = [at for at, holder in enumerate(HOLDERS) if machine_of[holder] == machine] or range(len(HOLDERS))
        for at in near:
            expected[at] += tokens / len(near)
    view = view_of((ELSEWHERE,) * 4).view(load, in_group(random_table(seed)), places)
    np.testing.assert_allclose(view.load.tokens, expected)
    node_of = view.devices.node_of.tolist()
    names = [machine_of[holder] for holder in HOLDERS]
    assert [[one == other for one in node_of] for other in node_of] == [[a == b for a in names] for b in names]


def test_shares_are_left_out_where_the_group_has_none():
    load, table = random_load(3), in_group(random_table(3))

    def weighted(view):
        part = PLACE_POLICIES.make("eplb")(view)
        return replace(part, shares=part.slot_parts)

    for has_shares in (True, False):
        plan = ask_policy("mine", weighted, PlanRequest(view_of(has_shares=has_shares), load, table))
        assert (plan.target.shares is not None) is has_shares


def test_a_load_of_another_network_is_refused():
    load = random_load(4)
    other = ExpertLoad(load.tokens[:, :2], load.variance[:2], load.activated[:2], 1.0)
    with pytest.raises(PlacementError, match="counted 8 experts in 2 layers, and the group has 8 in 3"):
        view_of().view(other, in_group(random_table(4)), group_places(HOLDERS, HOLDERS))


def settings(**placement: object) -> ServeSettings:
    return ServeSettings(
        placement=LivePlacementSettings(**placement),
        stepping=SteppingSettings(mode="ep"),
        processes=ProcessSettings(engines=2),
    )


def test_prices_are_those_of_the_named_gpu_in_the_served_type(demo_dir):
    named = replace(settings(placement_gpu="h200"), model=ModelSettings(model=str(demo_dir)))
    half, full = live_prices(named, "bfloat16"), live_prices(named, "float32")
    assert (half.gpu, half.link) == ("h200", "nvswitch-h100")
    assert full.prices.expert_bytes == 2 * half.prices.expert_bytes
    paced = PacedSettings(device="paced:a100-80g", network="mixtral-8x7b", paced_link="ethernet-100g")
    found = live_prices(replace(settings(), pacing=paced), "bfloat16")
    assert (found.gpu, found.link, found.network.name) == ("a100-80g", "ethernet-100g", "mixtral-8x7b")


def test_workers_on_cpus_are_priced_as_cpus(demo_dir):
    found = live_prices(replace(settings(), model=ModelSettings(model=str(demo_dir), device="cpu")), "bfloat16")
    gpu = live_prices(replace(settings(placement_gpu="h100"), model=ModelSettings(model=str(demo_dir))), "bfloat16")
    assert (found.gpu, found.link) == ("cpu", "local-socket")
    # A token's work weighs many times more beside reading an expert than on a GPU.
    assert found.prices.token_s / found.prices.expert_s > 10 * gpu.prices.token_s / gpu.prices.expert_s


def test_rows_and_moves_between_machines_have_the_price_of_the_link_across(demo_dir):
    model = ModelSettings(model=str(demo_dir))
    slow, fast = (
        live_prices(replace(settings(placement_link_across=name), model=model), "bfloat16")
        for name in ("ethernet-100g", "infiniband-ndr")
    )
    assert (slow.link_across, fast.link_across) == ("ethernet-100g", "infiniband-ndr")
    assert slow.prices.row_s[:2] == fast.prices.row_s[:2]
    assert slow.prices.row_s[2] == 4 * fast.prices.row_s[2]
    assert fast.prices.move_bytes_per_s[2] == 4 * slow.prices.move_bytes_per_s[2]


@pytest.mark.parametrize(
    ("num_experts", "has_group", "num_holders", "words"),
    [
        (0, True, 2, "The model is dense"),
        (8, False, 2, "no weights to move"),
        (8, True, 1, "One worker holds all experts"),
    ],
)
def test_what_cannot_be_placed_has_a_reason_and_its_flags_are_refused(num_experts, has_group, num_holders, words):
    info = ModelInfo(
        model_id="m", max_model_len=1, vocab_size=1, eos_token_ids=(), block_size=1, num_blocks=1, num_parameters=1,
        model_type="m", dtype="float32", device="cpu", num_layers=3, num_experts=num_experts, num_experts_per_token=1,
    )  # fmt: skip
    places = group_places(range(num_holders), range(num_holders))
    group = placeable(places)
    loads = ExpertLoads(2, lambda engine, question: False)
    found = open_placement(settings(), info, loads, group if has_group else None)
    assert found.driver is None
    assert words in found.why_not
    with pytest.raises(ConfigError, match=words):
        open_placement(settings(placement_policy="eplb"), info, loads, group if has_group else None)
