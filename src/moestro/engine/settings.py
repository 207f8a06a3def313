"""The settings of one rank's scheduler. A docstring under a field is its text in `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

from moestro.core.setting_checks import CheckedSettings, at_least, flag_help, name_of
from moestro.core.views import OrderPolicy
from moestro.engine.registry import (
    BATCH_POLICIES,
    EVICT_POLICIES,
    ORDER_POLICIES,
    SHARE_POLICIES,
    BatchPolicy,
    EvictPolicy,
    SharePolicy,
)
from moestro.errors import ConfigError


class Policies(NamedTuple):
    """Of one scheduler, and of no other, for they have state."""

    order: OrderPolicy
    batch: BatchPolicy
    evict: EvictPolicy
    share: SharePolicy


def make_policies(order: str, batch: str, evict: str, share: str) -> Policies:
    """Policies by name, order and batch with settings if any (`sjf:theta_age_s=5`), evict perhaps a user's own.

    Raises:
        ConfigError: they are unknown, or do not go together.
    """
    made = Policies(
        ORDER_POLICIES.make(order), BATCH_POLICIES.make(batch), EVICT_POLICIES.make(evict), SHARE_POLICIES.make(share)
    )
    if made.evict.makes_way and not made.order.puts_ls_first:
        first = [name for name in ORDER_POLICIES.names() if ORDER_POLICIES.make(name).puts_ls_first]
        raise ConfigError(
            f"evict_policy {evict!r} preempts best-effort sequences for latency-sensitive requests, so these must come"
            f" first: it goes with scheduling_policy {' or '.join(first)}, not with {order}"
        )
    return made


_ORDER = "Which waiting request is next (sjf:theta_age_s=2)."
_BATCH = "The sequences of the next step (qllm:max_batch=16)."
_EVICT = "The sequence that frees its KV when blocks run out; or FILE.py:NAME."
_SHARE = "The part of an engine that each client may claim while several have work."


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits(CheckedSettings):
    """How much one rank takes on. Names are vLLM's where the meaning is."""

    max_num_seqs: Annotated[int, at_least(1)] = 64
    "Sequences that run at once. More sequences mean more tokens per second in all, and fewer for each."
    max_num_batched_tokens: Annotated[int, at_least(1)] = 2048
    "Tokens of one step. With fewer tokens, long prompts delay running answers less, and take longer themselves."
    max_num_queued_reqs: Annotated[int, at_least(1)] = 1024  # each request waits, be it for a step
    "Requests that may wait; a further one is refused with 503 and Retry-After."
    enable_prefix_caching: bool = True
    "Compute the common prefix of prompts once."

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"{name_of(self, 'max_num_batched_tokens')} {self.max_num_batched_tokens} must be at least"
                f" {name_of(self, 'max_num_seqs')} {self.max_num_seqs}, or not every running sequence could decode in"
                " one step"
            )


@dataclass(frozen=True, kw_only=True)
class SchedulerPolicies(CheckedSettings):
    """The policies of one rank's scheduler, by name."""

    scheduling_policy: Annotated[str, flag_help(_ORDER, ORDER_POLICIES)] = "fcfs"
    batch_policy: Annotated[str, flag_help(_BATCH, BATCH_POLICIES)] = "decode_first"
    evict_policy: Annotated[str, flag_help(_EVICT, EVICT_POLICIES)] = "last_in_order"
    share_policy: Annotated[str, flag_help(_SHARE, SHARE_POLICIES)] = "equal"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.make_policies()

    def make_policies(self) -> Policies:
        """New policies, without any history.

        Raises:
            ConfigError: they are unknown, or do not go together.
        """
        return make_policies(self.scheduling_policy, self.batch_policy, self.evict_policy, self.share_policy)


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions(SchedulerPolicies, SchedulerLimits):
    """All that an operator chooses of one rank's scheduler."""


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings(SchedulerOptions):
    """The operator's choices, and what is known once the model is loaded.

    Attributes:
        num_blocks, block_size: the KV pool: blocks, and tokens a block.
        num_host_blocks: blocks of host memory for the KV of preempted sequences and for blocks that the prefix cache
            evicts; 0: such KV is computed again.
        block_bytes: KV of one block; 0: unknown, so that copies to and from the host count as 0 bytes.
        max_model_len: tokens of one sequence, prompt and output; at most `num_blocks * block_size`.
        max_num_urgent_seqs: running sequences beside `max_num_seqs`, for latency-sensitive sequences alone: these need
            not wait until a best-effort one ends. 0: classes are alike in this.
        max_chunk: tokens of one prefill chunk; None: the whole budget.
    """

    PLACE: ClassVar[str | None] = ""

    num_blocks: Annotated[int, at_least(1)]
    block_size: Annotated[int, at_least(1)]
    max_model_len: Annotated[int, at_least(1)]
    num_host_blocks: Annotated[int, at_least(0)] = 0
    block_bytes: Annotated[int, at_least(0)] = 0
    max_num_urgent_seqs: Annotated[int, at_least(0)] = 0
    max_chunk: Annotated[int | None, at_least(1)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_num_batched_tokens < self.num_slots:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} must be at least max_num_seqs and"
                f" max_num_urgent_seqs, {self.num_slots}, or not every running sequence could decode in one step"
            )
        if self.max_model_len > self.num_blocks * self.block_size:
            raise ConfigError(
                f"max_model_len {self.max_model_len} does not fit in the KV cache of {self.num_blocks} blocks of"
                f" {self.block_size} tokens: lower --max-model-len or raise --kv-cache-memory-bytes"
            )

    @property
    def num_slots(self) -> int:
        """Sequences of all classes that hold KV at once."""
        return self.max_num_seqs + self.max_num_urgent_seqs
