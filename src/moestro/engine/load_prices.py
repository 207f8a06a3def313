"""Prices by which a prefix in host memory is copied or computed again."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol

from moestro.core.work import Plan

_LEAST_TOKENS = 32  # of a step whose duration tells what the computation of a prompt takes
_NEW_SHARE = 0.2  # weight of the newest step


class LoadPrices(Protocol):
    """Costs that decide whether a prefix is copied from host memory or computed again."""

    def copying_ns(self, num_blocks: int) -> int:
        """Time of a copy of blocks to the device."""
        ...

    def computing_ns(self, start: int, num_tokens: int) -> int:
        """Time that the computation of a prompt's tokens from position `start` on takes."""
        ...


class LinearPrices(NamedTuple):
    """Prices in proportion to the blocks copied and to the tokens computed.

    Attributes:
        block_ns: time of the copy of a block.
        token_ns: time of the computation of a token.
    """

    block_ns: float
    token_ns: float

    def copying_ns(self, num_blocks: int) -> int:
        """Implement `LoadPrices.copying_ns`."""
        return round(num_blocks * self.block_ns)

    def computing_ns(self, start: int, num_tokens: int) -> int:
        """Implement `LoadPrices.computing_ns`."""
        return round(num_tokens * self.token_ns)


FREE_COPIES = LinearPrices(0.0, 1.0)  # where nothing is measured: a copy always pays


class MeasuredPrices:
    """Prices of a running engine: the copy as measured at the start, the computation as its own steps take.

    Before the first prompt a copy always pays.

    Args:
        block_ns: time of the copy of a block to the device.

    Attributes:
        token_ns: time of a token in steps of prompts. None means that no such step has ended.
    """

    def __init__(self, block_ns: float) -> None:
        self.block_ns = block_ns
        self.token_ns: float | None = None
        self._begun: deque[tuple[int, int]] = deque()  # time and tokens of steps in flight; 0 tokens tell nothing
        self._last_end_ns = 0

    def copying_ns(self, num_blocks: int) -> int:
        """Implement `LoadPrices.copying_ns`."""
        return round(num_blocks * self.block_ns)

    def computing_ns(self, start: int, num_tokens: int) -> int:
        """Implement `LoadPrices.computing_ns`."""
        token_ns = self.block_ns + 1 if self.token_ns is None else self.token_ns
        return round(num_tokens * token_ns)

    def began(self, plan: Plan, now_ns: int) -> None:
        """Note the submission of a plan."""
        num_tokens = plan.num_tokens
        tells = num_tokens >= max(_LEAST_TOKENS, 4 * len(plan.units)) and plan.moves is None
        self._begun.append((now_ns, num_tokens if tells else 0))

    def ended(self, now_ns: int) -> None:
        """Note the result of the oldest plan in flight."""
        begun_ns, num_tokens = self._begun.popleft()
        if num_tokens:
            token_ns = (now_ns - max(begun_ns, self._last_end_ns)) / num_tokens
            last = token_ns if self.token_ns is None else self.token_ns
            self.token_ns = last + _NEW_SHARE * (token_ns - last)
        self._last_end_ns = now_ns
