"""Errors that ranks send as messages and the API server raises."""

from __future__ import annotations

from moestro.errors import RequestError
from moestro.wire.messages import Refused


class RefusedByRankError(RequestError):
    """A rank refused a request; built from the rank's message."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message, param=refused.param, code=refused.code)
        self.http_status = refused.http_status
        self.error_type = refused.error_type
        self.retry_after_s = refused.retry_after_s
