"""Errors that a rank sends over the wire, as the API server raises them."""

from __future__ import annotations

from moestro.errors import RequestError
from moestro.wire.messages import Refused


class RefusedByRankError(RequestError):
    """A rank's refusal, as it came over the wire."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message, param=refused.param, code=refused.code)
        self.http_status = refused.http_status
        self.error_type = refused.error_type
        self.retry_after_s = refused.retry_after_s
