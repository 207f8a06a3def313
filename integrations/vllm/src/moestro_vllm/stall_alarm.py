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
        now_s = self.now_s()
        if is_moving and self._since_s is None:
            self._since_s = now_s
        elif not is_moving and not is_worker_gone:
            self._since_s, self._is_reported = None, False
            return
        if self._is_reported:
            return
        if is_worker_gone:
            self._report_once(
                "the thread that moves experts has ended: experts stay where they are until the server restarts"
            )
        elif self._since_s is not None and now_s - self._since_s > self.limit_s:
            self._report_once(
                f"experts have been moving for {now_s - self._since_s:.0f} s: vLLM makes no new placement meanwhile"
            )

    def _report_once(self, text: str) -> None:
        self._is_reported = True
        self.report(text)
