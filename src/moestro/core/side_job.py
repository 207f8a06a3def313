"""Methods of side jobs, which must never end a request or an engine: records, and what explains them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

_P = ParamSpec("_P")


class SideJob(Protocol):
    """An object whose methods may fail without harm.

    Attributes:
        has_failed: whether the job has ended because of an error.
    """

    has_failed: bool


_Job = TypeVar("_Job", bound=SideJob)
_Method = Callable[Concatenate[_Job, _P], None]


def ending_on_error(logger: logging.Logger, message: str) -> Callable[[_Method[_Job, _P]], _Method[_Job, _P]]:
    """Return a decorator that ends a side job where the method fails: it logs once, and later calls do nothing.

    Args:
        logger: receiver of the error.
        message: what no longer happens, and what goes on.
    """

    def guard(method: _Method[_Job, _P]) -> _Method[_Job, _P]:
        @functools.wraps(method)
        def guarded(self: _Job, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
            if not self.has_failed:
                try:
                    method(self, *args, **kwargs)
                except Exception:
                    self.has_failed = True
                    logger.exception(message)

        return guarded

    return guard
