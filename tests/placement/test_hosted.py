"""Placements for other engines, in NumPy: full slots, experts kept in their slots, no needless second copy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moestro.core.experts.expert_load import ExpertLoad, LayerPairs
from moestro.errors import ConfigError
from moestro.placement.contract import PLACE_POLICIES, PlacePrices, even_devices
from moestro.placement.hosted import (
    PRICE_DEFAULTS,
    HostLoad,
    HostSizes,
    HostVariables,
    Planner,
    or_else,
    planner_from,
    policy_text,
    rows_with_experts,
)
from moestro.placement.placement_file import table_of_slots
from moestro.placement.score import move_s, moves_between, score
from moestro.workload.experts.expert_profile import ExpertProfile, read_profile_file, write_profile

POLICIES = ["static", "eplb", "moestro"]


class HostCalls:
    """A planner with the window and the horizon of vLLM's defaults."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner

    def place(self, load: np.ndarray, sizes: HostSizes, old: np.ndarray | None) -> np.ndarray:
        return self.planner.place(HostLoad.of_sum(load, 1000), sizes, old, 3000)


def planner(policy: str = "eplb", **environment: str) -> HostCalls:
    return HostCalls(planner_from(policy, HostVariables("MOESTRO_VLLM_", environment), read_profile_file))


def initial(num_layers: int, num_experts: int, num_slots: int) -> np.ndarray:
    """vLLM's first placement: all experts, then the first ones again."""
    return np.tile(np.arange(num_slots) % num_experts, (num_layers, 1))


def by_rank(placed: np.ndarray, num_ranks: int) -> np.ndarray:
    return placed.reshape(len(placed), num_ranks, -1)


def has_second_copy(placed: np.ndarray, num_ranks: int) -> bool:
    local = np.sort(by_rank(placed, num_ranks), axis=-1)
    return bool((local[..., 1:] == local[..., :-1]).any())


def imbalance(load: np.ndarray, placed: np.ndarray, num_ranks: int) -> float:
    """Largest over mean load of a rank, summed over layers; copies get equal parts, as in vLLM."""
    copies = np.stack([np.bincount(row, minlength=load.shape[1]) for row in placed])
    each = np.take_along_axis(load / copies, placed, axis=1)
    ranks = by_rank(each, num_ranks).sum(axis=-1)
    return float(ranks.max(axis=1).sum() / ranks.mean(axis=1).sum())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(8))
def test_any_question_of_a_host_is_answered_with_full_slots_that_keep_what_stays(policy, seed):
    rng = np.random.default_rng(seed)
    num_ranks, num_local = int(rng.choice([2, 4, 8])), int(rng.integers(2, 6))
    num_slots = num_ranks * num_local
    num_experts = int(rng.integers(num_local, num_slots + 1))
    load = rng.zipf(1.5, (3, num_experts)).clip(0, 1000) * (rng.random((3, num_experts)) < 0.9)
    sizes = HostSizes(num_slots, 1, int(rng.choice([1, 2])), num_ranks)
    old = initial(3, num_experts, num_slots)
    if seed % 2:
        old = rng.permuted(old, axis=1)
    placed = planner(policy).place(load.astype(np.float64), sizes, old)
    assert placed.shape == (3, num_slots)
    assert placed.dtype == np.int64
    assert all(set(row) == set(range(num_experts)) for row in placed.tolist())
    assert not has_second_copy(placed, num_ranks)
    for now, was in zip(
        by_rank(placed, num_ranks).reshape(-1, num_local), by_rank(old, num_ranks).reshape(-1, num_local), strict=True
    ):
        stays = set(now) & set(was)
        assert all(np.flatnonzero(now == expert)[0] in np.flatnonzero(was == expert) for expert in stays)
    assert np.array_equal(placed, planner(policy).place(load.astype(np.float64), sizes, old))


# EPLB's second copies on a rank give way to other experts here, so the parts of its hottest experts grow.
@pytest.mark.parametrize(("policy", "bound"), [("eplb", 1.15), ("moestro", 1.04)])
def test_a_skewed_load_is_leveled(policy, bound):
    rng = np.random.default_rng(1)
    load = rng.permuted(np.tile(1e6 / np.arange(1, 65) ** 0.8, (32, 1)), axis=1)
    old = initial(32, 64, 80)
    placed = planner(policy).place(load, HostSizes(80, 8, 2, 8), old)
    assert imbalance(load, old, 8) > 1.5
    assert imbalance(load, placed, 8) < bound


