"""Drawn routing: a function of seed, token and layer alone, and as popular as requested."""

from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.core.work import request_key
from moestro.cost.gate import (
    AheadGate,
    CellIndex,
    DecodeChoices,
    PopularityGate,
    RecordedGate,
    gate_kernel,
)
from moestro.cost.model import AMOE_RATE, PopularityForm, exponential_popularity, zipf_popularity


def tokens(n: int, number: int = 0, domain: int = 0) -> np.ndarray:
    return request_key(number, domain) + np.arange(n, dtype=np.uint64)


@pytest.mark.parametrize("num_chosen", [1, 2, 5])
def test_a_token_visits_the_same_experts_in_any_batch(num_chosen):
    gate, keys = PopularityGate(zipf_popularity(8, 0.3), num_chosen), tokens(5, 9)
    for layer in (0, 7):
        together = gate.choose(keys, layer)
        alone = np.concatenate([gate.choose(keys[i : i + 1], layer) for i in range(5)])
        assert together.dtype == np.int32
        assert np.array_equal(together, alone)
        assert (np.diff(together, axis=1) > 0).all(), "ascending, none twice"
        assert np.array_equal(gate.count(keys, range(layer, layer + 1))[0], np.bincount(together.ravel(), minlength=8))


@pytest.mark.parametrize("hot_ids", ["same", "permuted"])
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(8, 1), (8, 2), (16, 3), (128, 8), (4, 4)])
def test_counts_are_those_of_the_choices(num_experts, num_chosen, hot_ids):
    form = PopularityForm(family="exponential", skew=0.1, hot_ids=hot_ids, num_domains=3, seed=4)
    gate = PopularityGate(form.by_layer(9, num_experts), num_chosen, seed=2)
    keys = np.concatenate([tokens(3000, 1), tokens(50, 2, domain=2), tokens(70, 3, domain=1)])
    counted = gate.count(keys, range(2, 9))
    chosen = [gate.choose(keys, layer) for layer in range(2, 9)]
    assert np.array_equal(counted, [np.bincount(each.ravel(), minlength=num_experts) for each in chosen])
    assert all((np.diff(each, axis=1) > 0).all() for each in chosen)


@pytest.fixture(scope="module")
def kernel():
    if gate_kernel.search().wait() is None:
        pytest.skip(f"no gate kernel: {gate_kernel.search().failure}")
    return gate_kernel.look()


@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 40)),
    num_tokens=st.sampled_from([0, 1, 31, 32, 33, 200]),
    skew=st.sampled_from([0.0, 1.0, 12.0]),
    data=st.data(),
)
def test_compiled_draws_are_those_of_numpy(kernel, sizes, num_tokens, skew, data):
    num_domains, num_layers, num_experts = sizes
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 20)))
    popularity = rng.random(sizes) ** skew + 1e-12
    num_chosen = data.draw(st.integers(1, num_experts))
    popularity[..., rng.permutation(num_experts)[num_chosen:]] *= rng.random() < 0.5  # some are never chosen
    gate = PopularityGate(popularity / popularity.sum(axis=-1, keepdims=True), num_chosen, int(rng.integers(1 << 30)))
    keys = rng.integers(0, 1 << 56, num_tokens, np.uint64) + (rng.integers(num_domains, size=num_tokens) << 56).astype(
        np.uint64
    )
    first = data.draw(st.integers(0, num_layers - 1))
    layers = range(first, num_layers)
    found = gate.choose_layers(keys[::2], layers), gate.count(keys, layers)
    with gate_kernel.left_out():
        assert gate_kernel.look() is None
        expected = gate.choose_layers(keys[::2], layers), gate.count(keys, layers)
    for each, other in zip(found, expected, strict=True):
        assert each.dtype == other.dtype
        assert np.array_equal(each, other)


@pytest.mark.parametrize("popularity", [np.full(8, 12.5), np.array([0.5, 0.7, -0.2]), np.array([0.5, np.nan])])
def test_popularities_that_do_not_sum_to_1_are_refused(popularity):
    with pytest.raises(ValueError, match="sum to 1"):
        PopularityGate(popularity, 1)


