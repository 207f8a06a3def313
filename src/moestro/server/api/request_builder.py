"""Builds engine requests from HTTP bodies: validates, tokenizes, checks limits, hashes. Functions run on threads."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from moestro.core.hashing import hash_blocks, hash_key
from moestro.core.request import Grammar, ModelInfo, Request, SamplingParams, packed_tokens
from moestro.errors import PromptTooLongError, RequestError, shown
from moestro.server.api.chat_fields import RequestedGrammar, refuse_large_grammar
from moestro.server.api.request_fields import refuse_unknown
from moestro.server.api.validation import (
    ALL_LOGPROBS,
    MAX_PROMPT_IDS,
    ChatAsk,
    CompletionAsk,
    Options,
    conversation_places,
    parse_chat,
    parse_chats,
    parse_completion,
)
from moestro.text.chats.chat_format import AnswerFormat, ChatEnd, ChatFormat
from moestro.text.chats.chat_template import DEFAULT_EFFORT, template_variables
from moestro.text.tokenizer import TemplateOptions, Tokenizer
from moestro.web.adapters.field_places import FieldPlaces
from moestro.web.errors import UnknownModelError

DEFAULT_VERBOSITY = "medium"  # Requests nothing, as the default effort does.
# Tokens of all words in both spellings: each choice carries them to its engine. 256 words of eight tokens fit.
MAX_BAD_WORD_TOKENS = 4096
# A longer text is tokenized only if its beginning, of so many characters for each token that fits, does not refuse it.
_TRIED_CHARS_PER_TOKEN = 16
MAX_SCORES = 1_000_000  # Log probabilities of prompt tokens in one response, and of several choices in one.
# Prompt tokens of all choices: 64 MiB on the way to engines, which is 128 choices of 131,072 tokens.
MAX_CHOICE_TOKENS = 1 << 24
_CHAT_PLACES = FieldPlaces({"prompt": "messages"})  # A chat's prompt is what its template makes of the messages.


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model as clients see it.

    Attributes:
        names: Names that clients may use; the first one comes first in the model list.
        created: Load time, in seconds since 1970.
        fingerprint: String that changes whenever answers may change.
        has_priorities: Whether the scheduling policy uses `priority`.
        resumes_streams: Whether another engine continues a stream even if its next tokens may differ.
        has_strict_fields: Whether a request with an unknown field is refused.
        forces_usage: Whether each stream ends with its usage.
        users_are_clients: Whether the user of a request is its client, whatever its field `user` says.
        is_traced: Whether spans of requests are recorded.
        shows_tokenizer: Whether clients may read the tokenizer's settings.
        max_choices_at_once: Choices of one request that engines have at once.
        chat: Formats of the model's answers to chats.
    """

    names: tuple[str, ...]
    created: int
    fingerprint: str
    info: ModelInfo
    tokenizer: Tokenizer
    has_priorities: bool = False
    resumes_streams: bool = False
    has_strict_fields: bool = False
    forces_usage: bool = False
    users_are_clients: bool = False
    is_traced: bool = False
    shows_tokenizer: bool = False
    max_choices_at_once: int = 1024
    chat: ChatFormat = field(default_factory=ChatFormat)

    def name_for(self, requested: str | None) -> str:
        """Return the model name for the response. A request without a name gets the first one."""
        if requested is not None and requested not in self.names:
            raise UnknownModelError(requested)
        return self.names[0] if requested is None else requested


