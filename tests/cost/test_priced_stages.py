"""Priced stages: each piece takes what the model says, what has begun ends, no batch changes who visits whom."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from moestro.core.request import Script
from moestro.core.stages import Attention, Experts, ExpertsDone, Merges, Passage, Sample, Stopped
from moestro.core.work import LOGITS_LAST, SAMPLING_ROW, BlockMoves, Units, request_key
from moestro.cost.gate import PopularityGate
from moestro.cost.gpus import H20
from moestro.cost.model import Batch
from moestro.cost.networks import network_named
from moestro.cost.priced_device import HostOverhead, PricedStages, Scripts, StageSetup, whole_setup, worker_shape
from moestro.cost.roofline import Roofline, RooflineSettings
from moestro.cost.tables import qllm

COST = qllm()
NOTHING = np.empty(0, np.int32)
NO_HOST = HostOverhead()
NO_MERGES = Merges(NOTHING, NOTHING)
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


def device(cost=COST, host=NO_HOST) -> PricedStages:
    scripts = Scripts(16)
    for serial in range(64):
        scripts.expect(serial, Script(5), 1)
    setup = whole_setup(cost, 8192, 16)
    return PricedStages(cost, replace(setup, host=host), lambda some, _: scripts.answer(some), scripts.request_keys)


def passage(some: Units, layer: int = 0, until: int = ALL) -> Passage:
    places = np.arange(int(some.num_tokens.sum()), dtype=np.int32)
    return Passage(layer, until, some, places, places, NO_MERGES)


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
    item = Experts(0, np.array([1, 4, 5]), np.array([3, 2, 1]), some, some * 0)
    stages.launch(item, 0)
    assert stages.ready_at_ns() == sum(COST.expert_ns(rows) for rows in (3, 2, 1))
    stages.withdraw(COST.expert_ns(3) + 1)
    assert stages.poll(COST.expert_ns(3) + COST.expert_ns(2)) == [ExpertsDone(2)]


def test_attention_and_sampler_are_not_withdrawn():
    stages, some = device(), decodes(2)
    rows = np.arange(2, dtype=np.int32)
    stages.launch(Attention(0, some, rows, rows, NO_MERGES), 0)
    stages.launch(Sample(some, rows, NO_MERGES), 0)
    stages.withdraw(0)
    [attended] = stages.poll(ATTENTION_NS)
    assert attended.topk_ids.shape == (2, 2)
    assert stages.ready_at_ns() == ATTENTION_NS + COST.sample_ns(2)


def experts(counts: list[int]) -> Experts:
    total = np.zeros(sum(counts), np.int32)
    return Experts(0, np.arange(len(counts), dtype=np.int32), np.array(counts, np.int32), total, total)


def attention(some: Units, layer: int = 0) -> Attention:
    rows = np.arange(int(some.num_tokens.sum()), dtype=np.int32)
    return Attention(layer, some, rows, rows, NO_MERGES)


def test_the_host_delays_an_item_only_where_no_earlier_item_hides_it():
    host = HostOverhead(attention_ns=400_000, expert_ns=90_000)
    stages = device(host=host)
    stages.launch(attention(decodes(2)), 1000)
    first_ns = 1000 + host.attention_ns + ATTENTION_NS
    assert stages.ready_at_ns() == first_ns, "nothing ran before it"
    stages.launch(experts([3]), 1000)
    stages.poll(first_ns)
    assert stages.ready_at_ns() == first_ns + COST.expert_ns(3), "prepared while the attention ran"
    stages.poll(first_ns + COST.expert_ns(3))
    stages.launch(experts([3]), 10 * first_ns)
    assert stages.ready_at_ns() == 10 * first_ns + host.expert_ns + COST.expert_ns(3)


def test_the_host_prepares_one_item_after_another():
    slow = HostOverhead(expert_ns=50_000_000)
    stages = device(host=slow)
    for _ in range(3):
        stages.launch(experts([1]), 0)
    [first] = [stages.ready_at_ns()]
    stages.poll(first)
    assert stages.ready_at_ns() - first == slow.expert_ns


def test_a_worker_without_attention_has_experts_and_remote_tokens_alone():
    shape = worker_shape(COST.network, num_slots=2, num_remote_places=512)
    assert (shape.num_rows, shape.num_places, shape.num_experts, shape.num_remote_places) == (0, 0, 2, 512)
    assert shape.num_chosen == 2
    stages = PricedStages(COST, StageSetup(shape=shape, block_size=16))
    stages.launch(experts([7, 1]), 0)
    assert stages.ready_at_ns() == COST.expert_ns(7) + COST.expert_ns(1)
    assert stages.poll(stages.ready_at_ns()) == [ExpertsDone(2)]


def test_a_worker_without_experts_chooses_among_all_experts():
    gate = PopularityGate(COST.popularity, 2)
    shape = worker_shape(COST.network, num_rows=64, num_places=64)
    some = decodes(40)
    stages = PricedStages(COST, StageSetup(shape=shape, block_size=16, gate=gate))
    stages.launch(attention(some, layer=3), 0)
    [result] = stages.poll(stages.ready_at_ns())
    assert result.topk_ids.shape == (40, 2)
    assert result.topk_ids.max() > 3
    whole = device()
    whole.launch(attention(some, layer=3), 0)
    [same] = whole.poll(whole.ready_at_ns())
    assert np.array_equal(result.topk_ids, same.topk_ids), "scripts without keys have those of their serials"


def test_a_factor_is_drawn_for_each_item_and_lengthens_its_pieces():
    factors = iter([2.0, 0.5])
    setup = replace(whole_setup(COST, 8192, 16), factor=lambda: next(factors))
    stages = PricedStages(COST, setup, lambda some, _: Scripts(16).answer(some))
    for now_ns, factor in ((0, 2.0), (10**9, 0.5)):
        stages.launch(attention(decodes(3)), now_ns)
        assert stages.ready_at_ns() == now_ns + ATTENTION_NS * factor
        stages.poll(stages.ready_at_ns())
    assert stages.busy_ns == ATTENTION_NS * 2.5


def test_a_token_has_the_same_experts_in_any_engine_slot_and_serial():
    chosen = []
    for shift in (0, 5, 17):  # other slots and serials, the same requests and positions
        scripts = Scripts(16)
        for serial in range(64):
            scripts.expect(serial, Script(5, request_key=request_key(serial - shift)), 1)
        stages = PricedStages(COST, whole_setup(COST, 128, 16), None, scripts.request_keys)
        some = units([300, 7, 40], [1, 3, 1], first_serial=shift)
        some = structs.replace(some, slot=np.arange(3)[::-1] + 2 * shift)
        stages.launch(attention(some, layer=9), 0)
        chosen.append(stages.poll(stages.ready_at_ns())[0].topk_ids)
    assert np.array_equal(chosen[0], chosen[1])
    assert np.array_equal(chosen[0], chosen[2])


def test_the_experts_of_an_item_are_drawn_when_it_is_launched():
    scripts = Scripts(16)
    scripts.expect(0, Script(5, request_key=request_key(7)), 1)
    stages = PricedStages(COST, whole_setup(COST, 128, 16), None, scripts.request_keys)
    stages.launch(attention(decodes(1)), 0)
    scripts.forget(0)  # the request was aborted meanwhile
    [result] = stages.poll(stages.ready_at_ns())
    expected = PopularityGate(COST.popularity, 2).choose(np.array([request_key(7) + 300], np.uint64), 0)
    assert np.array_equal(result.topk_ids, expected)