def test_the_static_policy_moves_nothing():
    old = initial(2, 8, 12)
    assert np.array_equal(planner("static").place(np.ones((2, 8)), HostSizes(12, 1, 1, 4), old), old)


def test_the_moestro_policy_moves_nothing_where_the_load_is_level():
    old = initial(2, 8, 8)
    assert np.array_equal(planner("moestro").place(np.full((2, 8), 1e5), HostSizes(8, 1, 1, 4), old), old)


def test_a_second_copy_on_a_rank_of_the_old_placement_gives_way_to_another_expert():
    old = np.array([[0, 0, 1, 2, 3, 1]])
    placed = planner("static").place(np.array([[1.0, 1.0, 1.0, 9.0]]), HostSizes(6, 1, 1, 2), old)
    assert placed.tolist() == [[0, 3, 1, 2, 3, 1]]


def test_more_slots_on_a_rank_than_experts_are_filled_with_second_copies():
    placed = planner("static").place(np.array([[1.0, 5.0]]), HostSizes(6, 1, 1, 2), np.array([[0, 1, 0, 0, 1, 1]]))
    assert sorted(placed[0, :3]) in ([0, 0, 1], [0, 1, 1])
    assert sorted(placed[0, 3:]) in ([0, 0, 1], [0, 1, 1])


@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_that_come_or_go_leave_every_expert_covered(policy):
    load = np.arange(1.0, 9.0)[None]
    old = np.array([[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]])  # four ranks of three
    fewer = planner(policy).place(load, HostSizes(9, 1, 1, 3), np.array([[0, 1, 2, 3, 4, 5, 0, 1, 2, 6, 7, 3]]))
    assert set(fewer[0].tolist()) == set(range(8))
    more = planner(policy).place(load, HostSizes(15, 1, 1, 5), np.concatenate([old, [[-1, -1, -1]]], axis=1))
    assert set(more[0].tolist()) == set(range(8))
    assert not has_second_copy(more, 5)
    none = planner(policy).place(load, HostSizes(12, 1, 2, 4), None)
    assert set(none[0].tolist()) == set(range(8))


def test_experts_that_do_not_fit_and_odd_sizes_are_refused():
    with pytest.raises(ValueError, match="9 experts do not fit into 8 slots"):
        planner().place(np.ones((1, 9)), HostSizes(8, 1, 1, 2), None)
    with pytest.raises(ValueError, match="do not divide"):
        HostSizes(9, 1, 1, 2)
    with pytest.raises(ValueError, match="below 1"):
        HostSizes(8, 1, 0, 2)


def test_settings_are_read_from_the_environment(tmp_path):
    slower = planner("eplb", MOESTRO_VLLM_GPU="h20").planner.prices
    assert slower.token_s > planner().planner.prices.token_s
    config = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 100, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert planner("eplb", MOESTRO_VLLM_NETWORK=str(tmp_path)).planner.prices.expert_bytes == 3 * 64 * 32 * 2


def profile_file(tmp_path: Path, pairs: LayerPairs | None) -> str:
    """Write a profile of layers 1 to 3 of a network of four, with six experts each."""
    load = ExpertLoad(np.ones((1, 3, 6)), np.ones((3, 6)), np.ones((3, 6)), 10.0, pairs)
    write_profile(tmp_path / "pairs.npz", ExpertProfile(load=load, layers=(1, 2, 3), num_model_layers=4))
    return str(tmp_path / "pairs.npz")


