"""Request and response bodies of the OpenAI API as typed structs.

A field that is neither here nor among the unsupported ones of `request_fields.py` is ignored with a warning in the
answer's headers.
"""

from __future__ import annotations

from typing import Any

import msgspec

# --- request bodies: every field may also be null ------------------------------------------------------------------


class StreamOptions(msgspec.Struct):
    """Options of a streamed response."""

    include_usage: bool | None = None  # One last chunk with the usage and no choices.
    continuous_usage_stats: bool | None = None  # The usage so far, in every chunk.


class JsonSchemaFormat(msgspec.Struct):
    """A JSON schema with OpenAI's frame. It is always enforced, as in vLLM.

    Attributes:
        strict: Whether a keyword that cannot be enforced is refused; otherwise it is a description.
    """

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """Form of an answer: `text`, `json_object` or `json_schema`.

    Attributes:
        schema: JSON schema without OpenAI's frame, as llama.cpp and Together AI name it.
    """

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's field: one of the first five, and options of JSON."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # EBNF, or Lark's notation.
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None


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
    logprob_token_ids: list[int] | None = None  # Alternatives of each token, in place of the most likely ones.
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None  # These four are vLLM's older names.
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None  # These two are SGLang's names of `guided_regex` and `guided_grammar`.
    ebnf: str | None = None
    user: str | None = None
    session_id: str | None = None  # Conversation, for affinity; as `moestro route` reads it.
    prompt_cache_key: str | None = None  # OpenAI's name for the same.
    cache_salt: str | None = None
    priority: int | None = None
    service_class: str | None = None  # "ls" or "be"; a field of Moestro alone.
    request_id: str | None = None  # Names the answer, `cmpl-ID` or `chatcmpl-ID`.
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None  # None means yes.
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None  # Number of tokens that are kept; -1 means all that fit.
    truncation_side: str | None = None  # Where tokens are cut off, "left" (the default) or "right".
    return_tokens_as_token_ids: bool | None = None  # Log probabilities name tokens as `token_id:ID`.


class CompletionFields(GenerationFields, kw_only=True):
    """Body of `POST /v1/completions`. `prompt` is a text, a list of token ids, or a list of several such prompts."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None


class ContentPart(msgspec.Struct):
    """One part of a message's content: a text, or a refusal of the assistant."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionField(msgspec.Struct):
    """Function of a call in the history. Its arguments are the text of a JSON object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class CallField(msgspec.Struct):
    """Call of a tool in the history."""

    function: FunctionField
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct):
    """One message of a chat. `reasoning` and `reasoning_content` are two names of one field.

    A refusal is what the assistant wrote in place of its content. Annotations are those of earlier answers, and say
    nothing to a template.
    """

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[CallField] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: Any = None


class ToolFunction(msgspec.Struct):
    """Function that a tool offers. Without `parameters` it takes no arguments; true allows any object."""

    name: str
    parameters: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None  # Whether a forced call must follow all of the schema.


class ToolField(msgspec.Struct):
    """One tool, of which chat templates also read further fields."""

    type: str
    function: ToolFunction


class NamedFunction(msgspec.Struct):
    """Function that has to be called."""

    name: str


class FunctionChoice(msgspec.Struct):
    """A tool by its name."""

    type: str
    function: NamedFunction


class AllowedTools(msgspec.Struct):
    """Tools among which the model may choose."""

    mode: str
    tools: list[FunctionChoice]


class AllowedChoice(msgspec.Struct):
    """A choice among some of the offered tools, which alone reach the model."""

    type: str
    allowed_tools: AllowedTools


class ToolChoiceField(msgspec.Struct):
    """Keys of both choices that are objects: a tool that has to be called, and allowed tools."""

    type: str
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


class ChatFields(GenerationFields, kw_only=True):
    """Body of `POST /v1/chat/completions`. `max_completion_tokens` overrides the older `max_tokens`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None  # None means yes.
    reasoning_effort: str | None = None
    verbosity: str | None = None
    include_reasoning: bool | None = None  # None means yes; a field of vLLM.
    thinking_token_budget: int | None = None  # Most tokens of reasoning; -1 means no limit; a field of vLLM.
    add_generation_prompt: bool | None = None  # None means yes, unless the final message is continued.
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class BatchChatFields(ChatFields, kw_only=True):
    """Body of `POST /v1/chat/completions/batch`: the fields of a chat, for several conversations."""

    messages: list[list[Message]]  # type: ignore[assignment]


# --- response bodies ----------------------------------------------------------------------------------------------


class PromptTokensDetails(msgspec.Struct, omit_defaults=True):
    """Number of prompt tokens that came from the prefix cache, and of those whose KV was copied from host memory."""

    cached_tokens: int
    host_cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    """Number of generated tokens that belong to the reasoning."""

    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Token counts of one response, summed over its choices. Hidden tokens count; each prompt counts once for any n."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    # Set if the server parses reasoning.
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


class PromptLogprob(msgspec.Struct):
    """A token at one position of a prompt, or of an answer. Rank 1 is the most likely token; None means unknown."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # vLLM's form: by position and token id; null for the first.


class CompletionLogprobs(msgspec.Struct):
    """Log probabilities of a completion's tokens: every list has one entry per token, null for a prompt's first."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # Start of each token in the choice's text, in characters.
    by_token_id: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET  # Set if token ids are requested.


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


class TextChoice(msgspec.Struct):
    """One choice of a completion, or of a chunk of its stream."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: CompletionLogprobs | None = None
    stop_reason: str | int | None = None  # Stop string or stop token that ended the choice; null for an end token.
    prompt_logprobs: PromptLogprobs | None = None  # Set if requested.
    token_ids: list[int] | None = None  # Set if requested.
    prompt_token_ids: list[int] | None = None  # Set if requested; in a stream once.


class CalledFunction(msgspec.Struct, omit_defaults=True):
    """Called function, or an addition to one. The arguments are the text of a JSON object, if the model wrote one."""

    arguments: str
    name: str | None = None


class ChatToolCall(msgspec.Struct, omit_defaults=True):
    """Call of a tool, or an addition to the call number `index` of a stream."""

    function: CalledFunction
    id: str | None = None
    type: str | None = None
    index: int | None = None


class ChatMessage(msgspec.Struct):
    """The assistant's message. vLLM names the reasoning `reasoning`, and DeepSeek and SGLang `reasoning_content`.

    As in vLLM, every key is present, because clients read attributes that are otherwise missing.
    """

    content: str | None
    role: str = "assistant"
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[ChatToolCall] = []
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatChoice(msgspec.Struct):
    """One choice of a chat completion."""

    index: int
    message: ChatMessage
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None  # Set if requested.


class ChatDelta(msgspec.Struct):
    """Addition of a chunk to the message. Only `reasoning` is always present, because clients read the attribute."""

    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ChatToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct):
    """One choice of a chunk."""

    index: int
    delta: ChatDelta
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None  # Set if requested.


class Answer(msgspec.Struct, kw_only=True):
    """A completion, a chat completion, or a chunk of either, as `object` says. Chunks have usage only on request.

    As in vLLM, the other keys of a complete answer are present, and null where they say nothing.
    """

    id: str
    object: str
    created: int  # Seconds since 1970.
    model: str
    choices: list[TextChoice] | list[ChatChoice] | list[ChatChunkChoice]
    system_fingerprint: str
    usage: Usage | msgspec.UnsetType = msgspec.UNSET
    service_tier: msgspec.UnsetType | None = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType | None = msgspec.UNSET  # A chat's, if requested.
    prompt_token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET  # The same; in a stream once.
    kv_transfer_params: msgspec.UnsetType | None = msgspec.UNSET


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
