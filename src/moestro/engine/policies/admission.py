"""Whether a request is taken at all. A refusal says why, with its HTTP status."""

from __future__ import annotations

from dataclasses import dataclass

from moestro.core.request import Request
from moestro.errors import PromptTooLongError, QueueFullError


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitLimits:
    """What one engine can hold: tokens of one request (prompt and output), and waiting requests."""

    max_model_len: int
    max_num_queued_reqs: int


def admit(request: Request, num_waiting: int, limits: AdmitLimits) -> None:
    """Return if the request is taken.

    Raises:
        PromptTooLongError: it can never fit, however long it waits.
        QueueFullError: it could fit, later.
    """
    if request.num_total_tokens > limits.max_model_len:
        raise PromptTooLongError(request.num_prompt_tokens, request.sampling.max_tokens, limits.max_model_len)
    if num_waiting >= limits.max_num_queued_reqs:
        raise QueueFullError(num_waiting)