@pytest.mark.parametrize("num_layers", [3, 4])
def test_gimbals_first_algorithm_ranks_the_pairs_of_a_profile_because_engines_count_none(tmp_path, num_layers):
    earlier, expert, after = np.array([[0, 0, 1], [5, 4, 0], [1, 2, 3]], np.int32)
    name = profile_file(tmp_path, LayerPairs(earlier, expert, after, np.array([9.0, 8.0, 7.0])))
    load = np.ones((num_layers, 6)) * np.arange(1, 7)
    placed = planner("gimbal_v1:top_pairs=1", MOESTRO_VLLM_PROFILE=name).place(load, HostSizes(6, 1, 1, 2), None)
    anchor = [set(row[:3].tolist()) for row in placed[num_layers - 3 :]]  # the first rank's experts, dense layers apart
    assert 5 in anchor[0]
    assert {1, 0} <= anchor[1]
    assert 3 in anchor[2]


def test_a_profile_of_another_network_is_named(tmp_path):
    pairs = LayerPairs(*np.zeros((3, 1), np.int32), np.ones(1))
    found = planner("gimbal_v1", MOESTRO_VLLM_PROFILE=profile_file(tmp_path, pairs))
    with pytest.raises(ValueError, match="6 experts in 3 of 4 layers, and the engine 6 experts in 5 layers"):
        found.place(np.ones((5, 6)), HostSizes(6, 1, 1, 2), None)


def test_a_policy_of_pairs_without_a_profile_of_them_is_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match="which engines do not count: set MOESTRO_VLLM_PROFILE"):
        planner("gimbal_v1")
    with pytest.raises(ConfigError, match=r"MOESTRO_VLLM_PROFILE=.*pairs\.npz has no pairs of experts: name a file"):
        planner("gimbal_v1", MOESTRO_VLLM_PROFILE=profile_file(tmp_path, None))
    with pytest.raises(ConfigError, match=r"MOESTRO_VLLM_PROFILE: .*none\.npz is damaged or cut off: .*No such file"):
        planner("gimbal_v1", MOESTRO_VLLM_PROFILE=str(tmp_path / "none.npz"))


def test_a_policy_that_reads_a_clock_is_refused_because_ranks_would_differ():
    with pytest.raises(ConfigError, match=r"gimbal_v1_milp: it gives up after a time, so ranks .* could differ"):
        planner("gimbal_v1_milp")


