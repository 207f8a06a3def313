"""The torch device as an engine sees it: opened from settings, launched, polled."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from parity import drive, tiny

from moestro.core.request import SamplingDefaults
from moestro.core.work import LOGITS_LAST, LOGITS_NONE, Forward
from moestro.errors import ConfigError, UnsupportedModelError
from moestro.model.device import open_device, read_facts
from moestro.model.pools import measure_copy
from moestro.model.sampler import sample
from moestro.model.settings import ModelSettings
from moestro.model.tensors import choose_device

PARTS = [(0, [5, 6, 7, 8, 9]), (0, [10, 11, 12])]
TABLES = [[0, 1], [2, 3]]


@pytest.fixture
def device(checkpoint):
    return open_device(tiny.settings_of(checkpoint("qwen3_moe")))[0]


def test_opening_says_what_it_does_and_what_it_found(checkpoint):
    phases: list[str] = []
    device, info = open_device(tiny.settings_of(checkpoint("deepseek_v3")), phases.append)
    assert phases == ["read config", "load weights", "check", "pack weights", "allocate KV cache", "ready"]
    assert (info.model_type, info.dtype, info.device) == ("deepseek_v3", "float32", "cpu")
    assert (info.max_model_len, info.vocab_size, info.eos_token_ids) == (256, tiny.VOCAB, (2,))
    assert (info.num_layers, info.num_experts, info.num_experts_per_token) == (3, 8, 3)
    assert (info.num_blocks, info.block_size) == (96, 4)
    # MLA: a latent of 16 and 8 rotated entries for all heads, 3 layers, float32.
    assert device.pools.bytes_per_block == 4 * (16 + 8) * 3 * 4
    unpacked = tiny.load(checkpoint("deepseek_v3")).model
    assert info.num_parameters == sum(p.numel() for p in unpacked.parameters())
    assert info.notes == ()


def test_every_unit_comes_back_once_and_in_launch_order(device):
    device.launch(Forward(drive.make_units(PARTS, TABLES, slot=np.array([4, 2], np.int32))), 0)
    device.launch(Forward(drive.make_units([(5, [3])], TABLES[:1], slot=np.array([4], np.int32))), 0)
    first, second = device.poll(0)
    assert (first.slot.tolist(), second.slot.tolist()) == ([4, 2], [4])
    assert device.poll(0) == []
    assert device.ready_at_ns() is None


def test_a_unit_without_wanted_logits_gets_no_token(device):
    result = drive.run(device, drive.make_units(PARTS, TABLES, logits=np.array([LOGITS_NONE, LOGITS_LAST], np.uint8)))
    assert result.token_ids[0] == -1
    assert 0 <= result.token_ids[1] < tiny.VOCAB
    nothing = drive.run(device, drive.make_units(PARTS, TABLES, logits=np.zeros(2, np.uint8)))
    assert nothing.token_ids.tolist() == [-1, -1]


def test_counts_are_of_this_step_alone(device):
    for parts in (PARTS, PARTS[:1]):
        counts = drive.run(device, drive.make_units(parts, TABLES[: len(parts)])).expert_counts
        assert counts.dtype == np.int64
        assert counts.shape == (3, 8)
        assert counts.sum(axis=1).tolist() == [3 * sum(len(tokens) for _, tokens in parts)] * 3


def test_a_dense_model_counts_nothing(checkpoint):
    device, info = open_device(tiny.settings_of(checkpoint("llama")))
    assert info.num_experts == 0
    assert drive.run(device, drive.make_units(PARTS, TABLES)).expert_counts is None


def test_logprobs_come_back_for_the_units_that_want_them(device):
    rows = drive.greedy(2)
    rows["num_logprobs"][1] = 3
    result = drive.run(device, drive.make_units(PARTS, TABLES, sampling=rows))
    assert set(result.logprobs) == {1}
    entry = result.logprobs[1]
    assert (entry.token_id, entry.rank, len(entry.top)) == (int(result.token_ids[1]), 1, 3)
    assert entry.top[0] == (entry.token_id, entry.logprob)
    assert math.exp(entry.logprob) <= 1
    assert result.prompt_logprobs == {}


def test_listed_logprobs_are_those_of_the_distribution_in_any_batch(device):
    rows = drive.greedy(2)
    rows["num_logprobs"] = [3, 2]
    rows["num_listed"][1] = 2
    rows["listed"][1, :2] = [9, 4]
    result = drive.run(device, drive.make_units(PARTS, TABLES, sampling=rows))
    alone = drive.run(device, drive.make_units(PARTS[1:], TABLES[1:], sampling=rows[1:]))
    every = drive.greedy(2)
    every["num_logprobs"] = 1 << 20
    whole = [
        dict(entry.top)
        for entry in drive.run(device, drive.make_units(PARTS, TABLES, sampling=every)).logprobs.values()
    ]
    assert result.logprobs[1] == alone.logprobs[0]
    assert result.logprobs[1].top == tuple((token_id, whole[1][token_id]) for token_id in (9, 4))
    assert result.logprobs[0].top == tuple(list(whole[0].items())[:3])


@pytest.mark.parametrize("seed", range(3))
def test_a_seeded_random_sequence_is_the_same_alone_in_a_batch_and_in_chunks(seed, device):
    hot = drive.greedy(1, temperature=1.2, top_k=30, top_p=0.95, seed=seed)
    prompt = list(range(20, 33))

    def generate(chunks: list[int], others: int) -> list[int]:
        tokens, computed = list(prompt), 0
        for index in range(len(chunks) + 5):
            end = min(computed + chunks[index], len(tokens)) if index < len(chunks) else len(tokens)
            parts = [(0, [7, 8, 9])] * others + [(computed, tokens[computed:end])]
            tables = [[20 + i] * 6 for i in range(others)] + [[0, 1, 2, 3, 4, 5]]
            sampling = np.concatenate([drive.greedy(others, temperature=2, seed=99), hot])
            token = drive.run(device, drive.make_units(parts, tables, sampling=sampling)).token_ids[-1]
            computed = end
            if end == len(tokens):
                tokens.append(int(token))
        return tokens

    assert generate([13], 0) == generate([13], 3) == generate([4, 8, 1], 0) == generate([1, 1, 9, 2], 2)


def test_noise_is_keyed_by_the_position_of_the_new_token(device):
    device.network = drive.recording(device.network)
    hot = drive.greedy(2, temperature=3, seed=[5, 6])
    for _ in range(20):
        hot["seed"] += np.uint64(1)
        tokens = drive.run(device, drive.make_units(PARTS, TABLES, sampling=hot)).token_ids
        assert tokens.tolist() == sample(device.network.last_logits, hot, np.array([5, 3])).tolist()


def test_the_kv_cache_takes_the_blocks_that_its_memory_holds(checkpoint):
    directory = checkpoint("qwen3_moe")
    per_block = 2 * 4 * 2 * 16 * 3 * 4  # K and V, tokens, heads, head size, layers, bytes
    settings = tiny.settings_of(directory, num_gpu_blocks_override=None, kv_cache_memory_bytes=100 * per_block + 7)
    device, info = open_device(settings)
    assert info.num_blocks == device.pools.num_blocks == 100
    assert device.pools.bytes_per_block == per_block


def test_an_unnamed_max_model_len_is_lowered_to_what_fits(checkpoint):
    _, info = open_device(tiny.settings_of(checkpoint("qwen3_moe"), num_gpu_blocks_override=10))
    assert info.max_model_len == 40
    assert "lowered from 256 to the 40 tokens" in info.notes[0]


def test_a_named_max_model_len_that_does_not_fit_is_refused_with_numbers(checkpoint):
    settings = tiny.settings_of(checkpoint("qwen3_moe"), num_gpu_blocks_override=10, max_model_len=41)
    with pytest.raises(ConfigError, match=r"holds 10 blocks of 4 tokens .* 11 are needed for 41 tokens") as caught:
        open_device(settings)
    assert f"--kv-cache-memory-bytes to at least {11 * 3072}" in str(caught.value)
    assert "--max-model-len" in str(caught.value)


@pytest.mark.parametrize(
    ("rope_type", "factor", "original", "wanted"),
    [
        ("yarn", 4.0, 256, 1024),
        ("yarn", 4.0, None, 1024),
        ("yarn", 4.0, 64, 256),
        ("yarn", 1e12, 64, 1 << 30),
        ("linear", 4.0, None, 256),
    ],
)
def test_yarn_lengthens_the_context_of_its_original_length(rope_type, factor, original, wanted, tmp_path):
    """As published: the scaling is added, and max_position_embeddings stays."""
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": factor}
    if original is not None:
        rope["original_max_position_embeddings"] = original
    tiny.make_config("qwen3_moe", rope_parameters=rope).save_pretrained(tmp_path)
    settings = tiny.settings_of(tmp_path, load_format="dummy", max_model_len=None)
    assert read_facts(settings).max_model_len == wanted
    with pytest.raises(ConfigError, match=f"Give at most {wanted}"):
        read_facts(dataclasses.replace(settings, max_model_len=wanted + 1))


def test_a_named_max_model_len_may_take_all_of_the_cache(checkpoint):
    settings = tiny.settings_of(checkpoint("qwen3_moe"), num_gpu_blocks_override=10, max_model_len=40)
    assert open_device(settings)[1].max_model_len == 40


def test_memory_for_less_than_one_block_is_refused(checkpoint):
    settings = tiny.settings_of(checkpoint("qwen3_moe"), num_gpu_blocks_override=None, kv_cache_memory_bytes=100)
    with pytest.raises(ConfigError, match=r"holds 0 blocks .* set --kv-cache-memory-bytes to at least 3072"):
        open_device(settings)


def test_host_memory_takes_the_blocks_that_its_size_holds(checkpoint):
    settings = tiny.settings_of(checkpoint("qwen3_moe"), kv_offloading_size=50 * 3072 / 2**30)
    assert open_device(settings)[1].num_host_blocks == 50


def test_the_copy_of_a_block_is_timed_in_few_blocks_that_were_written_before(monkeypatch):
    class Pools:
        now_ns, moves = 0, []

        def move(self, moves):
            self.moves.append(moves)
            slow = 100 if len(self.moves) == 5 else 1  # a neighbour of the machine disturbs one copy
            self.now_ns += slow * (800 + 100 * moves.restored.shape[1])

        def wait(self):
            pass

    pools = Pools()
    monkeypatch.setattr("moestro.model.pools.time.perf_counter_ns", lambda: pools.now_ns)
    assert measure_copy(pools, 24) == (800 + 8 * 100) / 8
    kept, restored = pools.moves[:3], pools.moves[3:]
    assert not any(moves.restored.shape[1] for moves in kept)
    assert np.concatenate([moves.kept[1] for moves in kept]).tolist() == list(range(24))
    assert np.concatenate([moves.restored[0] for moves in restored]).tolist() == list(range(24))
    assert measure_copy(pools, 0) == 0


@pytest.mark.parametrize(
    ("size", "cause"), [(3071 / 2**30, "holds no KV block, which takes 3072 bytes"), (2.0**29, "cannot be allocated")]
)
def test_host_memory_for_no_block_or_that_is_not_there_is_refused(checkpoint, size, cause):
    settings = tiny.settings_of(checkpoint("qwen3_moe"), kv_offloading_size=size)
    with pytest.raises(ConfigError, match=cause):
        open_device(settings)


def test_memory_that_is_not_there_is_refused(checkpoint):
    settings = tiny.settings_of(checkpoint("qwen3_moe"), num_gpu_blocks_override=1 << 48)
    with pytest.raises(ConfigError, match="cannot be allocated: lower --kv-cache-memory-bytes"):
        open_device(settings)


def test_more_than_the_network_was_made_for_is_refused(checkpoint):
    with pytest.raises(ConfigError, match=r"--max-model-len 257 exceeds .* 256 positions"):
        open_device(tiny.settings_of(checkpoint("qwen3_moe"), max_model_len=257))


def test_cuda_without_one_is_refused(checkpoint, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"--device cuda: torch .* finds no CUDA device: give --device cpu"):
        open_device(tiny.settings_of(checkpoint("qwen3_moe"), device="cuda"))


def test_ranks_take_the_accelerators_in_turn(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    for device in ("auto", "cuda"):
        found = [str(choose_device(ModelSettings(model="m", device=device), rank)) for rank in range(5)]
        assert found == ["cuda:0", "cuda:1", "cuda:2", "cuda:0", "cuda:1"]
    assert str(choose_device(ModelSettings(model="m", device="cpu"), 1)) == "cpu"


def test_end_tokens_are_those_of_both_files(checkpoint, tmp_path):
    directory = tiny.save_checkpoint(tmp_path, tiny.make_config("qwen2"))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert open_device(tiny.settings_of(directory))[1].eos_token_ids == (2, 5, 7)


def test_the_end_tokens_of_a_family_count_only_where_no_file_has_any(tmp_path):
    """OLMoE's own, 50279, lies outside of this vocabulary."""
    directory = tiny.save_checkpoint(tmp_path, tiny.make_config("olmoe"))
    config = json.loads((directory / "config.json").read_text())
    del config["eos_token_id"]
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert open_device(tiny.settings_of(directory))[1].eos_token_ids == (7,)
    (directory / "generation_config.json").unlink()
    with pytest.raises(ConfigError, match=r"config.json: eos_token_id must be an integer from 0 to 100.* got 50279"):
        open_device(tiny.settings_of(directory))


