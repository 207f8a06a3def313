"""Converts text to token ids and back. Never loads torch. Safe to call from several threads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Encoding
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel, DecodeStream

from moestro.core.processes import as_exception
from moestro.errors import ConfigError, RequestError, shown, shown_literal
from moestro.files.checkpoint import MAX_CONFIG_BYTES, check_files, read_bytes
from moestro.files.text_files import text_of
from moestro.text.chats.chat_template import (
    EFFORT_VARIABLE,
    THINKING_VARIABLE,
    Renderers,
    RenderJob,
    as_system_messages,
    nearest_effort,
    taken_efforts,
    template_variables,
)
from moestro.text.tokenizer_library import ANY_TEXT, InvalidPrefixError, TokenizerLibrary, TokenTexts, refuse_growth
from moestro.text.transformers_part import import_part

PreTrainedTokenizerFast = import_part("transformers.tokenization_utils_tokenizers").PreTrainedTokenizerFast

# The library's own threads would serve all texts in one queue, where a word waits behind a book: each text is tokenized
# on the thread that asks. The library reads the variable at each call.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

_MARK = "\ufeff"  # byte order mark, which editors of Windows put before a text
_UNFINISHED = "\ufffd"  # a decoder's replacement for bytes that are no character (yet)
# A character has at most four bytes, so of so many tokens without a character the first ones are none.
_HELD_TOKENS = 8
_CHARACTER_TOKENS = 4  # most tokens of one character
CONTEXT_TOKENS = 24  # most tokens of the prompt that affect the text of the first generated token
_LEAST_CONTEXT = 4
# Shapes of chats whose silent messages are kept, the longest of them, and the messages of a chat that is looked up.
_KEPT_SHAPES, _MAX_SHAPE_BYTES, _MOST_PROBED = 256, 8 << 10, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOptions:
    """What a request says about the rendering of its chat.

    Attributes:
        add_generation_prompt: the prompt ends with the start of an assistant's message.
        continue_final_message: the prompt ends within the last message, which the answer continues.
        variables: values for the template, by name.
        template: template instead of the model's own.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any] = field(default_factory=dict)
    template: str | None = None


PLAIN = TemplateOptions()


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    Args:
        path: directory with tokenizer.json and, for chats, a chat template. It is kept as an attribute.
        chat_template: template instead of the directory's: the name of a file, or the text itself.

    Raises:
        ConfigError: there is no readable tokenizer.json, or a file is a link out of the directory; or the tokenizer
            makes much of little; or the template is neither a file nor a text.
    """

    def __init__(self, path: Path, chat_template: str | None = None) -> None:
        if not (path / "tokenizer.json").is_file():
            raise ConfigError(
                f"no tokenizer.json in {path}: only fast tokenizers are supported;"
                " name a directory that has one with --tokenizer DIR"
            )
        check_files(path)
        self.path = path
        refuse_growth(path, lambda: _fast_tokenizer(path).backend_tokenizer)
        try:
            self._load(path)
        except BaseException as error:  # each reader of a broken file raises errors of its own, and Rust panics
            raise ConfigError(f"cannot load the tokenizer in {path}: {_one_line(as_exception(error))}") from error
        if chat_template is not None:
            self._fast.chat_template = template_text(chat_template)
        self._renderers = Renderers()
        self._efforts: tuple[str, ...] | None = None  # None: not tried yet
        self._silent: dict[bytes | None, tuple[int, ...]] = {}  # by the shape of a chat

    def _load(self, path: Path) -> None:
        self._fast = _fast_tokenizer(path)
        self._fast.chat_template = _checked_template(self._fast.chat_template)
        # The fast tokenizer's own call would set truncation on this shared object, and two threads at once would fail
        # with "Already borrowed".
        self.backend: Backend = self._fast.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        for special in (False, True):  # so that a tokenizer that fails for any text is known at the start
            self.backend.decode(self.backend.encode(ANY_TEXT, add_special_tokens=special).ids)
        self.library = TokenizerLibrary(self.backend)
        self.special_ids = frozenset(
            token_id for token_id, token in self.backend.get_added_tokens_decoder().items() if token.special
        )
        self.special_texts = frozenset(map(self.backend.id_to_token, self.special_ids))
        self.token_texts = TokenTexts(self.library)
        # Upper bound: a byte-level token of n symbols stands for n bytes, which are n characters at most.
        self.max_token_chars = max(map(len, self.backend.get_vocab(with_added_tokens=True)))
        # Texts found so far, by token. Where text is bytes end to end, a token of whole characters always has the same.
        self.texts_alone: dict[int, str] = {}
        self.has_texts_alone = isinstance(self.backend.decoder, ByteLevel)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; with `add_special_tokens` also those that the model needs around every text."""
        return self.library.encode(text, add_special_tokens=add_special_tokens)

    def encoding(self, text: str, *, add_special_tokens: bool) -> Encoding:
        """As `encode`, in the library's form, whose length is known before its ids are copied."""
        return self.library.encoding(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens, including special ones."""
        return self.library.decode(ids)

    def name(self, token_id: int) -> str | None:
        """Entry of a token in the vocabulary; None means that there is none."""
        return self.library.name(token_id)

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        options: TemplateOptions = PLAIN,
    ) -> str:
        """Return the prompt that the chat template makes of `messages`, by default up to the assistant's turn.

        Args:
            tools: tools in the API's form; templates without tools ignore them.

        Raises:
            RequestError: the model has no template, or its template refuses these messages or exceeds its limits.
        """
        given_tools = None if tools is None else list(tools)
        template = self._template(given_tools) if options.template is None else options.template
        job = RenderJob(
            template=template,
            messages=list(messages) if "developer" in template else as_system_messages(messages),
            tools=given_tools,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            variables={**options.variables, **self._fast.special_tokens_map},
        )
        return self._renderers.render(job)

    def silent_messages(
        self, messages: Sequence[dict[str, Any]], *, tools: Sequence[Any] | None, options: TemplateOptions
    ) -> tuple[int, ...]:
        """Return the numbers of the messages whose text seems to reach no prompt, in order.

        A chat of the same shape with short texts is rendered in place of `messages`, once for each shape, so a template
        that treats texts differently may still show them.

        Raises:
            RequestError: as for `render_chat`.
        """
        probes = [_probe(i, message) for i, message in enumerate(messages)]
        few_tools = None if tools is None else list(tools[:1])
        shape = None
        if options.template is None and len(probes) <= _MOST_PROBED:
            shape = msgspec.json.encode([probes, bool(tools), options])
        found = self._silent.get(shape)
        if found is None:
            prompt = self.render_chat(probes, tools=few_tools, options=options)
            found = tuple(i for i, probe in enumerate(probes) if probe["content"] not in prompt)
            if shape is not None and len(shape) <= _MAX_SHAPE_BYTES:
                if len(self._silent) >= _KEPT_SHAPES:
                    self._silent.clear()
                self._silent[shape] = found
        return found

    @property
    def chat_template(self) -> str:
        """Text of the model's chat template; of several, all their texts."""
        template = self._fast.chat_template or ""
        return "\n".join(template.values()) if isinstance(template, dict) else template

    def template_names(self, variable: str) -> bool:
        """Return whether any chat template of the model mentions `variable`, so that its value may matter."""
        return variable in self.chat_template

    def effort_for(self, wanted: str) -> str | None:
        """Return the effort that the chat template takes for the `wanted` one; None if it takes no efforts.

        The first call renders a short chat with each effort.
        """
        if not self.template_names(EFFORT_VARIABLE):
            return wanted if self.template_names(THINKING_VARIABLE) else None
        if self._efforts is None:
            self._efforts = taken_efforts(self._try_effort)
        return nearest_effort(wanted, self._efforts)

    def _try_effort(self, effort: str) -> None:
        variables = template_variables(effort, {}, {})
        self.render_chat([{"role": "user", "content": "x"}], options=TemplateOptions(variables=variables))

    def special_ids_of(self, texts: Iterable[str]) -> frozenset[int]:
        """Return the ids of those special tokens whose text is in `texts`."""
        found = {self.backend.token_to_id(text) for text in texts}
        return frozenset(token_id for token_id in found if token_id is not None and token_id in self.special_ids)

    def _template(self, tools: list[Any] | None) -> str:
        if not self._fast.chat_template:
            raise RequestError(
                "This model has no chat template. Send the prompt as text to /v1/completions, or start the server with"
                " --chat-template.",
                param="messages",
                code="no_chat_template",
            )
        try:
            template: str = self._fast.get_chat_template(tools=tools)
        except ValueError as error:  # several templates, but none for this kind of chat
            text = f"This model has no chat template for these messages: {shown(error)}"
            raise RequestError(text, param="messages", code="no_chat_template") from error
        return template

    def warm_chats(self) -> None:
        """Start the rendering process, so that the first chat does not wait for it."""
        if self._fast.chat_template:
            self._renderers.warm()

    def close(self) -> None:
        """End the rendering processes."""
        self._renderers.close()

    def detokenizer(self, prompt_ids: Sequence[int], shown_special: frozenset[int] = frozenset()) -> Detokenizer:
        """Make a detokenizer for the tokens generated after `prompt_ids`."""
        return Detokenizer(self, prompt_ids, shown_special)


def _probe(number: int, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of the same shape with short texts; a text of its own marks the content, if there is one."""
    probe = message | {"content": f"zq{number}qz" if message["content"].strip() else ""}
    if "tool_calls" in message:
        probe["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": {}}} for call in message["tool_calls"]
        ]
    for name in ("reasoning", "reasoning_content"):
        if name in message:
            probe[name] = "zq" if message[name] else ""
    return probe


def _fast_tokenizer(path: Path) -> Any:
    """Load transformers' tokenizer."""
    return PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)


def template_text(given: str) -> str:
    """Return the template in the file `given`, or `given` itself if it is one.

    Raises:
        ConfigError: it is neither.
    """
    if "{" in given or "\n" in given:  # as in vLLM: no name of a file has these
        return given
    try:
        return text_of(read_bytes(Path(given), MAX_CONFIG_BYTES))
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"--chat-template {given!r} is neither a readable file nor a template: {error}") from None