@pytest.mark.parametrize("context", [nullcontext, gate_kernel.left_out])
def test_layers_and_domains_that_the_gate_lacks_are_refused(kernel, context):
    gate = PopularityGate(np.full((2, 3, 4), 0.25), 2)
    for keys, layers in ((tokens(2), range(2, 4)), (tokens(2), range(-1, 1)), (tokens(2, domain=2), range(1))):
        with context(), pytest.raises(IndexError):
            gate.count(keys, layers)
        with context(), pytest.raises(IndexError):
            gate.choose_layers(keys, layers)


def test_experts_are_visited_as_often_as_they_are_popular():
    popularity = zipf_popularity(8, 0.6)
    shares = PopularityGate(popularity, 1).count(tokens(20_000), range(4)) / 20_000
    assert np.allclose(shares, popularity, atol=0.012)
    assert not np.array_equal(shares[0], shares[1]), "layers choose on their own"


@pytest.mark.parametrize("num_chosen", [2, 3])
def test_a_choice_without_return_is_the_first_of_exponential_clocks(num_chosen):
    popularity, n = exponential_popularity(6, 0.5), 40_000
    found = PopularityGate(popularity, num_chosen).count(tokens(n), range(1))[0] / n
    rings = np.random.default_rng(1).exponential(size=(n, 6)) / popularity
    first = np.argsort(rings, axis=1)[:, :num_chosen]
    expected = np.bincount(first.ravel(), minlength=6) / n
    assert np.allclose(found, expected, atol=0.012)


def test_requests_positions_layers_and_seeds_choose_independently():
    gate = PopularityGate(zipf_popularity(8, 0.0), 1)
    n = 20_000
    columns = [
        gate.choose(tokens(n), 0),
        gate.choose(tokens(n), 1),
        gate.choose(tokens(n, 1), 0),
        gate.choose(tokens(n) + np.uint64(1), 0),
        PopularityGate(zipf_popularity(8, 0.0), 1, seed=1).choose(tokens(n), 0),
    ]
    for i, one in enumerate(columns):
        for other in columns[:i]:
            assert np.mean(one == other) == pytest.approx(1 / 8, abs=0.012)
    numbers = np.array([request_key(number) for number in range(n)], np.uint64)
    assert np.allclose(gate.count(numbers, range(3)) / n, 1 / 8, atol=0.012)


def test_an_expert_that_is_not_popular_at_all_is_never_chosen():
    popularity = np.array([0.0, 0.5, 0.0, 0.5, 0.0])
    assert (PopularityGate(popularity, 2).choose(tokens(100), 0) == [1, 3]).all()
    with pytest.raises(ValueError, match="fewer have a popularity"):
        PopularityGate(popularity, 3)


@pytest.mark.parametrize(("num_experts", "ratio"), [(8, 3.34), (16, 6.58)])
def test_the_exponential_family_has_the_skew_that_amoe_s_figure_4_implies(num_experts, ratio):
    popularity = exponential_popularity(num_experts, AMOE_RATE)
    assert popularity.sum() == pytest.approx(1)
    assert popularity.max() * num_experts == pytest.approx(ratio, abs=0.005)
    assert np.allclose(popularity[1:] / popularity[:-1], np.exp(-AMOE_RATE))


def test_hot_ids_are_the_same_in_all_layers_or_permuted_in_each():
    form = {"family": "exponential", "skew": AMOE_RATE, "num_domains": 2}
    same, permuted = (PopularityForm(hot_ids=ids, **form).by_layer(32, 8) for ids in ("same", "permuted"))
    assert same.shape == (2, 1, 8)
    assert permuted.shape == (2, 32, 8)
    assert np.array_equal(same[0, 0], exponential_popularity(8, AMOE_RATE))
    assert not np.array_equal(same[0], same[1]), "domains prefer other experts"
    hottest = permuted.argmax(axis=-1)
    assert all(len(set(row)) > 4 for row in hottest.tolist())
    assert np.allclose(np.sort(permuted), np.sort(same[0, 0]))
    assert np.array_equal(permuted, PopularityForm(hot_ids="permuted", **form).by_layer(32, 8))


def test_each_domain_chooses_by_its_own_popularity():
    popularity = np.stack([zipf_popularity(8, 1.0), zipf_popularity(8, 1.0)[::-1]])[:, None, :]
    gate, n = PopularityGate(popularity, 1), 20_000
    for domain in (0, 1):
        shares = gate.count(tokens(n, 5, domain), range(2)) / n
        assert np.allclose(shares, popularity[domain], atol=0.012)