def test_sampling_defaults_are_the_checkpoints_unless_neutral_ones_are_set(tmp_path):
    directory = tiny.save_checkpoint(tmp_path, tiny.make_config("qwen2"))
    assert open_device(tiny.settings_of(directory))[1].sampling_defaults == SamplingDefaults()
    named = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "repetition_penalty": 1.05,
        "min_p": None,
        "do_sample": True,
    }
    (directory / "generation_config.json").write_text(json.dumps(named))
    found = open_device(tiny.settings_of(directory))[1].sampling_defaults
    assert found == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05)
    neutral = open_device(tiny.settings_of(directory, generation_config="vllm"))[1].sampling_defaults
    assert neutral == SamplingDefaults()


@pytest.mark.parametrize(("name", "value"), [("temperature", 3), ("top_p", 0), ("top_k", 1.5), ("min_p", "x")])
def test_a_default_that_no_client_could_ask_for_is_refused(tmp_path, name, value):
    directory = tiny.save_checkpoint(tmp_path, tiny.make_config("qwen2"))
    (directory / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(UnsupportedModelError, match=f"{name} must be .* --generation-config vllm"):
        open_device(tiny.settings_of(directory))
    assert open_device(tiny.settings_of(directory, generation_config="vllm"))


def test_a_gate_override_is_checked_against_the_model(checkpoint):
    directory = checkpoint("llama")
    with pytest.raises(ConfigError, match="no experts to choose"):
        open_device(tiny.settings_of(directory, gate_override="uniform"))
    device, _ = open_device(tiny.settings_of(checkpoint("qwen3_moe"), gate_override="exponential:5"))
    counts = drive.run(device, drive.make_units(PARTS, TABLES)).expert_counts
    assert (counts.max(axis=1) == 8).all()  # the hottest expert gets every token


def test_the_tokenizer_s_own_end_token_ends_answers(tmp_path):
    tiny.make_config("qwen3_moe", eos_token_id=5).save_pretrained(tmp_path)
    settings = tiny.settings_of(tmp_path, load_format="dummy")
    assert read_facts(settings).eos_token_ids == (5,)
    tokens = {"3": {"content": "<|im_end|>"}}
    config = {"eos_token": "<|im_end|>", "added_tokens_decoder": tokens}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert read_facts(settings).eos_token_ids == (3, 5)
