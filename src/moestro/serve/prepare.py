"""From a checked ask to requests: tokenized, bounded, hashed. Plain functions; the front door runs them on threads."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moestro.core.hashing import hash_blocks, hash_key
from moestro.core.request import Request, SamplingParams
from moestro.errors import PromptTooLongError, RequestError
from moestro.serve.messages import ModelInfo
from moestro.serve.refusals import UnknownModelError
from moestro.serve.tokenizer import Tokenizer
from moestro.serve.validation import ChatAsk, CompletionAsk, Options


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model as clients see it.

    Attributes:
        names: what clients may call it; the first is listed first.
        root: where it was loaded from.
        created: when it was loaded, in seconds since 1970.
        fingerprint: changes whenever answers may.
    """

    names: tuple[str, ...]
    root: str
    created: int
    fingerprint: str
    info: ModelInfo
    tokenizer: Tokenizer

    def name_for(self, asked: str | None) -> str:
        """The name to answer with; a client that names none means the only model there is."""
        if asked is not None and asked not in self.names:
            raise UnknownModelError(asked)
        return self.names[0] if asked is None else asked


@dataclass(frozen=True, slots=True)
class Arrival:
    """When an HTTP request came in, and the id of its answer."""

    answer_id: str
    now_ns: int


def completion_requests(ask: CompletionAsk, model: ServedModel, arrival: Arrival) -> list[Request]:
    """One request per prompt, in order.

    Raises:
        RequestError: a prompt, or a token id, that this model cannot take.
    """
    prompts = [_prompt_ids(prompt, model) for prompt in ask.prompts]
    _refuse_foreign_ids("stop_token_ids", ask.options.stop_token_ids, model.info.vocab_size)
    return [_request(ids, ask.options, model, arrival, i) for i, ids in enumerate(prompts)]


def chat_requests(ask: ChatAsk, model: ServedModel, arrival: Arrival) -> list[Request]:
    """The one request of a chat, as a list; without max_tokens it may fill the context.

    Raises:
        RequestError: a chat that this model, or its template, cannot take.
    """
    _refuse_too_much_text(sum(len(message["content"]) for message in ask.messages), model)
    text = model.tokenizer.render_chat(ask.messages)
    ids = model.tokenizer.encode(text, add_special_tokens=False)  # the template has written them
    _refuse_foreign_ids("messages", ids, model.info.vocab_size)
    _refuse_foreign_ids("stop_token_ids", ask.options.stop_token_ids, model.info.vocab_size)
    return [_request(ids, ask.options, model, arrival, 0)]


def _prompt_ids(prompt: str | tuple[int, ...], model: ServedModel) -> Sequence[int]:
    if isinstance(prompt, str):
        _refuse_too_much_text(len(prompt), model)
        ids: Sequence[int] = model.tokenizer.encode(prompt, add_special_tokens=True)
    else:
        ids = prompt
    _refuse_foreign_ids("prompt", ids, model.info.vocab_size)
    return ids


def _request(ids: Sequence[int], options: Options, model: ServedModel, arrival: Arrival, index: int) -> Request:
    if not ids:
        raise RequestError("The prompt has no tokens.", param="prompt", code="invalid_value")
    tokens = np.array(ids, np.int32)
    key = hash_key(model.info.model_id, None, options.cache_salt)
    return Request(
        request_id=f"{arrival.answer_id}-{index}",
        num_prompt_tokens=len(tokens),
        sampling=_sampling(len(tokens), options, model.info),
        arrival_ns=arrival.now_ns,
        token_ids=tokens.tobytes(),
        block_hashes=hash_blocks(key, tokens, model.info.block_size),
        hash_key=key,
        priority=options.priority,
    )


def _sampling(num_prompt_tokens: int, options: Options, info: ModelInfo) -> SamplingParams:
    """Never clips: what cannot fit is refused, so that a short answer always means a short answer."""
    room = info.max_model_len - num_prompt_tokens
    max_tokens = max(1, room) if options.max_tokens is None else options.max_tokens
    if max_tokens > room:
        raise PromptTooLongError(num_prompt_tokens, max_tokens, info.max_model_len)
    ends = () if options.ignore_eos else info.eos_token_ids
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=secrets.randbits(64) if options.seed is None else options.seed,
        stop_token_ids=tuple(dict.fromkeys(ends + options.stop_token_ids)),
    )


def _refuse_foreign_ids(param: str, ids: Sequence[int], vocab_size: int) -> None:
    """Also for ids of our own making: a tokenizer may have more tokens than the network."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise RequestError(
            f"{param}: token id out of range: must be between 0 and {vocab_size - 1}, got {wrong}.",
            param=param,
            code="invalid_value",
        )


def _refuse_too_much_text(num_chars: int, model: ServedModel) -> None:
    """Refuse what cannot fit whatever its tokens are, without spending the time to find them."""
    limit = model.info.max_model_len * model.tokenizer.max_token_chars
    if num_chars > limit:
        raise RequestError(
            f"This model's maximum context length is {model.info.max_model_len} tokens. However, your prompt contains"
            f" {num_chars} characters, and {limit} are the most that could fit. Shorten the prompt.",
            param="prompt",
            code="context_length_exceeded",
        )
