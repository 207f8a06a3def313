"""Each (token, expert) once, in ascending expert id, in at least float32; the grouped path equals the plain one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from parity import tiny
from torch import nn

from moestro.model.experts.routed import Routing, routed_experts, run_each, run_grouped, tag_experts

NUM_EXPERTS, HIDDEN, INNER, NUM_CHOSEN = 6, 16, 8, 3


class Packed(nn.Module):
    """An experts module as transformers packs it, in any of its layouts."""

    def __init__(self, *, gate: bool, bias: bool, transposed: bool, norm: bool = False, dtype=torch.float32) -> None:
        super().__init__()
        self.num_experts, self.has_gate, self.has_bias, self.is_transposed = NUM_EXPERTS, gate, bias, transposed
        if norm:
            self.has_post_expert_norm, self.post_expert_norm = True, lambda rows: 3 * rows
        generator = torch.Generator().manual_seed(1)
        up, name = 2 * INNER if gate else INNER, "gate_up_proj" if gate else "up_proj"
        for weight, shape in ((name, (up, HIDDEN)), ("down_proj", (HIDDEN, INNER))):
            shaped = shape[::-1] if transposed else shape
            setattr(self, weight, 0.3 * torch.randn(NUM_EXPERTS, *shaped, generator=generator).to(dtype))
            if bias:
                setattr(self, f"{weight}_bias", torch.randn(NUM_EXPERTS, shape[0], generator=generator).to(dtype))

    def act_fn(self, rows):
        return rows.relu()

    def _apply_gate(self, rows):
        gate, up = rows.chunk(2, -1)
        return gate.sigmoid() * up

    def expert(self, which: int, row: torch.Tensor) -> torch.Tensor:
        """One row through one expert, spelt out."""
        name = "gate_up_proj" if self.has_gate else "up_proj"
        up, down = getattr(self, name)[which], self.down_proj[which]
        up, down = (up.T, down.T) if self.is_transposed else (up, down)
        inner = up @ row + (getattr(self, f"{name}_bias")[which] if self.has_bias else 0)
        inner = self._apply_gate(inner[None])[0] if self.has_gate else self.act_fn(inner)
        outer = down @ inner + (self.down_proj_bias[which] if self.has_bias else 0)
        return 3 * outer if hasattr(self, "post_expert_norm") else outer


LAYOUTS = [
    {"gate": gate, "bias": bias, "transposed": transposed, "norm": norm}
    for gate, bias, transposed, norm in [
        (True, False, False, False),
        (True, True, True, False),
        (False, True, False, False),
        (False, False, True, False),
        (True, False, False, True),
    ]
]


def inputs(num: int = 20, dtype=torch.float32, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num, HIDDEN, generator=generator).to(dtype)
    index = torch.stack([torch.randperm(NUM_EXPERTS, generator=generator)[:NUM_CHOSEN] for _ in range(num)])
    return hidden, index, torch.rand(num, NUM_CHOSEN, generator=generator).to(dtype)


def tagged(module: nn.Module, layer: int = 1) -> Routing:
    routing = Routing(3, NUM_EXPERTS, torch.device("cpu"))
    tag_experts([(layer, module)], routing, torch.float32)
    return routing


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_chosen_expert_contributes_once(layout):
    module = Packed(**layout)
    tagged(module)
    hidden, index, weights = inputs()
    wanted = [
        sum(w * module.expert(e, row) for e, w in zip(experts, scale, strict=True))
        for row, experts, scale in zip(hidden, index.tolist(), weights, strict=True)
    ]
    torch.testing.assert_close(routed_experts(module, hidden, index, weights), torch.stack(wanted))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_grouped_products_equal_one_expert_after_the_other(layout):
    module = Packed(**layout)
    hidden, index, _ = inputs()
    flat = index.reshape(-1)
    rows = hidden[flat.argsort(stable=True) // NUM_CHOSEN]
    counts = flat.bincount(minlength=NUM_EXPERTS)
    torch.testing.assert_close(run_grouped(module, rows, counts), run_each(module, rows, counts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_order_in_which_the_gate_names_experts_changes_no_bit(dtype):
    module = Packed(gate=True, bias=False, transposed=False, dtype=dtype)
    tagged(module)
    hidden, index, weights = inputs(dtype=dtype)
    first = routed_experts(module, hidden, index, weights)
    assert first.dtype == dtype
    assert torch.equal(first, routed_experts(module, hidden, index.flip(1), weights.flip(1)))


def test_contributions_are_added_in_ascending_expert_id_in_float32():
    module = SimpleNamespace(num_experts=3, has_gate=False, has_bias=False, is_transposed=False)
    module.up_proj, module.down_proj = torch.ones(3, 1, 1), torch.tensor([1e8, 1.0, -1e8]).view(3, 1, 1)
    module.act_fn = lambda rows: rows
    tagged(module)
    index, ones = torch.tensor([[2, 0, 1]]), torch.ones(1, 3)
    # 1e8 + 1 is 1e8 in float32; only in ascending order does the 1 vanish.
    assert routed_experts(module, torch.ones(1, 1), index, ones).item() == 0.0
    module.down_proj = torch.tensor([1e8, -1e8, 1.0]).view(3, 1, 1)
    assert routed_experts(module, torch.ones(1, 1), index, ones).item() == 1.0


def test_bfloat16_contributions_are_added_in_float32_and_rounded_once():
    module = SimpleNamespace(num_experts=3, has_gate=False, has_bias=False, is_transposed=False)
    module.up_proj = torch.ones(3, 1, 1, dtype=torch.bfloat16)
    module.down_proj = torch.tensor([256, 1, 1], dtype=torch.bfloat16).view(3, 1, 1)
    module.act_fn = lambda rows: rows
    tagged(module)
    ones = torch.ones(1, 3, dtype=torch.bfloat16)
    done = routed_experts(module, ones[:, :1], torch.tensor([[0, 1, 2]]), ones)
    # A running sum in bfloat16 stays at 256: 257 is not one of its numbers.
    assert (done.dtype, done.item()) == (torch.bfloat16, 258.0)


def test_tokens_are_counted_by_layer_and_expert_from_the_steps_begin():
    module = Packed(gate=True, bias=False, transposed=False)
    routing = tagged(module, layer=2)
    _, index, _ = inputs()
    routed_experts(module, *inputs())
    assert routing.counts[2].tolist() == index.reshape(-1).bincount(minlength=NUM_EXPERTS).tolist()
    assert routing.counts[:2].sum() == 0
    routing.begin(None)
    assert routing.counts.sum() == 0


def test_an_override_replaces_the_experts_and_keeps_the_weights():
    module = Packed(gate=True, bias=False, transposed=False)
    routing = tagged(module)
    hidden, index, weights = inputs()
    other = (index + 1) % NUM_EXPERTS
    wanted = routed_experts(module, hidden, other, weights)
    routing.begin(other[None])
    assert torch.equal(routed_experts(module, hidden, index, weights), wanted)


@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral", "llama"])
def test_a_network_knows_its_gates(name, checkpoint):
    network = tiny.load(checkpoint(name))
    shape = network.gate_shape(network.probe(4)[1])
    assert (shape.layers, shape.num_experts, shape.num_chosen) == {
        "deepseek_v3": ((1, 2), 8, 3),
        "mixtral": ((0, 1, 2), 6, 2),
        "llama": ((), 0, 0),
    }[name]