def _checked_template(template: object) -> str | dict[str, str] | None:
    """Return the template of a checkpoint, or its templates by name, without the byte order marks of their files."""
    texts = template.values() if isinstance(template, dict) else (template,)
    if template is not None and not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"the chat template must be a text, or texts by name, got {shown_literal(template)}")
    if isinstance(template, dict):
        return {name: text.removeprefix(_MARK) for name, text in template.items()}
    return template.removeprefix(_MARK) if isinstance(template, str) else None


def _one_line(error: Exception) -> str:
    return shown(" ".join(str(error).split()) or type(error).__name__)


class Detokenizer:
    """Text of a growing token sequence. Unfinished characters wait for their bytes.

    The pieces, `flush` included, join to the text of decoding everything at once, for any tokenizer whose text of more
    tokens begins with its text of fewer. (Byte-fallback tokenizers break that rule where the model emits invalid UTF-8;
    there the pieces stay as they were sent.)

    Args:
        prompt_ids: the preceding tokens, or the last `CONTEXT_TOKENS` of them. Some tokenizers strip the space of a
            first token, and these make sure that no generated token is the first.
        shown_special: special tokens whose text is kept nevertheless.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], shown_special: frozenset[int] = frozenset()
    ) -> None:
        self._library = tokenizer.library
        self._hidden_ids = tokenizer.special_ids - shown_special
        self._before = _context(tokenizer, prompt_ids)  # the last tokens whose text was returned
        self._held: list[int] = []  # tokens whose text was not returned yet
        self._texts, self._learns = tokenizer.texts_alone, tokenizer.has_texts_alone
        self._stream: DecodeStream | None = None  # behind `_before`; the hidden tokens never reach it

    def push(self, token_id: int) -> str:
        """Return the text that this token makes certain; often "" and seldom more than a word."""
        if token_id in self._hidden_ids:
            return ""
        is_alone = not self._held
        if is_alone and (known := self._texts.get(token_id)) is not None:
            self._before, self._stream = [token_id], None
            return known
        if self._library.name(token_id) is None:
            return ""  # A model may have more tokens than its tokenizer; they have no text.
        self._held.append(token_id)
        text = self._step(token_id)
        if text is None:
            return "" if len(self._held) < _HELD_TOKENS else self._settle()
        if is_alone and self._learns:
            self._texts[token_id] = text
        self._before, self._held = self._held, []
        return text

    def flush(self) -> str:
        """Return the held-back text at the end: bytes that never became a character; "" if they change sent text."""
        if not self._held:
            return ""
        before = self._library.decode(self._before)
        text = self._library.decode(self._before + self._held)
        self._before, self._held = self._held, []
        return text.removeprefix(before) if text.startswith(before) else ""

    def _settle(self) -> str:
        """Return the text of those held tokens that no further token can make a character of.

        Without it, each of many such tokens would be decoded together with all before it.
        """
        held, before = self._held, self._text_behind([])
        whole = self._text_behind(held)
        num_settled = next(
            (
                num
                for num in range(len(held) - 1, len(held) - _CHARACTER_TOKENS, -1)
                if whole == self._text_behind(held[:num]) + self._text_behind(held[num:])[len(before) :]
            ),
            len(held),  # No border lies between characters, so the tokens are none.
        )
        text = self._text_behind(held[:num_settled])
        self._held, self._stream = [], None
        for token_id in held[num_settled:]:
            self._held.append(token_id)
            self._step(token_id)
        return text.removeprefix(before)

    def _text_behind(self, token_ids: list[int]) -> str:
        """Return the text of the last finished tokens and `token_ids`."""
        return self._library.decode(self._before + token_ids)

    def _step(self, token_id: int) -> str | None:
        if self._stream is None:
            self._stream = DecodeStream(ids=self._before, skip_special_tokens=False)
        try:
            return self._library.step(self._stream, token_id)
        except InvalidPrefixError:
            pass
        # Invalid UTF-8 in a byte-fallback vocabulary changed returned text: continue from here, as vLLM does.
        self._held = [token_id]
        self._stream = DecodeStream(skip_special_tokens=False)
        return self._library.step(self._stream, token_id)


def _context(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> list[int]:
    """The shortest end of the prompt that decodes to whole characters."""
    plain = [token_id for token_id in prompt_ids[-CONTEXT_TOKENS:] if token_id not in tokenizer.special_ids]
    for length in range(min(_LEAST_CONTEXT, len(plain)), len(plain) + 1):
        end = plain[len(plain) - length :]
        if _UNFINISHED not in tokenizer.library.decode(end, skip_special_tokens=True):
            return end
    return []
