"""Priced stages: each piece takes what the model says, what has begun ends, no batch changes who visits whom."""

from __future__ import annotations

import numpy as np
import pytest

from moestro.core.script import Script
from moestro.core.stages import Attention, Experts, ExpertsDone, Passage, Sample, Stopped
from moestro.core.work import LOGITS_LAST, SAMPLING_ROW, BlockMoves, Units
from moestro.cost.gate import PopularityGate, token_keys
from moestro.cost.gating import zipf_popularity
from moestro.cost.gpus import H20
from moestro.cost.hf_config import network_named
from moestro.cost.model import Batch
from moestro.cost.priced_device import Scripts
from moestro.cost.priced_stages import PricedStages
from moestro.cost.roofline import Roofline, RooflineSettings
from moestro.cost.staged_engines import qllm

COST = qllm()
ATTENTION_NS, ALL = 1_500_000, 2**31 - 1


def units(start, num_tokens, first_serial: int = 0) -> Units:
    n = len(start)
    return Units(
        slot=np.arange(n),
        serial=np.arange(first_serial, first_serial + n),
        service_class=np.zeros(n, np.uint8),
        start=np.array(start, np.int32),
        num_tokens=np.array(num_tokens, np.int32),
        write_start=np.array(start, np.int32),
        logits=np.full(n, LOGITS_LAST, np.uint8),
        block_tables=np.zeros((n, 1), np.int32),
        sampling=np.zeros(n, SAMPLING_ROW),
        token_ids=None,
    )


def decodes(n: int) -> Units:
    return units([300] * n, [1] * n)


def device(cost=COST) -> PricedStages:
    scripts = Scripts(16)
    for serial in range(64):
        scripts.expect(serial, Script(5))
    return PricedStages(cost, 4096, 16, lambda some, _: scripts.answer(some))


def passage(some: Units, layer: int = 0, until: int = ALL) -> Passage:
    places = np.arange(int(some.num_tokens.sum()), dtype=np.int32)
    return Passage(layer, until, some, places, places)


@pytest.mark.parametrize("cost", [COST, Roofline(RooflineSettings(network=network_named("qwen3-30b-a3b"), gpu=H20))])
def test_a_passage_takes_the_sum_of_its_stages_and_counts_every_choice(cost):
    stages, some = device(cost), units([0, 40, 7], [9, 1, 30])
    stages.launch(passage(some), 1000)
    took = stages.ready_at_ns() - 1000
    [result] = stages.poll(1000 + took)
    counts, batch = result.expert_counts, Batch(some.start, some.num_tokens)
    experts = sum(cost.expert_ns(rows) for rows in counts[counts > 0].tolist())
    attention = sum(cost.attention_ns(layer, batch) for layer in range(stages.shape.num_layers))
    assert took == experts + attention + cost.sample_ns(3)
    assert (counts.sum(axis=1) == 40 * stages.shape.num_chosen).all()
    assert result.slot.tolist() == [0, 1, 2]
    assert stages.ready_at_ns() is None


def test_what_is_launched_after_a_copy_waits_for_it_and_what_was_before_does_not():
    took = device()
    took.launch(passage(decodes(2)), 0)
    alone_ns, moved_ns = took.ready_at_ns(), COST.move_ns(3 * 16)
    stages = device()
    stages.launch(passage(decodes(2)), 0)
    stages.move_blocks(BlockMoves(np.array([[1, 2], [0, 1]]), np.array([[5], [3]])), alone_ns - 1)
    assert stages.ready_at_ns() == alone_ns
    stages.launch(passage(decodes(2)), alone_ns - 1)
    stages.poll(alone_ns)
    assert stages.ready_at_ns() == 2 * alone_ns - 1 + moved_ns
    assert moved_ns > 1000


def test_an_iteration_in_pieces_takes_what_the_whole_is_priced_at():
    for num_sequences in (1, 4, 32):
        stages, total = device(), 0
        for position in range(20):
            stages.launch(passage(units([position] * num_sequences, [1] * num_sequences)), 0)
            total += stages.ready_at_ns()
            stages = device()
        whole = COST.step_ns(Batch(np.full(num_sequences, 9), np.ones(num_sequences, np.int64)))
        assert total / 20 == pytest.approx(whole, rel=0.02)


