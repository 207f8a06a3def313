"""Admission of a request to the waiting queue. A refusal carries its reason and HTTP status."""

from __future__ import annotations

from moestro.core.request import Request
from moestro.errors import PromptTooLongError, QueueFullError


def admit(request: Request, num_waiting: int, *, max_model_len: int, max_num_queued_reqs: int) -> None:
    """Return if the request may enter the waiting queue.

    Args:
        num_waiting: requests in the queue.
        max_model_len: tokens of one request, prompt and output.
        max_num_queued_reqs: requests that may wait.

    Raises:
        PromptTooLongError: the request can never fit, however long it waits.
        QueueFullError: the request could fit later.
    """
    if request.num_total_tokens > max_model_len:
        raise PromptTooLongError(request.num_prompt_tokens, request.sampling.max_tokens, max_model_len)
    if num_waiting >= max_num_queued_reqs:
        raise QueueFullError(num_waiting)
