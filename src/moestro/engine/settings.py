"""The settings of one rank's scheduler: frozen, checked when made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from moestro.engine.policy_contract import BatchPolicy, EvictPolicy, OrderPolicy
from moestro.engine.registry import BATCH_POLICIES, EVICT_POLICIES, ORDER_POLICIES
from moestro.errors import ConfigError


class Policies(NamedTuple):
    """Of one scheduler, and of no other, for they have state."""

    order: OrderPolicy
    batch: BatchPolicy
    evict: EvictPolicy


def make_policies(order: str, batch: str, evict: str) -> Policies:
    """Policies by name, the first two with settings if any (`sjf:theta_age_s=5`), the last perhaps a user's own.

    Raises:
        ConfigError: they are unknown, or do not go together.
    """
    made = Policies(ORDER_POLICIES.make(order), BATCH_POLICIES.make(batch), EVICT_POLICIES.make(evict))
    if made.evict.makes_way and not made.order.puts_ls_first:
        first = [name for name in ORDER_POLICIES.names() if ORDER_POLICIES.make(name).puts_ls_first]
        raise ConfigError(
            f"evict_policy {evict!r} preempts best-effort sequences for latency-sensitive requests, so these must come"
            f" first: it goes with scheduling_policy {' or '.join(first)}, not with {order}"
        )
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """What one rank may hold and do at once. Names are vLLM's where the meaning is.

    Attributes:
        num_blocks, block_size: the KV pool: blocks, and tokens a block.
        num_host_blocks: blocks of host memory for the KV of preempted sequences; 0: it is always computed again.
        max_model_len: tokens of one sequence, prompt and output; at most `num_blocks * block_size`.
        max_num_seqs: sequences that hold KV at once.
        max_num_urgent_seqs: more of them, for latency-sensitive sequences alone: these need not wait until a
            best-effort one ends. 0: classes are alike in this.
        max_num_batched_tokens: the token budget of one step.
        max_chunk: tokens of one prefill chunk; None: the whole budget.
        max_num_queued_reqs: requests waiting; one more is refused.
        enable_prefix_caching: keep the KV of full blocks for prompts that begin alike.
        scheduling_policy, batch_policy, evict_policy: policies by name, the first two with settings if any,
            `sjf:theta_age_s=5` (the first orders the waiting queue); the last also as FILE.py:NAME.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    num_host_blocks: int = 0
    max_num_seqs: int = 64
    max_num_urgent_seqs: int = 0
    max_num_batched_tokens: int = 2048
    max_chunk: int | None = None
    max_num_queued_reqs: int = 1024
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    batch_policy: str = "decode_first"
    evict_policy: str = "last_in_order"

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("num_host_blocks", "max_num_queued_reqs", "max_num_urgent_seqs"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.max_chunk is not None and self.max_chunk < 1:
            raise ConfigError(f"max_chunk must be at least 1, got {self.max_chunk}")
        if self.max_num_batched_tokens < self.num_slots:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs"
                f" and max_num_urgent_seqs ({self.num_slots}), or not every running sequence could decode in one step"
            )
        if self.max_model_len > self.num_blocks * self.block_size:
            raise ConfigError(
                f"max_model_len {self.max_model_len} does not fit in the KV cache of {self.num_blocks} blocks of"
                f" {self.block_size} tokens: lower --max-model-len or raise --kv-cache-memory-bytes"
            )
        self.make_policies()

    @property
    def num_slots(self) -> int:
        """Sequences of all classes that hold KV at once."""
        return self.max_num_seqs + self.max_num_urgent_seqs

    def make_policies(self) -> Policies:
        """New ones, without any history.

        Raises:
            ConfigError: they are unknown, or do not go together.
        """
        return make_policies(self.scheduling_policy, self.batch_policy, self.evict_policy)
