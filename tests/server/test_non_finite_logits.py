"""A network that answers NaN after one token: requests that contain it end, each by itself, and no other does."""

from __future__ import annotations

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.running import REAL, Running, complete, is_idle, metrics, open_stream, read_to_end, wait_until

POISON = 4000  # which no answer here contains
CLEAN = list(range(100, 160))  # more than three blocks
ENDED = 'moestro:request_success_total{engine="0",finished_reason="non_finite_logits"}'
HITS = 'moestro:prefix_cache_hits_total{engine="0"}'


def poisoned_checkpoint(demo: Path, directory: Path) -> Path:
    """A demo model, whose embedding of POISON is NaN; its output layer stays as it was."""
    shutil.copytree(demo, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture(scope="module", params=["fused", "preemptive"])
def poisoned(request, short_demo, tmp_path_factory):
    """Chunks of at most 32 tokens, so that a long prompt's first chunk wants no logits."""
    directory = tmp_path_factory.mktemp("poisoned")
    checkpoint = poisoned_checkpoint(short_demo, directory / "checkpoint")
    flags = ("--dtype", "float32", "--kv-cache-memory-bytes", "100000000", "--max-num-seqs", "16")
    flags = (*flags, "--mode", request.param, "--max-num-batched-tokens", "32", "--served-model-name", "m")
    running = Running((*REAL, str(checkpoint), *flags), directory)
    yield running
    try:
        assert running.stop() == 0
    finally:
        running.kill()


def ask(server: Running, prompt: list[int], **fields: object):
    return complete(server, prompt=prompt, ignore_eos=True, **{"max_tokens": 24, "temperature": 0} | fields)


WAYS = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 3},
    "filtered": {"temperature": 0.9, "top_p": 0.7, "top_k": 20, "min_p": 0.01, "seed": 3},
    "edited": {"logit_bias": {"200": 100, str(POISON): -100}, "repetition_penalty": 1.3, "presence_penalty": 1.0},
    "banned": {"min_tokens": 4, "stop_token_ids": [7], "temperature": 0.5},
    "with log probabilities": {"logprobs": 3},
    "with the prompt's": {"logprobs": 2, "echo": True},
    "scored alone": {"logprobs": 2, "echo": True, "max_tokens": 0},
    "best effort": {"service_class": "be"},
}


def test_requests_without_finite_logits_end_alone_and_the_others_of_their_batch_go_on(poisoned, short_server):
    others = [{"prompt": [200 + n, *CLEAN[n:]], "max_tokens": 40} for n in range(6)]
    before = metrics(poisoned)[ENDED]
    with ThreadPoolExecutor(24) as pool:
        right = [pool.submit(ask, poisoned, **fields) for fields in others]
        wrong = [pool.submit(ask, poisoned, [*CLEAN, POISON], **fields) for fields in WAYS.values()]
        early = [pool.submit(ask, poisoned, [n, POISON, *CLEAN]) for n in range(300, 304)]  # NaN in the first chunk
        for name, reply in zip([*WAYS, *["early"] * 4], (job.result() for job in wrong + early), strict=True):
            assert (reply.status, reply.json["error"]["code"]) == (500, "non_finite_logits"), (name, reply.body)
            assert "not finite" in reply.json["error"]["message"]
        texts = [job.result().json["choices"][0]["text"] for job in right]
    assert texts == [ask(short_server, **fields).json["choices"][0]["text"] for fields in others]
    assert metrics(poisoned)[ENDED] - before == len(WAYS) + 4
    assert metrics(poisoned)['moestro:engine_restarts_total{engine="0"}'] == 0
    wait_until(lambda: is_idle(poisoned))


def test_a_stream_ends_with_an_error_event_and_the_log_names_the_request(poisoned):
    reported = read_to_end(open_stream(poisoned, prompt=CLEAN, logit_bias={str(POISON): 100}, temperature=0))
    events = [json.loads(line[6:]) for line in reported.decode().splitlines() if line.startswith("data: {")]
    assert "choices" in events[0]  # the token that is poison; there is none after it
    assert events[-1]["error"]["code"] == "non_finite_logits"
    assert b"[DONE]" not in reported
    request = events[0]["id"]
    assert f"engine 0: request {request}-0 ended after 1 tokens: its logits are not finite" in poisoned.text


def test_what_such_a_request_computed_is_never_read_from_the_prefix_cache(poisoned):
    prompt = [POISON, *reversed(CLEAN)]
    ask(poisoned, prompt)
    before = metrics(poisoned)[HITS]
    assert ask(poisoned, prompt).status == 500
    assert metrics(poisoned)[HITS] == before
    assert ask(poisoned, prompt[1:]).status == 200


EXCLUDING = {
    "allowed tokens and a choice": {"allowed_token_ids": [5, 6, 7], "guided_choice": ["yes", "no"]},
    "only a stop token, too early": {"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 2},
}


@pytest.mark.parametrize("way", EXCLUDING)
def test_a_request_that_excludes_every_token_is_the_client_s_fault(poisoned, way):
    """It is a 400, it writes nothing into the log, and the prefix cache keeps its blocks."""
    prompt = [900 + list(EXCLUDING).index(way), *CLEAN]
    logged = len(poisoned.text)
    reply = ask(poisoned, prompt, **EXCLUDING[way])
    assert (reply.status, reply.json["error"]["code"]) == (400, "all_tokens_excluded"), reply.body
    before = metrics(poisoned)[HITS]
    assert ask(poisoned, prompt).status == 200
    assert metrics(poisoned)[HITS] > before
    assert not re.search("WARNING|ERROR", poisoned.text[logged:])