@dataclass(frozen=True, slots=True)
class Arrival:
    """Arrival of an HTTP request.

    Attributes:
        answer_id: Id of its response.
        now_ns: Time of the arrival.
        session_id: Conversation that its headers name; None means that the body may name one.
        client: Name of the client, which its body cannot choose.
        tenant: Tenant of its key; None means that it has none.
        traceparent: Context of the client's span; None where spans are not recorded.
    """

    answer_id: str
    now_ns: int
    session_id: str | None = None
    client: str | None = None
    tenant: str | None = None
    traceparent: str | None = None


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Limit of an answer's reasoning.

    Attributes:
        num_tokens: Most tokens of reasoning.
        end_token_ids: Tokens that end the reasoning.
    """

    num_tokens: int
    end_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One choice: its request to an engine, and the parts of the response that the engine does not generate.

    Attributes:
        stop: Stop strings.
        stop_token_ids: The client's stop tokens, without the model's end tokens.
        keeps_stop: Whether the text of the stop string or the stop token is shown.
        keeps_special_tokens: Whether special tokens of the answer are shown.
        returns_token_ids: Whether the response has the ids of the prompt and the answer.
        echo: Text of the prompt, put before the answer; None means no echo.
        echo_has_special_tokens: Whether `echo` has the text of special tokens, as that of a prompt in token ids has.
        prompt_logprobs: Number of alternatives shown for each prompt token; None means no prompt log probabilities.
        is_copy: Whether the job has the prompt of the job before it, which is counted already.
        answers: Format by which the answer is parsed; None means that all text is content.
        thinking: Limit of the reasoning; None means none.
    """

    request: Request
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    keeps_stop: bool = False
    keeps_special_tokens: bool = False
    returns_token_ids: bool = False
    echo: str | None = None
    echo_has_special_tokens: bool = False
    prompt_logprobs: int | None = None
    is_copy: bool = False
    answers: AnswerFormat | None = None
    thinking: ThinkingBudget | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is ready to be submitted.

    Attributes:
        name: Model name for the response.
        jobs: Jobs, one per choice, in order.
        answer_id: Id of the response.
    """

    name: str
    options: Options
    jobs: list[Job]
    answer_id: str


@dataclass(frozen=True, slots=True)
class _Prompt:
    ids: Sequence[int]
    text: str | None = None  # Text for an echo.
    has_special_tokens: bool = False  # Whether `text` has the text of special tokens.


def prepare_completion(body: bytes, model: ServedModel, arrival: Arrival) -> Prepared:
    """Return the prepared request for a body of `POST /v1/completions`; RequestError if it cannot be served."""
    ask = parse_completion(body, model.info.max_model_len)
    ask = replace(ask, options=_for_server(ask.options, model))
    named = _named(arrival, ask.options)
    jobs = completion_jobs(ask, model, named)
    return Prepared(model.name_for(ask.options.model), ask.options, jobs, named.answer_id)


def prepare_chat(body: bytes, model: ServedModel, arrival: Arrival) -> Prepared:
    """Return the prepared request for a body of `POST /v1/chat/completions`; RequestError if it cannot be served."""
    ask = parse_chat(body)
    ask = replace(ask, options=_for_server(ask.options, model))
    return prepare_chat_ask(ask, model, _named(arrival, ask.options))


def prepare_chats(body: bytes, model: ServedModel, arrival: Arrival) -> Prepared:
    """Return the prepared request for a body of `POST /v1/chat/completions/batch`; RequestError as for one chat."""
    asks = [replace(ask, options=_for_server(ask.options, model)) for ask in parse_chats(body)]
    named = _named(arrival, asks[0].options)
    parts: list[Prepared] = []
    for i, ask in enumerate(asks):
        with conversation_places(i).naming_errors():
            parts.append(prepare_chat_ask(ask, model, replace(named, answer_id=f"{named.answer_id}-{i}")))
    jobs = [job for part in parts for job in part.jobs]
    options = parts[0].options
    if any(part.options.grammar != options.grammar for part in parts):
        raise RequestError(
            "response_format has one grammar for all chats of a batch, and the prompts of these begin their answers in"
            " different ways. Send each to /v1/chat/completions.",
            param="response_format",
            code="invalid_value",
        )
    _refuse_many_copies(
        options, sum(job.request.num_prompt_tokens for job in jobs), len(jobs), model.info.max_model_len
    )
    _refuse_large_answer(options, len(jobs), model.info.max_model_len)
    return replace(parts[0], jobs=jobs, answer_id=named.answer_id)


def prepare_chat_ask(ask: ChatAsk, model: ServedModel, arrival: Arrival) -> Prepared:
    """Return the prepared request of a validated chat. Without max_tokens, each answer may fill the context.

    Raises:
        RequestError: The model or its chat template cannot take the chat.
    """
    name = model.name_for(ask.options.model)
    model.chat.check(ask.use)
    end = chat_prompt(ask, model)
    with _CHAT_PLACES.naming_errors():  # The template writes special tokens.
        ids = encoded(end.prompt, model, ask.options, add_special_tokens=False)
    refuse_foreign_ids("messages", ids, model.info.vocab_size)
    requested = ask.options.grammar
    grammar = None if requested is None else requested.grammar
    answers = model.chat.answers(ask.use, end, grammar, shows_reasoning=ask.shows_reasoning)
    options = replace(ask.options, unknown_fields=ask.options.unknown_fields + _vain_wishes(ask, model))
    if answers is not None and answers.grammar is not None:
        param = "tools" if requested is None else requested.param
        refuse_large_grammar(answers.grammar, param)
        options = replace(options, grammar=RequestedGrammar(answers.grammar, param))
    prompt, thinking = _Prompt(_truncated(ids, options, model.info)), _thinking(ask, model)
    with _CHAT_PLACES.naming_errors():
        jobs = [replace(job, answers=answers, thinking=thinking) for job in _jobs([prompt], options, model, arrival)]
    return Prepared(name, options, jobs, arrival.answer_id)


def _thinking(ask: ChatAsk, model: ServedModel) -> ThinkingBudget | None:
    """Return the limit of the reasoning; RequestError if this model's reasoning cannot be ended from outside."""
    if ask.thinking_budget is None:
        return None
    end = model.chat.reasoning_end
    if end is None:
        raise RequestError(
            "thinking_token_budget needs a model whose reasoning ends with a tag, such as </think>, and this server"
            " knows none of this model. Leave it out, or choose the format with --reasoning-parser.",
            param="thinking_token_budget",
            code="unsupported_parameter",
        )
    return ThinkingBudget(ask.thinking_budget, tuple(model.tokenizer.encode(end, add_special_tokens=False)))


