"""Validates the fields of a request and converts them to options."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moestro.core.request import SAMPLING_RANGES, SamplingDefaults, SamplingParams, ServiceClass
from moestro.errors import PromptTooLongError, RequestError, shown
from moestro.server.protocol import ContentPart, GenerationFields, Message
from moestro.server.request_fields import decode_chat, decode_completion
from moestro.web.json_elements import count_elements

MAX_PROMPTS = 1024
MAX_PROMPT_IDS = 1 << 20  # Token ids in all prompts of a request, unless one prompt may be longer; decoded in 50 ms.
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_SALT_CHARS = 1024
MAX_USER_CHARS = 1024
MAX_COPIES = 128  # Limit of `n`.
MAX_CHOICES = 1024  # Limit of the number of prompts times `n`.
MAX_BIASES = 300
MAX_LOGPROBS = 20
ROLES = ("developer", "system", "user", "assistant", "tool")
DEFAULT_COMPLETION_TOKENS = 16
_IDS = re.compile(rb"\s*\[[\s\[]*[-0-9\]]")  # Start of a prompt in token ids.
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,18}")  # One spelling for each id.


# A checkpoint recommends no values for these, so the API's default applies.
_API_DEFAULTS: dict[str, float] = {
    name: getattr(SamplingParams(), name) for name in SAMPLING_RANGES if name not in SamplingDefaults.__struct_fields__
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Validated options of both kinds of completion. None means that the client gave no value."""

    model: str | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    max_tokens: int | None
    has_default_limit: bool  # `max_tokens` is the API's default, and is lowered near the end of the context.
    min_tokens: int
    sampling: dict[str, float]  # By field of `SamplingParams`; the checkpoint decides missing ones.
    logit_bias: tuple[tuple[int, float], ...]  # (token id, bias)
    seed: int | None  # 0 .. 2**64 - 1
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    n: int
    echo: bool
    logprobs: int | None  # Number of alternatives for each token; None means no log probabilities.
    prompt_logprobs: int | None
    cache_salt: str | None
    priority: int
    service_class: ServiceClass
    user: str | None


@dataclass(frozen=True, slots=True)
class CompletionAsk:
    """Validated `POST /v1/completions`. Each prompt, a text or token ids, gets `options.n` choices."""

    prompts: tuple[str | tuple[int, ...], ...]
    options: Options


@dataclass(frozen=True, slots=True)
class ChatAsk:
    """Validated `POST /v1/chat/completions`. Messages are {"role", "content", ...}, as chat templates read them."""

    messages: tuple[dict[str, str], ...]
    options: Options


def parse_completion(body: bytes, max_prompt_ids: int = sys.maxsize) -> CompletionAsk:
    """Return the validated request; RequestError says what is wrong with the body.

    Args:
        max_prompt_ids: Most token ids of one prompt.
    """
    fields = decode_completion(body, lambda prompt: _refuse_swarm(prompt, max_prompt_ids))
    echo = bool(fields.echo)
    limit = DEFAULT_COMPLETION_TOKENS if fields.max_tokens is None else fields.max_tokens
    _refuse_too_many_ids(fields.prompt, limit, max_prompt_ids)
    prompts = _prompts(fields.prompt)
    # An answer that echoes its prompt may have no new tokens: clients score prompts in this way.
    shape = _Shape(
        _range("max_tokens", limit, 0 if echo else 1, 2**31 - 1),
        echo=echo,
        logprobs=_logprobs("logprobs", fields.logprobs),
        has_default_limit=fields.max_tokens is None,
    )
    options = _options(fields, shape)
    if len(prompts) * options.n > MAX_CHOICES:
        raise _invalid(
            "n", f"times the number of prompts must be {MAX_CHOICES} at most, got {len(prompts) * options.n}"
        )
    return CompletionAsk(prompts, options)


def parse_chat(body: bytes) -> ChatAsk:
    """Return the validated request; RequestError says what is wrong with the body."""
    fields = decode_chat(body)
    name = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    limit = getattr(fields, name)
    messages = check_messages(fields.messages)
    if fields.top_logprobs and not fields.logprobs:
        raise _invalid("top_logprobs", "is only allowed with logprobs: true")
    logprobs = _logprobs("top_logprobs", fields.top_logprobs or 0) if fields.logprobs else None
    return ChatAsk(messages, _options(fields, _Shape(_limit(name, limit), echo=False, logprobs=logprobs)))


