"""Builds the assistant's message of a chat, whole and in additions."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from moestro.server.api.fields.protocol import CalledFunction, ChatDelta, ChatMessage, ChatToolCall
from moestro.server.engines.piece import Piece
from moestro.text.parsing.answer_parser import merged


def chat_message(piece: Piece) -> ChatMessage:
    """Return the message of a complete choice. Its content is null where it has only reasoning or calls."""
    if piece.parts is None:
        return ChatMessage(piece.text)
    delta = merged(piece.parts)
    has_more = bool(delta.reasoning or delta.calls)
    return ChatMessage(
        delta.content or (None if has_more else ""),
        reasoning=delta.reasoning or None,
        reasoning_content=delta.reasoning or None,
        tool_calls=[
            ChatToolCall(CalledFunction(call.arguments, call.name), call.id, "function") for call in delta.calls
        ],
    )


def chat_delta(piece: Piece) -> ChatDelta:
    """Return the addition of one piece. As in vLLM, a token without any text yet has empty content."""
    delta = None if piece.parts is None else merged(piece.parts)
    content = piece.text if delta is None else delta.content
    shown: str | UnsetType
    if not content and (piece.finish_reason is not None or (delta is not None and (delta.reasoning or delta.calls))):
        shown = UNSET
    else:
        shown = content
    if delta is None:
        return ChatDelta(content=shown)
    calls = [
        ChatToolCall(CalledFunction(call.arguments, call.name), call.id, "function" if call.id else None, call.index)
        for call in delta.calls
    ]
    return ChatDelta(
        content=shown,
        reasoning=delta.reasoning or None,
        reasoning_content=delta.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )
