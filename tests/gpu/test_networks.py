"""Whole steps on an accelerator: the logits and tokens of transformers on a CPU, under any schedule."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from laws.test_schedule_never_changes_the_network import oracle_tokens, random_requests, serve
from laws.test_steps_ahead_change_no_token import count_next_steps
from parity import drive, tiny
from parity.test_families import NUM_NEW, prompts
from parity.test_non_finite import check_that_nan_ends_alone, poisoned_network
from support.fake_device import make_request
from support.plain_grammar import PATTERNS, backend, light

from moestro.core.request import MaskRequest
from moestro.core.work import Forward, LogitEdits, Units
from moestro.model.device import open_device
from moestro.model.step import to_host

# Largest difference of float32 logits of size 1 to 10 from those of a CPU, whose kernels add in another order.
LOGITS_TOLERANCE = 1e-4
WAITING = ("phimoe",)  # transformers' own forward reads the largest position, to choose among rotary frequencies
NOTHING = np.empty(0, np.int32)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_a_family_gets_the_logits_and_greedy_tokens_of_the_cpu(name, checkpoint, accelerator):
    network = drive.recording(accelerator.place(tiny.load(checkpoint(name))))
    rng = np.random.default_rng(0)
    sequences = drive.drive(drive.make_device(network), prompts(rng), NUM_NEW, rng)
    found = drive.compare(sequences, tiny.load_oracle(checkpoint(name)), name)
    print(f"{name}: largest difference {found.largest:.1e} over {found.num_rows} rows")
    assert found.num_rows > 40
    assert found.wrong_tokens == 0
    assert found.largest < LOGITS_TOLERANCE


@pytest.mark.parametrize("seed", range(3))
def test_seeds_penalties_grammars_prefix_hits_and_host_memory_change_no_token(seed, checkpoint, accelerator):
    """In float64, as the law of the CPU: whatever the rank does, transformers' logits and the plain sampler."""
    ours = accelerator.place(tiny.load(checkpoint("qwen3_moe"), dtype="float64"))
    oracle = tiny.load_oracle(checkpoint("qwen3_moe"), torch.float64, "sdpa")
    rng = np.random.default_rng(seed)
    requests = random_requests(rng, 8)
    bounds = {"num_blocks": 18, "max_num_seqs": 5, "budget": 24, "caching": True, "host": 20 if seed else 0}
    answers, rank = serve(ours, requests, rng, **bounds)
    for request in requests:
        assert answers[request.request_id][0] == oracle_tokens(oracle, request)
    assert rank.scheduler.counts.num_hit_tokens > 0


@pytest.mark.parametrize("seed", range(6))
def test_steps_ahead_change_no_token(seed, checkpoint, accelerator, monkeypatch):
    """Prompts, stops, aborts, prefix hits and preemptions between steps whose tokens the host does not have yet."""
    ours = accelerator.place(tiny.load(checkpoint("qwen3_moe"), dtype="float64"))
    oracle = tiny.load_oracle(checkpoint("qwen3_moe"), torch.float64, "sdpa")
    rng, counts = np.random.default_rng(seed), count_next_steps(monkeypatch)
    requests = random_requests(rng, 8)
    bounds = {"num_blocks": 18, "max_num_seqs": 5, "budget": 24, "caching": True, "host": 20 if seed % 2 else 0}
    answers, _ = serve(ours, requests, rng, runs_ahead=True, abort_share=0.1 if seed > 3 else 0.0, **bounds)
    for request in requests:
        if request.request_id in answers:
            assert answers[request.request_id][0] == oracle_tokens(oracle, request)
    assert counts


def test_preempted_requests_continue_from_host_memory(checkpoint, accelerator):
    ours = accelerator.place(tiny.load(checkpoint("qwen3_moe"), dtype="float64"))
    oracle = tiny.load_oracle(checkpoint("qwen3_moe"), torch.float64, "sdpa")
    rng = np.random.default_rng(1)
    requests = [
        make_request(f"r{i}", rng.integers(3, tiny.VOCAB, 12).tolist(), arrival_ns=i, max_tokens=20) for i in range(3)
    ]
    answers, rank = serve(ours, requests, rng, num_blocks=14, max_num_seqs=3, budget=32, caching=False, host=40)
    assert rank.stats().num_preemptions > 0
    assert rank.stats().num_restored_tokens > 0
    for request in requests:
        assert answers[request.request_id][0] == oracle_tokens(oracle, request)


@pytest.mark.parametrize("mode", ["fused", "preemptive"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "llama"])
def test_a_prompt_that_leads_to_nan_ends_alone(family, mode, checkpoint, accelerator):
    check_that_nan_ends_alone(accelerator.place(poisoned_network(checkpoint(family))), mode, launch_ahead=2)


