"""`moestro.SamplingParams`: how `LLM` generates, with the names of vLLM's class and the values of the server's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from moestro.errors import RequestError

# Fields that the server's API does not have under the same name; `request_fields` handles them.
_HANDLED = ("max_tokens", "extra_args")


@dataclass(frozen=True, kw_only=True)
class OfflineSamplingParams:
    """How `LLM` generates. The server checks the values; None leaves a value to it.

    A sampling value of None is the one of the checkpoint's `generation_config.json`, or else OpenAI's default, as for a
    request to `moestro serve` without the field. vLLM's class has neutral values in these places.

    Attributes:
        n: Number of answers to each prompt.
        temperature, top_p, top_k, min_p: Limits and sharpness of the distribution; temperature 0 takes the most likely.
        presence_penalty, frequency_penalty, repetition_penalty: Penalties on tokens that are there already.
        seed: Seed of the noise; equal seeds give equal answers in float32.
        stop: Texts that end an answer.
        stop_token_ids: Tokens that end an answer.
        include_stop_str_in_output: Whether the text keeps the stop string.
        ignore_eos: Whether the answer goes on after an end token.
        max_tokens: Most tokens of an answer; None means as many as the context has room for.
        min_tokens: Tokens before which nothing ends the answer.
        logprobs: Number of alternatives of each generated token; None means no log probabilities.
        prompt_logprobs: The same for tokens of the prompt; -1 means the whole vocabulary.
        bad_words, allowed_token_ids, logit_bias: Words and tokens that are forbidden, allowed alone, or biased.
        skip_special_tokens: Whether the text leaves out special tokens; None means yes.
        truncate_prompt_tokens: Number of last tokens of the prompt that are kept; None means all.
        structured_outputs: Grammar of the answer, as the API's field: one of `json`, `regex`, `choice`, `grammar`.
        extra_args: Further fields of the API, such as `cache_salt` and `service_class`.
    """

    n: int = 1
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = 16
    min_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: Mapping[str, Any] | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    extra_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = {each.name for each in fields(self)} | {"prompt", "stream", "echo", "return_token_ids", "model"}
        if taken := sorted(own & set(self.extra_args)):
            raise RequestError(f"extra_args must not have {taken[0]!r}", param="extra_args", code="invalid_value")

    def request_fields(self) -> dict[str, Any]:
        """Return the fields of a completion request, except for `max_tokens`."""
        given = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _HANDLED}
        return {name: value for name, value in given.items() if value is not None} | dict(self.extra_args)
