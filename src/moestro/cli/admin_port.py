"""Requests to the operators' port of a running server or router."""

from __future__ import annotations

from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

_OPENER = build_opener(ProxyHandler({}))  # the operators' port is no business of a proxy


def ask_admin(url: str, key: str | None, timeout_s: float, body: bytes | None = None) -> tuple[int, bytes]:
    """Send a request to an operators' port, and return the status and the body of the answer.

    Args:
        url: whole address, with http or https.
        key: its --admin-api-key; None means that it needs none.
        timeout_s: longest wait, in seconds.
        body: JSON to post; None means a GET.

    Raises:
        OSError, HTTPException, ValueError: nothing answers there, or the address is none.
    """
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    if body is not None:
        headers["Content-Type"] = "application/json"
    try:
        with _OPENER.open(Request(url, body, headers), timeout=timeout_s) as answer:  # noqa: S310 - the operator's
            return answer.status, answer.read()
    except HTTPError as refusal:
        return refusal.code, refusal.read()
