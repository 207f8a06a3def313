"""Every tested family with its units in random fragments at every layer: the results and the KV of a whole step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity import drive, tiny
from parity.fragments import FragmentDriver
from support.torch_stages import make_staged_device
from transformers import CONFIG_MAPPING

from moestro.core.work import LOGITS_LAST, LOGITS_PROMPT, StepResult, Units
from moestro.model.device import TorchDevice
from moestro.model.experts.gate_override import make_override
from moestro.model.staged.arena import Arena

NUM_BLOCKS = 40
LENGTHS = ((9, 1, 14), (6, 3))  # prompts of two waves
# Some gates compute in float32 even in a float64 network, where the other rows of a product change the last digits.
FLOAT32_GATES = {"deepseek_v2", "deepseek_v2-lite", "deepseek_v3", "glm4_moe", "minimax_m2", "ernie4_5_moe"}


class Sequences:
    """Sequences that both devices compute, wave by wave."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.waves = [list(range(3)), [3, 4]]
        self.tokens = [rng.integers(3, tiny.VOCAB, n).tolist() for wave in LENGTHS for n in wave]
        self.computed = [0] * len(self.tokens)
        self.tables = rng.permutation(NUM_BLOCKS).reshape(len(self.tokens), -1)
        self.rng = rng

    def next_units(self, wave: list[int]) -> Units:
        """The next chunk of each sequence, with all logits."""
        ends, parts, following = [], [], []
        for index in wave:
            tokens, start = self.tokens[index], self.computed[index]
            ends.append(min(start + int(self.rng.integers(1, 10)), len(tokens)))
            parts.append((start, tokens[start : ends[-1]]))
            following += [*tokens, 0][start + 1 : ends[-1] + 1]
        last = [LOGITS_LAST * (end == len(self.tokens[index])) for index, end in zip(wave, ends, strict=True)]
        for index, end in zip(wave, ends, strict=True):
            self.computed[index] = end
        return drive.make_units(
            parts,
            self.tables[wave],
            slot=np.array(wave),
            serial=np.array(wave),
            logits=np.array(last, np.uint8) + np.uint8(LOGITS_PROMPT),
            next_token_ids=np.array(following, np.int32),
            sampling=drive.greedy(len(wave), num_logprobs=2, num_prompt_logprobs=0),
        )

    def take(self, results: dict[int, StepResult]) -> None:
        for index, result in results.items():
            if result.token_ids[0] >= 0:
                self.tokens[index].append(int(result.token_ids[0]))


def compare(network, rng: np.random.Generator, num_steps: int = 10):
    """(largest difference of log probabilities and of K and V, driver) after some steps."""
    fused = TorchDevice(network, network.probe(drive.BLOCK_SIZE)[0].allocate(NUM_BLOCKS))
    staged = make_staged_device(network, drive.BLOCK_SIZE, NUM_BLOCKS, num_rows=50, num_places=47)
    driver, sequences, largest, counts = FragmentDriver(staged, rng), Sequences(rng), 0.0, 0
    for _ in range(num_steps):
        waves = [sequences.next_units(wave) for wave in sequences.waves]
        expected = {}
        for units in waves:
            result = drive.run(fused, units)
            counts = counts + (0 if result.expert_counts is None else result.expert_counts)
            expected |= {int(slot): result.select(np.array([at])) for at, slot in enumerate(units.slot)}
        found = driver.run(waves)
        assert found.keys() == expected.keys()
        largest = max(largest, *(difference(found[slot], expected[slot]) for slot in found))
        sequences.take(expected)
    assert len(driver.free_rows) == staged.shape.num_rows
    assert sorted(driver.free_places.tolist()) == list(range(staged.shape.num_places))
    if staged.shape.num_experts and driver.counts.tolist() != counts.tolist():
        return float("inf"), driver
    for ours, theirs in zip(staged.pools.blocks(), fused.pools.blocks(), strict=True):
        largest = max(largest, apart(ours, theirs))
    return largest, driver


