"""Every tested family on NaN: gates, experts and sampler do not raise, and the others of the batch are untouched."""

from __future__ import annotations

import pytest
import torch
from parity import drive, tiny
from parity.test_stages import BLOCK_SIZE, staged_device
from support.fake_device import make_request

from moestro.core.request import FinishReason
from moestro.engine.rank import build_preemptive_rank, build_rank
from moestro.engine.settings import SchedulerSettings
from moestro.flow.policies.one_queue import in_order

POISON = 100
CLEAN = ([3, 4, 5, 6, 7, 8, 9], [20, 21, 22])
SETTINGS = SchedulerSettings(
    num_blocks=64, block_size=BLOCK_SIZE, max_model_len=40, max_num_seqs=6, max_num_urgent_seqs=6,
    max_num_batched_tokens=24,
)  # fmt: skip


def poisoned_network(directory):
    network = tiny.load(directory)
    embedding = network.model.get_input_embeddings()
    with torch.no_grad():  # a tensor of its own: the output layer may share the weights
        embedding.weight = torch.nn.Parameter(embedding.weight.clone())
        embedding.weight[POISON] = torch.nan
    return network


def run(rank, *prompts) -> dict[str, tuple[list[int], FinishReason | None]]:
    """{id: (tokens, why it ended)}; a prompt's number is its id."""
    found = {str(number): [] for number in range(len(prompts))}
    for number, prompt in enumerate(prompts):
        rank.add(make_request(str(number), prompt, block_size=BLOCK_SIZE, max_tokens=4), 0)
    while rank.has_work:
        for output in rank.step(0):
            found[output.request_id].append(output)
    return {
        name: ([token for output in outputs for token in output.token_ids], outputs[-1].finish_reason)
        for name, outputs in found.items()
    }


@pytest.mark.parametrize("mode", ["fused", "preemptive"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_prompt_that_leads_to_nan_ends_and_the_others_get_their_own_tokens(family, mode, checkpoint):
    check_that_nan_ends_alone(poisoned_network(checkpoint(family)), mode)


def check_that_nan_ends_alone(network, mode: str, launch_ahead: int = 1) -> None:
    def make_rank():
        if mode == "fused":
            return build_rank(SETTINGS, drive.make_device(network, 64), runs_ahead=launch_ahead > 1)
        return build_preemptive_rank(SETTINGS, staged_device(network), in_order, launch_ahead)

    alone = run(make_rank(), *CLEAN)
    rank = make_rank()
    together = run(rank, *CLEAN, [30, POISON, 31, 32, 33])
    assert together.pop("2") == ([], FinishReason.NON_FINITE)
    assert together == alone
    assert run(rank, *CLEAN) == alone  # also in blocks that hold NaN from before
