"""A load for schedulers whose device answers at once. Standard library only: interpreters of peers import it, too."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

BLOCK_SIZE, PROMPT = 16, 256
_WARM_STEPS = 20


@dataclass(frozen=True)
class Load:
    """A batch that always has the same number of sequences.

    Attributes:
        num_sequences: Sequences of the batch.
        answer: Tokens of an answer. As one ends, a request comes, and ends are spread evenly over the steps. 0 means
            that no answer ends while steps are measured.
        num_steps: Measured steps.
    """

    num_sequences: int
    answer: int
    num_steps: int

    @property
    def longest_answer(self) -> int:
        """Tokens of the longest answer."""
        return self.answer or _WARM_STEPS + self.num_steps + 100

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence."""
        return PROMPT + self.longest_answer + 1

    @property
    def num_blocks(self) -> int:
        """KV blocks for all sequences, and for twice as many that have ended."""
        return 3 * self.num_sequences * (self.max_model_len // BLOCK_SIZE + 1)


class MeasuredScheduler(Protocol):
    """A scheduler with its device."""

    def add(self, request_id: str, token_ids: list[int], num_tokens: int) -> None:
        """Add a request that gets `num_tokens` tokens; its time does not count."""
        ...

    def step_ns(self) -> tuple[int, int]:
        """Plan a step, take its tokens, and encode the outputs. Returns nanoseconds and rows."""
        ...


def step_us(scheduler: MeasuredScheduler, load: Load) -> float:
    """Return the mean microseconds of a step."""
    num_arrived, spent_ns, ends = 0, 0, Counter[int]()

    def arrive(first_step: int, num_tokens: int) -> None:
        nonlocal num_arrived
        token_ids = [1000 + num_arrived, *range(1, PROMPT)]  # no prompt begins like another one
        scheduler.add(f"cmpl-{num_arrived:032x}", token_ids, num_tokens)
        num_arrived += 1
        ends[first_step + num_tokens - 1] += 1

    for row in range(load.num_sequences):
        first_end = 1 + (row + 1) * load.answer // load.num_sequences
        arrive(-_WARM_STEPS, min(first_end, load.answer) if load.answer else load.longest_answer)
    for step in range(-_WARM_STEPS, load.num_steps):
        ns, num_rows = scheduler.step_ns()
        if num_rows != load.num_sequences:
            raise AssertionError(f"step {step} has {num_rows} of {load.num_sequences} sequences")
        spent_ns += ns if step >= 0 else 0
        for _ in range(ends[step]):
            arrive(step + 1, load.answer)
    return spent_ns / load.num_steps / 1e3
