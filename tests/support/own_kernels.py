"""The compiled kernels, and tiny checkpoints whose sizes they accept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from parity import tiny

from moestro.model.device import use_threads
from moestro.model.kernels.exchange import KernelExchange
from moestro.model.kernels.library import KernelBuild, KernelLibrary
from moestro.model.network import Network
from moestro.model.settings import ModelSettings

# Families with heads (of MLA: latents) of whole 32s and widths of whole 16s; what differs from `tiny.FAMILIES`.
SIZES: dict[str, dict] = {
    "qwen3_moe": {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 32},
    "qwen3_moe-window": {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 48, "intermediate_size": 40},
    "gpt_oss": {"hidden_size": 64, "head_dim": 32, "intermediate_size": 32},
    "deepseek_v3": {
        "hidden_size": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "moe_intermediate_size": 32,
    },
    "deepseek_v2": {
        "hidden_size": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "moe_intermediate_size": 32,
    },
    "mixtral": {"hidden_size": 128, "intermediate_size": 32},
    "granitemoe": {"hidden_size": 128, "intermediate_size": 32},
    "qwen2_moe": {"hidden_size": 128, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 40},
    "glm4_moe": {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 32},
    "minimax_m2": {"hidden_size": 64, "head_dim": 32, "intermediate_size": 32},
    "ernie4_5_moe": {"hidden_size": 128, "moe_intermediate_size": 32},
    "olmoe": {"hidden_size": 128, "intermediate_size": 32},
    "llama": {"hidden_size": 128},
}


@cache
def _build() -> KernelBuild:
    build = KernelBuild()
    build.wait()
    return build


def kernels() -> KernelLibrary:
    """The kernels of this machine, in the user's cache afterwards; the test is skipped where no compiler is."""
    build = _build()
    if build.library is None:
        pytest.skip(f"no CPU kernels: {build.failure}")
    return build.library


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch and the kernels compute with `count` threads in the block, as `--threads` does."""
    before = torch.get_num_threads()
    try:
        use_threads(ModelSettings(threads=count))
        kernels().function["set_threads"](count)
        yield
    finally:
        torch.set_num_threads(before)
        kernels().function["set_threads"](before)


def use_own(network: Network) -> Network:
    """Exchange all modules of a loaded network, as a start does after its check."""
    network.probe(4)
    network.use_kernels(KernelExchange(kernels()))
    network.pack()
    return network


def save_checkpoint(directory, name: str):
    """A random checkpoint of a family in `SIZES`."""
    return tiny.save_checkpoint(directory, tiny.make_config(name, **SIZES[name]))
