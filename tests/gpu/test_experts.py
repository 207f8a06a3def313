"""Grouped products of experts against one expert after the other, in bfloat16."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity import drive, tiny
from torch.overrides import TorchFunctionMode

from moestro.model.experts.routed import can_group, run_each, run_grouped, run_slots

# The products are added in another order and rounded to bfloat16, which has 8 bits: 2**-7 of the largest of a row.
PRODUCT_TOLERANCE = 2.0**-6
# Of a network's logits, as a fraction of their spread: a gate near a tie may choose another expert in some rows.
MEDIAN_TOLERANCE = 0.1
GROUPED = ["qwen3_moe", "gpt_oss", "mixtral", "deepseek_v2", "minimax_m2"]
COUNTS = {
    "all alike": [3] * 6,
    "one row": [0, 0, 1, 0, 0, 0],
    "all to the last": [0, 0, 0, 0, 0, 37],
    "every other is empty": [5, 0, 7, 0, 1, 0],
    "many": [130, 1, 0, 257, 64, 16],
}


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("name", GROUPED)
def test_grouped_products_are_those_of_one_expert_after_the_other(name, counts, checkpoint, accelerator):
    network = accelerator.place(tiny.load(checkpoint(name), dtype="bfloat16"))
    module = network.experts[0][1]
    counts = [*counts, *[0] * (module.num_experts - len(counts))]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(counts), network.config.hidden_size, generator=generator).bfloat16()
    rows, num_rows = rows.to(accelerator.device), torch.tensor(counts).to(accelerator.device)
    assert can_group(module, rows)
    with torch.inference_mode():
        grouped, plain = run_grouped(module, rows, num_rows).cpu(), run_each(module, rows, num_rows).cpu()
    assert grouped.dtype == torch.bfloat16
    scale = plain.float().abs().amax(-1, keepdim=True)
    assert bool(((grouped.float() - plain.float()).abs() <= PRODUCT_TOLERANCE * scale).all())


@pytest.mark.parametrize("name", GROUPED)
def test_a_network_on_grouped_products_has_the_logits_of_the_cpu(name, checkpoint, accelerator):
    parts = [(0, list(range(20, 50))), (0, [5]), (0, list(range(60, 75)))]
    tables = np.arange(24).reshape(3, 8)
    logits = []
    for place in (lambda network: network, accelerator.place):
        network = drive.recording(place(tiny.load(checkpoint(name), dtype="bfloat16")))
        drive.run(drive.make_device(network), drive.make_units(parts, tables, logits=np.full(3, 3, np.uint8),
                  next_token_ids=np.array([t for _, tokens in parts for t in [*tokens[1:], 0]], np.int32)))  # fmt: skip
        logits.append(network.last_logits.cpu())
    cpu, there = logits
    assert len(cpu) == 46
    errors = (there - cpu).abs().amax(-1) / cpu.std(-1)
    assert float(errors.median()) < MEDIAN_TOLERANCE


class _Names(TorchFunctionMode):
    """Keeps the names of torch's functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.found.add(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "has_bias"), [("qwen3_moe", False), ("gpt_oss", True)])
def test_only_experts_with_biases_look_for_the_expert_of_each_row(name, has_bias, checkpoint, accelerator):
    module = accelerator.place(tiny.load(checkpoint(name), dtype="bfloat16")).experts[0][1]
    assert module.has_bias == has_bias
    rows = torch.zeros(module.num_experts, 32, dtype=torch.bfloat16, device=accelerator.device)
    with torch.inference_mode(), _Names() as names:
        run_grouped(module, rows, torch.ones(module.num_experts, dtype=torch.int64, device=accelerator.device))
    assert ("searchsorted" in names.found, "arange" in names.found) == (has_bias, has_bias)
    assert "cumsum" in names.found


def test_no_rows_at_all_give_no_answers(checkpoint, accelerator):
    """A worker of `ep` without tokens may have none for any of its experts."""
    network = accelerator.place(tiny.load(checkpoint("qwen3_moe"), dtype="bfloat16"))
    rows = torch.empty(0, network.config.hidden_size, dtype=torch.bfloat16).to(accelerator.device)
    with torch.inference_mode():
        answers = run_slots(network.experts[0][1], rows, torch.zeros(8, dtype=torch.int64).to(accelerator.device))
    assert answers.cpu().shape == rows.shape
