"""The KV cache that a share of a card's memory leaves beside weights and the largest step."""

from __future__ import annotations

import numpy as np
import pytest

from moestro.core.work import LOGITS_LAST, LOGITS_PROMPT
from moestro.cost.networks import network_named
from moestro.errors import ConfigError
from moestro.model.device import CardUse, trial_units
from moestro.model.settings import LocalRank

GIB = 1 << 30
BLOCK_SIZE, H100_BYTES = 16, int(79.1 * GIB)
# A step of 2,048 tokens, by arithmetic: logits of all rows in bfloat16 and float32 (1.9 GB), and half a GB of the rest.
STEP_BYTES, LIBRARY_BYTES = 2_500_000_000, 700_000_000


def use(**changes: int) -> CardUse:
    network = network_named("qwen3-30b-a3b")
    given = {"total_bytes": H100_BYTES, "weight_bytes": int(network.weight_bytes()), "other_bytes": LIBRARY_BYTES,
             "step_bytes": STEP_BYTES}  # fmt: skip
    return CardUse(**{**given, **changes})


def num_tokens(card: CardUse, utilization: float = 0.9) -> int:
    bytes_per_token = int(network_named("qwen3-30b-a3b").kv_bytes_per_token)
    kv_bytes = card.kv_bytes(utilization, bytes_per_token * BLOCK_SIZE, num_pools=96)
    return kv_bytes // (bytes_per_token * BLOCK_SIZE) * BLOCK_SIZE


def test_a_card_of_80_gb_holds_100000_tokens_beside_qwen3_30b():
    assert 100_000 < num_tokens(use()) < 150_000


def test_the_parts_and_the_kv_cache_never_exceed_the_share():
    rng = np.random.default_rng(0)
    num_fitting = 0
    for _ in range(500):
        card = CardUse(
            total_bytes=int(rng.integers(1 << 30, 1 << 38)),
            num_sharing=int(rng.integers(1, 5)),
            weight_bytes=int(rng.integers(0, 1 << 36)),
            other_bytes=int(rng.integers(0, 1 << 31)),
            step_bytes=int(rng.integers(0, 1 << 32)),
            graph_bytes=int(rng.integers(0, 1 << 31)),
        )
        utilization, block, num_pools = float(rng.uniform(0.01, 1)), int(rng.integers(1, 1 << 24)), 2
        used = card.weight_bytes + card.other_bytes + card.step_bytes + card.graph_bytes
        allowed = utilization * card.total_bytes / card.num_sharing
        if used + block + num_pools * (2 << 20) > allowed:
            with pytest.raises(ConfigError, match="--gpu-memory-utilization"):
                card.kv_bytes(utilization, block, num_pools)
            continue
        left = card.kv_bytes(utilization, block, num_pools)
        num_fitting += 1
        assert left >= block
        assert used + left <= allowed
        assert used + left + num_pools * (2 << 20) > allowed - 1, "nothing is left unused"
    assert 50 < num_fitting < 450


def test_a_larger_share_holds_more_and_sharing_divides_it():
    assert num_tokens(use(), 0.95) > num_tokens(use()) > num_tokens(use(graph_bytes=GIB))
    small = use(weight_bytes=GIB)
    assert num_tokens(small) > 2 * num_tokens(use(weight_bytes=GIB, num_sharing=2)) > 0


def test_what_does_not_fit_says_what_was_given_what_takes_it_and_what_to_do():
    with pytest.raises(ConfigError) as refused:
        use().kv_bytes(0.5, 1 << 20, 96)
    text = str(refused.value)
    for words in (
        "--gpu-memory-utilization 0.5 of 79.1 GiB allows 39.5 GiB",
        "no KV block of 1048576 bytes: 56.9 by weights, 2.3 by a step and 0.7 by what else is on the card",
        "Raise it, lower --max-num-batched-tokens",
    ):
        assert words in text
    with pytest.raises(ConfigError, match=r"shared by 2 processes, allows 35\.6 GiB.*let fewer processes share"):
        use(num_sharing=2).kv_bytes(0.9, 1 << 20, 96)


@pytest.mark.parametrize(
    ("rank", "num_ranks", "num_cards", "num_sharing"),
    [(0, 1, 1, 1), (0, 1, 8, 1), (0, 2, 1, 2), (1, 2, 2, 1), (0, 3, 2, 2), (1, 3, 2, 1), (2, 3, 2, 2), (5, 4, 2, 2),
     (7, 1, 4, 1)],
)  # fmt: skip
def test_ranks_that_take_cards_in_turn_know_how_many_share_one(rank, num_ranks, num_cards, num_sharing):
    assert LocalRank(rank=rank, num_ranks=num_ranks).num_sharing(num_cards) == num_sharing


@pytest.mark.parametrize("max_tokens", [1, 5, 64, 2048, 8192])
@pytest.mark.parametrize("max_seqs", [1, 3, 64])
@pytest.mark.parametrize("max_model_len", [1, 7, 300, 40_960])
def test_the_trial_is_as_large_as_a_step_can_be(max_tokens, max_seqs, max_model_len):
    units = trial_units(LocalRank(max_tokens=max_tokens, max_seqs=max_seqs), max_model_len, BLOCK_SIZE, 101)
    count = min(max_tokens, max_seqs)
    assert len(units) == count
    assert len(units.token_ids) == units.num_tokens.sum()
    length = units.start + units.num_tokens
    assert units.num_tokens.min() >= 1
    assert units.start.min() >= 0
    assert length.max() == length[0] == max_model_len
    assert units.block_tables.shape[1] * BLOCK_SIZE >= max_model_len
    if max_seqs > 2 + max_tokens // max_model_len:
        assert units.num_tokens.sum() == max_tokens
    assert (units.logits & LOGITS_LAST != 0).all()
    asks = units.logits & LOGITS_PROMPT != 0
    assert len(units.next_token_ids) == units.num_tokens[asks].sum()
