"""The law of `test_schedule_never_changes_tokens`, with a real network on the torch device, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity import drive, tiny
from support import plain_sampling
from support.examples import num_examples
from support.fake_device import make_request
from support.plain_grammar import backend, random_grammar
from support.plain_sampling import random_wishes

from moestro.engine.rank import build_rank
from moestro.engine.settings import SchedulerSettings

BLOCK_SIZE, LONGEST = 4, 40


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral-window", "deepseek_v3"])
def networks(request, tmp_path_factory):
    """Ours, and transformers' own."""
    directory = tiny.save_checkpoint(tmp_path_factory.mktemp(request.param), tiny.make_config(request.param))
    ours = tiny.load(directory, dtype="float64")
    return ours, tiny.load_oracle(directory, torch.float64, "sdpa")


def random_requests(rng, num):
    stem = rng.integers(3, tiny.VOCAB, LONGEST)
    requests = []
    for i in range(num):
        max_tokens = int(rng.integers(0, 9))
        length = int(rng.integers(1, LONGEST - max_tokens))
        if rng.random() < 0.4:  # full prefix hits
            length = max(BLOCK_SIZE, length // BLOCK_SIZE * BLOCK_SIZE)
        tokens = stem[:length].copy()
        if rng.random() < 0.5:
            tokens[length // 2 :] = rng.integers(3, tiny.VOCAB, length - length // 2)
        requests.append(
            make_request(
                f"r{i}",
                tokens,
                block_size=BLOCK_SIZE,
                arrival_ns=i,
                max_tokens=max_tokens,
                temperature=float(rng.choice([0.0, 0.0, 1.0])),
                top_p=float(rng.choice([1.0, 0.8])),
                top_k=int(rng.choice([0, 20])),
                seed=int(rng.integers(2**63)),
                stop_token_ids=tuple(rng.integers(0, tiny.VOCAB, 3).tolist()),
                prompt_logprobs=0 if rng.random() < 0.3 else None,
                **(random_wishes(rng, tiny.VOCAB, max_tokens) | random_grammar(rng)),
            )
        )
    return requests


def serve(
    network, requests, rng, *, num_blocks, max_num_seqs, budget, caching, abort_share=0.0, host=0, runs_ahead=False
):
    """Run `requests` to their ends; {id: (tokens, prompt logprobs)} of those that were not aborted, and the rank."""
    settings = SchedulerSettings(
        num_blocks=num_blocks,
        num_host_blocks=host,
        block_size=BLOCK_SIZE,
        max_model_len=LONGEST,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
    )
    rank = build_rank(settings, drive.make_device(network, num_blocks, host), runs_ahead=runs_ahead)
    rank.scheduler.use_grammars(backend(tiny.VOCAB))
    arriving, tokens, prompts, ended, aborted = list(requests), {}, {}, set(), set()
    for now_ns in range(5000):
        while arriving and rng.random() < 0.5:
            rank.add(arriving.pop(0), now_ns)
        for output in rank.step(now_ns):
            assert output.request_id not in ended | aborted
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.prompt_logprobs is not None:
                prompts[output.request_id] = [(e.token_id, e.logprob) for e in output.prompt_logprobs]
            if output.finish_reason is not None:
                ended.add(output.request_id)
        if rng.random() < abort_share:
            victim = requests[rng.integers(len(requests))].request_id
            if victim in rank.scheduler.by_id:
                rank.abort(victim, now_ns)
                aborted.add(victim)
        if not arriving and not rank.has_work:
            break
    assert rank.scheduler.pool.num_free == num_blocks, "a block leaked"
    assert ended | aborted == {request.request_id for request in requests}
    return {i: (tokens[i], prompts.get(i)) for i in ended}, rank


@torch.inference_mode()
def oracle_tokens(oracle, request):
    """transformers' logits of the whole sequence, and the plain twin's choice."""
    tokens = request.token_array().tolist()
    for _ in range(request.sampling.max_tokens):
        logits = oracle(torch.tensor([tokens]), use_cache=False).logits[0, -1].numpy()
        tokens.append(plain_sampling.next_token(logits, tokens, request))
        if tokens[-1] in request.sampling.stop_token_ids:
            break
    return tokens[request.num_prompt_tokens :]


@torch.inference_mode()
def oracle_prompt_logprobs(oracle, request):
    tokens = request.token_array().tolist()
    logprobs = oracle(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
    return [float(logprobs[i, token]) for i, token in enumerate(tokens[1:])]


@pytest.mark.parametrize("seed", range(num_examples(2, thorough=5)))
def test_every_history_gives_the_tokens_of_transformers(networks, seed):
    ours, oracle = networks
    rng = np.random.default_rng(seed)
    requests = random_requests(rng, 10)
    answers, rank = serve(
        ours,
        requests,
        rng,
        num_blocks=int(rng.integers(10, 40)),
        max_num_seqs=int(rng.integers(2, 7)),
        budget=int(rng.integers(8, 40)),
        caching=seed != 0,
        abort_share=0.1 if seed % 2 else 0.0,
        host=20 if seed % 3 else 0,
    )
    alone, _ = serve(ours, requests, rng, num_blocks=100, max_num_seqs=1, budget=64, caching=False)
    for request in requests:
        if request.request_id not in answers:
            continue
        tokens, prompt_logprobs = answers[request.request_id]
        assert tokens == alone[request.request_id][0], "seeded or greedy, the schedule changed a token"
        assert tokens == oracle_tokens(oracle, request)
        if prompt_logprobs is not None:
            given = [logprob for _, logprob in prompt_logprobs]
            np.testing.assert_allclose(given, oracle_prompt_logprobs(oracle, request), atol=2e-6)
    if seed != 0:
        assert rank.scheduler.counts.num_hit_tokens > 0, "the history used no cached prefix"


@pytest.mark.parametrize("host", [0, 40])
def test_evictions_happen_and_change_nothing(networks, host):
    ours, oracle = networks
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, tiny.VOCAB, 12) for _ in range(3)]
    requests = [make_request(f"r{i}", p, block_size=4, arrival_ns=i, max_tokens=20) for i, p in enumerate(prompts)]
    answers, rank = serve(ours, requests, rng, num_blocks=14, max_num_seqs=3, budget=32, caching=not host, host=host)
    assert rank.stats().num_preemptions > 0
    assert (rank.stats().num_restored_tokens > 0) == (host > 0)
    for request in requests:
        assert answers[request.request_id][0] == oracle_tokens(oracle, request)


def test_every_token_visits_exactly_its_experts_once(networks):
    ours, _ = networks
    request = make_request("r", range(3, 20), block_size=4, max_tokens=6)
    _, rank = serve(ours, [request], np.random.default_rng(0), num_blocks=20, max_num_seqs=1, budget=5, caching=False)
    config = ours.config
    num_computed = request.num_prompt_tokens + request.sampling.max_tokens - 1  # the last token is never computed
    per_layer = rank.expert_counts.sum(1)
    sparse = per_layer[per_layer > 0]
    assert (sparse == num_computed * config.num_experts_per_tok).all()
