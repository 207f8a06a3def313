"""Laws of the roofline: many steps at once are exactly the single ones, and more work is never cheaper."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.cost.gpus import GPUS
from moestro.cost.model import Batch, even_gating, placed_gating, zipf_popularity
from moestro.cost.networks import CONFIGS, network_named
from moestro.cost.roofline import Roofline, RooflineSettings, twice_num_pairs
from moestro.cost.tables import amoe, qllm

NAMES = sorted(CONFIGS)


def placement(network, num_ranks: int, rng: np.random.Generator):
    """A gating of its own for each layer: popularity drawn, experts dealt at random, some of them replicated."""
    num_experts = network.experts.num_experts
    num_layers = sum(group.num_layers for group in network.groups if group.has_experts)
    popularity = rng.dirichlet(np.full(num_experts, 0.5), num_layers)
    share = np.zeros((num_layers, num_ranks, num_experts))
    for layer in range(num_layers):
        owner, replica = rng.integers(num_ranks, size=(2, num_experts))
        share[layer, owner, range(num_experts)] += 0.5
        share[layer, replica, range(num_experts)] += 0.5
    return placed_gating(popularity, network.experts.top_k, share)


def draw_model(rng: np.random.Generator) -> Roofline:
    network = network_named(NAMES[rng.integers(len(NAMES))])
    gpu = list(GPUS.values())[rng.integers(len(GPUS))]
    num_ranks = int(rng.choice([1, 2, 4]))
    gating = None
    if network.experts is not None and rng.random() < 0.5:
        gating = placement(network, num_ranks, rng)
    return Roofline(RooflineSettings(network=network, gpu=gpu, num_ep_ranks=num_ranks, gating=gating))


def draw_batch(rng: np.random.Generator) -> Batch:
    num_decodes, num_chunks = int(rng.integers(0, 40)), int(rng.integers(0, 4))
    if num_decodes + num_chunks == 0:
        num_decodes = 1
    start = rng.integers(0, 9000, num_decodes + num_chunks)
    start[rng.random(len(start)) < 0.3] //= 100
    num_tokens = np.ones(len(start), np.int64)
    num_tokens[num_decodes:] = rng.integers(2, 3000, num_chunks)
    return Batch(start, num_tokens)


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_many_steps_at_once_are_the_single_steps(seed):
    rng = np.random.default_rng(seed)
    model, start = draw_model(rng), draw_batch(rng).start.astype(np.int32)
    num_steps = int(rng.integers(1, 200))
    single = [model.step_ns(Batch(start + i, np.ones_like(start))) for i in range(num_steps)]
    assert model.decode_steps_ns(start, num_steps).tolist() == single
    starts = [start[:: r + 1] if rng.random() < 0.8 else start[:0] for r in range(model.num_ep_ranks)]
    if any(map(len, starts)):
        grouped = [
            model.group_step_ns([Batch(s + i, np.ones_like(s)) if len(s) else None for s in starts])
            for i in range(num_steps)
        ]
        assert model.group_decode_steps_ns(starts, num_steps).tolist() == grouped


@pytest.mark.parametrize("engine", [qllm(), amoe()])
def test_many_steps_of_a_staged_engine_are_the_single_steps(engine):
    start = np.arange(7, dtype=np.int32)
    single = [engine.step_ns(Batch(start + i, np.ones_like(start))) for i in range(5)]
    assert engine.decode_steps_ns(start, 5).tolist() == single


def more_of(batch: Batch, rng: np.random.Generator) -> Batch:
    """`batch` with more to do: a unit more, a longer context, or a longer chunk."""
    start, num_tokens = batch.start.copy(), batch.num_tokens.copy()
    row, chunks = rng.integers(len(start)), np.flatnonzero(num_tokens > 1)
    what = rng.integers(3 if len(chunks) else 2)
    if what == 0:
        return Batch(np.append(start, rng.integers(5000)), np.append(num_tokens, rng.choice([1, 2, 500])))
    if what == 1:
        start[row] += rng.integers(1, 2000)
    else:
        num_tokens[rng.choice(chunks)] += rng.integers(1, 2000)
    return Batch(start, num_tokens)


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32))
def test_more_work_is_never_cheaper(seed):
    rng = np.random.default_rng(seed)
    model, batch = draw_model(rng), draw_batch(rng)
    more = more_of(batch, rng)
    assert model.step_ns(more) >= model.step_ns(batch)
    others = [draw_batch(rng) if rng.random() < 0.7 else None for _ in range(model.num_ep_ranks - 1)]
    assert model.group_step_ns([more, *others]) >= model.group_step_ns([batch, *others])
    if others:
        busier = [draw_batch(rng) if other is None else other for other in others]
        assert model.group_step_ns([batch, *busier]) >= model.group_step_ns([batch, *others])
    busy = Batch(batch.start, batch.num_tokens, 100)
    assert model.step_ns(busy) >= model.step_ns(batch)


@settings(max_examples=200)
@given(cached=st.integers(0, 60), new=st.integers(1, 60), window=st.one_of(st.none(), st.integers(1, 50)))
def test_pairs_of_a_chunk_are_those_of_a_recount_but_for_half_a_key_a_query(cached, new, window):
    seen = [min(cached + i, window) if window else cached + i for i in range(1, new + 1)]
    assert 0 <= 2 * sum(seen) - twice_num_pairs(cached, new, window) <= new


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), num_tokens=st.integers(1, 30))
def test_activated_experts_are_those_of_a_draw(seed, num_tokens):
    """Against a simulation in which each token takes an expert with the chance that the gating says."""
    rng = np.random.default_rng(seed)
    popularity, top_k, num_ranks = zipf_popularity(16, float(rng.uniform(0, 1.2))), 4, 2
    share = np.zeros((1, num_ranks, 16))
    share[0, rng.integers(num_ranks, size=16), range(16)] = 1
    gating = placed_gating(popularity[None], top_k, share)
    hit = rng.random((4000, num_tokens, 16)) < np.minimum(1, top_k * popularity)
    drawn = (hit.any(axis=1)[:, None, :] * share).sum(axis=-1).mean(axis=0)
    np.testing.assert_allclose(gating.activated(num_tokens)[0], drawn, atol=0.2)
    assert gating.copies.sum() == pytest.approx(top_k)
    even = even_gating(popularity, top_k, num_ranks)
    assert even.activated(num_tokens)[0, 0] * num_ranks == pytest.approx(gating.activated(num_tokens).sum())