def check_messages(messages: Sequence[Message]) -> tuple[dict[str, str], ...]:
    """Return a chat's messages in plain text, as chat templates read them; RequestError names an invalid one."""
    if not messages:
        raise _invalid("messages", "is an empty list; send at least one message")
    return tuple(_message(f"messages[{i}]", message) for i, message in enumerate(messages))


def _invalid(param: str, text: str) -> RequestError:
    return RequestError(f"{param} {text}.", param=param, code="invalid_value")


def _range(param: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise _invalid(param, f"must be between {low} and {high}, got {shown(value)}")
    return value


@dataclass(frozen=True, slots=True)
class _Shape:
    """Options that the two kinds of completion spell differently."""

    max_tokens: int | None
    echo: bool
    logprobs: int | None
    has_default_limit: bool = False


def _options(fields: GenerationFields, shape: _Shape) -> Options:
    streaming, extras = bool(fields.stream), fields.stream_options
    if extras is not None and not streaming:
        raise _invalid("stream_options", "is only allowed with stream: true")
    return Options(
        model=fields.model,
        stream=streaming,
        include_usage=bool(extras and extras.include_usage),
        continuous_usage=bool(extras and extras.include_usage and extras.continuous_usage_stats),
        max_tokens=shape.max_tokens,
        has_default_limit=shape.has_default_limit,
        min_tokens=_min_tokens(fields.min_tokens or 0, shape.max_tokens),
        sampling=_sampling(fields),
        logit_bias=_logit_bias(fields.logit_bias or {}),
        seed=None if fields.seed is None else _range("seed", fields.seed, -(2**63), 2**63 - 1) % 2**64,
        stop=_stops(fields.stop),
        stop_token_ids=_stop_token_ids(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        n=_copies(fields.n, fields.best_of),
        echo=shape.echo,
        logprobs=shape.logprobs,
        prompt_logprobs=_prompt_logprobs(fields.prompt_logprobs, streaming=streaming),
        cache_salt=_salt(fields.cache_salt),
        priority=_range("priority", fields.priority or 0, -(2**31), 2**31 - 1),
        service_class=_service_class(fields.service_class),
        user=_user(fields.user),
    )


def _limit(name: str, value: int | None) -> int | None:
    return None if value is None else _range(name, value, 1, 2**31 - 1)


def _sampling(fields: GenerationFields) -> dict[str, float]:
    """Return the numeric sampling parameters, each in its range, without those left to the checkpoint."""
    given = {name: value for name in SAMPLING_RANGES if (value := getattr(fields, name)) is not None}
    for name, value in given.items():
        if value not in SAMPLING_RANGES[name]:
            raise _invalid(name, f"must be {SAMPLING_RANGES[name]}, got {shown(value)}")
    if given.get("top_k") == -1:  # vLLM's clients write "all tokens" as -1 or 0.
        given["top_k"] = 0
    return _API_DEFAULTS | given


def _min_tokens(value: int, max_tokens: int | None) -> int:
    if max_tokens is not None and value > max_tokens:
        raise _invalid("min_tokens", f"must not exceed max_tokens ({max_tokens}), got {shown(value)}")
    return _range("min_tokens", value, 0, 2**31 - 1)


def _logit_bias(biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
    if len(biases) > MAX_BIASES:
        raise _invalid("logit_bias", f"may hold {MAX_BIASES} tokens at most, got {len(biases)}")
    for key, bias in biases.items():
        if not _TOKEN_ID.fullmatch(key):
            raise _invalid("logit_bias", f"keys must be token ids, got {shown(key)}")
        if not -100 <= bias <= 100:
            raise _invalid("logit_bias", f"values must be between -100 and 100, got {bias}")
    return tuple((int(key), bias) for key, bias in biases.items() if bias)


def _copies(n: int | None, best_of: int | None) -> int:
    copies = _range("n", 1 if n is None else n, 1, MAX_COPIES)
    if best_of not in (None, copies):
        raise _invalid("best_of", f"must equal n ({copies}), because all choices are returned, got {shown(best_of)}")
    return copies


def _logprobs(param: str, value: int | None) -> int | None:
    return None if value is None else _range(param, value, 0, MAX_LOGPROBS)


def _prompt_logprobs(value: int | None, *, streaming: bool) -> int | None:
    if value is not None and streaming:
        raise _invalid("prompt_logprobs", "is not allowed with stream: true")
    return _logprobs("prompt_logprobs", value)


def _salt(salt: str | None) -> str | None:
    if salt is not None and not 1 <= len(salt) <= MAX_SALT_CHARS:
        raise _invalid("cache_salt", f"must have 1 to {MAX_SALT_CHARS} characters, got {len(salt)}")
    return salt


def _user(user: str | None) -> str | None:
    if user is not None and len(user) > MAX_USER_CHARS:
        raise _invalid("user", f"may have {MAX_USER_CHARS} characters at most, got {len(user)}")
    return user or None


def _service_class(given: str | None) -> ServiceClass:
    if given is not None and given not in set(ServiceClass):
        raise _invalid("service_class", f"must be one of {', '.join(ServiceClass)}, got {shown(given)}")
    return ServiceClass.LS if given is None else ServiceClass(given)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise _invalid("stop", f"may hold {MAX_STOPS} strings at most, got {len(stops)}")
    for text in stops:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise _invalid("stop", f"strings must have 1 to {MAX_STOP_CHARS} characters, got one of {len(text)}")
    return stops


def _stop_token_ids(ids: Sequence[int]) -> tuple[int, ...]:
    if len(ids) > MAX_STOP_TOKEN_IDS:  # Counted first: deduplication takes seconds if the hashes of ids collide.
        raise _invalid("stop_token_ids", f"may hold {MAX_STOP_TOKEN_IDS} ids at most, got {len(ids)}")
    return tuple(dict.fromkeys(ids))


def _refuse_swarm(prompt: memoryview, limit: int) -> None:
    """Refuse too many texts or ids by their punctuation, because decoding millions would block the whole process.

    A prompt that passes is counted exactly after decoding.
    """
    if not _IDS.match(prompt):
        if bytes(prompt[:1]) == b"[" and count_elements(prompt, MAX_PROMPTS + 1) > MAX_PROMPTS:
            raise _invalid("prompt", f"must hold 1 to {MAX_PROMPTS} prompts, and has more")
        return
    chars = np.frombuffer(prompt, np.uint8)
    starts = np.flatnonzero(chars == ord("["))
    if len(starts) > MAX_PROMPTS + 1:
        raise _invalid("prompt", f"must hold 1 to {MAX_PROMPTS} prompts, got {len(starts) - 1}")
    # A list of n ids has n - 1 commas, and perhaps one after it.
    counts = [int(np.count_nonzero(ids == ord(","))) for ids in np.split(chars, starts)]
    if max(counts) > limit:
        raise PromptTooLongError(max(counts), DEFAULT_COMPLETION_TOKENS, limit)
    if sum(counts) > max(limit, MAX_PROMPT_IDS):
        text = f"may hold {max(limit, MAX_PROMPT_IDS)} token ids in all, got {sum(counts)}; send several requests"
        raise _invalid("prompt", text)


def _refuse_too_many_ids(prompt: str | Sequence[str | int | list[int]], max_tokens: int, limit: int) -> None:
    """Refuse prompts with too many ids by their length alone, because a check of millions of ids takes seconds."""
    if isinstance(prompt, str):
        return
    is_one = bool(prompt) and isinstance(prompt[0], int)
    longest = len(prompt) if is_one else max((len(item) for item in prompt if isinstance(item, list)), default=0)
    if longest > limit:
        raise PromptTooLongError(longest, max_tokens, limit)


def _prompts(prompt: str | Sequence[str | int | list[int]]) -> tuple[str | tuple[int, ...], ...]:
    """Return all prompts. The type of a list's first item decides how the list is read."""
    if isinstance(prompt, str):
        prompts: list[str | tuple[int, ...]] = [prompt]
    elif prompt and isinstance(prompt[0], int):
        prompts = [_token_ids(prompt)]
    else:
        prompts = [item if isinstance(item, str) else _token_ids(item) for item in prompt]
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise _invalid("prompt", f"must hold 1 to {MAX_PROMPTS} prompts, got {len(prompts)}")
    if not all(prompts):
        raise _invalid("prompt", "is empty or holds an empty prompt; each needs at least one character or token id")
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
    """Return the parts' texts, one a line, as vLLM joins them for templates that need a string."""
    texts = []
    for i, part in enumerate(parts):
        if part.type != "text" or part.text is None:
            where = f"{place}.content[{i}]"
            raise RequestError(f"{where}: only parts of type text are supported, got {shown(part.type)}.", param=where)
        texts.append(part.text)
    return "\n".join(texts)
