"""From a request's fields to checked options: what was given, what is allowed, what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moestro.errors import RequestError
from moestro.serve.decoding import decode_chat, decode_completion
from moestro.serve.protocol import ContentPart, GenerationFields, Message
from moestro.serve.refusals import shown

MAX_PROMPTS = 1024
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_SALT_CHARS = 1024
ROLES = ("developer", "system", "user", "assistant", "tool")
DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to answer, checked, whatever the kind of prompt. None: the client left it to us."""

    model: str | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int  # 0: all
    seed: int | None  # 0 .. 2**64 - 1
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    cache_salt: str | None
    priority: int


@dataclass(frozen=True, slots=True)
class CompletionAsk:
    """A checked `POST /v1/completions`: a text or token ids for each choice."""

    prompts: tuple[str | tuple[int, ...], ...]
    options: Options


@dataclass(frozen=True, slots=True)
class ChatAsk:
    """A checked `POST /v1/chat/completions`: {"role", "content", ...} in plain text, as chat templates read it."""

    messages: tuple[dict[str, str], ...]
    options: Options


def parse_completion(body: bytes) -> CompletionAsk:
    """The checked request, or RequestError, which says what is wrong with the body."""
    fields = decode_completion(body)
    limit = DEFAULT_COMPLETION_TOKENS if fields.max_tokens is None else fields.max_tokens
    return CompletionAsk(_prompts(fields.prompt), _options(fields, _range("max_tokens", limit, 1, 2**31 - 1)))


def parse_chat(body: bytes) -> ChatAsk:
    """The checked request, or RequestError, which says what is wrong with the body."""
    fields = decode_chat(body)
    name = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    limit = getattr(fields, name)
    if not fields.messages:
        raise _invalid("messages", "is an empty list; send at least one message")
    messages = tuple(_message(f"messages[{i}]", message) for i, message in enumerate(fields.messages))
    return ChatAsk(messages, _options(fields, None if limit is None else _range(name, limit, 1, 2**31 - 1)))


def _invalid(param: str, text: str) -> RequestError:
    return RequestError(f"{param} {text}.", param=param, code="invalid_value")


def _range(param: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise _invalid(param, f"must be between {low} and {high}, got {shown(value)}")
    return value


def _options(fields: GenerationFields, max_tokens: int | None) -> Options:
    streaming = bool(fields.stream)
    extras = fields.stream_options
    if extras is not None and not streaming:
        raise _invalid("stream_options", "is only allowed with stream: true")
    if fields.n not in (None, 1):
        raise RequestError(f"n must be 1 (more is not supported yet), got {shown(fields.n)}.", param="n")
    salt = fields.cache_salt
    if salt is not None and not 1 <= len(salt) <= MAX_SALT_CHARS:
        raise _invalid("cache_salt", f"must have 1 to {MAX_SALT_CHARS} characters, got {len(salt)}")
    return Options(
        model=fields.model,
        stream=streaming,
        include_usage=bool(extras and extras.include_usage),
        continuous_usage=bool(extras and extras.include_usage and extras.continuous_usage_stats),
        max_tokens=max_tokens,
        temperature=_temperature(fields.temperature),
        top_p=_top_p(fields.top_p),
        top_k=max(0, _range("top_k", fields.top_k or 0, -1, 2**31 - 1)),
        seed=None if fields.seed is None else _range("seed", fields.seed, -(2**63), 2**63 - 1) % 2**64,
        stop=_stops(fields.stop),
        stop_token_ids=_stop_token_ids(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        cache_salt=salt,
        priority=_range("priority", fields.priority or 0, -(2**31), 2**31 - 1),
    )


def _temperature(value: float | None) -> float:
    if value is None:
        return 1.0
    if not (math.isfinite(value) and 0 <= value <= 2):
        raise _invalid("temperature", f"must be between 0 and 2, got {value}")
    return value


def _top_p(value: float | None) -> float:
    if value is None:
        return 1.0
    if not 0 < value <= 1:
        raise _invalid("top_p", f"must be above 0 and at most 1, got {value}")
    return value


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise _invalid("stop", f"may hold {MAX_STOPS} strings at most, got {len(stops)}")
    for text in stops:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise _invalid("stop", f"strings must have 1 to {MAX_STOP_CHARS} characters, got one of {len(text)}")
    return stops


def _stop_token_ids(ids: Iterable[int]) -> tuple[int, ...]:
    unique = tuple(dict.fromkeys(ids))
    if len(unique) > MAX_STOP_TOKEN_IDS:
        raise _invalid("stop_token_ids", f"may hold {MAX_STOP_TOKEN_IDS} ids at most, got {len(unique)}")
    return unique


def _prompts(prompt: str | Sequence[str | int | list[int]]) -> tuple[str | tuple[int, ...], ...]:
    """One entry per choice. The type of the first item says what a list is."""
    if isinstance(prompt, str):
        prompts: list[str | tuple[int, ...]] = [prompt]
    elif prompt and isinstance(prompt[0], int):
        prompts = [_token_ids(prompt)]
    else:
        prompts = [item if isinstance(item, str) else _token_ids(item) for item in prompt]
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise _invalid("prompt", f"must hold 1 to {MAX_PROMPTS} prompts, got {len(prompts)}")
    if not all(prompts):
        raise _invalid("prompt", "is empty, or holds an empty one; each needs at least one character or token id")
    if len({type(item) for item in prompts}) > 1:
        raise _invalid("prompt", "mixes texts and token ids; send one kind")
    return tuple(prompts)


def _token_ids(items: object) -> tuple[int, ...]:
    if isinstance(items, list) and all(isinstance(item, int) for item in items):
        return tuple(items)
    raise _invalid("prompt", "mixes texts and token ids; send one kind")


def _message(place: str, message: Message) -> dict[str, str]:
    if message.role not in ROLES:
        raise _invalid(f"{place}.role", f"must be one of {', '.join(ROLES)}, got {shown(message.role)}")
    if message.tool_calls or message.role == "tool":
        raise RequestError(f"{place}: tool calls are not supported yet.", param=place, code="unsupported_parameter")
    if message.content is None:
        raise _invalid(f"{place}.content", "is missing; send a text")
    content = message.content if isinstance(message.content, str) else _text(place, message.content)
    named = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "content": content} | named


def _text(place: str, parts: list[ContentPart]) -> str:
    """The parts' texts, a line each, as vLLM joins them for templates that want a string."""
    texts = []
    for i, part in enumerate(parts):
        if part.type != "text" or part.text is None:
            where = f"{place}.content[{i}]"
            raise RequestError(f"{where}: only parts of type text are supported, got {shown(part.type)}.", param=where)
        texts.append(part.text)
    return "\n".join(texts)
