"""Reads the placement of a running server of ours, and sends it another one."""

from __future__ import annotations

from http import HTTPStatus
from http.client import HTTPException
from typing import Any

import msgspec

from moestro.cli.admin_port import ask_admin
from moestro.placement.placement_file import PlacementFile
from moestro.placement.registry import PlacementError

_ANSWER_S = 30.0


class _Refusal(msgspec.Struct):
    message: str


class _ApplyAnswer(msgspec.Struct):
    """Fields of the server's answer that are shown.

    Attributes:
        num_moves, num_layers: Copies that move from the server's present placement, and layers of them.
        error: Why the placement stays; None means that it does not.
    """

    num_moves: int = 0
    num_layers: int = 0
    error: _Refusal | None = None


def apply_placement(url: str, key: str | None, placement: PlacementFile) -> str:
    """Let a server move its experts towards a placement, and return what it answered in words.

    Args:
        url: Address of the server's operators' port.
        key: Its --admin-api-key; None means that it needs none.
        placement: The placement.

    Raises:
        PlacementError: The server cannot be reached, or refuses the placement; the text says why.
    """
    status, body = _ask(url, key, "/admin/placement/apply", msgspec.json.encode(placement))
    answer = msgspec.json.decode(body, type=_ApplyAnswer)
    if status != 202:
        return f"{url} has this placement already"
    return f"{url} moves {answer.num_moves:,} copies of experts in {answer.num_layers} layers"


def served_placement(url: str, key: str | None) -> Any:
    """Return what a server answers to `GET /admin/placement?arrays=true`, as `table_of_contents` takes it.

    Args:
        url, key: As for `apply_placement`.

    Raises:
        PlacementError: The server cannot be reached, or has no placement; the text says why.
    """
    _, body = _ask(url, key, "/admin/placement?arrays=true")
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise PlacementError(f"--apply {url}: it is no server of Moestro: {error}") from None


def _ask(url: str, key: str | None, path: str, contents: bytes | None = None) -> tuple[int, bytes]:
    """Return the status and the body of the server's answer to a GET, or to a POST of `contents`."""
    if not url.startswith(("http://", "https://")):
        raise PlacementError(
            f"--apply {url}: give the address of a server's --admin-port, such as http://localhost:8100"
        )
    try:
        status, body = ask_admin(f"{url.rstrip('/')}{path}", key, _ANSWER_S, contents)
    except (OSError, HTTPException, ValueError) as error:
        raise PlacementError(f"--apply {url}: the server cannot be reached: {error}") from None
    if status >= HTTPStatus.BAD_REQUEST:
        raise PlacementError(f"--apply {url}: the server refused: {_reason(status, body)}")
    return status, body


def _reason(status: int, body: bytes) -> str:
    try:
        found = msgspec.json.decode(body, type=_ApplyAnswer).error
    except msgspec.MsgspecError:
        found = None
    return f"status {status}" if found is None else found.message