def _named(arrival: Arrival, options: Options) -> Arrival:
    """Return the arrival under the id that the client gave, if it did."""
    if options.request_id is None:
        return arrival
    kind = arrival.answer_id.partition("-")[0]
    return replace(arrival, answer_id=f"{kind}-{options.request_id}")


def completion_jobs(ask: CompletionAsk, model: ServedModel, arrival: Arrival) -> list[Job]:
    """Return the jobs of all prompts: n for the first, n for the second, and so on.

    Raises:
        RequestError: The model cannot take a prompt or a token id.
    """
    return _jobs([_prompt(prompt, ask.options, model) for prompt in ask.prompts], ask.options, model, arrival)


def chat_prompt(ask: ChatAsk, model: ServedModel) -> ChatEnd:
    """Return the text of a chat's prompt, and how it ends.

    Raises:
        RequestError: The model or its chat template cannot take the chat.
    """
    _refuse_foreign_template(ask, model)
    shows_tools = ask.use.choice != "none" or model.chat.shows_unused_tools
    tools = ask.tools if ask.tools and shows_tools else None
    with _CHAT_PLACES.naming_errors():
        refuse_too_much_text(sum(len(message["content"]) for message in ask.messages), model)
        rendering = _rendering(ask, model)
        text = model.tokenizer.render_chat(ask.messages, tools=tools, options=rendering)
        refuse_too_much_text(len(text), model)  # The template may add text to the messages.
        _refuse_dropped_message(ask, text, model, tools, rendering)
    continued = ask.messages[-1]["content"] if ask.template.continue_final_message else None
    return ChatEnd(prompt=text, continued=continued)


def _for_server(options: Options, model: ServedModel) -> Options:
    """Return the options with what the model and the operator decide.

    These are the number of all tokens where the client wants log probabilities of them, and the usage of streams.
    """
    if options.prompt_logprobs == ALL_LOGPROBS:
        options = replace(options, prompt_logprobs=model.info.vocab_size)
    return replace(options, include_usage=options.stream) if model.forces_usage else options


def _prompt(prompt: str | tuple[int, ...], options: Options, model: ServedModel) -> _Prompt:
    if isinstance(prompt, str):
        refuse_too_much_text(len(prompt), model)
        ids: Sequence[int] = encoded(prompt, model, options, add_special_tokens=True)
    else:
        ids = prompt
    refuse_foreign_ids("prompt", ids, model.info.vocab_size)
    kept = _truncated(ids, options, model.info)
    if not options.echo:
        return _Prompt(kept)
    if isinstance(prompt, str) and len(kept) == len(ids):
        return _Prompt(kept, prompt)
    text = model.tokenizer.decode(kept)
    return _Prompt(kept, text, has_special_tokens=True)


def encoded(text: str, model: ServedModel, options: Options, *, add_special_tokens: bool) -> list[int]:
    """Return the tokens of a prompt; PromptTooLongError comes before the ids of a prompt that cannot fit are copied."""
    tokenizer, limit = model.tokenizer, model.info.max_model_len
    max_tokens = 1 if options.max_tokens is None or options.has_default_limit else options.max_tokens
    truncates = options.truncate_prompt_tokens is not None
    num_tried = _TRIED_CHARS_PER_TOKEN * limit
    if len(text) > num_tried and not truncates:
        # Twice the limit, because more text may change the last tokens of the beginning.
        num_tokens = len(tokenizer.encoding(text[:num_tried], add_special_tokens=add_special_tokens))
        if num_tokens > 2 * limit:
            raise PromptTooLongError(num_tokens, max_tokens, limit)
    encoding = tokenizer.encoding(text, add_special_tokens=add_special_tokens)
    if len(encoding) > limit and not truncates:
        raise PromptTooLongError(len(encoding), max_tokens, limit)
    ids: list[int] = encoding.ids
    return ids


def _truncated(ids: Sequence[int], options: Options, info: ModelInfo) -> Sequence[int]:
    """Return the tokens of a prompt, as many as the client allows, from the end or from the beginning."""
    most = options.truncate_prompt_tokens
    if most == -1:
        most = max(1, info.max_model_len - (options.max_tokens or 1))
    if most is None:
        return ids
    return ids[:most] if options.keeps_first_tokens else ids[-most:]


def _jobs(prompts: Sequence[_Prompt], options: Options, model: ServedModel, arrival: Arrival) -> list[Job]:
    refuse_unknown(options.unknown_fields, is_strict=model.has_strict_fields)
    _refuse_vain_priority(options.priority, model)
    if model.users_are_clients:
        options = replace(options, user=arrival.client)
    if arrival.session_id is not None:
        options = replace(options, session_id=arrival.session_id)
    refuse_foreign_ids("allowed_token_ids", options.allowed_token_ids, model.info.vocab_size)
    bad_words = _bad_words(options.bad_words, model)
    refuse_foreign_ids("stop_token_ids", options.stop_token_ids, model.info.vocab_size)
    refuse_foreign_ids("logprob_token_ids", options.logprob_token_ids, model.info.vocab_size)
    refuse_foreign_ids("logit_bias", [token_id for token_id, _ in options.logit_bias], model.info.vocab_size)
    num_tokens = options.n * sum(len(prompt.ids) for prompt in prompts)
    _refuse_many_copies(options, num_tokens, len(prompts) * options.n, model.info.max_model_len)
    scored = _scored(options)
    if scored is not None:
        _refuse_too_many_scores(scored, num_tokens)
    _refuse_large_answer(options, len(prompts) * options.n, model.info.max_model_len)
    ends = () if options.ignore_eos else model.info.eos_token_ids
    stop_token_ids = tuple(token_id for token_id in options.stop_token_ids if token_id not in ends)
    jobs: list[Job] = []
    for prompt in prompts:
        first = _request(prompt.ids, options, model, f"{arrival.answer_id}-{len(jobs)}", arrival)
        if bad_words:
            first = msgspec.structs.replace(
                first, sampling=msgspec.structs.replace(first.sampling, bad_words=bad_words)
            )
        for copy in range(options.n):
            request = first if copy == 0 else _copy(first, options, copy, f"{arrival.answer_id}-{len(jobs)}")
            jobs.append(
                Job(
                    request=request,
                    stop=options.stop,
                    stop_token_ids=stop_token_ids,
                    keeps_stop=options.keeps_stop,
                    keeps_special_tokens=options.keeps_special_tokens,
                    returns_token_ids=options.returns_token_ids,
                    echo=prompt.text,
                    echo_has_special_tokens=prompt.has_special_tokens,
                    prompt_logprobs=options.prompt_logprobs,
                    is_copy=copy > 0,
                )
            )
    return jobs


