"""Answers of `LLM`, in the form of vLLM's `RequestOutput`."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class Logprob(msgspec.Struct, frozen=True):
    """Log probability of a token at one position. Rank 1 is the most likely token.

    Attributes:
        logprob: Of the raw logits; -9999 stands for minus infinity.
        decoded_token: Text of the token alone.
    """

    logprob: float
    rank: int
    decoded_token: str


PositionLogprobs = dict[int, Logprob]  # By token id: the token itself first, then the most likely ones.


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a prompt.

    Attributes:
        index: Number of the answer among the prompt's `n`.
        token_ids: Generated tokens, including an end token that the text does not show.
        cumulative_logprob: Sum over the generated tokens; None without log probabilities.
        logprobs: One entry for each generated token; None if not requested.
        finish_reason: "stop" or "length".
        stop_reason: Stop string or stop token of the client that ended the answer; None for another end.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[PositionLogprobs] | None
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answers to one prompt.

    Attributes:
        request_id: Id of the answer, as in the server's logs.
        prompt: Text of the prompt, in a chat with the template around the messages; None for a prompt of token ids.
        prompt_logprobs: One entry for each token of the prompt, None for the first; None if not requested.
        num_cached_tokens: Tokens of the prompt that came from the prefix cache.
        finished: Always True.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    finished: bool = True


class _AnsweredLogprobs(msgspec.Struct):
    by_token_id: list[PositionLogprobs]


class _AnsweredChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int]
    prompt_token_ids: list[int]
    logprobs: _AnsweredLogprobs | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None


class _AnsweredDetails(msgspec.Struct):
    cached_tokens: int


class _AnsweredUsage(msgspec.Struct):
    prompt_tokens_details: _AnsweredDetails


class _AnsweredCompletion(msgspec.Struct):
    id: str
    choices: list[_AnsweredChoice]
    usage: _AnsweredUsage


_decode = msgspec.json.Decoder(_AnsweredCompletion).decode


def request_output(body: bytes, prompt: str | None) -> RequestOutput:
    """Return the answers of a completion with token ids.

    Args:
        body: Response of the server.
        prompt: Text of the prompt, if it is known.
    """
    answer = _decode(body)
    first = answer.choices[0]
    return RequestOutput(
        request_id=answer.id,
        prompt=prompt,
        prompt_token_ids=first.prompt_token_ids,
        prompt_logprobs=first.prompt_logprobs,
        outputs=[_completion_output(choice) for choice in answer.choices],
        num_cached_tokens=answer.usage.prompt_tokens_details.cached_tokens,
    )


def _completion_output(choice: _AnsweredChoice) -> CompletionOutput:
    logprobs = None if choice.logprobs is None else choice.logprobs.by_token_id
    total = None
    if logprobs is not None:
        total = sum(entry[token_id].logprob for entry, token_id in zip(logprobs, choice.token_ids, strict=True))
    return CompletionOutput(
        index=choice.index,
        text=choice.text,
        token_ids=choice.token_ids,
        cumulative_logprob=total,
        logprobs=logprobs,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
    )
