"""`moestro.LLM`: generates for many prompts from Python, with the engines and the code path of `moestro serve`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from moestro.errors import RequestError
from moestro.offline.server import (
    ApiAnswer,
    ApiClient,
    BackgroundLoop,
    OwnedServer,
    UnreachableServerError,
    flags_from,
    refusal_of,
)
from moestro.workload.progress import progress

# Answers of `LLM`, in the form of vLLM's `RequestOutput`.


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


# A text, token ids, or a dictionary with `prompt` or `prompt_token_ids`.
Prompt = str | Sequence[int] | Mapping[str, Any]
Prompts = Prompt | Sequence[Prompt]
Params = OfflineSamplingParams | Sequence[OfflineSamplingParams] | None


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """One prompt: a text or token ids, and its parameters.

    Attributes:
        shown: Text of token ids, if it is known.
    """

    content: str | list[int]
    params: OfflineSamplingParams
    shown: str | None = None

    @property
    def text(self) -> str | None:
        """Text of the prompt, if it is known."""
        return self.content if isinstance(self.content, str) else self.shown


def given_prompts(prompts: Prompts, params: Params) -> list[GivenPrompt]:
    """Return all prompts with their parameters.

    Raises:
        RequestError: A prompt has none of the forms, or the numbers of prompts and of parameters differ.
    """
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence):
        is_one = True
    else:
        is_one = bool(prompts) and isinstance(prompts[0], int)
    contents = [_content(each) for each in ([prompts] if is_one else prompts)]
    return [GivenPrompt(*pair) for pair in zip(contents, params_of_each(params, len(contents)), strict=True)]


def params_of_each(params: Params, count: int) -> list[OfflineSamplingParams]:
    """Return the parameters of each of `count` prompts; RequestError says that a list has another length."""
    if params is None or isinstance(params, OfflineSamplingParams):
        return [params or OfflineSamplingParams()] * count
    if len(params) != count:
        text = f"{count} prompts need as many sampling_params, or one for all; got {len(params)}"
        raise RequestError(text, param="sampling_params", code="invalid_value")
    return list(params)


def _content(prompt: object) -> str | list[int]:
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence) and all(isinstance(each, int) for each in prompt):
        if not prompt:
            text = "a prompt has no token ids: it needs at least one"
            raise RequestError(text, param="prompts", code="invalid_value")
        return list(prompt)
    text = (
        f"a prompt is a text, token ids, or a dictionary with prompt or prompt_token_ids; got {type(prompt).__name__}"
    )
    raise RequestError(text, param="prompts", code="invalid_type")


# Requests at the server at once: enough for the 64 running sequences of each of several engines, and half of what one
# engine lets wait. Refusals are sent again, so a larger number is not wrong, only slower.
MAX_IN_FLIGHT = 512

Messages = Sequence[Mapping[str, Any]]
Item = TypeVar("Item")
Result = TypeVar("Result")


class LLM:
    """A model for offline generation. It runs in processes of its own, as under `moestro serve`, so tokens are equal.

    Processes that die are restarted, and their prompts go on. Close it, or use it in a `with` block; the processes also
    end with this one.

    Args:
        model: Checkpoint directory, or a name on the Hugging Face hub. `moestro-demo` comes with Moestro.
        settings: Flags of `moestro serve` as names: `max_num_seqs=8`, `dtype="float32"`, `enable_prefix_caching=False`.

    Attributes:
        max_model_len: Most tokens of a prompt and its answer.

    Raises:
        ConfigError: The settings cannot be honoured; the text says what to do.
        EngineDiedError: An engine failed before it was ready; the text is its cause.
    """

    def __init__(self, model: str = "moestro-demo", **settings: object) -> None:
        self._server = OwnedServer([*flags_from({"model": model} | settings)])
        self._loop = BackgroundLoop()
        try:
            self.max_model_len = self._run(_max_model_len)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the model's processes. Further calls do nothing."""
        self._loop.close()
        self._server.close()

    def generate(
        self, prompts: Prompts, sampling_params: Params = None, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Return the answers to all prompts, in their order.

        Args:
            prompts: A prompt or several; each is a text, token ids, or a dictionary with `prompt` or
                `prompt_token_ids`.
            sampling_params: Parameters of all prompts, or of each; None means the defaults.
            use_tqdm: Whether a terminal shows a progress bar. The name is vLLM's.

        Raises:
            RequestError: A prompt or a parameter is invalid; no answer is returned.
            EngineDiedError: The model's processes have ended for good; the text is the cause.
        """
        given = given_prompts(prompts, sampling_params)
        return self._generated(given, "prompts" if use_tqdm else None)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        **fields: object,
    ) -> list[RequestOutput]:
        """Return the answers to one chat or to several, in their order. The text is what the model wrote, not parsed.

        Args:
            messages: Messages of a chat, {"role", "content", ...} each, or a list of such chats.
            sampling_params: Parameters of all chats, or of each; None means the defaults.
            use_tqdm: Whether a terminal shows a progress bar. The name is vLLM's.
            fields: Fields of the API that shape a chat's prompt: `tools`, `add_generation_prompt`,
                `continue_final_message`, `chat_template_kwargs` and others.

        Raises:
            RequestError: A chat or a parameter is invalid; no answer is returned.
            EngineDiedError: The model's processes have ended for good; the text is the cause.
        """
        is_one = not messages or isinstance(messages[0], Mapping)
        chats: Sequence[Any] = [messages] if is_one else messages
        params = params_of_each(sampling_params, len(chats))
        prompts = self._run(lambda client: _gathered(chats, lambda chat: _rendered(client, chat, fields)))
        given = [GivenPrompt(ids, each, text) for (ids, text), each in zip(prompts, params, strict=True)]
        return self._generated(given, "chats" if use_tqdm else None)

    def _generated(self, prompts: Sequence[GivenPrompt], title: str | None) -> list[RequestOutput]:
        """Return the answers to all prompts, with a progress bar if there is a title for it."""
        bar = contextlib.nullcontext(_nothing) if title is None else progress(title, len(prompts))
        with bar as advance:
            return self._run(lambda client: self._answers(client, prompts, advance))

    def _run(self, work: Callable[[ApiClient], Coroutine[Any, Any, Result]]) -> Result:
        """Run `work` with a client of the server. A lost server becomes the cause of its end."""
        self._server.raise_if_closed()

        async def with_client() -> Result:
            async with ApiClient(self._server.url, self._server.api_key) as client:
                return await work(client)

        try:
            return self._loop.run(with_client())
        except UnreachableServerError:
            self._server.raise_if_ended()
            raise

    async def _answers(
        self, client: ApiClient, prompts: Sequence[GivenPrompt], advance: Callable[[], None]
    ) -> list[RequestOutput]:
        async def answer(prompt: GivenPrompt) -> RequestOutput:
            fields = prompt.params.request_fields() | {"prompt": prompt.content, "return_token_ids": True}
            fields["max_tokens"] = await self._max_tokens(client, prompt)
            body = _checked(await client.post("/v1/completions", msgspec.json.encode(fields))).body
            advance()
            return request_output(body, prompt.text)

        return await _gathered(prompts, answer)

    async def _max_tokens(self, client: ApiClient, prompt: GivenPrompt) -> int:
        """Return the most tokens of an answer, at least 1, with which the server names the length of a long prompt."""
        if prompt.params.max_tokens is not None:
            return prompt.params.max_tokens
        num_tokens, limit = len(prompt.content), prompt.params.truncate_prompt_tokens
        if isinstance(prompt.content, str):
            num_tokens = int((await _ask(client, "/tokenize", {"prompt": prompt.content}))["count"])
        return max(1, self.max_model_len - (num_tokens if limit is None or limit < 0 else min(limit, num_tokens)))


def _nothing() -> None:
    """Stand for a progress bar."""


async def _max_model_len(client: ApiClient) -> int:
    return (await client.models())[0].max_model_len or 0


async def _rendered(client: ApiClient, chat: Messages, fields: Mapping[str, object]) -> tuple[list[int], str]:
    """Return the prompt of a chat, as token ids and as text."""
    ids = (await _ask(client, "/tokenize", {**fields, "messages": chat}))["tokens"]
    return ids, (await _ask(client, "/detokenize", {"tokens": ids}))["prompt"]


async def _ask(client: ApiClient, path: str, fields: Mapping[str, object]) -> dict[str, Any]:
    answer = _checked(await client.post(path, msgspec.json.encode(fields)))
    return msgspec.json.decode(answer.body, type=dict[str, Any])


def _checked(answer: ApiAnswer) -> ApiAnswer:
    if answer.status != 200:
        raise refusal_of(answer.status, answer.body)
    return answer


async def _gathered(items: Sequence[Item], make: Callable[[Item], Coroutine[Any, Any, Result]]) -> list[Result]:
    """Return the results of `make` in order, at most `MAX_IN_FLIGHT` at once. The first error ends all others."""
    slots = asyncio.Semaphore(MAX_IN_FLIGHT)

    async def one(number: int, item: Item) -> Result:
        async with slots:
            try:
                return await make(item)
            except RequestError as error:
                if len(items) > 1:
                    error.add_note(f"prompt number {number}, counted from 0")
                raise

    tasks = [asyncio.ensure_future(one(number, item)) for number, item in enumerate(items)]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
