"""Modules exchanged for own kernels: every family computes what it did, and a lookalike stays as it is."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from parity import drive, tiny
from support import own_kernels
from torch import nn

from moestro.model.attention import OWN_ATTENTION
from moestro.model.experts.routed import tag_of
from moestro.model.kernels.library import KernelPacking
from moestro.model.kernels.matching import random_rows
from moestro.model.kernels.packing import TORCH_PACKING, PackedLinear, can_pack
from moestro.model.kernels.rows import RowwiseWeight, exchange_norm, is_rotation_rowwise
from moestro.model.staged.layer_stages import LAYER_FRONT

WITHOUT_WHOLE = {"gpt_oss"}  # no kernel for the experts' activation
# Sinks behind another rotation, keys and values of unlike sizes, scaled residuals, a front of its own.
WITHOUT_PLAN = {"gpt_oss", "deepseek_v2", "deepseek_v3", "granitemoe", "ernie4_5_moe"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A function: the directory of a family's tiny checkpoint with sizes for the kernels."""
    made = {}

    def make(name: str):
        if name not in made:
            made[name] = own_kernels.save_checkpoint(tmp_path_factory.mktemp(name), name)
        return made[name]

    return make


def drive_network(network, seed: int):
    prompts = [np.random.default_rng(0).integers(3, tiny.VOCAB, length).tolist() for length in (3, 9, 27, 1)]
    return drive.drive(drive.make_device(drive.recording(network)), prompts, 5, np.random.default_rng(seed))


@pytest.mark.transformers
@pytest.mark.parametrize("name", own_kernels.SIZES)
def test_a_family_computes_what_it_did_and_no_schedule_changes_a_bit(name, checkpoints):
    directory = checkpoints(name)
    own = own_kernels.use_own(tiny.load(directory, dtype="bfloat16"))
    assert not own.exchange.kept
    assert own.is_batch_invariant
    assert own.exchange.num_planned == (0 if name in WITHOUT_PLAN else own.num_layers)
    attention = [module for module in own.model.modules() if OWN_ATTENTION in module.__dict__]
    assert len(attention) == own.num_layers
    for _, module in own.experts:
        assert (tag_of(module).packed.whole is None) == (name in WITHOUT_WHOLE)
    first, second = (drive_network(own, seed) for seed in (1, 2))
    for one, other in zip(first, second, strict=True):
        assert one.tokens == other.tokens
        for position in one.logits.keys() & other.logits.keys():
            assert torch.equal(one.logits[position], other.logits[position])
    # In bfloat16 a gate near a tie may choose another expert, so most rows decide.
    oracle = tiny.load_oracle(directory)
    errors = []
    for sequence in first:
        with torch.inference_mode():
            theirs = oracle(input_ids=torch.tensor([sequence.tokens]), use_cache=False).logits[0]
        errors += [float((row - theirs[at]).abs().max() / theirs.std()) for at, row in sequence.logits.items()]
    assert np.median(errors) < 0.15