def _decode_units(num_units: int, step: int, kind: str):
    """One token of each unit at position 8 + step. `kind`: what the units ask for."""
    parts = [(8 + step, [3 + unit]) for unit in range(num_units)]
    tables = np.arange(num_units * 4).reshape(num_units, 4)
    columns: dict[str, object] = {}
    if kind == "drawn":
        columns["sampling"] = drive.greedy(
            num_units, temperature=1.0, top_p=0.9, top_k=20, min_p=0.01, seed=np.arange(num_units), num_logprobs=3
        )
    if kind == "edited":
        matcher = backend(tiny.VOCAB)
        (mask,) = matcher.masks([MaskRequest(matcher.matcher(light(PATTERNS[0])), NOTHING, NOTHING)])
        rows = np.arange(num_units, dtype=np.int32)
        pairs = np.stack([rows, rows + 5])
        columns["sampling"] = drive.greedy(num_units, repetition_penalty=1.3, presence_penalty=0.5)
        columns["edits"] = LogitEdits(
            counted=pairs,
            num_generated=np.ones(num_units, np.int32),
            biased=pairs,
            bias=np.ones(num_units, np.float32),
            banned=np.stack([rows, rows + 9]),
            masks=((0, mask),),
        )
    return drive.make_units(parts, tables, **columns)


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "greedy") for name in tiny.FAMILIES if name not in WAITING]
    + [("qwen3_moe", "drawn"), ("qwen3_moe", "edited")],
)
def test_a_steady_decode_never_waits_at_its_launch(name, kind, checkpoint, accelerator):
    """In bfloat16, whose experts have grouped kernels: launching two steps reads nothing of the device."""
    device = drive.make_device(accelerator.place(tiny.load(checkpoint(name), dtype="bfloat16")))
    drive.run(device, _decode_units(5, 0, kind))  # kernels are loaded and memory is reserved
    with accelerator.forbid_waits():
        for step in (1, 2):
            device.launch(Forward(_decode_units(5, step, kind)), 0)
    results = []
    while len(results) < 2:
        results += device.poll(0)
    assert all((result.token_ids >= 0).all() for result in results)


@pytest.mark.parametrize("kind", ["greedy", "drawn"])
def test_a_step_ahead_waits_for_nothing_and_computes_what_it_would_have_computed_later(kind, checkpoint, accelerator):
    """Its units are those of the step before, others of them, or in another order."""
    device = drive.make_device(accelerator.place(tiny.load(checkpoint("qwen3_moe"), dtype="bfloat16")))
    first = drive.run(device, _decode_units(5, 0, kind)).token_ids
    for rows in ([0, 1, 2, 3, 4], [0, 2, 3], [4, 1]):
        later, ahead = (_rows_of(_decode_units(5, 1, kind), rows) for _ in range(2))
        wanted = drive.run(device, msgspec.structs.replace(later, token_ids=first[rows]))
        with accelerator.forbid_waits():
            device.launch(Forward(_decode_units(5, 0, kind)), 0)
            device.launch(Forward(msgspec.structs.replace(ahead, token_ids=np.full(len(rows), -1, np.int32))), 0)
        results = []
        while len(results) < 2:
            results += device.poll(0)
        assert results[1].token_ids.tolist() == wanted.token_ids.tolist()


def _rows_of(units: Units, rows: list[int]) -> Units:
    """Some units of one token, in this order."""
    names = ("slot", "serial", "service_class", "start", "num_tokens", "write_start", "logits", "block_tables")
    columns = {name: getattr(units, name)[rows] for name in (*names, "sampling", "token_ids")}
    return msgspec.structs.replace(units, **columns)


@pytest.mark.parametrize(("name", "dtype"), [("qwen3_moe", "float32"), *((name, "bfloat16") for name in WAITING)])
def test_the_launches_that_wait_are_known(name, dtype, checkpoint, accelerator):
    """The test above can fail: without grouped kernels the host reads how many rows each expert has."""
    device = drive.make_device(accelerator.place(tiny.load(checkpoint(name), dtype=dtype)))
    drive.run(device, _decode_units(5, 0, "greedy"))
    with accelerator.forbid_waits(), pytest.raises((RuntimeError, AssertionError), match=r"(?i)wait|synchroniz"):
        device.launch(Forward(_decode_units(5, 1, "greedy")), 0)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_device_opens_there_and_serves(load_format, checkpoint, accelerator):
    phases: list[str] = []
    settings = tiny.settings_of(
        checkpoint("qwen3_moe"), device="cuda", load_format=load_format, kv_offloading_size=0.001
    )
    device, info = open_device(settings, phases.append)
    assert (info.device, phases[-1]) == ("cuda", "ready")
    assert {parameter.device for parameter in device.network.model.parameters()} == {accelerator.device}
    assert drive.run(device, _decode_units(3, 0, "greedy")).token_ids.min() >= 0


@torch.inference_mode()
def test_copies_to_the_host_arrive_with_the_event(accelerator):
    """Also of tensors with gaps or with their dimensions in another order."""
    numbers = torch.arange(6000).view(50, 120)
    there = numbers.to(accelerator.device)
    views = (lambda it: it, lambda it: it[:, ::3], lambda it: it.T, lambda it: it[:, ::3].T, lambda it: it[3])
    copies = [to_host(view(there)) for view in views]
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(accelerator.device))
    event.synchronize()
    assert all(copy.is_pinned() or accelerator.is_imitated for copy in copies)
    assert all(torch.equal(copy, view(numbers)) for copy, view in zip(copies, views, strict=True))
