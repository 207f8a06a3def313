"""Admission of a request to the waiting queue: its length, and the client that gives way when the queue is full."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.request import Request
from moestro.errors import PromptTooLongError


def check_length(request: Request, max_model_len: int) -> None:
    """Check that a request can fit.

    Args:
        request: new request.
        max_model_len: maximum tokens of a request, prompt and output.

    Raises:
        PromptTooLongError: the request can never fit, however long it waits.
    """
    if request.num_total_tokens > max_model_len:
        raise PromptTooLongError(request.num_prompt_tokens, request.sampling.max_tokens, max_model_len)


def client_giving_way(num_waiting: NDArray[np.int64], may_leave: NDArray[np.bool_], client: int | None) -> int | None:
    """Return the client that gives up a place of a full queue for a request of `client`. None means none.

    It is the one with most places, if it still has as many as `client` afterwards. So each client has a place before
    any has another one, and none with fewer than an equal share is refused while another has more.

    Args:
        num_waiting: int64[clients], places of each client, by number.
        may_leave: bool[clients], whether a client has a request that may leave.
        client: number of the new request's client. None means that it has no request yet.
    """
    num_own = 0 if client is None or client >= len(num_waiting) else num_waiting.item(client)
    givers = np.where(may_leave, num_waiting, 0)
    if not len(givers) or givers.max() <= num_own + 1:
        return None
    return int(givers.argmax())