@pytest.mark.parametrize(
    ("policy", "environment", "message"),
    [
        ("best", {}, "MOESTRO_VLLM_PLACEMENT=best: unknown place policy 'best'; known: "),
        ("eplb:speed=2", {}, "has no setting 'speed'"),
        ("eplb", {"MOESTRO_VLLM_GPU": "tpu"}, "MOESTRO_VLLM_NETWORK, _GPU, .*no constants for GPU 'tpu'"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(policy, environment, message):
    with pytest.raises(ConfigError, match=message):
        planner(policy, **environment)


def test_moestro_plans_with_equal_parts_by_default():
    assert policy_text("moestro") == "moestro:weighted=0"
    assert policy_text("moestro:target=0.9") == "moestro:target=0.9,weighted=0"
    assert policy_text("moestro:weighted=1") == "moestro:weighted=1"
    assert policy_text("eplb") == "eplb"
    assert set(POLICIES) <= set(PLACE_POLICIES.names())
    assert set(PRICE_DEFAULTS) == {"NETWORK", "GPU", "LINK_WITHIN", "LINK_ACROSS"}


def test_a_whole_number_is_refused_by_the_name_of_its_variable():
    with pytest.raises(ConfigError, match=r"MOESTRO_VLLM_WINDOW_SIZE must be a whole number, 1 or more, got '0'"):
        HostVariables("MOESTRO_VLLM_", {"MOESTRO_VLLM_WINDOW_SIZE": "0"}).whole("WINDOW_SIZE", 1000)
    assert HostVariables("MOESTRO_VLLM_", {"MOESTRO_VLLM_WINDOW_SIZE": ""}).whole("WINDOW_SIZE", 1000) == 1000


def test_counts_of_steps_give_the_variance_and_idle_steps_count_for_nothing():
    counts = np.array([[[4, 0]], [[0, 0]], [[0, 2]]])
    load = HostLoad.of_steps(counts)
    assert load.num_steps == 2
    assert load.tokens.tolist() == [[2.0, 1.0]]
    assert load.variance.tolist() == [[4.0, 1.0]]
    assert load.activated.tolist() == [[0.5, 0.5]]
    idle = HostLoad.of_steps(np.zeros((3, 1, 2)))
    assert (idle.num_steps, idle.tokens.tolist()) == (1, [[0.0, 0.0]])


@pytest.mark.parametrize("policy", POLICIES)
def test_layers_without_tokens_keep_their_experts(policy):
    load = np.stack([np.zeros(8), np.arange(8.0) ** 3])
    old = np.random.default_rng(1).permuted(initial(2, 8, 12), axis=1)
    placed = planner(policy).place(load, HostSizes(12, 1, 1, 4), old)
    assert np.array_equal(placed[0], old[0])
    assert set(placed[1].tolist()) == set(range(8))


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_questions_get_equal_answers_on_every_rank(policy):
    rng = np.random.default_rng(5)
    load, old, sizes = rng.zipf(1.4, (6, 32)).clip(0, 10**6), initial(6, 32, 48), HostSizes(48, 1, 2, 8)
    first, second = (planner(policy).place(load, sizes, old) for _ in range(2))
    assert np.array_equal(first, second)


def test_an_exception_of_the_policy_leaves_the_placement_to_the_engine(caplog):
    own = np.array([[1, 0]])

    def failing() -> np.ndarray:
        raise ZeroDivisionError("no")

    assert or_else(failing, lambda: own) is own
    assert "the engine's own policy places the experts this time" in caplog.text
    assert or_else(lambda: own + 1, failing).tolist() == [[2, 1]]


def test_a_start_file_has_rows_for_the_expert_layers_or_for_all_layers():
    rows = np.arange(8).reshape(4, 2)
    assert rows_with_experts(rows, 4, (1, 2, 3), 4) is rows
    assert rows_with_experts(rows, 3, (1, 2, 3), 4).tolist() == rows[1:].tolist()
    for num_layers, num_model_layers in ((5, 4), (3, 5), (2, 4)):
        with pytest.raises(ValueError, match=f"has 4 layers, and the engine has {num_layers} layers with experts"):
            rows_with_experts(rows, num_layers, (1, 2, 3), num_model_layers)


def hosted_price(rows: np.ndarray, old: np.ndarray, load: HostLoad, sizes: HostSizes, prices: PlacePrices) -> float:
    """Seconds per step of a placement, with its moves spread over the horizon of 3,000 steps."""
    devices = even_devices(sizes.num_ranks, sizes.num_slots // sizes.num_ranks, sizes.num_nodes)
    before, after = (table_of_slots(each, devices, load.tokens.shape[1]) for each in (old, rows))
    tokens = np.repeat(load.tokens[None] / sizes.num_ranks, sizes.num_ranks, axis=0)
    loads = ExpertLoad(tokens, load.variance, load.activated, float(load.num_steps))
    step_s = score(loads, after, devices, prices).step_s
    return step_s + move_s(moves_between(before, after, devices), devices, prices) / 3000


@pytest.mark.parametrize("seed", range(8))
def test_a_filled_plan_is_priced_above_neither_the_present_one_nor_its_peers(seed):
    """Filling slots moves copies that the search had dropped; without tokens enough, that never pays."""
    rng = np.random.default_rng([48, seed])
    num_experts, num_ranks = int(rng.choice([8, 16, 32])), int(rng.choice([2, 4, 8]))
    sizes = HostSizes(
        (-(-num_experts // num_ranks) + int(rng.integers(0, 5))) * num_ranks, 1, int(rng.choice([1, 2])), num_ranks
    )
    tokens = rng.lognormal(0, rng.uniform(0.1, 1.5), (3, num_experts))
    tokens *= 8 * num_ranks * float(np.exp(rng.uniform(-4, 7))) / tokens.sum(axis=1, keepdims=True)
    load, old = HostLoad.of_sum(tokens * 1000, 1000), initial(3, num_experts, sizes.num_slots)
    found = {name: planner(name).planner for name in ("moestro", "eplb", "gimbal_v2", "static")}
    prices = found["moestro"].prices
    priced = {name: each.place(load, sizes, old, 3000) for name, each in found.items()}
    costs = {name: hosted_price(rows, old, load, sizes, prices) for name, rows in priced.items()}
    costs["stay"] = hosted_price(old, old, load, sizes, prices)
    assert costs["moestro"] <= (1 + 1e-9) * min(costs.values()), costs
