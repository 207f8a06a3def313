"""Reads the few fields of a request's body that routing needs, and turns its prompt into block hashes.

The router never rejects a body. An unreadable body is sent to an engine unchanged, which reports the error.

`tokenized_blocks.py` contains the reader of prompts with a tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import msgspec

from moestro.core.clients import has_many_elements, may_have_many_elements
from moestro.core.hashing import hash_key, hash_text
from moestro.core.request import Request, SamplingParams, ServiceClass
from moestro.gateway.clients.http_headers import Incoming
from moestro.gateway.clients.paths import BATCH_PATH
from moestro.text.thread_pool import PrepareThreads

BYTES_PER_TOKEN = 4  # typical for English text; a unit of load and hits, not a measurement
DEFAULT_MAX_TOKENS = 16
_MAX_AFFINITY_CHARS = 256  # limit of session and user names
_MAX_CACHED_CHARS = 256  # of a model's name and a salt; longer ones are rare, and a cache of them would fill memory
_BE, _LS = ServiceClass.BE, ServiceClass.LS  # to find the member of an enumeration takes longer than all else of it
_BEST_EFFORT = b'"%b"' % _BE.value.encode()
ABSENT = msgspec.Raw()  # marks a missing field, because a Raw cannot be in a union; null is a Raw too


class MessagePart(msgspec.Struct):
    """One part of a message's content, of OpenAI's or Anthropic's kinds."""

    text: str | None = None
    thinking: str | None = None
    name: str | None = None
    input: msgspec.Raw = ABSENT
    content: msgspec.Raw = ABSENT
    image_url: msgspec.Raw = ABSENT
    source: msgspec.Raw = ABSENT


