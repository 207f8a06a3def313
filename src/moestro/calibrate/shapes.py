"""The measured steps: a grid of chunks, a grid of decodes, and other batches to check the table with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moestro.core.request import ModelInfo
from moestro.core.work import LOGITS_LAST, SAMPLING_ROW, Forward, Units
from moestro.cost.model import Batch
from moestro.engine.rank import ExpertObserver
from moestro.errors import ConfigError
from moestro.model.device import open_device
from moestro.model.settings import ModelSettings

SHORT_CHUNK = 64
_MIN_CONTEXT = 16
_VARIES = 16  # a chunk's size varies by 1 / _VARIES of itself
_SIZES = (1, 4, 16, 32, SHORT_CHUNK, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of the device, and the range of the table.

    Attributes:
        max_model_len, max_num_seqs, max_num_batched_tokens: as of a server.
        num_blocks, block_size: its KV cache.
        vocab_size: number of token ids.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    vocab_size: int

    def fits(self, batch: Batch) -> bool:
        """Whether the KV cache holds these sequences, and none is too long."""
        ends = batch.start + batch.num_tokens
        num_blocks = -(-ends // self.block_size)
        return bool(int(ends.max()) <= self.max_model_len and int(num_blocks.sum()) <= self.num_blocks)


def prefill_grid(limits: Limits) -> list[tuple[int, int]]:
    """(new, cached): sizes in steps of two or less, each with nothing cached and with up to most of the context."""
    most = min(limits.max_num_batched_tokens, limits.max_model_len - 1)
    cached = [0, limits.max_model_len // 4, limits.max_model_len // 2, limits.max_model_len * 3 // 4]
    return [(new, old) for new in _sizes(most) for old in cached if limits.fits(chunk(new, old))]


def short_chunks_grid(limits: Limits) -> list[int]:
    """Tokens of steps that consist of short chunks: from two chunks to a full step."""
    counts = (size // SHORT_CHUNK * SHORT_CHUNK for size in _sizes(limits.max_num_batched_tokens))
    return sorted({count for count in counts if count > SHORT_CHUNK and limits.fits(short_chunks(count))})


def decode_grid(limits: Limits) -> list[tuple[int, int]]:
    """(sequences, mean context): numbers in steps of two, contexts up to half of the longest."""
    counts = sorted({*(2**i for i in range(20) if 2**i < limits.max_num_seqs), limits.max_num_seqs})
    longest = limits.max_model_len - 1
    contexts = sorted({min(_MIN_CONTEXT, longest // 8), *(longest // part for part in (8, 4, 2))})
    return [(n, context) for n in counts for context in contexts if limits.fits(decodes(spread_contexts(n, context)))]


def check_batches(limits: Limits, num_batches: int, rng: np.random.Generator) -> list[Batch]:
    """Batches of shapes outside of the grids: decodes of mixed contexts, one chunk, several chunks, both together."""
    found: list[Batch] = []
    while len(found) < num_batches:
        kind = len(found) % 4
        num_chunks = (0, 1, int(rng.integers(2, 5)), int(rng.integers(1, 3)))[kind]
        num_decodes = int(rng.integers(2, limits.max_num_seqs + 1)) if kind in (0, 3) else 0
        longest = limits.max_model_len - 1
        mean = rng.uniform(0.1, 0.7) * longest
        contexts = np.clip(rng.gamma(4, mean / 4, num_decodes), 2, longest).astype(np.int64)
        share = min(limits.max_num_batched_tokens, longest) // max(num_chunks, 1)
        new = np.exp(rng.uniform(np.log(8), np.log(max(share, 9)), num_chunks)).astype(np.int64)
        cached = rng.integers(0, np.maximum(longest - new, 1)) * rng.integers(2, size=num_chunks)
        batch = Batch(
            np.concatenate([contexts - 1, cached]),
            np.concatenate([np.ones(num_decodes, np.int64), new]).astype(np.int64),
        )
        if limits.fits(batch):
            found.append(batch)
    return found


def _sizes(most: int) -> list[int]:
    return [*(size for size in _SIZES if size < most), most]


def chunk(new: int, cached: int) -> Batch:
    """Make one prefill chunk."""
    return Batch(np.array([cached]), np.array([new]))


def short_chunks(num_tokens: int) -> Batch:
    """Make prefill chunks of SHORT_CHUNK tokens, `num_tokens` in all."""
    num_chunks = num_tokens // SHORT_CHUNK
    return Batch(np.zeros(num_chunks, np.int64), np.full(num_chunks, SHORT_CHUNK))


def spread_contexts(num_sequences: int, mean: int) -> list[int]:
    """Contexts spread evenly from 0.2 to 1.8 of `mean`, because a server's sequences differ in age."""
    shares = np.linspace(0.2, 1.8, num_sequences) if num_sequences > 1 else np.ones(1)
    contexts: list[int] = np.maximum(np.rint(shares * mean), 1).astype(np.int64).tolist()
    return contexts


def decodes(contexts: list[int]) -> Batch:
    """Make one decode of each context, its own token included."""
    return Batch(np.array(contexts) - 1, np.ones(len(contexts), np.int64))


def about(batch: Batch, limits: Limits, rng: np.random.Generator) -> Batch:
    """Vary a batch: its chunks get up to a sixteenth longer or shorter. A batch that would not fit stays unchanged.

    A server hardly ever meets the same large chunk twice, and libraries cache what they computed for a shape. Repeated
    measurements of one exact shape are up to a fifth faster than real steps.
    """
    room = np.where(batch.num_tokens > 1, batch.num_tokens // _VARIES, 0)
    if not limits.fits(Batch(batch.start, batch.num_tokens + room)):
        return batch
    return Batch(batch.start, batch.num_tokens + rng.integers(-room, room + 1))


def forward(batch: Batch, limits: Limits, rng: np.random.Generator) -> Forward:
    """Make a work item of this shape. New random tokens make the gate choose anew; each sequence has its own blocks."""
    num_units = len(batch.start)
    start, num_tokens = batch.start.astype(np.int32), batch.num_tokens.astype(np.int32)
    num_blocks = -(-(start + num_tokens) // limits.block_size)
    tables = np.zeros((num_units, int(num_blocks.max())), np.int32)
    for row, first, count in zip(tables, np.cumsum(num_blocks) - num_blocks, num_blocks, strict=True):
        row[:count] = np.arange(first, first + count)
    sampling = np.zeros(num_units, SAMPLING_ROW)
    sampling["temperature"], sampling["top_p"], sampling["repetition_penalty"] = 1, 1, 1
    sampling["num_logprobs"], sampling["num_prompt_logprobs"] = -1, -1
    sampling["seed"] = rng.integers(2**63, size=num_units)
    units = Units(
        slot=np.arange(num_units, dtype=np.int32),
        serial=np.arange(num_units),
        service_class=np.zeros(num_units, np.uint8),
        start=start,
        num_tokens=num_tokens,
        write_start=start,
        logits=np.full(num_units, LOGITS_LAST, np.uint8),
        block_tables=tables,
        sampling=sampling,
        token_ids=rng.integers(limits.vocab_size, size=int(num_tokens.sum()), dtype=np.int32),
    )
    return Forward(units)


# Runs a network on random tokens, so that the load and the pairs of its experts can be counted without traffic.
#
# Source: Gimbal, section IV, which takes the affinity of experts from vLLM's random input, "to avoid dataset-specific
# bias". Random tokens visit other experts than text does; `placement.pair_overlap` says how far the two agree.


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
