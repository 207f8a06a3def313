"""Validates the fields of a request and converts them to options."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moestro.core.clients import count_elements
from moestro.core.request import MAX_LISTED_TOKENS, SAMPLING_RANGES, SamplingDefaults, SamplingParams, ServiceClass
from moestro.errors import PromptTooLongError, shown
from moestro.server.api.chat_fields import (
    RequestedGrammar,
    check_messages,
    invalid,
    offered_tools,
    requested_grammar,
    template_options,
    unread_in_messages,
)
from moestro.server.api.protocol import ChatFields, GenerationFields
from moestro.server.api.request_fields import decode_chat, decode_chats, decode_completion, named
from moestro.text.chats.chat_format import NO_TOOLS, ToolUse
from moestro.text.tokenizer import TemplateOptions
from moestro.web.adapters.field_places import FieldPlaces

MAX_PROMPTS = 1024
MAX_PROMPT_IDS = 1 << 20  # Token ids in all prompts of a request, unless one prompt may be longer; decoded in 50 ms.
MAX_STOPS = 64  # vLLM has no limit, and editors send dozens; each costs up to 2 µs a token.
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_SALT_CHARS = 1024
MAX_USER_CHARS = 1024
MAX_ID_CHARS = 128
MAX_COPIES = 128  # Limit of `n`.
MAX_CHOICES = 1024  # Limit of the number of prompts times `n`.
MAX_BIASES = 300
MAX_LOGPROBS = 20
ALL_LOGPROBS = -1  # Of `prompt_logprobs`: the whole vocabulary.
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
DEFAULT_COMPLETION_TOKENS = 16
_IDS = re.compile(rb"\s*\[[\s\[]*[-0-9\]]")  # Start of a prompt in token ids.
_REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_ID_CHARS}}}")
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
    logprob_token_ids: tuple[int, ...]  # These alternatives; () means the most likely tokens.
    prompt_logprobs: int | None
    grammar: RequestedGrammar | None  # Language of the answer, and the field that asks for it.
    allowed_token_ids: tuple[int, ...]  # () means all tokens.
    bad_words: tuple[str, ...]
    cache_salt: str | None
    priority: int
    service_class: ServiceClass
    user: str | None
    session_id: str | None = None
    request_id: str | None = None
    returns_token_ids: bool = False
    keeps_special_tokens: bool = False
    keeps_stop: bool = False  # Whether the text of a stop string or stop token is shown.
    truncate_prompt_tokens: int | None = None  # Most prompt tokens; -1 means all that fit.
    keeps_first_tokens: bool = False  # Whether a prompt that is too long loses its last tokens, not its first ones.
    names_tokens_by_id: bool = False  # Whether log probabilities name tokens by their ids.
    unknown_fields: tuple[str, ...] = ()  # Names of fields without effect, for the answer's `Warning` header.


@dataclass(frozen=True, slots=True)
class CompletionAsk:
    """Validated `POST /v1/completions`. Each prompt, a text or token ids, gets `options.n` choices."""

    prompts: tuple[str | tuple[int, ...], ...]
    options: Options


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAsk:
    """Validated `POST /v1/chat/completions`.

    Attributes:
        messages: {"role", "content", ...}, as chat templates read them.
        tools: Tools in the API's form, for the template.
        use: Use of these tools that the request allows.
        template: Arguments of the rendering, without the operator's variables and those that the model decides.
        effort: Effort of reasoning that the request asks for.
        verbosity: Length of the answer that the request asks for.
        shows_reasoning: Whether the client wants the reasoning.
        thinking_budget: Most tokens of reasoning; None means no limit.
    """

    messages: tuple[dict[str, Any], ...]
    options: Options
    template: TemplateOptions
    tools: tuple[dict[str, Any], ...] = ()
    use: ToolUse = NO_TOOLS
    effort: str | None = None
    verbosity: str | None = None
    shows_reasoning: bool = True
    thinking_budget: int | None = None


def parse_completion(body: bytes, max_prompt_ids: int = sys.maxsize) -> CompletionAsk:
    """Return the validated request; RequestError says what is wrong with the body.

    Args:
        max_prompt_ids: Most token ids of one prompt.
    """
    fields, unknown = decode_completion(body, lambda prompt: _refuse_swarm(prompt, max_prompt_ids))
    echo, listed = bool(fields.echo), _listed(fields.logprob_token_ids)
    if echo and listed and fields.prompt_logprobs is not None:
        text = "cannot be used together with echo and logprob_token_ids: a prompt token gets one kind of alternatives"
        raise invalid("prompt_logprobs", text)
    limit = DEFAULT_COMPLETION_TOKENS if fields.max_tokens is None else fields.max_tokens
    _refuse_too_many_ids(fields.prompt, limit, max_prompt_ids)
    prompts = _prompts(fields.prompt)
    # An answer that echoes its prompt may have no new tokens: clients score prompts in this way.
    shape = _Shape(
        _range("max_tokens", limit, 0 if echo else 1, 2**31 - 1),
        echo=echo,
        logprobs=len(listed) if listed else _logprobs("logprobs", fields.logprobs),
        has_default_limit=fields.max_tokens is None,
        unknown_fields=unknown,
    )
    options = _options(fields, shape)
    if len(prompts) * options.n > MAX_CHOICES:
        raise invalid("n", f"times the number of prompts must be {MAX_CHOICES} at most, got {len(prompts) * options.n}")
    return CompletionAsk(prompts, options)


def parse_chat(body: bytes) -> ChatAsk:
    """Return the validated request; RequestError says what is wrong with the body."""
    return chat_ask(*decode_chat(body))


def parse_chats(body: bytes) -> list[ChatAsk]:
    """Return the validated chats of a batch; RequestError says what is wrong with the body."""
    fields, unknown = decode_chats(body)
    for name in ("stream", "tools", "prompt_logprobs", "return_token_ids"):
        given = getattr(fields, name)
        if not (given is None or given is False or given == []):
            raise invalid(name, "is not possible for several chats; send each to /v1/chat/completions")
    conversations = fields.messages
    if not 1 <= len(conversations) <= MAX_PROMPTS:
        raise invalid("messages", f"must hold 1 to {MAX_PROMPTS} conversations, got {len(conversations)}")
    common = {name: getattr(fields, name) for name in ChatFields.__struct_fields__}
    asks = []
    for i, messages in enumerate(conversations):
        with conversation_places(i).naming_errors():
            asks.append(chat_ask(ChatFields(**common | {"messages": messages}), unknown))
    num_choices = len(asks) * asks[0].options.n
    if num_choices > MAX_CHOICES:
        raise invalid("n", f"times the number of conversations must be {MAX_CHOICES} at most, got {num_choices}")
    return asks


def conversation_places(number: int) -> FieldPlaces:
    """Return the places in a batch of the fields of one of its chats."""
    return FieldPlaces({"messages": f"messages[{number}]"})


def chat_ask(fields: ChatFields, unknown: tuple[str, ...]) -> ChatAsk:
    """Return the validated request of decoded fields; RequestError names an invalid one.

    Args:
        unknown: Names of the body's other fields.
    """
    name = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    limit = getattr(fields, name)
    messages = check_messages(fields.messages)
    if fields.top_logprobs and not fields.logprobs:
        raise invalid("top_logprobs", "is only allowed with logprobs: true")
    listed = _listed(fields.logprob_token_ids)
    if listed and fields.logprobs is False:
        raise invalid("logprob_token_ids", "asks for log probabilities: send logprobs: true, or leave logprobs out")
    logprobs = _logprobs("top_logprobs", fields.top_logprobs or 0) if fields.logprobs else None
    if listed:
        logprobs = len(listed)
    use, tools, left_out = offered_tools(fields)
    ignored = named([*unread_in_messages(fields.messages), *left_out])
    shape = _Shape(_limit(name, limit), echo=False, logprobs=logprobs, unknown_fields=unknown + ignored)
    options = _options(fields, shape)
    if options.grammar is not None and use.choice in ("required", "named"):
        raise invalid(options.grammar.param, f"cannot be used together with tool_choice {shown(fields.tool_choice)}")
    return ChatAsk(
        messages=messages,
        options=options,
        template=template_options(fields),
        tools=tools,
        use=use,
        effort=fields.reasoning_effort,
        verbosity=fields.verbosity,
        shows_reasoning=fields.include_reasoning is not False,
        thinking_budget=_thinking_budget(fields),
    )


def _thinking_budget(fields: ChatFields) -> int | None:
    budget = fields.thinking_token_budget
    if budget in (None, -1):
        return None
    if fields.logprobs or fields.logprob_token_ids:
        raise invalid("thinking_token_budget", "cannot be used together with logprobs: no token that it adds has any")
    return _range("thinking_token_budget", budget, 0, 2**31 - 1)


def _range(param: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise invalid(param, f"must be between {low} and {high}, got {shown(value)}")
    return value


@dataclass(frozen=True, slots=True)
class _Shape:
    """Options that the two kinds of completion spell differently."""

    max_tokens: int | None
    echo: bool
    logprobs: int | None
    has_default_limit: bool = False
    unknown_fields: tuple[str, ...] = ()


def _options(fields: GenerationFields, shape: _Shape) -> Options:
    streaming, extras = bool(fields.stream), fields.stream_options
    grammar = requested_grammar(fields)
    if extras is not None and not streaming:
        raise invalid("stream_options", "is only allowed with stream: true")
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
        logprob_token_ids=_listed(fields.logprob_token_ids),
        prompt_logprobs=_prompt_logprobs(fields.prompt_logprobs, streaming=streaming),
        grammar=grammar,
        allowed_token_ids=_allowed_token_ids(fields.allowed_token_ids),
        bad_words=_bad_words(fields.bad_words or ()),
        cache_salt=_salt(fields.cache_salt),
        priority=_range("priority", fields.priority or 0, -(2**31), 2**31 - 1),
        service_class=_service_class(fields.service_class),
        user=_user(fields.user),
        session_id=(fields.session_id or fields.prompt_cache_key or "")[:MAX_USER_CHARS] or None,
        request_id=_request_id(fields.request_id),
        returns_token_ids=bool(fields.return_token_ids),
        keeps_special_tokens=fields.skip_special_tokens is False,
        keeps_stop=bool(fields.include_stop_str_in_output),
        truncate_prompt_tokens=_truncation(fields.truncate_prompt_tokens),
        keeps_first_tokens=_is_right(fields.truncation_side),
        names_tokens_by_id=bool(fields.return_tokens_as_token_ids),
        unknown_fields=shape.unknown_fields + (() if grammar is None else named(grammar.left_out)),
    )


def _limit(name: str, value: int | None) -> int | None:
    return None if value is None else _range(name, value, 1, 2**31 - 1)


def _sampling(fields: GenerationFields) -> dict[str, float]:
    """Return the numeric sampling parameters, each in its range, without those left to the checkpoint."""
    given = {name: value for name in SAMPLING_RANGES if (value := getattr(fields, name)) is not None}
    for name, value in given.items():
        if value not in SAMPLING_RANGES[name]:
            raise invalid(name, f"must be {SAMPLING_RANGES[name]}, got {shown(value)}")
    if given.get("top_k") == -1:  # vLLM's clients write "all tokens" as -1 or 0.
        given["top_k"] = 0
    return _API_DEFAULTS | given


def _min_tokens(value: int, max_tokens: int | None) -> int:
    if max_tokens is not None and value > max_tokens:
        raise invalid("min_tokens", f"must not exceed max_tokens ({max_tokens}), got {shown(value)}")
    return _range("min_tokens", value, 0, 2**31 - 1)


def _logit_bias(biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
    if len(biases) > MAX_BIASES:
        raise invalid("logit_bias", f"may hold {MAX_BIASES} tokens at most, got {len(biases)}")
    for key, bias in biases.items():
        if not _TOKEN_ID.fullmatch(key):
            raise invalid("logit_bias", f"keys must be token ids, got {shown(key)}")
        if not -100 <= bias <= 100:
            raise invalid("logit_bias", f"values must be between -100 and 100, got {bias}")
    return tuple((int(key), bias) for key, bias in biases.items() if bias)


def _copies(n: int | None, best_of: int | None) -> int:
    copies = _range("n", 1 if n is None else n, 1, MAX_COPIES)
    if best_of not in (None, copies):
        raise invalid("best_of", f"must equal n ({copies}), because all choices are returned, got {shown(best_of)}")
    return copies


def _logprobs(param: str, value: int | None) -> int | None:
    return None if value is None else _range(param, value, 0, MAX_LOGPROBS)


def _listed(ids: Sequence[int] | None) -> tuple[int, ...]:
    """Return the tokens of `logprob_token_ids`, each once and in the client's order."""
    if ids is not None and len(ids) > MAX_LISTED_TOKENS:
        raise invalid("logprob_token_ids", f"may hold {MAX_LISTED_TOKENS} tokens at most, got {len(ids)}")
    return tuple(dict.fromkeys(ids or ()))