class BodyMessage(msgspec.Struct):
    """One message of a chat."""

    role: str
    content: str | list[MessagePart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: msgspec.Raw = ABSENT
    reasoning: str | None = None
    reasoning_content: str | None = None


class RequestBody(msgspec.Struct):
    """Fields that the router reads, of all APIs that take a prompt.

    These are OpenAI's completions, chats and responses, Anthropic's messages and SGLang's generate.
    """

    model: str | None = None
    messages: list[BodyMessage] | None = None
    prompt: msgspec.Raw = ABSENT
    input: msgspec.Raw = ABSENT
    text: msgspec.Raw = ABSENT
    system: msgspec.Raw = ABSENT
    instructions: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    tool_choice: msgspec.Raw = ABSENT
    reasoning_effort: str | None = None
    verbosity: str | None = None
    chat_template_kwargs: msgspec.Raw = ABSENT
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    user: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    service_class: msgspec.Raw = ABSENT
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None


class BatchBody(RequestBody):
    """The same fields of a body with several chats."""

    messages: list[list[BodyMessage]] | None = None  # type: ignore[assignment]


NOTHING = RequestBody()
_decode = msgspec.json.Decoder(RequestBody).decode
_decode_batch = msgspec.json.Decoder(BatchBody).decode
_decode_messages = msgspec.json.Decoder(list[BodyMessage]).decode
_decode_chats = msgspec.json.Decoder(list[list[BodyMessage]]).decode
_decode_but_messages = msgspec.json.Decoder(
    msgspec.defstruct(
        "RequestBodyWithoutMessages",
        [
            (field.name, msgspec.Raw, ABSENT) if field.name == "messages" else (field.name, field.type, field.default)
            for field in msgspec.structs.fields(RequestBody)
        ],
    )
).decode


def read(body: bytes, path: str) -> RequestBody:
    """Parse the fields of a body; `NOTHING` for an unreadable body.

    Of several chats only the first is read, as of several prompts.

    Args:
        path: path of the request, by which a body has one chat or several.
    """
    if not body:
        return NOTHING
    is_batch = path == BATCH_PATH
    try:
        if may_have_many_elements(body):
            return _read_large(body, is_batch=is_batch)
        if not is_batch:
            return _decode(body)
        fields = msgspec.structs.asdict(_decode_batch(body))
        return RequestBody(**fields | {"messages": _first(fields["messages"])})
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return NOTHING


def _first(chats: list[list[BodyMessage]] | None) -> list[BodyMessage] | None:
    return chats[0] if chats else None


def _read_large(body: bytes, *, is_batch: bool) -> RequestBody:
    """Read a body that may have more elements than can be decoded quickly.

    A chat with too many elements counts as a prompt of its raw JSON, because decoding it would stop all streams.
    """
    fields = msgspec.structs.asdict(_decode_but_messages(body))
    messages = fields.pop("messages")
    if not is_given(messages):
        return RequestBody(**fields)
    if has_many_elements(messages):
        return RequestBody(**fields | {"prompt": messages})
    return RequestBody(**fields, messages=_first(_decode_chats(messages)) if is_batch else _decode_messages(messages))


def is_given(raw: msgspec.Raw) -> bool:
    """Return whether a field is present and not null."""
    return raw is not ABSENT and bytes(raw) != b"null"


def plain_text(body: RequestBody) -> bytes:
    """Return the prompt as one text in the order of templates: tools and instructions, then roles and contents.

    Prompts with a common prefix have texts with a common prefix. The text differs from the engine's template. Token ids
    stay in their JSON form.
    """
    messages = body.messages
    if messages is None:
        raws = [body.tools, body.system, body.instructions, body.prompt, body.input, body.text]
        return b"\n".join([_unquoted(bytes(raw)) for raw in raws if is_given(raw)])
    text = "".join(
        [
            f"{each.role}\n{each.content}\n"
            if each.content.__class__ is str and each.tool_calls is ABSENT
            else _message_text(each)
            for each in messages
        ]
    ).encode()
    if body.tools is ABSENT and body.system is ABSENT and body.instructions is ABSENT:
        return text
    raws = [body.tools, body.system, body.instructions]
    return b"\n".join([*[bytes(raw) for raw in raws if is_given(raw)], text])


def request_from_text(body: RequestBody, incoming: Incoming, now_ns: int, block_bytes: int | None) -> Request:
    """Make the request by which the router decides from text blocks, with a token count estimated from the length.

    Args:
        block_bytes: bytes of a block. None means that no policy reads the names of blocks.
    """
    text = plain_text(body)
    key = prompt_key(body.model, body.cache_salt)
    num_tokens = max(1, (len(text) or len(incoming.body)) // BYTES_PER_TOKEN)
    names = b"" if block_bytes is None else hash_text(key, text, block_bytes)
    return make_request(body, incoming, now_ns, (num_tokens, key, names))


def make_request(body: RequestBody, incoming: Incoming, now_ns: int, prompt: tuple[int, bytes, bytes]) -> Request:
    """Make the request for the policy. `prompt` is (number of tokens, hash key, packed block hashes)."""
    num_tokens, key, block_hashes = prompt
    user, limit = body.user, body.max_completion_tokens
    if limit is None:  # 0 asks for no token
        limit = body.max_output_tokens if body.max_tokens is None else body.max_tokens
    session_id = incoming.head.session_id or body.session_id or body.prompt_cache_key
    is_best_effort = body.service_class is not ABSENT and bytes(body.service_class) == _BEST_EFFORT
    return Request(
        request_id=incoming.request_id,
        num_prompt_tokens=num_tokens,
        sampling=_sampling(DEFAULT_MAX_TOKENS if limit is None else limit),
        arrival_ns=now_ns,
        block_hashes=block_hashes,
        hash_key=key,
        priority=body.priority or 0,
        service_class=_BE if is_best_effort else _LS,
        user=user[:_MAX_AFFINITY_CHARS] if user else None,
        session_id=session_id[:_MAX_AFFINITY_CHARS] if session_id else None,
    )


def prompt_key(model: str | None, salt: str | None) -> bytes:
    """Return the key under which a prompt's blocks are hashed."""
    is_short = len(model or "") + len(salt or "") <= _MAX_CACHED_CHARS
    return (_cached_prompt_key if is_short else _prompt_key)(model, salt)


def _prompt_key(model: str | None, salt: str | None) -> bytes:
    return hash_key(model or "", None, salt)


_cached_prompt_key = lru_cache(maxsize=4096)(_prompt_key)  # Some MB at most.


def _message_text(message: BodyMessage) -> str:
    content = message.content
    if not isinstance(content, str):
        content = "".join([part.text or _spelt_part(part) for part in content or ()])
    calls = _spelt(message.tool_calls) if is_given(message.tool_calls) else ""
    return f"{message.role}\n{content}{calls}\n"


def _spelt_part(part: MessagePart) -> str:
    raws = [part.input, part.content, part.image_url, part.source]
    return "".join([part.thinking or "", part.name or "", *[_spelt(raw) for raw in raws if is_given(raw)]])


def _spelt(raw: msgspec.Raw) -> str:
    return bytes(raw).decode("utf-8", "replace")


def _unquoted(raw: bytes) -> bytes:
    """Return the text of a JSON string. Other JSON, such as lists of texts or token ids, is returned unchanged."""
    if not raw.startswith(b'"'):
        return raw
    try:
        return msgspec.json.decode(raw, type=str).encode()
    except (msgspec.DecodeError, UnicodeDecodeError):
        return raw


@lru_cache(maxsize=4096)
def _sampling(max_tokens: int) -> SamplingParams:
    """Return sampling parameters with only the output limit, which is all that the router uses."""
    return SamplingParams(max_tokens=min(max(0, max_tokens), 1 << 31))


_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def with_fields(body: bytes, fields: Mapping[str, bytes | None]) -> bytes:
    """Return the JSON object `body` with some of its fields replaced, added or removed.

    Args:
        body: bytes of the object. Anything else is returned as it is, because the engine has the better error message.
        fields: JSON of each value by its name; None removes the field.
    """
    try:
        found = _decode_fields(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    for name, value in fields.items():
        found.pop(name, None)
        if value is not None:
            found[name] = msgspec.Raw(value)
    return msgspec.json.encode(found)


MAX_INLINE_BYTES = 512 << 10  # parsed and hashed in little more than a millisecond
Prepare = Callable[[RequestBody, Incoming, int], Request]  # (parsed body, complete request, now_ns) -> routed request


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReader:
    """Method of reading prompts.

    Attributes:
        prepare: makes the request by which the router decides.
        block_tokens: tokens per block, exact or estimated.
        words: method of comparing prompts, in words for the operator.
        count: makes the same request without names of blocks. None means that it takes as long.
        max_inline_bytes: largest body read on the event loop, bytes; larger bodies are read on threads.
        threads: thread pool, started at first use.
    """

    prepare: Prepare
    block_tokens: int
    words: str
    count: Prepare | None = None
    max_inline_bytes: int = MAX_INLINE_BYTES
    threads: PrepareThreads = field(default_factory=PrepareThreads)

    def without_names(self) -> PromptReader:
        """Return a reader of the same prompts that makes no names of blocks, where that saves time."""
        return self if self.count is None else replace(self, prepare=self.count)


def text_prompt_reader(block_bytes: int) -> PromptReader:
    """Make a reader that compares prompts as text, in blocks of `block_bytes`."""
    return PromptReader(
        prepare=partial(request_from_text, block_bytes=block_bytes),
        block_tokens=max(1, block_bytes // BYTES_PER_TOKEN),
        words=f"as text, in blocks of {block_bytes} bytes",
        count=partial(request_from_text, block_bytes=None),
    )
