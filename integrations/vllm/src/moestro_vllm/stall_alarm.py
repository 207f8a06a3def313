"""Reports a placement that stalls: a plan that takes long, or experts that stop moving."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

_logger = logging.getLogger(f"vllm.{__name__}")  # vLLM's handlers print the loggers below "vllm"


@dataclass(slots=True, eq=False)
class StallAlarm:
    """Reports once when something takes longer than a limit.

    While a plan is made in vLLM's synchronous mode, all ranks wait for it. In its asynchronous mode a thread moves the
    experts; where it ends, vLLM logs one line and never moves an expert again.

    Attributes:
        limit_s: Time after which a plan or a move is reported, seconds.
        report: Takes the text of a report.
        now_s: Clock.
    """

    limit_s: float
    report: Callable[[str], object] = _logger.error
    now_s: Callable[[], float] = time.monotonic
    _since_s: float | None = field(default=None, init=False)
    _is_reported: bool = field(default=False, init=False)
    _is_gone_reported: bool = field(default=False, init=False)

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Report while `what` is still under way after the limit, and again when it ends."""
        began_s = self.now_s()
        timer = threading.Timer(self.limit_s, self.report, [f"{what} has taken {self.limit_s:g} s and goes on"])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            took_s = self.now_s() - began_s
            if took_s > self.limit_s:
                self.report(f"{what} took {took_s:.1f} s")

    def observe(self, *, is_moving: bool, is_worker_gone: bool) -> None:
        """Take in the state of the balancer after a step.

        Args:
            is_moving: Whether experts of a placement are still to be moved.
            is_worker_gone: Whether the thread that moves them has ended.
        """
        if is_worker_gone:
            if not self._is_gone_reported:
                self._is_gone_reported = True
                self.report(
                    "the thread that moves experts has ended: experts stay where they are until the server restarts"
                )
            return
        if not is_moving:
            self._since_s, self._is_reported = None, False
            return
        now_s = self.now_s()
        if self._since_s is None:
            self._since_s = now_s
        if not self._is_reported and now_s - self._since_s > self.limit_s:
            self._is_reported = True
            self.report(
                f"experts have been moving for {now_s - self._since_s:.0f} s: vLLM makes no new placement meanwhile"
            )

    def give_up(self, why: str) -> None:
        """Report once that moves cannot be watched."""
        if not self._is_gone_reported:
            self._is_gone_reported = True
            self.report(f"no alarm watches the moves of experts: {why}")
