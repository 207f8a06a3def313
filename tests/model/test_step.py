"""Where a step reads and writes: shared blocks stay as they are, strangers' slots unseen, pieces change nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity import drive, tiny

from moestro.core.work import FROM_STEP_BEFORE, LOGITS_LAST, LOGITS_NONE, LOGITS_PROMPT
from moestro.model import step as step_module
from moestro.model.attention import PLAIN
from moestro.model.pools import KVPools
from moestro.model.step import PagedStep, Reach, SampledTokens

CPU = torch.device("cpu")
WINDOWED = ["mixtral-window", "gpt_oss", "deepseek_v2"]


def prompt(num: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, tiny.VOCAB, size=num).tolist()


def logits_of(device, parts, tables, **columns) -> torch.Tensor:
    step = PagedStep(drive.make_units(parts, tables, **columns), device.pools, torch.device("cpu"))
    return device.network.logits(step)


@pytest.mark.parametrize("name", WINDOWED)
def test_a_full_prefix_hit_computes_its_last_token_and_leaves_the_shared_block_alone(name, checkpoint):
    device = drive.make_device(tiny.load(checkpoint(name)))
    tokens = prompt(16)
    whole = logits_of(device, [(0, tokens)], [[5, 2, 9, 1]])
    before = {layer: [pool[:-2].clone() for pool in pair] for layer, pair in device.pools._by_layer.items()}
    again = logits_of(device, [(15, tokens[15:])], [[5, 2, 9, 1]], write_start=np.array([16], np.int32))
    torch.testing.assert_close(again, whole, atol=1e-5, rtol=0)
    for layer, pair in device.pools._by_layer.items():
        assert all(torch.equal(pool[:-2], old) for pool, old in zip(pair, before[layer], strict=True))
        assert not any(pool[device.pools.zero_slot].any() for pool in pair)


def test_two_sequences_share_their_prefix_blocks(checkpoint):
    device = drive.make_device(tiny.load(checkpoint("qwen3_moe")))
    shared, one, other = prompt(8), prompt(5, 1), prompt(3, 2)
    logits_of(device, [(0, shared + one)], [[7, 3, 8, 6]])
    both = logits_of(device, [(8, other), (13, [9])], [[7, 3, 11, 12], [7, 3, 8, 6]])
    alone = drive.make_device(device.network)
    wanted = logits_of(alone, [(0, shared + other), (0, [*shared, *one, 9])], [[0, 1, 2, 3], [4, 5, 6, 7]])
    torch.testing.assert_close(both, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", WINDOWED)
def test_what_other_sequences_left_in_free_slots_is_never_seen(name, checkpoint):
    network = tiny.load(checkpoint(name))
    answers = []
    for poison in (0.0, float("nan")):
        device = drive.make_device(network)
        for pair in device.pools.write(0, torch.empty(0, dtype=torch.int64), *_nothing(device)), *_others(device):
            for pool in pair:
                pool[: device.pools.scratch_slot] = poison
        first = logits_of(device, [(0, prompt(5)), (0, prompt(11, 1))], [[0, 1, 60], [2, 3, 4]])
        # A decode beside a longer one, whose padding runs through blocks of others, and a chunk.
        tables = [[0, 1, 60, 61], [2, 3, 4, 62], [5, 6, 7, 63]]
        second = logits_of(device, [(5, [9]), (11, [8]), (0, prompt(9, 2))], tables)
        answers.append(torch.cat([first, second]))
    assert torch.equal(*answers)


def _nothing(device):
    return tuple(pool[:0] for pool in device.pools._by_layer[0])


def _others(device):
    return [pair for layer, pair in device.pools._by_layer.items() if layer]


@pytest.mark.parametrize("name", [*WINDOWED, "qwen2"])
def test_pieces_of_a_long_chunk_change_nothing(name, checkpoint, monkeypatch):
    network = tiny.load(checkpoint(name))
    parts, tables = [(0, prompt(60)), (0, prompt(3, 1))], np.arange(30).reshape(2, 15)[:, ::-1]
    columns = {"logits": np.full(2, LOGITS_LAST | LOGITS_PROMPT, np.uint8)}
    whole = logits_of(drive.make_device(network), parts, tables, **columns)
    monkeypatch.setattr(step_module, "_MAX_PIECE_QUERIES", 7)
    step = PagedStep(drive.make_units(parts, tables, **columns), drive.make_device(network).pools, torch.device("cpu"))
    torch.testing.assert_close(network.logits(step), whole, atol=1e-5, rtol=0)
    assert len(step.view(Reach(None, has_sink=False)).pieces) == 10
    network.model.set_attn_implementation(PLAIN)
    torch.testing.assert_close(
        logits_of(drive.make_device(network), parts, tables, **columns), whole, atol=1e-5, rtol=0
    )


def test_a_windowed_decode_reads_the_blocks_of_its_window_alone():
    units = drive.make_units([(41, [1]), (9, [1])], np.arange(40).reshape(2, 20))
    step = PagedStep(units, KVPools(40, 4), torch.device("cpu"))
    (view,) = step.view(Reach(6, has_sink=False)).decode
    assert view.rows is None
    assert view.slots.shape[1] == 8
    positions = [sorted(row[seen].tolist()) for row, seen in zip(view.slots, view.allowed[:, 0, 0], strict=True)]
    assert positions == [list(range(36, 42)), list(range(80 + 4, 80 + 10))]
    assert step.windows == {6}


@pytest.mark.parametrize("name", [*WINDOWED, "qwen3_moe"])
def test_decodes_of_mixed_lengths_and_a_chunk_equal_each_alone(name, checkpoint, monkeypatch):
    monkeypatch.setattr(step_module, "_MAX_GROUP_SLOTS_ON_CPU", 64)
    device = drive.make_device(tiny.load(checkpoint(name)))
    lengths = [3, 70, 1, 9, 33, 8, 2, 71, 20, 4]
    parts = [*((length, [9]) for length in lengths), (0, prompt(6))]
    tables, free = np.zeros((len(parts), 19), np.int32), iter(np.random.default_rng(1).permutation(96))
    for row, (start, tokens) in zip(tables, parts, strict=True):
        for block in range((start + len(tokens) - 1) // 4 + 1):
            row[block] = next(free)
        if start:
            logits_of(device, [(0, prompt(start, start))], row[None])
    alone = [logits_of(device, [part], row[None]) for part, row in zip(parts, tables, strict=True)]
    step = PagedStep(drive.make_units(parts, tables), device.pools, torch.device("cpu"))
    torch.testing.assert_close(device.network.logits(step), torch.cat(alone), atol=1e-5, rtol=0)
    assert len(step.view(Reach(None, has_sink=False)).decode) > 4


@pytest.mark.parametrize("window", [None, 100])
def test_padding_at_most_doubles_what_decodes_read_and_no_group_is_too_large(window, monkeypatch):
    monkeypatch.setattr(step_module, "_MAX_GROUP_SLOTS_ON_CPU", 1_000)
    lengths = np.concatenate([np.random.default_rng(0).integers(1, 600, 80), np.full(50, 31), [3_000]])
    units = drive.make_units([(length - 1, [1]) for length in lengths], np.zeros((131, 750), np.int32))
    groups = PagedStep(units, KVPools(1, 4), torch.device("cpu")).view(Reach(window, has_sink=False)).decode
    assert sorted(row for group in groups for row in group.rows.tolist()) == list(range(131))
    needed = np.minimum(lengths, window or 3_000)
    assert sum(group.slots.numel() for group in groups) <= 2 * (needed.sum() + 4 * len(needed))
    assert all(group.slots.numel() <= 1_000 or len(group.rows) == 1 for group in groups)


def test_pieces_keep_masks_small_and_cover_every_query_once():
    units = drive.make_units([(5_000, [1] * 700), (3, [1]), (0, [1] * 30)], np.zeros((3, 1_500), np.int32))
    pieces = PagedStep(units, KVPools(1, 4), torch.device("cpu")).view(Reach(None, has_sink=True)).pieces
    rows = [row for piece in pieces for row in range(piece.first_row, piece.end_row)]
    assert rows == [*range(700), *range(701, 731)]
    assert max(piece.allowed.numel() for piece in pieces) <= 1 << 20
    assert [piece.slots.numel() for piece in pieces][-2:] == [5_701, 31]


def test_only_the_logits_that_are_wanted_are_computed():
    wanted = np.array([LOGITS_LAST, LOGITS_NONE, LOGITS_PROMPT, LOGITS_LAST | LOGITS_PROMPT], np.uint8)
    units = drive.make_units([(0, [1] * n) for n in (3, 2, 2, 1)], np.arange(4)[:, None], logits=wanted)
    assert PagedStep(units, KVPools(4, 4), torch.device("cpu")).logit_rows.tolist() == [2, 5, 6, 7]


@pytest.mark.parametrize("seed", range(5))
def test_a_step_of_decodes_alone_has_the_rows_that_it_has_beside_a_chunk(seed):
    """Such steps are built on a shorter way."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, 30, 6).tolist()
    tables = rng.permutation(90)[:63].reshape(7, 9)
    logits = rng.choice([LOGITS_NONE, LOGITS_LAST, LOGITS_PROMPT], 7).astype(np.uint8)
    parts = [*((start, [7 + start]) for start in starts), (0, [1, 2, 3])]
    shared = np.array([*starts, 0], np.int32) + rng.integers(0, 2, 7).astype(np.int32)
    pools = KVPools(90, 4)

    def step(num: int) -> PagedStep:
        units = drive.make_units(parts[:num], tables[:num], logits=logits[:num], write_start=shared[:num])
        return PagedStep(units, pools, torch.device("cpu"))

    alone, beside = step(6), step(7)
    for name in ("positions", "token_ids", "write_slots", "input_ids", "position_ids"):
        assert getattr(alone, name).ravel().tolist() == getattr(beside, name).ravel()[:6].tolist(), name
    for name in ("first_row_of", "end_row_of", "length_of"):
        assert getattr(alone, name).tolist() == getattr(beside, name)[:6].tolist(), name
    assert alone.logit_rows.tolist() == beside.logit_rows[beside.logit_rows < 6].tolist()
    assert alone.layout.rows.tolist() == beside.layout.rows[:7].tolist()


