"""Prompt reader with a tokenizer: hashes the same blocks as the engines, from the model's template and tokenizer.

Tokenizing takes milliseconds and therefore runs on threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.clients import has_many_elements
from moestro.core.hashing import hash_blocks
from moestro.core.request import Request
from moestro.errors import RequestError
from moestro.gateway.clients.http_headers import Incoming
from moestro.gateway.clients.paths import CHAT_PATH
from moestro.gateway.clients.request_body import (
    BodyMessage,
    PromptReader,
    RequestBody,
    is_given,
    make_request,
    prompt_key,
    read,
    request_from_text,
)
from moestro.text.chats.chat_template import EFFORTS, calls_for_templates, template_variables
from moestro.text.tokenizer import TemplateOptions, Tokenizer
from moestro.web.adapters.paths import chat_body

MAX_TEXT_BYTES = 4 << 20  # limit of tokenized bodies; a longer one would occupy a thread for seconds


def tokenized_prompt_reader(directory: Path, block_size: int) -> PromptReader:
    """Make a reader that compares prompts as tokens, in blocks of `block_size`, with the tokenizer in `directory`.

    Raises:
        ConfigError: the directory contains no tokenizer.
    """
    tokenizer = Tokenizer(directory)
    tokenizer.warm_chats()
    return PromptReader(
        prepare=TokenizedReader(tokenizer, block_size),
        block_tokens=block_size,
        words=f"as tokens of {directory}, in blocks of {block_size}",
        max_inline_bytes=0,
    )


class TokenizedReader:
    """Makes the request by which the router decides from a body.

    A prompt that the template or the tokenizer cannot read is routed by its length alone, and the engine reports the
    error. Only the first of several prompts in one body is read.

    Args:
        block_size: tokens per block, equal to the engines'.
    """

    def __init__(self, tokenizer: Tokenizer, block_size: int) -> None:
        self._tokenizer = tokenizer
        self._block_size = block_size

    def __call__(self, body: RequestBody, incoming: Incoming, now_ns: int) -> Request:
        """Return the request with its exact token count and block hashes."""
        ids = self._ids(body, incoming) if len(incoming.body) <= MAX_TEXT_BYTES else None
        if ids is None or not len(ids):
            return request_from_text(body, incoming, now_ns, len(incoming.body) + 1)  # too long a block: no hashes
        key = prompt_key(body.model, body.cache_salt)
        return make_request(body, incoming, now_ns, (len(ids), key, hash_blocks(key, ids, self._block_size)))

    def _ids(self, body: RequestBody, incoming: Incoming) -> NDArray[np.int32] | None:
        try:
            ids = np.array(self._id_list(_as_chat(body, incoming)), np.int32)
        except (RequestError, msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError):
            return None
        most = body.truncate_prompt_tokens
        if most is None or most < 1:
            return ids
        return ids[:most] if body.truncation_side == "right" else ids[-most:]

    def _id_list(self, body: RequestBody) -> Sequence[int]:
        if body.messages is not None:
            messages = [_message(turn) for turn in body.messages]
            text = self._tokenizer.render_chat(messages, tools=_tools(body), options=self._options(body))
            return self._tokenizer.encode(text, add_special_tokens=False)
        raw = body.prompt if is_given(body.prompt) else body.text
        prompt: Any = msgspec.json.decode(raw, type=str | list[str | int | list[int]])
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompt = prompt[0]  # the first of several
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt, add_special_tokens=True)
        return msgspec.convert(prompt, list[int])

    def _options(self, body: RequestBody) -> TemplateOptions:
        kwargs = body.chat_template_kwargs
        given = msgspec.json.decode(kwargs, type=dict[str, Any]) if is_given(kwargs) else {}
        wishes = {} if body.verbosity is None else {"verbosity": body.verbosity}
        effort = body.reasoning_effort
        if effort is not None and effort in EFFORTS:  # Engines refuse another one.
            effort = self._tokenizer.effort_for(effort)
        continues = bool(body.continue_final_message)
        return TemplateOptions(
            add_generation_prompt=not continues and body.add_generation_prompt is not False,
            continue_final_message=continues,
            variables=template_variables(effort, wishes | given, {}),
        )


def _as_chat(body: RequestBody, incoming: Incoming) -> RequestBody:
    """Return the fields of the chat to which engines translate a request of another API."""
    if has_many_elements(incoming.body):
        return body
    chat = chat_body(incoming.head.path, incoming.body)
    return body if chat is None else read(chat, CHAT_PATH)


def _message(turn: BodyMessage) -> dict[str, Any]:
    content = turn.content
    if not isinstance(content, str):
        parts = content or ()
        if any(part.text is None for part in parts):
            raise RequestError("A part of a message is not text, so its tokens are not known.")
        content = "\n".join([part.text or "" for part in parts])  # as engines join them
    message: dict[str, Any] = {"role": turn.role, "content": content}
    if turn.name is not None:
        message["name"] = turn.name
    if turn.tool_call_id is not None:
        message["tool_call_id"] = turn.tool_call_id
    if is_given(turn.tool_calls):
        message["tool_calls"] = calls_for_templates(msgspec.json.decode(turn.tool_calls, type=list[dict[str, Any]]))
    reasoning = turn.reasoning if turn.reasoning is not None else turn.reasoning_content
    if reasoning is not None:
        message["reasoning"] = message["reasoning_content"] = reasoning
    return message


class _Function(msgspec.Struct):
    name: str = ""


class _Tool(msgspec.Struct):
    function: _Function = msgspec.field(default_factory=_Function)


class _AllowedTools(msgspec.Struct):
    tools: list[_Tool]


class _ChosenTools(msgspec.Struct):
    """A choice of tools in a chat, as far as it shapes the prompt."""

    type: str = ""
    allowed_tools: _AllowedTools | None = None


def _tools(body: RequestBody) -> list[Any] | None:
    """Return the tools in the prompt: the allowed ones, where the choice names some."""
    if not is_given(body.tools):
        return None
    tools = msgspec.json.decode(body.tools, type=list[Any])
    if not is_given(body.tool_choice) or b'"allowed_tools"' not in bytes(body.tool_choice):
        return tools
    choice = msgspec.json.decode(body.tool_choice, type=_ChosenTools)
    if choice.type != "allowed_tools" or choice.allowed_tools is None:
        return tools
    allowed = {each.function.name for each in choice.allowed_tools.tools}
    names = [each.function.name for each in msgspec.json.decode(body.tools, type=list[_Tool])]
    return [tool for tool, name in zip(tools, names, strict=True) if name in allowed]