def _prompt_logprobs(value: int | None, *, streaming: bool) -> int | None:
    if value is not None and streaming:
        raise invalid("prompt_logprobs", "is not allowed with stream: true")
    return value if value == ALL_LOGPROBS else _logprobs("prompt_logprobs", value)


def _salt(salt: str | None) -> str | None:
    if salt is not None and not 1 <= len(salt) <= MAX_SALT_CHARS:
        raise invalid("cache_salt", f"must have 1 to {MAX_SALT_CHARS} characters, got {len(salt)}")
    return salt


def _user(user: str | None) -> str | None:
    if user is not None and len(user) > MAX_USER_CHARS:
        raise invalid("user", f"may have {MAX_USER_CHARS} characters at most, got {len(user)}")
    return user or None


def _request_id(given: str | None) -> str | None:
    if given is not None and not _REQUEST_ID.fullmatch(given):
        text = f"must have 1 to {MAX_ID_CHARS} printable ASCII characters without spaces, got {shown(given)}"
        raise invalid("request_id", text)
    return given


def _truncation(given: int | None) -> int | None:
    if given is None or given == -1:
        return given
    return _range("truncate_prompt_tokens", given, 1, 2**31 - 1)


def _is_right(side: str | None) -> bool:
    if side not in (None, "left", "right"):
        raise invalid("truncation_side", f'must be "left" or "right", got {shown(side)}')
    return side == "right"