@pytest.mark.parametrize("slots", [[4, 2, 7], [7, 4, 2], [7, 4], [2]])
def test_tokens_of_the_step_before_go_to_their_slots(slots):
    sampled = SampledTokens(np.array([4, 2, 7]), torch.tensor([40, 20, -1]))
    token_of = {4: 40, 2: 20, 7: 0}  # where there is none, any token id
    parts = [(8, [FROM_STEP_BEFORE]) for _ in slots]
    alone = PagedStep(drive.make_units(parts, [[0, 1, 2]] * len(slots), slot=np.array(slots)), None, CPU)
    alone.fill_tokens(sampled)
    assert alone.input_ids.tolist() == [[token_of[slot] for slot in slots]]
    assert alone.tokens_before(np.arange(len(slots))).tolist() == [token_of[slot] for slot in slots]
    units = drive.make_units([(0, [5, 6]), *parts], [[0, 1, 2]] * (len(slots) + 1), slot=np.array([9, *slots]))
    mixed = PagedStep(units, None, CPU)
    mixed.fill_tokens(sampled)
    assert mixed.input_ids.tolist() == [[5, 6, *(token_of[slot] for slot in slots)]]
    assert mixed.tokens_before(np.arange(1 + len(slots))).tolist() == [-1, *(token_of[slot] for slot in slots)]
