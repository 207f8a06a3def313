"""Runs a network on random tokens, so that the load and the pairs of its experts can be counted without traffic.

Source: Gimbal, section IV, which takes the affinity of experts from vLLM's random input, "to avoid dataset-specific
bias". Random tokens visit other experts than text does; `placement.pair_overlap` says how far the two agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moestro.calibrate.shapes import Limits, forward
from moestro.core.model_info import ModelInfo
from moestro.cost.model import Batch
from moestro.engine.rank import ExpertObserver
from moestro.errors import ConfigError
from moestro.model.device import open_device
from moestro.model.settings import ModelSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomInput:
    """The random prompts.

    Attributes:
        num_steps: Forward passes.
        num_sequences: Prompts of each pass.
        num_tokens: Tokens of each prompt; shorter where the model allows no more.
        seed: Seed of the tokens.
    """

    num_steps: int = 200  # as many as the requests of Gimbal's figure 3
    num_sequences: int = 4
    num_tokens: int = 64
    seed: int = 0


def profile_random_input(settings: ModelSettings, text: RandomInput, observer: ExpertObserver) -> ModelInfo:
    """Run a network on random prompts, and show every step to `observer`; each step has a sample of choices too.

    Args:
        settings: The network, and memory for the prompts of one step.
        text: The prompts.

    Raises:
        ConfigError: The network cannot be loaded, is dense, or has too little memory for a step.
    """
    device, info = open_device(settings)
    if not info.num_experts:
        raise ConfigError(f"{settings.model} is dense: it has no experts to profile")
    device.network.finish_kernels()
    device.network.sample_choices(1)
    limits = Limits(
        max_model_len=info.max_model_len,
        max_num_seqs=text.num_sequences,
        max_num_batched_tokens=text.num_sequences * text.num_tokens,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        vocab_size=info.vocab_size,
    )
    num_tokens = np.full(text.num_sequences, min(text.num_tokens, info.max_model_len - 1))
    batch = Batch(np.zeros_like(num_tokens), num_tokens)
    if not limits.fits(batch):
        raise ConfigError(
            f"{info.num_blocks} KV blocks hold no step of {int(num_tokens.sum())} tokens: give more memory"
        )
    rng = np.random.default_rng(text.seed)
    for _ in range(text.num_steps):
        device.launch(forward(batch, limits, rng), 0)
        while not (results := device.poll(0)):
            pass  # an accelerator is at work
        for result in results:
            observer.observe(result)
    return info