def test_withdrawn_it_ends_the_piece_that_has_begun_and_no_other():
    stages, some = device(), decodes(8)
    stages.launch(passage(some, layer=3), 0)
    stages.withdraw(ATTENTION_NS + 1)  # the first expert has begun
    first = stages.ready_at_ns()
    assert 0 < first - ATTENTION_NS - COST.expert_ns(1) < 8 * 2_300
    assert stages.poll(first - 1) == []
    [stopped] = stages.poll(first)
    assert isinstance(stopped, Stopped)
    assert stopped.layer == 3
    assert stopped.topk_ids.shape == (8, 2)
    done = stopped.topk_ids < stopped.first_open
    assert stopped.expert_counts.sum() == stopped.expert_counts[3].sum() == done.sum() > 0


@pytest.mark.parametrize(("at_ns", "layer", "chosen"), [(0, 0, False), (1, 0, True), (ATTENTION_NS, 0, True)])
def test_a_piece_that_would_begin_at_that_moment_does_not(at_ns, layer, chosen):
    stages = device()
    stages.launch(passage(decodes(4)), 0)
    stages.withdraw(at_ns)
    [stopped] = stages.poll(ATTENTION_NS)
    assert stopped.layer == layer
    assert (stopped.topk_ids is not None) == chosen
    assert stopped.expert_counts.sum() == 0


def test_it_may_be_withdrawn_before_the_sampler_and_after_its_last_piece():
    stages, some = device(), decodes(4)
    stages.launch(passage(some, layer=31), 0)
    stages.launch(passage(some, layer=31, until=32), 0)
    whole = stages.ready_at_ns()
    stages.withdraw(whole - 1)  # the sampler has begun
    result, stopped = stages.poll(whole)
    assert result.slot.tolist() == [0, 1, 2, 3]
    assert (stopped.layer, stopped.topk_ids) == (31, None), "the one behind it had not begun"


def test_the_sampler_alone_is_a_passage_too():
    stages = device()
    stages.launch(passage(decodes(3), layer=32), 0)
    [result] = stages.poll(COST.sample_ns(3))
    assert result.slot.tolist() == [0, 1, 2]
    assert result.expert_counts.sum() == 0


def test_expert_batches_that_have_not_begun_come_back():
    stages = device()
    some = np.arange(6, dtype=np.int32)
    item = Experts(0, np.array([1, 4, 5]), np.array([3, 2, 1]), some, some * 0, some[:0], some[:0])
    stages.launch(item, 0)
    assert stages.ready_at_ns() == sum(COST.expert_ns(rows) for rows in (3, 2, 1))
    stages.withdraw(COST.expert_ns(3) + 1)
    assert stages.poll(COST.expert_ns(3) + COST.expert_ns(2)) == [ExpertsDone(2)]


def test_attention_and_sampler_are_not_withdrawn():
    stages, some = device(), decodes(2)
    rows = np.arange(2, dtype=np.int32)
    stages.launch(Attention(0, some, rows, rows), 0)
    stages.launch(Sample(some, rows), 0)
    stages.withdraw(0)
    [attended] = stages.poll(ATTENTION_NS)
    assert attended.topk_ids.shape == (2, 2)
    assert stages.ready_at_ns() == ATTENTION_NS + COST.sample_ns(2)


def test_a_token_visits_the_same_experts_in_any_batch():
    gate, some = PopularityGate(zipf_popularity(8, 0.3), 2), units([5, 9], [4, 1])
    keys = token_keys(some)
    for layer in (0, 7):
        together = gate.choose(keys, layer)
        alone = np.concatenate([gate.choose(keys[i : i + 1], layer) for i in range(5)])
        assert np.array_equal(together, alone)
        assert (together[:, 0] < together[:, 1]).all()
        assert np.array_equal(gate.count(keys, range(layer, layer + 1))[0], np.bincount(together.ravel(), minlength=8))


def test_experts_are_visited_as_often_as_they_are_popular():
    popularity = zipf_popularity(8, 0.6)
    keys = token_keys(units([0], [20_000]))
    shares = PopularityGate(popularity, 1).count(keys, range(4)) / 20_000
    assert np.allclose(shares, popularity, atol=0.01)
    assert not np.array_equal(shares[0], shares[1]), "layers choose on their own"