class Lookalike(nn.Module):
    """A norm with the name and the parameters of another, which adds 1 to its weight, as Gemma's does."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        wide = rows.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (wide * (1 + self.weight.float())).to(rows.dtype)


@pytest.mark.transformers
def test_a_lookalike_stays_as_it_is(checkpoints):
    network = tiny.load(checkpoints("qwen3_moe"), dtype="bfloat16")
    original = network.model.model.norm
    lookalike = type("LookalikeRMSNorm", (Lookalike,), {})(original)
    network.model.model.norm = lookalike
    rows = random_rows(3, 64)
    wanted = lookalike(rows)
    assert exchange_norm(original, own_kernels.kernels())
    own_kernels.use_own(network)
    assert network.model.model.norm is lookalike
    assert "forward" not in lookalike.__dict__
    assert torch.equal(lookalike(rows), wanted)
    assert "forward" in network.model.model.layers[0].input_layernorm.__dict__


@pytest.mark.transformers
@pytest.mark.parametrize("name", ["qwen3_moe-window", "qwen2_moe", "llama"])
def test_a_layer_s_front_in_one_call_gives_the_bits_of_its_modules(name, checkpoints):
    network = own_kernels.use_own(tiny.load(checkpoints(name), dtype="bfloat16"))
    planned = drive_network(network, 1)
    for layer in network.model.model.layers:
        del layer.__dict__["forward"], layer.__dict__[LAYER_FRONT]
    for one, other in zip(planned, drive_network(network, 2), strict=True):
        assert one.tokens == other.tokens
        for position in one.logits.keys() & other.logits.keys():
            assert torch.equal(one.logits[position], other.logits[position])


@pytest.mark.transformers
def test_a_layer_that_computes_something_else_keeps_its_forward(checkpoints, monkeypatch):
    network = tiny.load(checkpoints("qwen3_moe"), dtype="bfloat16")
    layer = network.model.model.layers[1]
    original = layer.forward
    monkeypatch.setitem(layer.__dict__, "forward", lambda *args, **kwargs: 1.01 * original(*args, **kwargs))
    scaled = layer.forward
    own_kernels.use_own(network)
    assert network.exchange.num_planned == network.num_layers - 1
    assert layer.forward is scaled
    assert LAYER_FRONT not in layer.__dict__


def gate_by_tanh(module: nn.Module, inner: torch.Tensor) -> torch.Tensor:
    """An activation with the interface of a gated SiLU."""
    gate, up = inner.chunk(2, dim=-1)
    return torch.tanh(gate) * up


@pytest.mark.transformers
def test_experts_with_another_activation_use_only_the_products(checkpoints, monkeypatch):
    network = tiny.load(checkpoints("qwen3_moe"), dtype="bfloat16")
    module = network.experts[1][1]
    monkeypatch.setattr(type(module), "_apply_gate", gate_by_tanh)
    own_kernels.use_own(network)
    assert all(tag_of(each).packed.whole is None for _, each in network.experts)
    assert isinstance(tag_of(module).packed.packing, KernelPacking)
    assert network.is_batch_invariant


@pytest.mark.transformers
def test_a_gate_keeps_its_module_and_its_weight(checkpoints):
    network = tiny.load(checkpoints("qwen3_moe"), dtype="bfloat16")
    gate = network.model.model.layers[0].mlp.gate
    before, rows = gate.weight.clone(), random_rows(9, 64)
    wanted = gate(rows)
    own_kernels.use_own(network)
    assert network.model.model.layers[0].mlp.gate is gate
    assert isinstance(gate.weight, RowwiseWeight)
    assert torch.equal(gate.weight, before)
    assert (gate.weight + 0).shape == before.shape
    found = gate(rows)
    for mine, theirs in zip(found, wanted, strict=True):
        assert type(mine) is torch.Tensor
        torch.testing.assert_close(mine, theirs, atol=0.05, rtol=0.05)


def test_sizes_without_kernels_stay_with_torch_and_are_named(tmp_path):
    """Heads of 8, widths of 24 and an odd number of inputs."""
    config = tiny.make_config("gpt_oss", intermediate_size=21)
    network = tiny.load(tiny.save_checkpoint(tmp_path, config), dtype="bfloat16")
    own_kernels.use_own(network)
    assert network.exchange.kept == {"GptOssAttention": 3, "GptOssExperts": 3}
    assert not network.is_batch_invariant
    assert "3 GptOssAttention, 3 GptOssExperts" in network.exchange.note
    assert len(drive_network(network, 1)[0].tokens) == 8


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_kernels_that_arrive_late_replace_torch_s_packed_weights(name, checkpoints, monkeypatch):
    """One module between two steps, while sequences are computed; what comes out is what an exchange at load gives."""
    if not can_pack(torch.device("cpu"), torch.bfloat16):
        pytest.skip("torch has no packed kernels for bfloat16 on this CPU")
    monkeypatch.setattr("moestro.model.network._BYTES_A_STEP", 1)
    at_load = own_kernels.use_own(tiny.load(checkpoints(name), dtype="bfloat16"))
    network = tiny.load(checkpoints(name), dtype="bfloat16")
    device = drive.make_device(drive.recording(network))
    network.pack()
    linear = network.model.model.layers[0].self_attn.o_proj
    assert linear.packing is TORCH_PACKING
    own_kernels.kernels()
    network.await_kernels(own_kernels._build())
    rng, num_steps, states = np.random.default_rng(0), 0, []
    network.on_exchanged = lambda: states.append(network.is_batch_invariant)
    (sequence,) = drive.admit([[7, 8, 9]], 60, rng)
    while network._awaited is not None:
        assert not states
        drive.step(device, [sequence], rng)
        num_steps += 1
        assert not network.is_batch_invariant or network._awaited is None
    assert states == [True]
    assert num_steps > len(network.experts)
    assert isinstance(linear, PackedLinear)
    assert isinstance(linear.packing, KernelPacking)
    assert network.is_batch_invariant
    for one, other in zip(drive_network(network, 3), drive_network(at_load, 4), strict=True):
        assert one.tokens == other.tokens
        for position in one.logits.keys() & other.logits.keys():
            assert torch.equal(one.logits[position], other.logits[position])


@pytest.mark.parametrize("num_experts", [16, 32])
@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "minimax_m2"])
def test_a_float32_sigmoid_of_a_gate_knows_no_batch(name, num_experts, tmp_path):
    """torch's ends a vector, and the part of each of its threads, by another formula."""
    num_rows = 2049  # two threads of torch share so many numbers, and part them inside of a row
    sizes = {"n_group": 4} if name == "deepseek_v3" else {}
    sizes["num_local_experts" if name == "minimax_m2" else "n_routed_experts"] = num_experts
    config = tiny.make_config(name, **{**own_kernels.SIZES[name], **sizes})
    with own_kernels.threads(2):
        network = own_kernels.use_own(tiny.load(tiny.save_checkpoint(tmp_path, config), dtype="bfloat16"))
        assert network.is_batch_invariant
        gates = [m for m in network.model.modules() if type(m).__name__.lower().endswith("topkrouter")]
        correction = (torch.zeros(num_experts),) if name == "minimax_m2" else ()
        rows = random_rows(num_rows, config.hidden_size)
        for gate in gates:
            assert isinstance(gate.weight, RowwiseWeight)
            whole = [part.clone() for part in gate(rows, *correction)]
            for row in (*range(20), num_rows // 2, num_rows - 1):
                for one, all_rows in zip(gate(rows[row : row + 1], *correction), whole, strict=True):
                    assert torch.equal(one[0], all_rows[row])


class EndsOtherwise(nn.Module):
    """An activation that computes the end of a vector by another formula, as torch's GELU on some CPUs."""

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        out = nn.functional.silu(numbers).contiguous()
        out.view(-1)[numbers.numel() // 64 * 64 :] *= 1.01
        return out


class SeesGaps(nn.Module):
    """An activation with another formula for halves of rows, as torch's GELU on CPUs with AVX-512."""

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(numbers) * (1.0 if numbers.is_contiguous() else 1.01)


@pytest.mark.parametrize(
    ("activation", "kept"),
    [(EndsOtherwise(), {"EndsOtherwise": 1}), (SeesGaps(), {"SeesGaps": 1}), (nn.ReLU(), {}), (nn.Tanh(), {})],
)
def test_an_activation_with_two_formulas_is_named(activation, kept, checkpoints):
    network = tiny.load(checkpoints("llama"), dtype="bfloat16")
    network.model.model.layers[1].mlp.act_fn = activation
    assert own_kernels.use_own(network).exchange.kept == kept


@pytest.mark.parametrize(("rope_size", "is_invariant"), [(32, True), (16, True), (8, False)])
def test_a_complex_rotation_that_ends_a_vector_by_another_formula_is_named(rope_size, is_invariant, tmp_path):
    sizes = own_kernels.SIZES["deepseek_v2"] | {"qk_rope_head_dim": rope_size}
    config = tiny.make_config("deepseek_v2", **sizes)
    network = own_kernels.use_own(tiny.load(tiny.save_checkpoint(tmp_path, config), dtype="bfloat16"))
    attention = network.model.model.layers[0].self_attn
    rotate = sys.modules[type(attention).__module__].apply_rotary_emb
    found = [rotate(*rotated(5, rope_size, slice(first, end)))[0] for first, end in ((0, 5), (2, 3))]
    # What torch's loops do with the end of a vector depends on the instruction set.
    is_equal = torch.equal(found[0][:, :, 2:3], found[1])
    assert is_equal or not is_invariant
    assert is_rotation_rowwise(attention) == is_equal
    # The attention kernel itself reads rows of whole 32 entries.
    assert network.is_batch_invariant == (is_equal and rope_size == 32)
    assert network.exchange.kept == ({} if network.is_batch_invariant else {"DeepseekV2Attention": 3})


def rotated(num_tokens: int, size: int, tokens: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads, angles = (
        torch.randn(shape, generator=generator) for shape in ((1, 4, num_tokens, size), (1, num_tokens, size // 2))
    )
    turns = torch.polar(torch.ones_like(angles), angles)
    return heads[:, :, tokens], heads[:, :1, tokens], turns[:, tokens]


def test_a_search_that_fails_leaves_torch_s_kernels(checkpoints):
    class Failed:
        is_over, library, failure = True, None, "no compiler"

    network = tiny.load(checkpoints("llama"), dtype="bfloat16")
    device = drive.make_device(network)
    network.pack()
    network.await_kernels(Failed())
    drive.run(device, drive.make_units([(0, [7, 8])], np.zeros((1, 1))))
    assert network.exchange is None
    assert network._awaited is None


@pytest.mark.parametrize("function", [torch.sigmoid, nn.functional.silu])
def test_torch_s_elementwise_functions_know_no_batch_in_bfloat16(function):
    """For all 65,536 values: in whole vectors, and in the parts of one."""
    values = torch.arange(65536).to(torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[~values.isnan()]
    parts = torch.cat([function(part.clone()) for part in values.split(31)])
    assert torch.equal(parts.view(torch.int16), function(values).view(torch.int16))
