"""Law: however late the masks of grammars come, no token changes, and no request without a grammar takes another step.

Counted in steps and computed tokens; no clock decides.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laws.test_schedule_never_changes_tokens import BLOCK_SIZE, POLICIES, random_requests, serve
from support.fake_device import VOCAB_SIZE, KvDevice, expected_prompt_logprobs, expected_tokens, make_request
from support.late_masks import LateMasks
from support.plain_grammar import PATTERNS, light
from support.policy_text import policy_text

from moestro.core.request import Grammar
from moestro.engine.rank import Rank, build_rank
from moestro.engine.settings import SchedulerSettings

NEVER = 10**9


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(8, 40),
    max_num_seqs=st.integers(1, 8),
    budget=st.integers(8, 40),
    max_chunk=st.one_of(st.none(), st.integers(1, 9)),
    delay=st.integers(0, 2),
    caching=st.booleans(),
    policies=st.one_of(st.just(("fcfs", "decode_first", "last_in_order")), st.sampled_from(POLICIES)),
    host=st.sampled_from([0, 40]),
)
def test_late_masks_change_no_token(seed, num_blocks, max_num_seqs, budget, max_chunk, delay, caching, policies, host):
    rng = np.random.default_rng(seed)
    order, batch, evict = policies
    rank = build_rank(
        SchedulerSettings(
            num_blocks=num_blocks,
            num_host_blocks=host,
            block_size=BLOCK_SIZE,
            max_model_len=32,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_chunk=max_chunk,
            scheduling_policy=policy_text(
                order, {"theta_age_s": 30e-9} if order in ("sjf", "prefill_aware", "qllm") else {}
            ),
            batch_policy=policy_text(batch, {"max_batch": 3} if "qllm" in batch else {}),
            evict_policy=evict,
            enable_prefix_caching=caching,
        ),
        KvDevice(num_blocks, BLOCK_SIZE, delay, host),
    )
    requests = random_requests(rng, 14, 32)
    masks = LateMasks(VOCAB_SIZE, lambda _: int(rng.choice([0, 0, 1, 4])))
    tokens, prompts, _, aborted = serve(rank, requests, rng, abort_share=0.05, grammars=masks)
    for request in requests:
        if request.request_id in aborted:
            continue
        assert tokens[request.request_id] == expected_tokens(request)
        if request.sampling.prompt_logprobs is not None:
            assert prompts[request.request_id] == expected_prompt_logprobs(request)
    assert rank.scheduler.pool.num_free == num_blocks, "a block leaked"
    assert rank.scheduler.table.num_sitting_out == 0


def ample_rank() -> tuple[Rank, KvDevice]:
    device = KvDevice(4000, BLOCK_SIZE)
    return build_rank(
        SchedulerSettings(num_blocks=4000, block_size=BLOCK_SIZE, max_model_len=64, max_num_batched_tokens=4000), device
    ), device


def steps_of(rank: Rank, arrivals: dict[int, list], names: set[str]) -> dict[str, list[tuple[int, int]]]:
    """Step and token of each output of the requests called `names`, until these have ended."""
    found: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
    left = set(names)
    for step in range(2000):
        for request in arrivals.get(step, ()):
            rank.add(request, step)
        for output in rank.step(step):
            if output.request_id in names:
                found[output.request_id] += [(step, token) for token in output.token_ids]
                left -= {output.request_id} if output.finish_reason is not None else set()
        if not left and step > max(arrivals):
            return found
    raise AssertionError(f"left over: {left}")


@pytest.mark.parametrize("seed", range(8))
def test_plain_requests_take_the_same_steps_beside_grammars_whose_masks_never_come(seed):
    rng = np.random.default_rng(seed)
    arrivals: dict[int, list] = {}
    hostile: dict[int, list] = {}
    for i in range(12):
        prompt = rng.integers(0, VOCAB_SIZE, rng.integers(1, 30))
        wishes = {} if i % 3 else {"grammar": light(str(rng.choice(PATTERNS)))}  # these masks are ready
        plain = make_request(f"plain{i}", prompt, arrival_ns=i, max_tokens=int(rng.integers(1, 20)), **wishes)
        arrivals.setdefault(int(rng.integers(0, 20)), []).append(plain)
        grammar = Grammar("regex", str(rng.choice(PATTERNS)))
        bad = make_request(f"hostile{i}", prompt, arrival_ns=i, max_tokens=20, grammar=grammar)
        hostile.setdefault(int(rng.integers(0, 20)), []).append(bad)
    names = {request.request_id for requests in arrivals.values() for request in requests}
    alone, _ = ample_rank()
    alone.scheduler.use_grammars(LateMasks(VOCAB_SIZE, lambda _: 0))
    beside, device = ample_rank()
    masks = LateMasks(VOCAB_SIZE, lambda grammar: 0 if grammar.is_light else int(rng.choice([3, NEVER])))
    beside.scheduler.use_grammars(masks)
    both = {step: [*hostile.get(step, ()), *arrivals.get(step, ())] for step in range(20)}
    assert steps_of(beside, both, names) == steps_of(alone, arrivals, names)
    computed_alone = alone.executor._device.num_launched_tokens
    prompts = sum(request.num_prompt_tokens for requests in hostile.values() for request in requests)
    assert device.num_launched_tokens <= computed_alone + prompts + 2 * masks.num_masks, "a row for each late mask"


def test_a_rank_of_sequences_without_masks_has_nothing_to_compute():
    rank, device = ample_rank()
    rank.scheduler.use_grammars(LateMasks(VOCAB_SIZE, lambda _: NEVER))
    rank.add(make_request("hostile", [1, 2, 3], max_tokens=5, grammar=Grammar("regex", "a+")), 0)
    for step in range(50):
        assert not rank.step(step)
    assert (rank.num_steps, device.num_launched_tokens, rank.has_work) == (1, 3, True)
    rank.abort("hostile", 50)
    assert not rank.has_work
    rank.scheduler.check()


def test_the_law_can_fail_a_scheduler_that_drops_no_late_token_is_caught(monkeypatch):
    monkeypatch.setattr("support.fake_device.late_masks_of", lambda _units, result: result)
    rank, _ = ample_rank()
    request = make_request("r", [1, 2, 3], max_tokens=9, grammar=Grammar("regex", "a{20}"))
    tokens, *_ = serve(rank, [request], np.random.default_rng(0), grammars=LateMasks(VOCAB_SIZE, lambda _: 2))
    assert tokens["r"] != expected_tokens(request)
