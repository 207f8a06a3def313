"""Layered prefill in a whole rank: decodes get tokens while a long prompt is inside, and only with this policy."""

from __future__ import annotations

import pytest
from support.fake_device import make_request
from support.fake_stages import FakeStages, expected_tokens, make_shape

from moestro.engine.rank import build_preemptive_rank
from moestro.engine.settings import SchedulerSettings
from moestro.flow.registry import make_step_policy

BLOCK_SIZE, PROMPT, NUM_LAYERS = 4, 24, 4


def tokens_before_the_first_of_a_prompt(text: str) -> int:
    """Count the tokens that a decode gets while a prompt is computed, which arrives just after one of them."""
    device = FakeStages(make_shape(64), 64, BLOCK_SIZE, None)
    bounds = SchedulerSettings(
        num_blocks=64,
        block_size=BLOCK_SIZE,
        max_model_len=64,
        max_num_seqs=4,
        max_num_urgent_seqs=4,
        max_num_batched_tokens=32,
        scheduling_policy="fcfs",
    )
    rank = build_preemptive_rank(bounds, device, make_step_policy(text, 1.0))
    decode = make_request("decode", [1, 2, 3], max_tokens=30)
    prompt = make_request("prompt", range(PROMPT), arrival_ns=1, max_tokens=2)
    tokens: dict[str, list[int]] = {"decode": [], "prompt": []}
    rank.add(decode, 0)
    before = during = -1
    for now_ns in range(1, 5000):
        for output in rank.step(now_ns, lambda _: False):
            tokens[output.request_id] += output.token_ids
            if before < 0 and len(tokens["decode"]) >= 3:
                before = len(tokens["decode"])
                rank.add(prompt, now_ns)
        if tokens["prompt"] and during < 0:
            during = len(tokens["decode"]) - before
        if not rank.has_work:
            break
    for request in (decode, prompt):
        assert tokens[request.request_id] == expected_tokens(request, device.shape)
    return during


@pytest.mark.parametrize(("num_groups", "least"), [(4, 4), (2, 2), (1, 1)])
def test_a_decode_gets_a_token_for_each_group_of_layers_that_a_prompt_passes(num_groups, least):
    assert (
        least
        <= tokens_before_the_first_of_a_prompt(f"layered_prefill:num_groups={num_groups},tokens_per_group=1")
        <= least + 1
    )


def test_in_order_a_decode_gets_no_token_while_the_batch_of_a_prompt_runs():
    assert tokens_before_the_first_of_a_prompt("in_order") <= 2  # the one under way, and that of the batch itself
