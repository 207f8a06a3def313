"""What a client asked for and what it gets: frozen values that travel between processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.hashing import HASH_BYTES


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # a stop token, or (in the front door) a stop string
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"  # the client left
    ERROR = "error"  # the rank failed
    NON_FINITE = "non_finite_logits"  # the network answered NaN or infinity: there is no next token


class ServiceClass(StrEnum):
    """How much a request minds waiting."""

    LS = "ls"  # latency-sensitive
    BE = "be"  # best-effort


@dataclass(frozen=True, slots=True)
class AllowedRange:
    """Values of a sampling parameter that a client, or a checkpoint's authors, may choose.

    Attributes:
        low, high: bounds, both allowed.
        is_above_low: whether `low` itself is not allowed.
    """

    low: float
    high: float
    is_above_low: bool = False

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.is_above_low and value == self.low)

    def __str__(self) -> str:
        if self.is_above_low:
            return f"above {self.low} and at most {self.high}"
        return f"between {self.low} and {self.high}"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters by which the next token is chosen. Names and meanings are vLLM's.

    A field with an `AllowedRange` is a column of `SAMPLING_ROW`. Requests are checked by that range.
    """

    max_tokens: int = 16  # 0: the prompt is computed, for its logprobs say, and nothing is sampled
    min_tokens: int = 0  # of `stop_token_ids`, none is sampled before so many others
    temperature: Annotated[float, AllowedRange(0, 2)] = 1.0  # 0 means greedy
    top_p: Annotated[float, AllowedRange(0, 1, is_above_low=True)] = 1.0
    top_k: Annotated[int, AllowedRange(-1, 2**31 - 1)] = 0  # 0 means all; the API has -1 for it, too
    # Tokens less likely than this fraction of the likeliest are left out.
    min_p: Annotated[float, AllowedRange(0, 1)] = 0.0
    # Subtracted from the logit of each generated token.
    presence_penalty: Annotated[float, AllowedRange(-2, 2)] = 0.0
    # Subtracted from the logit of each generated token, once for each time that it was generated.
    frequency_penalty: Annotated[float, AllowedRange(-2, 2)] = 0.0
    # Divides the logit of each prompt or generated token, or multiplies it if the logit is negative.
    repetition_penalty: Annotated[float, AllowedRange(0.01, 100)] = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit), each id once
    seed: int = 0  # 0 .. 2**64 - 1; the front door draws one when the client gave none
    stop_token_ids: tuple[int, ...] = ()  # the model's end tokens among them, unless the client ignores these
    logprobs: int | None = None  # alternatives reported beside each sampled token; None: no logprobs
    prompt_logprobs: int | None = None  # the same for each prompt token but the first

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise ValueError(f"max_tokens must not be negative, got {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens must be in 0 .. max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty must be above 0, got {self.repetition_penalty}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be in 0 .. 2**64 - 1, got {self.seed}")

    @property
    def has_penalties(self) -> bool:
        """Whether what was said before changes the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def edits_logits(self) -> bool:
        """Whether the logits are changed before a token is chosen, beyond temperature and filters."""
        return self.has_penalties or bool(self.logit_bias or (self.min_tokens and self.stop_token_ids))


def _allowed_ranges() -> dict[str, AllowedRange]:
    hints: dict[str, Any] = get_type_hints(SamplingParams, include_extras=True)
    return {
        name: each
        for name, hint in hints.items()
        for each in getattr(hint, "__metadata__", ())
        if isinstance(each, AllowedRange)
    }


# Sampling parameters that are plain numbers, by name.
SAMPLING_RANGES: Mapping[str, AllowedRange] = _allowed_ranges()


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What holds where a client says nothing: neutral, or what the checkpoint's authors recommend."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One generation job. Its progress lives in an engine's `Sequence`, never here.

    `token_ids` is packed int32, or None when a hashed trace is replayed; `block_hashes` holds HASH_BYTES for each
    *full* block of the prompt, made once where the request enters, under `hash_key` (model, adapter, salt).
    `user` and `session_id` say who asks and in which conversation, where that is known: policies that keep a user or a
    conversation on one engine read them; they are names to compare, nothing more.
    `resumed_token_ids` is packed int32: tokens of the answer that another engine generated before it ended. They follow
    the prompt and never count as part of it: the engine that is given them goes on as if it had sampled them itself.
    """

    request_id: str
    num_prompt_tokens: int
    sampling: SamplingParams
    arrival_ns: int
    token_ids: bytes | None = None
    resumed_token_ids: bytes = b""
    block_hashes: bytes = b""
    hash_key: bytes = b""
    cache_salt: str | None = None  # of `hash_key`; said again where others must make the same names
    priority: int = 0  # lower is earlier
    service_class: ServiceClass = ServiceClass.LS
    user: str | None = None  # whose it is, as the client says; for affinity and fair shares, never for access
    session_id: str | None = None  # the conversation that it continues

    def __post_init__(self) -> None:
        if self.num_prompt_tokens < 1:
            raise ValueError(f"request {self.request_id!r}: empty prompt")
        if self.token_ids is not None and len(self.token_ids) != 4 * self.num_prompt_tokens:
            raise ValueError(f"request {self.request_id!r}: token_ids holds {len(self.token_ids)} bytes")
        if len(self.resumed_token_ids) % 4:
            raise ValueError(
                f"request {self.request_id!r}: resumed_token_ids holds {len(self.resumed_token_ids)} bytes,"
                " not a multiple of 4"
            )
        if self.resumed_token_ids and self.num_resumed_tokens >= self.sampling.max_tokens:
            raise ValueError(
                f"request {self.request_id!r}: {self.num_resumed_tokens} resumed tokens leave none of"
                f" {self.sampling.max_tokens} to generate"
            )
        if len(self.block_hashes) % HASH_BYTES:
            raise ValueError(f"request {self.request_id!r}: block_hashes holds {len(self.block_hashes)} bytes")

    @property
    def num_resumed_tokens(self) -> int:
        """Tokens of the answer that were generated elsewhere."""
        return len(self.resumed_token_ids) // 4

    @property
    def num_known_tokens(self) -> int:
        """Tokens that an engine computes before it samples one: the prompt and what is resumed."""
        return self.num_prompt_tokens + self.num_resumed_tokens

    @property
    def num_total_tokens(self) -> int:
        """Prompt and the most that may be generated."""
        return self.num_prompt_tokens + self.sampling.max_tokens

    def token_array(self) -> NDArray[np.int32]:
        """int32[num_prompt_tokens]; only for a request that carries its token ids."""
        assert self.token_ids is not None, f"request {self.request_id!r} carries no token ids"
        return np.frombuffer(self.token_ids, np.int32)

    def resumed_array(self) -> NDArray[np.int32]:
        """int32[num_resumed_tokens]."""
        return np.frombuffer(self.resumed_token_ids, np.int32)


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities at one position, of the raw distribution (before temperature)."""

    token_id: int
    logprob: float
    rank: int  # 1: the most likely token
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What one request gained in one step; the last one carries `finish_reason`."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # once, with the first token, or with the end without one
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache when it was first admitted
    admitted_ns: int = 0  # when that was, by the rank's clock
