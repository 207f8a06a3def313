"""In bfloat16 on the own CPU kernels, a request's logits and tokens are the same bits whatever else is computed.

Batches of 1 to 64, chunks, preemption, stages of any fragments, experts that are elsewhere and move, workers whose
messages are lost: none may change a bit. `test_schedule_never_changes_the_network` has the same law against
transformers, in float64.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from laws import test_schedule_never_changes_the_network as fused_law
from parity import drive, test_moving_experts, test_stages, test_torch_group, tiny
from support import own_kernels
from support.fake_device import make_request
from support.linked_group import serve as serve_group
from support.moving_ranks import MovingRanks
from support.torch_group import Layout, TorchGroup

from moestro.flow.policies.qllm import ExpertLevelPreemption

ALONE = {"num_blocks": 120, "max_num_seqs": 1, "budget": 64, "caching": False}
FAMILIES = ["qwen3_moe", "gpt_oss", "deepseek_v3"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    own_kernels.kernels()  # in the cache, so that every device finds them at once
    made = {}

    def make(name: str):
        if name not in made:
            made[name] = own_kernels.save_checkpoint(tmp_path_factory.mktemp(name), name)
        return made[name]

    return make


@pytest.fixture(scope="module")
def demo(demo_dir):
    return own_kernels.use_own(tiny.load(demo_dir, dtype="bfloat16"))


def own_network(directory):
    return own_kernels.use_own(tiny.load(directory, dtype="bfloat16"))


def test_a_decode_step_of_64_gives_the_bits_of_each_alone(demo):
    rng = np.random.default_rng(0)
    assert demo.is_batch_invariant
    lengths = rng.integers(0, 40, 64)
    tables = np.zeros((64, 11), np.int32)
    tables[:] = rng.permutation(64 * 11).reshape(64, 11)
    device = drive.make_device(drive.recording(demo), num_blocks=64 * 11)
    prompts = [rng.integers(3, 4000, length + 1).tolist() for length in lengths]
    for row, prompt in enumerate(prompts):
        if len(prompt) > 1:
            drive.run(device, drive.make_units([(0, prompt[:-1])], tables[row : row + 1]))

    def logits(rows: list[int]) -> torch.Tensor:
        units = [(len(prompts[row]) - 1, prompts[row][-1:]) for row in rows]
        drive.run(device, drive.make_units(units, tables[rows]))
        return device.network.last_logits

    whole = logits(list(range(64)))
    for size in (1, 2, 3, 5, 8, 13, 31, 33, 63):
        rows = rng.choice(64, size, replace=False).tolist()
        assert torch.equal(logits(rows), whole[rows]), size
    for row in range(64):
        assert torch.equal(logits([row]), whole[row : row + 1])


@pytest.mark.parametrize("seed", range(3))
def test_chunks_and_batches_of_any_size_give_the_same_bits(demo, seed):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, 4000, length).tolist() for length in rng.integers(1, 28, 9)]
    device = drive.make_device(drive.recording(demo))
    first, second = (drive.drive(device, prompts, 5, np.random.default_rng(seed + n)) for n in (10, 20))
    num_compared = 0
    for one, other in zip(first, second, strict=True):
        assert one.tokens == other.tokens
        for position in one.logits.keys() & other.logits.keys():
            assert torch.equal(one.logits[position], other.logits[position])
            num_compared += 1
    assert num_compared > 40


def test_the_number_of_threads_changes_no_bit(demo):
    rng = np.random.default_rng(7)
    prompts = [rng.integers(3, 4000, length).tolist() for length in (25, 13, 3, 1)]
    found = []
    for count in (1, 2, 3):
        with own_kernels.threads(count):
            device = drive.make_device(drive.recording(demo))
            found.append(drive.drive(device, prompts, 3, np.random.default_rng(count)))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert one.tokens == two.tokens
            shared = one.logits.keys() & two.logits.keys()
            assert shared
            assert all(torch.equal(one.logits[position], two.logits[position]) for position in shared)


@pytest.mark.parametrize("name", FAMILIES)
def test_chunks_and_prefix_hits_change_no_token_and_no_logprob(name, checkpoints):
    network = own_network(checkpoints(name))
    requests = fused_law.random_requests(np.random.default_rng(0), 10)
    tight = {"num_blocks": 20, "max_num_seqs": 5, "budget": 9, "caching": True}
    alone, _ = fused_law.serve(network, requests, np.random.default_rng(1), **ALONE)
    found, rank = fused_law.serve(network, requests, np.random.default_rng(2), **tight)
    assert found == alone
    assert rank.scheduler.counts.num_hit_tokens > 0


@pytest.mark.parametrize("host", [0, 40])
@pytest.mark.parametrize("name", FAMILIES)
def test_preemption_changes_no_token(name, host, checkpoints):
    """Sequences that are computed again, or whose KV comes back from host memory."""
    network, rng = own_network(checkpoints(name)), np.random.default_rng(1)
    prompts = [rng.integers(3, tiny.VOCAB, 12) for _ in range(3)]
    requests = [
        make_request(f"r{i}", prompt, block_size=4, arrival_ns=i, max_tokens=20, temperature=float(i == 1), seed=i)
        for i, prompt in enumerate(prompts)
    ]
    scarce = {"num_blocks": 14, "max_num_seqs": 3, "budget": 32, "caching": not host, "host": host}
    alone, _ = fused_law.serve(network, requests, np.random.default_rng(1), **ALONE)
    found, rank = fused_law.serve(network, requests, rng, **scarce)
    assert rank.stats().num_preemptions > 0
    assert found == alone


@pytest.mark.parametrize("name", FAMILIES)
def test_stages_of_any_fragments_change_no_token(name, checkpoints):
    """Preemptive mode under a policy that stops and mixes at random."""
    requests = test_stages.make_requests(np.random.default_rng(3), 6)
    fused = drive_alone(own_network(checkpoints(name)), requests, test_stages.NUM_NEW)
    for policy in (test_stages.Random(1), ExpertLevelPreemption(max_wait_ns=300, max_merged=4)):
        device = test_stages.staged_device(own_network(checkpoints(name)))
        assert test_stages.serve(device, policy, requests, np.random.default_rng(4))[0] == fused


def drive_alone(network, requests, num_new: int) -> dict[str, list[int]]:
    """Greedy tokens of each request in steps of its own."""
    device, found = drive.make_device(drive.recording(network)), {}
    for request in requests:
        prompt = request.token_array().tolist()
        (sequence,) = drive.drive(device, [prompt], num_new, np.random.default_rng(0))
        found[request.request_id] = sequence.tokens[len(prompt) :]
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_experts_that_move_between_ranks_change_no_token(name, checkpoints):
    rng = np.random.default_rng(5)
    sent = test_moving_experts.requests(rng)
    moving = MovingRanks(checkpoints(name), 2, 4, "bfloat16")
    try:
        num_committed, _ = test_moving_experts.serve_while_moving(moving, sent, rng, 1)
    finally:
        moving.stop()
    assert num_committed > 0
    network = moving.devices[0].network
    assert network.is_batch_invariant
    assert moving.tokens == test_moving_experts.answers_alone(checkpoints(name), sent, "bfloat16")


@pytest.mark.parametrize("name", FAMILIES)
def test_workers_whose_messages_are_lost_change_no_token(name, checkpoints):
    """Asynchronous workers with copies of experts: what is lost is computed again elsewhere, in another batch."""
    layout = Layout(num_homes=2, num_expert_workers=2, num_copies=2, dtype="bfloat16")
    policies = test_torch_group.POLICIES["2+2"]
    group = TorchGroup(np.random.default_rng(2), checkpoints(name), layout, policies, moods=(0.2, 0.05))
    requests = test_torch_group.make_requests()
    found = serve_group(group, requests)
    assert all(device.network.exchange is not None for device in group.devices)
    assert found == drive_alone(own_network(checkpoints(name)), requests, test_torch_group.NUM_NEW)


def test_a_kernel_that_knows_its_neighbours_is_detected(demo, monkeypatch):
    """The law has teeth: one product rounded by the number of its rows."""
    module = demo.model.lm_head
    linear = module._linear

    def by_batch(rows, packed, bias):
        return linear(rows, packed, bias) * (1.01 if rows.shape[1] > 3 else 1)

    monkeypatch.setattr(module, "_linear", by_batch)
    with pytest.raises(AssertionError):
        test_chunks_and_batches_of_any_size_give_the_same_bits(demo, 0)