def close(name: str) -> float:
    return 1e-5 if name in FLOAT32_GATES else 1e-10


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference; infinite for what is not a number."""
    return float((ours - theirs).abs().nan_to_num(float("inf")).max())


def difference(found: StepResult, expected: StepResult) -> float:
    """Of all log probabilities; infinite where tokens differ."""
    if found.token_ids.tolist() != expected.token_ids.tolist() or found.non_finite is not None:
        return float("inf")
    ours = [*found.logprobs.values(), *found.prompt_logprobs.get(0, ())]
    theirs = [*expected.logprobs.values(), *expected.prompt_logprobs.get(0, ())]
    assert len(ours) == len(theirs) > 0
    return max(abs(a.logprob - b.logprob) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.transformers
@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_a_family_in_random_fragments_computes_what_whole_steps_compute(name, checkpoint):
    network = tiny.load(checkpoint(name), dtype="float64")
    largest, driver = compare(network, np.random.default_rng(len(name)))
    print(f"{name}: largest difference {largest:.1e}, {driver.seen}")
    assert largest < close(name)
    if network.num_experts:
        assert min(driver.seen.values()) > 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["qwen3_moe-window", "gpt_oss", "granitemoe", "deepseek_v2"])
def test_other_fragments_compute_it_too(name, seed, checkpoint):
    network = tiny.load(checkpoint(name), dtype="float64")
    assert compare(network, np.random.default_rng(100 + seed), num_steps=8)[0] < close(name)


def test_layers_with_different_rotary_tables_get_their_own(tmp_path):
    if "mimo_v2_flash" not in CONFIG_MAPPING:
        pytest.skip("this transformers has no such family")
    config = tiny.make_config(
        "mimo_v2_flash",
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        head_dim=8,
        v_head_dim=12,
        sliding_window=6,
    )
    network = tiny.load(tiny.save_checkpoint(tmp_path, config), dtype="float64")
    largest, driver = compare(network, np.random.default_rng(5))
    assert len(set(driver.device.staged.arguments.kind_of)) == 2
    assert largest < 1e-5


def test_fragments_keep_the_choices_of_a_gate_override(checkpoint):
    network = tiny.load(checkpoint("qwen3_moe"), dtype="float64")
    network.override = make_override("exponential:0.3", network.gate_shape(network.probe(4)[1]), 11)
    assert compare(network, np.random.default_rng(0))[0] < close("qwen3_moe")


def test_units_run_the_part_before_the_layers_once(checkpoint, monkeypatch):
    network = tiny.load(checkpoint("qwen3_moe"), dtype="float64")
    decoder = network.model.get_decoder()
    device = make_staged_device(network, drive.BLOCK_SIZE, NUM_BLOCKS, num_rows=50, num_places=47)
    entered = []
    decoder.register_forward_pre_hook(lambda *args: entered.append(args[2]["input_ids"].shape[1]), with_kwargs=True)
    rng = np.random.default_rng(4)
    waves = [Sequences(rng).next_units([0, 1, 2]), Sequences(rng).next_units([3, 4])]
    driver = FragmentDriver(device, rng, withdraws=False)  # units of a passage without any piece would enter again
    driver.run(waves)
    assert sum(entered) == sum(units.num_tokens.sum() for units in waves)
    assert driver.seen["Attention"] + driver.seen["Passage"] > len(entered)


def _first_rows(arena: Arena, column: int, rows) -> torch.Tensor:
    whole = arena._columns[column]
    return whole[: len(whole[rows])]


def _unmerged(arena: Arena, rows, places):
    attended, total = READ_ATTENDED(arena, rows, places)
    return attended, total * 0


READ_ATTENDED = Arena.read_attended


@pytest.mark.parametrize(("method", "wrong"), [("read_column", _first_rows), ("read_attended", _unmerged)])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "granitemoe"])
def test_the_comparison_detects_a_wrong_arena(name, method, wrong, checkpoint, monkeypatch):
    network = tiny.load(checkpoint(name), dtype="float64")
    monkeypatch.setattr(Arena, method, wrong)
    assert compare(network, np.random.default_rng(0), num_steps=5)[0] > 1e-3