def _request(ids: Sequence[int], options: Options, model: ServedModel, request_id: str, arrival: Arrival) -> Request:
    if not ids:
        raise RequestError("The prompt has no tokens.", param="prompt", code="invalid_value")
    tokens = np.array(ids, np.int32)
    key = hash_key(model.info.model_id, None, options.cache_salt)
    return Request(
        request_id=request_id,
        num_prompt_tokens=len(tokens),
        sampling=_sampling(len(tokens), options, model.info),
        arrival_ns=arrival.now_ns,
        token_ids=tokens.tobytes(),
        block_hashes=hash_blocks(key, tokens, model.info.block_size),
        hash_key=key,
        cache_salt=options.cache_salt,
        priority=options.priority,
        service_class=options.service_class,
        user=options.user,
        client=arrival.client,
        tenant=arrival.tenant,
        traceparent=arrival.traceparent,
        session_id=options.session_id,
    )


def _copy(first: Request, options: Options, copy: int, request_id: str) -> Request:
    """Return the request with a seed: the client's plus `copy`, as in vLLM, or a random one."""
    sampling = msgspec.structs.replace(first.sampling, seed=_seed(options, copy))
    return msgspec.structs.replace(first, request_id=request_id, sampling=sampling)


def following(grammar: Grammar, jobs: Sequence[Job]) -> list[Job]:
    """Return `jobs` with `grammar`, an equal one to theirs that was checked."""
    found: list[Job] = []
    for job in jobs:
        sampling = msgspec.structs.replace(job.request.sampling, grammar=grammar)
        found.append(replace(job, request=msgspec.structs.replace(job.request, sampling=sampling)))
    return found


def _seed(options: Options, copy: int) -> int:
    return secrets.randbits(64) if options.seed is None else (options.seed + copy) % 2**64


def _sampling(num_prompt_tokens: int, options: Options, info: ModelInfo) -> SamplingParams:
    """Return the sampling parameters. A client's token limit that does not fit is refused, never lowered."""
    room = info.max_model_len - num_prompt_tokens
    max_tokens = max(1, room) if options.max_tokens is None else options.max_tokens
    if options.has_default_limit:
        max_tokens = min(max_tokens, max(1, room))
    if max_tokens > room:
        raise PromptTooLongError(num_prompt_tokens, max_tokens, info.max_model_len)
    stops = tuple(dict.fromkeys((() if options.ignore_eos else info.eos_token_ids) + options.stop_token_ids))
    _check_min_tokens(options.min_tokens, max_tokens, stops, info.vocab_size)
    numbers: dict[str, Any] = msgspec.structs.asdict(info.sampling_defaults) | options.sampling
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=options.min_tokens,
        logit_bias=options.logit_bias,
        seed=_seed(options, 0),
        stop_token_ids=stops,
        logprobs=options.logprobs,
        prompt_logprobs=_scored(options),
        logprob_token_ids=options.logprob_token_ids,
        lists_prompt=bool(options.echo and options.logprob_token_ids),
        grammar=None if options.grammar is None else options.grammar.grammar,
        allowed_tokens=packed_tokens(options.allowed_token_ids),
        **numbers,
    )