def _service_class(given: str | None) -> ServiceClass:
    if given is not None and given not in set(ServiceClass):
        raise invalid("service_class", f"must be one of {', '.join(ServiceClass)}, got {shown(given)}")
    return ServiceClass.LS if given is None else ServiceClass(given)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"may hold {MAX_STOPS} strings at most, got {len(stops)}")
    for text in stops:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise invalid("stop", f"strings must have 1 to {MAX_STOP_CHARS} characters, got one of {len(text)}")
    return stops


def _stop_token_ids(ids: Sequence[int]) -> tuple[int, ...]:
    if len(ids) > MAX_STOP_TOKEN_IDS:  # Counted first: deduplication takes seconds if the hashes of ids collide.
        raise invalid("stop_token_ids", f"may hold {MAX_STOP_TOKEN_IDS} ids at most, got {len(ids)}")
    return tuple(dict.fromkeys(ids))


def _allowed_token_ids(ids: Sequence[int] | None) -> tuple[int, ...]:
    if ids is not None and not ids:
        raise invalid("allowed_token_ids", "is empty, so that no token is possible; leave it out for all tokens")
    return tuple(ids or ())


def _bad_words(words: Sequence[str]) -> tuple[str, ...]:
    if len(words) > MAX_BAD_WORDS:
        raise invalid("bad_words", f"may hold {MAX_BAD_WORDS} words at most, got {len(words)}")
    for word in words:
        if not 1 <= len(word.lstrip()) <= MAX_BAD_WORD_CHARS:
            raise invalid("bad_words", f"must have 1 to {MAX_BAD_WORD_CHARS} characters each, got {len(word.lstrip())}")
    return tuple(words)


