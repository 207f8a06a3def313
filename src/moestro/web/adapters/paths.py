"""The paths whose bodies are translated to chat completions, for a router that has to know a prompt's tokens."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from moestro.web.adapters.field_places import TranslatedChat
from moestro.web.adapters.messages import CountFields, MessagesFields, chat_of_count, chat_of_message
from moestro.web.adapters.responses_request import ResponsesFields, chat_of_response

MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
RESPONSES, INPUT_TOKENS = "/v1/responses", "/v1/responses/input_tokens"

_decode_message = msgspec.json.Decoder(MessagesFields).decode
_decode_count = msgspec.json.Decoder(CountFields).decode
_decode_response = msgspec.json.Decoder(ResponsesFields).decode
_TO_CHAT: dict[str, Callable[[bytes], TranslatedChat]] = {
    MESSAGES: lambda body: chat_of_message(_decode_message(body)),
    COUNT_TOKENS: lambda body: chat_of_count(_decode_count(body)),
    RESPONSES: lambda body: chat_of_response(_decode_response(body)).chat,
    INPUT_TOKENS: lambda body: chat_of_response(_decode_response(body)).chat,
}


def chat_body(path: str, body: bytes) -> bytes | None:
    """Return the body of the chat completion that answers a request; None if `path` is no adapter's.

    Raises:
        RequestError, msgspec.MsgspecError, UnicodeDecodeError: The body cannot be translated.
    """
    translate = _TO_CHAT.get(path)
    return None if translate is None else msgspec.json.encode(translate(body).fields)
