"""Every tested family in stages: whatever the step policy does to its plans, transformers' own greedy tokens."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
import torch
from parity import tiny
from support import plain_sampling
from support.fake_device import make_request
from support.plain_grammar import PATTERNS, backend, light
from support.step_policies import ADVERSARIES, Random

from moestro.core.request import ServiceClass
from moestro.core.stages import StageShape
from moestro.engine.rank import build_preemptive_rank
from moestro.engine.settings import SchedulerSettings
from moestro.flow.policies.one_queue import in_order
from moestro.flow.policies.qllm import ExpertLevelPreemption
from moestro.model.staged.staged_device import StagedTorchDevice
from moestro.model.staged.staged_network import StagedNetwork

BLOCK_SIZE, NUM_BLOCKS, BUDGET, NUM_NEW = 4, 64, 24, 5
REPLAYED = {"granitemoe"}
EAGER_ONLY = {"gpt_oss"}


def staged_device(network, num_blocks: int = NUM_BLOCKS, num_host_blocks: int = 0) -> StagedTorchDevice:
    probe, num_chosen = network.probe(BLOCK_SIZE)
    staged = StagedNetwork(network)
    shape = StageShape(
        is_sparse=staged.is_sparse,
        num_experts=network.num_experts,
        num_chosen=num_chosen,
        num_rows=2 * BUDGET,
        num_places=2 * BUDGET - 8,
    )
    pools = probe.allocate(num_blocks)
    pools.allocate_host(num_host_blocks)
    return StagedTorchDevice(staged, pools, shape, piece_bytes=1)


def make_requests(rng, num: int = 5) -> list:
    requests = []
    for i in range(num):
        prompt = rng.integers(3, tiny.VOCAB, int(rng.integers(1, 34)))
        request = make_request(f"r{i}", prompt, block_size=BLOCK_SIZE, arrival_ns=i, max_tokens=NUM_NEW)
        service_class = ServiceClass.LS if i % 2 else ServiceClass.BE
        requests.append(msgspec.structs.replace(request, service_class=service_class))
    return requests


def serve(device, policy, requests, rng, num_host_blocks: int = 0):
    """{id: tokens}, and the rank. Requests come in mid-network."""
    bounds = SchedulerSettings(
        num_blocks=device.pools.num_blocks,
        num_host_blocks=num_host_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=40,
        max_num_seqs=6,
        max_num_urgent_seqs=6,
        max_num_batched_tokens=BUDGET,
        max_chunk=9,
        scheduling_policy="qllm",
        evict_policy="least_computed_be_first",
    )
    rank = build_preemptive_rank(bounds, device, policy)
    rank.scheduler.use_grammars(backend(tiny.VOCAB))
    arriving, tokens = list(requests), {}
    for now_ns in range(50_000):
        if arriving and rng.random() < 0.2:
            rank.add(arriving.pop(0), now_ns)
        for output in rank.step(now_ns, lambda _: rng.random() < 0.3):
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if not arriving and not rank.has_work:
            return tokens, rank
    raise AssertionError("parked work was forgotten")


@torch.inference_mode()
def check_greedy(oracle, request, tokens: list[int], name: str) -> None:
    """Each of `tokens` is the oracle's, or a tie of its logits."""
    prompt = request.token_array().tolist()
    logits = oracle(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0]
    assert len(tokens) == NUM_NEW
    for position, token in enumerate(tokens, start=len(prompt)):
        best = logits[position - 1].topk(2).values
        if int(logits[position - 1].argmax()) != token:
            print(f"{name}: position {position}: top-2 gap {float(best[0] - best[1]):.2e}")
            assert float(best[0] - best[1]) < 1e-5


def make_policy(name: str):
    policies = {
        "random": Random(0),
        "in order": in_order,
        "qllm": ExpertLevelPreemption(max_wait_ns=40, max_merged=4),
        **ADVERSARIES,
    }
    return policies[name]


MANY = [(family, policy) for family in ("qwen3_moe", "granitemoe") for policy in ("in order", *ADVERSARIES)]
FEW = [*zip(tiny.FAMILIES, itertools.cycle(("random", "qllm")), strict=False)]


@pytest.mark.transformers
@pytest.mark.parametrize(("name", "policy"), sorted({*FEW, *MANY}))
def test_a_family_in_stages_gets_the_greedy_tokens_of_transformers(name, policy, checkpoint):
    network = tiny.load(checkpoint(name), dtype="float64")
    device = staged_device(network)
    num_sparse = sum(device.staged.is_sparse)
    assert device.staged.num_direct == (0 if name in REPLAYED else num_sparse)
    rng = np.random.default_rng(len(name))
    requests = make_requests(rng)
    tokens, rank = serve(device, make_policy(policy), requests, rng)
    oracle = tiny.load_oracle(checkpoint(name), torch.float64, "eager" if name in EAGER_ONLY else "sdpa")
    for request in requests:
        check_greedy(oracle, request, tokens[request.request_id], f"{name} under {policy}")
    if num_sparse:
        computed = sum(r.num_prompt_tokens + NUM_NEW - 1 for r in requests) - rank.stats().num_hit_tokens
        assert rank.expert_counts.sum(1).max() == computed * device.shape.num_chosen


@pytest.mark.parametrize("policy", ["random", "in order", "qllm"])
@torch.inference_mode()
def test_grammars_hold_under_any_step_policy(policy, checkpoint):
    """Units of several plans are sampled together, and their masks go with them."""
    network = tiny.load(checkpoint("qwen3_moe"), dtype="float64")
    oracle = tiny.load_oracle(checkpoint("qwen3_moe"), torch.float64, "sdpa")
    rng = np.random.default_rng(3)
    requests = [
        msgspec.structs.replace(
            request,
            sampling=msgspec.structs.replace(request.sampling, grammar=light(PATTERNS[i % 6])),
        )
        if i % 3
        else request
        for i, request in enumerate(make_requests(rng, 10))
    ]
    tokens, _ = serve(staged_device(network, num_blocks=24), make_policy(policy), requests, rng)
    for request in requests:
        known = request.token_array().tolist()
        for token in tokens[request.request_id]:
            logits = oracle(input_ids=torch.tensor([known]), use_cache=False).logits[0, -1].numpy()
            assert token == plain_sampling.next_token(logits, known, request)
            known.append(token)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral-window", "deepseek_v3", "gpt_oss"])
def test_kv_that_was_in_host_memory_gives_the_same_tokens(name, checkpoint):
    network = tiny.load(checkpoint(name), dtype="float64")
    oracle = tiny.load_oracle(checkpoint(name), torch.float64, "eager" if name in EAGER_ONLY else "sdpa")
    num_restored = 0
    for seed in range(3):
        rng = np.random.default_rng(seed)
        requests = make_requests(rng, 8)
        device = staged_device(network, num_blocks=14, num_host_blocks=40)
        tokens, rank = serve(device, make_policy("random"), requests, rng, 40)
        for request in requests:
            check_greedy(oracle, request, tokens[request.request_id], f"{name}, seed {seed}")
        num_restored += rank.stats().num_restored_tokens
    assert num_restored > 0