def _bad_words(words: Sequence[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that spell the words, at the start of a text and, as in vLLM, after a space.

    The second spelling counts only if it has as many tokens, and another first one.
    """
    spellings: list[tuple[int, ...]] = []
    for word in words:
        plain, spaced = (
            tuple(model.tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False)) for prefix in ("", " ")
        )
        refuse_foreign_ids("bad_words", (*plain, *spaced), model.info.vocab_size)
        spellings.append(plain)
        if spaced[0] != plain[0] and len(spaced) == len(plain):
            spellings.append(spaced)
    if (num_tokens := sum(map(len, spellings))) > MAX_BAD_WORD_TOKENS:
        raise RequestError(
            f"bad_words have {num_tokens} tokens in all spellings, and may have {MAX_BAD_WORD_TOKENS} at most. Send"
            " fewer or shorter words.",
            param="bad_words",
            code="invalid_value",
        )
    return tuple(spellings)


def _scored(options: Options) -> int | None:
    """Return the number of alternatives that an engine reports for each prompt token; None means no scores."""
    wanted = [
        count for count in (options.prompt_logprobs, options.logprobs if options.echo else None) if count is not None
    ]
    return max(wanted, default=None)


def _rendering(ask: ChatAsk, model: ServedModel) -> TemplateOptions:
    """Return the arguments of the chat's rendering, with all variables of the template."""
    wishes = {} if ask.verbosity is None else {"verbosity": ask.verbosity}
    variables = template_variables(_effort(ask, model), wishes | ask.template.variables, model.chat.variables)
    return replace(ask.template, variables=variables)


def _effort(ask: ChatAsk, model: ServedModel) -> str | None:
    """Return the effort for the chat's template: the wanted one, or the nearest that the model's template takes."""
    if ask.effort is None or ask.template.template is not None:
        return ask.effort
    return model.tokenizer.effort_for(ask.effort)


def _vain_wishes(ask: ChatAsk, model: ServedModel) -> tuple[str, ...]:
    """Return the names of fields that ask for what the chat template does not read."""
    if ask.template.template is not None:
        return ()
    found = []
    if ask.effort not in (None, DEFAULT_EFFORT) and _effort(ask, model) is None:
        found.append("reasoning_effort")
    if ask.verbosity not in (None, DEFAULT_VERBOSITY) and not model.tokenizer.template_names("verbosity"):
        found.append("verbosity")
    return tuple(found)


def _refuse_dropped_message(
    ask: ChatAsk, prompt: str, model: ServedModel, tools: Sequence[dict[str, Any]] | None, rendering: TemplateOptions
) -> None:
    """Refuse a message that leaves no trace in the prompt, so that nothing a client says is lost in silence."""
    messages = ask.messages

    def render(kept: Sequence[dict[str, Any]]) -> str | None:
        try:
            return model.tokenizer.render_chat(kept, tools=tools, options=rendering)
        except RequestError:
            return None  # The template needs the message.

    try:
        silent = model.tokenizer.silent_messages(messages, tools=tools, options=rendering)
    except RequestError:  # The template refuses other texts.
        silent = tuple(i for i, each in enumerate(messages) if each["content"].strip() not in prompt)
    for i in _first_and_last_of_roles(messages, silent):
        kept = [message for j, message in enumerate(messages) if j != i]
        if not kept:  # Templates may need a message, so this one gets another text.
            kept = [messages[i] | {"content": f"{messages[i]['content']}."}]
        if render(kept) == prompt:
            raise RequestError(
                f"messages[{i}] leaves no trace in the prompt, because the model's chat template has no place for a"
                f" message of role {messages[i]['role']} there. Send its text in another message.",
                param=f"messages[{i}]",
                code="message_without_effect",
            )


def _first_and_last_of_roles(messages: Sequence[dict[str, Any]], numbers: Sequence[int]) -> list[int]:
    """Return of `numbers` the first and the last message of each role: templates drop roles, or all but one of one."""
    by_role: dict[str, list[int]] = {}
    for i in numbers:
        by_role.setdefault(messages[i]["role"], []).append(i)
    return sorted({i for found in by_role.values() for i in (found[0], found[-1])})


def _refuse_foreign_template(ask: ChatAsk, model: ServedModel) -> None:
    """Refuse a template that the operator does not trust."""
    if ask.template.template is not None and not model.chat.trusts_templates:
        raise RequestError(
            "chat_template is refused, because a template is a program. The operator can accept it with"
            " --trust-request-chat-template.",
            param="chat_template",
            code="unsupported_parameter",
        )


def _refuse_vain_priority(priority: int, model: ServedModel) -> None:
    if priority and not model.has_priorities:
        raise RequestError(
            f"priority {priority} would have no effect, because this server's scheduling policy ignores it. Leave it"
            " out, or start the server with --scheduling-policy priority.",
            param="priority",
            code="invalid_value",
        )


def _check_min_tokens(min_tokens: int, max_tokens: int, stops: tuple[int, ...], vocab_size: int) -> None:
    if min_tokens > max_tokens:
        text = f"min_tokens must not exceed the {max_tokens} tokens that fit into the context, got {min_tokens}."
        raise RequestError(text, param="min_tokens", code="invalid_value")
    if min_tokens and len(stops) >= vocab_size:
        text = "stop_token_ids lists every token of the vocabulary: with min_tokens, no first token is possible."
        raise RequestError(text, param="stop_token_ids", code="invalid_value")


def _refuse_too_many_scores(num_alternatives: int, num_tokens: int) -> None:
    """Refuse a response that would be too large, before any work is done for it."""
    if (num_alternatives + 1) * num_tokens > MAX_SCORES:
        raise RequestError(
            f"Log probabilities of {num_tokens} prompt tokens with {num_alternatives} alternatives each are too many:"
            f" the limit of one request is {MAX_SCORES}. Send fewer prompts, or ask for fewer alternatives.",
            param="logprobs",
            code="invalid_value",
        )


def _refuse_many_copies(options: Options, num_tokens: int, num_choices: int, max_model_len: int) -> None:
    """Refuse choices whose prompts are too much in all: each choice carries its prompt to an engine, or back too."""
    repeats = options.echo or options.returns_token_ids
    limit = max(MAX_PROMPT_IDS if repeats else MAX_CHOICE_TOKENS, max_model_len)
    if num_tokens > limit:
        where = " with echo or return_token_ids" if repeats else ""
        raise RequestError(
            f"The prompts of all {num_choices} choices have {num_tokens} tokens, and may have {limit} in all{where}."
            " Lower n, or send several requests.",
            param="n",
            code="invalid_value",
        )


def _refuse_large_answer(options: Options, num_choices: int, max_model_len: int) -> None:
    """Refuse several choices whose log probabilities, which are kept until all have ended, may be too many."""
    if options.stream or options.logprobs is None or num_choices == 1:
        return
    max_tokens = max_model_len if options.max_tokens is None else min(options.max_tokens, max_model_len)
    num_scores = num_choices * max_tokens * (options.logprobs + 1)
    if num_scores > MAX_SCORES:
        raise RequestError(
            f"The answers of {num_choices} choices may have {num_scores} log probabilities, and without"
            f" stream: true {MAX_SCORES} are the limit. Lower max_tokens or n, or stream.",
            param="logprobs",
            code="invalid_value",
        )


def refuse_foreign_ids(param: str, ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids outside of the vocabulary, including a tokenizer's: it may have more tokens than the model."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise RequestError(
            f"{param}: token id out of range: must be between 0 and {vocab_size - 1}, got {shown(wrong)}.",
            param=param,
            code="invalid_value",
        )


def refuse_too_much_text(num_chars: int, model: ServedModel) -> None:
    """Refuse text that is too long for any tokenization, before time is spent to tokenize it."""
    limit = model.info.max_model_len * model.tokenizer.max_token_chars
    if num_chars > limit:
        raise RequestError(
            f"This model's maximum context length is {model.info.max_model_len} tokens. However, your prompt contains"
            f" {num_chars} characters, and at most {limit} can fit. Shorten the prompt.",
            param="prompt",
            code="context_length_exceeded",
        )
