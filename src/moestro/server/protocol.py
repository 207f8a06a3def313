"""Request and response bodies of the OpenAI API as typed structs.

A field that is neither here nor in `unsupported.py` is ignored, as in other engines.
"""

from __future__ import annotations

import msgspec

# --- request bodies: every field may also be null ------------------------------------------------------------------


class StreamOptions(msgspec.Struct):
    """Options of a streamed response."""

    include_usage: bool | None = None  # One last chunk with the usage and no choices.
    continuous_usage_stats: bool | None = None  # The usage so far, in every chunk.


class GenerationFields(msgspec.Struct, kw_only=True):
    """Fields of both kinds of completion. Names and meanings are OpenAI's, those of the additional fields vLLM's."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    best_of: int | None = None
    prompt_logprobs: int | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    service_class: str | None = None  # "ls" or "be"; a field of Moestro alone.


class CompletionFields(GenerationFields, kw_only=True):
    """Body of `POST /v1/completions`. `prompt` is a text, a list of token ids, or a list of several such prompts."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None


class ContentPart(msgspec.Struct):
    """One part of a message's content; only parts of type `text` are supported."""

    type: str
    text: str | None = None


class Message(msgspec.Struct):
    """One message of a chat."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[msgspec.Raw] | None = None
    tool_call_id: str | None = None


class ChatFields(GenerationFields, kw_only=True):
    """Body of `POST /v1/chat/completions`. `max_completion_tokens` overrides the older `max_tokens`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


# --- response bodies ----------------------------------------------------------------------------------------------


class PromptTokensDetails(msgspec.Struct):
    """Number of prompt tokens that came from the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Token counts of one response, summed over its choices. Hidden tokens count; each prompt counts once for any n."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(msgspec.Struct):
    """Log probabilities of a completion's tokens: every list has one entry per token, null for a prompt's first."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # Start of each token in the choice's text, in characters.


class TopLogprob(msgspec.Struct):
    """A likely token at one position of a message."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    """A generated token, and the most likely tokens at its position, the most likely first."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log probabilities of a message's tokens."""

    content: list[ChatLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct):
    """A token at one position of a prompt. Rank 1 is the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # vLLM's form: by position and token id; null for the first.


class TextChoice(msgspec.Struct):
    """One choice of a completion, or of a chunk of its stream."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET  # Set if requested.


class ChatMessage(msgspec.Struct):
    """The assistant's message."""

    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """One choice of a chat completion."""

    index: int
    message: ChatMessage
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    """Addition of a chunk to the message."""

    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct):
    """One choice of a chunk."""

    index: int
    delta: ChatDelta
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None


class Answer(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A completion, a chat completion, or a chunk of either, as `object` says. Chunks have usage only on request."""

    id: str
    object: str
    created: int  # Seconds since 1970.
    model: str
    choices: list[TextChoice] | list[ChatChoice] | list[ChatChunkChoice]
    system_fingerprint: str
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | None = None  # Set in a chat completion if requested.


class ModelCard(msgspec.Struct, kw_only=True):
    """One entry of `GET /v1/models`. `device` is the engines' device; that of a paced engine begins with "paced".

    `pace_dilation` is the factor on the durations of a paced engine.
    """

    id: str
    created: int
    root: str
    max_model_len: int
    device: str
    pace_dilation: float = 1.0
    object: str = "model"
    owned_by: str = "moestro"
    parent: None = None
    permission: tuple[()] = ()


class ModelList(msgspec.Struct):
    """Body of `GET /v1/models`."""

    data: list[ModelCard]
    object: str = "list"
