"""The OpenAI API's bodies as typed structs: what is accepted, and what is answered.

A field that is missing here and in `unsupported.py` is ignored, as the field's engines do.
"""

from __future__ import annotations

import msgspec

# --- what a client sends: every field may also be null ------------------------------------------------------------


class StreamOptions(msgspec.Struct):
    """Extras of a streamed answer."""

    include_usage: bool | None = None  # one last chunk with the usage and no choices
    continuous_usage_stats: bool | None = None  # the usage so far, in every chunk


class GenerationFields(msgspec.Struct, kw_only=True):
    """What both kinds of completion share. Names and meanings are OpenAI's, the extras vLLM's."""

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
    service_class: str | None = None  # "ls" or "be": Moestro's own


class CompletionFields(GenerationFields, kw_only=True):
    """Body of `POST /v1/completions`. `prompt`: a text, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None


class ContentPart(msgspec.Struct):
    """One part of a message's content; only `type: text` is read."""

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
    """Body of `POST /v1/chat/completions`. `max_completion_tokens` wins over the older `max_tokens`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


# --- what it gets -------------------------------------------------------------------------------------------------


class PromptTokensDetails(msgspec.Struct):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens of one answer, all choices together: what was generated, shown or not; each prompt once, whatever n."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(msgspec.Struct):
    """Log probabilities of a completion's tokens, one entry each in every list; null for the first of a prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # where each token's text begins in the choice's, in characters


class TopLogprob(msgspec.Struct):
    """A token that could have come."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    """The token that came, and the likeliest ones, the likeliest first."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log probabilities of a message's tokens."""

    content: list[ChatLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct):
    """A token at one position of a prompt; rank 1: the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by position, then by token id; null for the first: vLLM's form


class TextChoice(msgspec.Struct):
    """One choice of a completion, whole or a piece of a stream."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET  # where asked for


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
    """What a chunk adds to the message."""

    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct):
    """The choice of a chunk."""

    index: int
    delta: ChatDelta
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None


class Answer(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A completion, a chat completion, or a chunk of either: `object` says which. A chunk has usage when asked."""

    id: str
    object: str
    created: int  # seconds since 1970
    model: str
    choices: list[TextChoice] | list[ChatChoice] | list[ChatChunkChoice]
    system_fingerprint: str
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | None = None  # of a chat, where asked for


class ModelCard(msgspec.Struct, kw_only=True):
    """One entry of `GET /v1/models`. `device`: what the engines run on; a paced one's begins with "paced"."""

    id: str
    created: int
    root: str
    max_model_len: int
    device: str
    object: str = "model"
    owned_by: str = "moestro"
    parent: None = None
    permission: tuple[()] = ()


class ModelList(msgspec.Struct):
    """Body of `GET /v1/models`."""

    data: list[ModelCard]
    object: str = "list"