def test_choices_drawn_for_all_layers_at_once_are_those_of_each_layer():
    rng, gate = np.random.default_rng(3), PopularityGate(zipf_popularity(16, 0.6), 3)
    choices, position = DecodeChoices(gate, 12), np.zeros(200, np.int64)
    for _ in range(300):
        slots = rng.permutation(int(rng.integers(1, 200)))[:40]
        position[slots] += rng.integers(0, 2, len(slots))  # some sequences are in the next step, some in another layer
        keys = np.array([request_key(int(slot) % 7) for slot in slots], np.uint64) + position[slots].astype(np.uint64)
        layer = int(rng.integers(12))
        assert np.array_equal(choices.choose(slots, keys, layer), gate.choose(keys, layer))


@given(st.lists(st.one_of(st.integers(0, 9), st.integers(0, 1 << 30)), min_size=1, max_size=60).filter(any), st.data())
def test_law_a_point_lies_in_the_cell_that_a_binary_search_finds(lengths, data):
    end = np.cumsum(lengths)
    points = st.one_of(st.integers(0, int(end[-1]) - 1), st.sampled_from([int(each) for each in end[:-1]] or [0]))
    at = np.array(data.draw(st.lists(points, min_size=1, max_size=40)))
    at = np.minimum(np.append(at, [0, end[-1] - 1]), end[-1] - 1)
    assert np.array_equal(CellIndex(end).find(at), end.searchsorted(at, side="right"))


# --- recorded choices -------------------------------------------------------------------------------------------------

NUM_RECORDED, NUM_LAYERS, NUM_EXPERTS = 600, 3, 8
ANSWERS = [np.array([[0, 40], [40, 160]]), np.array([[200, 400]])]


def recording() -> np.ndarray:
    """Choices of two experts, of which each layer repeats those of the layer before it, moved by one."""
    first = np.random.default_rng(5).permuted(np.tile(np.arange(NUM_EXPERTS), (NUM_RECORDED, 1)), axis=1)[:, :2]
    return ((first[:, None] + np.arange(NUM_LAYERS)[:, None]) % NUM_EXPERTS).astype(np.uint8)


def recorded(**given) -> RecordedGate:
    return RecordedGate(recording(), ANSWERS, NUM_EXPERTS, seed=3, **given)


def test_a_request_repeats_one_recorded_answer_of_its_domain():
    choices = np.sort(recording(), axis=-1)
    for domain, number in ((0, 1), (0, 2), (0, 5), (1, 1)):
        found = recorded().choose_layers(tokens(900, number, domain), range(NUM_LAYERS))
        fitting = [first for first, length in ANSWERS[domain] if (found[0] == choices[first]).all()]
        [length] = [length for first, length in ANSWERS[domain] if first == fitting[0]]
        assert np.array_equal(found, choices[fitting[0] + np.arange(900) % length])
    first = {recorded().choose_layers(tokens(1, number), range(1)).tobytes() for number in range(20)}
    assert len(first) == 2, "requests have different answers"


def test_shifted_layers_keep_the_popularity_and_lose_the_affinity():
    keys = np.concatenate([tokens(400, number, domain=1) for number in range(2)])
    whole, shifted = (recorded(shift_layers=shift) for shift in (False, True))
    pairs = [gate.choose_layers(keys, range(NUM_LAYERS)) for gate in (whole, shifted)]
    follows = [np.mean(np.sort((each[:, 0] + 1) % NUM_EXPERTS) == each[:, 1]) for each in pairs]
    assert follows[0] == 1
    assert follows[1] < 0.5
    counts = [gate.count(keys, range(NUM_LAYERS)) for gate in (whole, shifted)]
    assert np.allclose(counts[0].sum(axis=1), counts[1].sum(axis=1))


def test_recorded_counts_are_those_of_the_choices_and_of_draws_ahead():
    gate, keys = recorded(), tokens(64, 7)
    counted = gate.count(keys, range(1, NUM_LAYERS))
    chosen = gate.choose_layers(keys, range(1, NUM_LAYERS))
    assert chosen.dtype == np.int32
    by_layer = [np.bincount(chosen[:, layer].ravel(), minlength=NUM_EXPERTS) for layer in range(NUM_LAYERS - 1)]
    assert np.array_equal(counted, by_layer)
    ahead = AheadGate(gate, NUM_LAYERS, NUM_EXPERTS)
    assert np.array_equal(ahead.count(keys, range(NUM_LAYERS)), gate.count(keys, range(NUM_LAYERS)))