def _refuse_swarm(prompt: memoryview, limit: int) -> None:
    """Refuse too many texts or ids by their punctuation, because decoding millions would block the whole process.

    A prompt that passes is counted exactly after decoding.
    """
    if not _IDS.match(prompt):
        if bytes(prompt[:1]) == b"[" and count_elements(prompt, MAX_PROMPTS + 1) > MAX_PROMPTS:
            raise invalid("prompt", f"must hold 1 to {MAX_PROMPTS} prompts, and has more")
        return
    chars = np.frombuffer(prompt, np.uint8)
    starts = np.flatnonzero(chars == ord("["))
    if len(starts) > MAX_PROMPTS + 1:
        raise invalid("prompt", f"must hold 1 to {MAX_PROMPTS} prompts, got {len(starts) - 1}")
    # A list of n ids has n - 1 commas, and perhaps one after it.
    counts = [int(np.count_nonzero(ids == ord(","))) for ids in np.split(chars, starts)]
    if max(counts) > limit:
        raise PromptTooLongError(max(counts), DEFAULT_COMPLETION_TOKENS, limit)
    if sum(counts) > max(limit, MAX_PROMPT_IDS):
        text = f"may hold {max(limit, MAX_PROMPT_IDS)} token ids in all, got {sum(counts)}; send several requests"
        raise invalid("prompt", text)


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
        raise invalid("prompt", f"must hold 1 to {MAX_PROMPTS} prompts, got {len(prompts)}")
    if not all(prompts):
        raise invalid("prompt", "is empty or holds an empty prompt; each needs at least one character or token id")
    if len({type(item) for item in prompts}) > 1:
        raise invalid("prompt", "mixes texts and token ids; send one kind")
    return tuple(prompts)


def _token_ids(items: object) -> tuple[int, ...]:
    if isinstance(items, list) and all(isinstance(item, int) for item in items):
        return tuple(items)
    raise invalid("prompt", "mixes texts and token ids; send one kind")
