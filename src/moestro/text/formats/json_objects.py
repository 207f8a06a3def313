"""Calls whose arguments are a JSON object: Hermes, Llama 3, Granite, Mistral and DeepSeek.

The markers around the object differ, and whether the name stands within it.
"""

from __future__ import annotations

from typing import ClassVar

from moestro.text.json_text import opened_object
from moestro.text.parsing.call_readers import JsonCallReader, read_value
from moestro.text.parsing.output_parser import TOOL_PARSERS, ToolParser
from moestro.text.parsing.parser_input import BrokenCallError, Markers, Steps

_HERMES_START, _HERMES_END = "<tool_call>", "</tool_call>"
_HERMES_STARTS, _HERMES_ENDS = Markers(_HERMES_START), Markers(_HERMES_END)


@TOOL_PARSERS.register_function(
    "hermes", "Hermes, Qwen 2.5 and Qwen 3: JSON objects in `<tool_call>` tags.", source="Qwen3's chat template"
)
class HermesParser(ToolParser):
    """Parses JSON objects in tags. A call whose JSON breaks ends at its end tag."""

    MARKERS = (_HERMES_START, _HERMES_END)
    TEMPLATE = (_HERMES_START, "arguments")
    STARTS = (_HERMES_START,)

    def steps(self) -> Steps[None]:
        """Parse content and calls in turn."""
        while (yield from self._input.until(_HERMES_STARTS, self.show)):
            yield from self.or_content(self._call(), _HERMES_START)

    def _call(self) -> Steps[None]:
        yield from self._input.skip_space()
        try:
            yield from JsonCallReader(self, self._input).call()
        except BrokenCallError:
            if self.may_be_content:
                raise
            if not (yield from self._input.until(_HERMES_ENDS, self.add_arguments)):
                raise
        else:
            yield from self._input.skip_space()
            yield from self._input.take_if(_HERMES_END)


_LLAMA_TAG = "<|python_tag|>"
_LLAMA_TAGS = Markers(_LLAMA_TAG)


@TOOL_PARSERS.register_function(
    "llama3_json",
    "Llama 3.1 to 3.3: `{...}` with `name` and `parameters`; several are separated by `;`.",
    source="Llama 3.1's prompt format",
)
class Llama3JsonParser(ToolParser):
    """Parses JSON objects that name a tool of the request. Any other JSON is content: it may be the answer itself."""

    MARKERS = (_LLAMA_TAG,)
    TEMPLATE = ('"parameters": dictionary of argument name',)
    STARTS = (_LLAMA_TAG,)

    def steps(self) -> Steps[None]:
        """Parse calls at the start of the answer, and after each tag."""
        yield from self._input.skip_space()
        if (yield from self._input.next_char()) == "{":
            yield from self._calls("")
        while (yield from self._input.until(_LLAMA_TAGS, self.show)):
            yield from self._calls(_LLAMA_TAG)

    def _calls(self, marker: str) -> Steps[None]:
        while (yield from self.or_content(self._call(), marker, shows_cut=marker != _LLAMA_TAG)):
            yield from self._input.skip_space()
            marker = yield from self._input.take_if(";", ",")
            if not marker:
                return

    def _call(self) -> Steps[None]:
        yield from self._input.skip_space()
        yield from JsonCallReader(self, self._input).call()


_GRANITE_TOKEN, _GRANITE_TAG = "<|tool_call|>", "<tool_call>"
_GRANITE_STARTS = Markers(_GRANITE_TOKEN, _GRANITE_TAG)


@TOOL_PARSERS.register_function(
    "granite",
    "Granite 3.0 to 3.3: a list of JSON objects, at the start or after `<|tool_call|>`.",
    source="Granite 3's chat template",
)
class GraniteParser(ToolParser):
    """Parses lists of calls. A list without a marker counts at the start of the answer alone."""

    MARKERS = (_GRANITE_TOKEN,)
    TEMPLATE = (_GRANITE_TOKEN, "<|start_of_role|>")
    STARTS = (_GRANITE_TOKEN, _GRANITE_TAG)

    def steps(self) -> Steps[None]:
        """Parse content and lists of calls in turn."""
        yield from self.lists_of_calls(_GRANITE_STARTS, self._calls)

    def _calls(self) -> Steps[None]:
        yield from self._input.skip_space()
        yield from JsonCallReader(self, self._input).array()


_MISTRAL_START, _MISTRAL_ARGUMENTS, _MISTRAL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_MISTRAL_STARTS = Markers(_MISTRAL_START)
_AFTER_MISTRAL_NAME = Markers(_MISTRAL_ARGUMENTS, _MISTRAL_ID, "{")
_AFTER_MISTRAL_ID = Markers(_MISTRAL_ARGUMENTS, "{")


@TOOL_PARSERS.register_function(
    "mistral",
    "Mistral, both forms: a list of JSON objects, or `NAME[ARGS]{...}`, after `[TOOL_CALLS]`.",
    source="mistral-common, tokenizers v3 to v13",
)
class MistralParser(ToolParser):
    """Parses the calls after `[TOOL_CALLS]`."""

    MARKERS = (_MISTRAL_START, _MISTRAL_ARGUMENTS, _MISTRAL_ID)
    TEMPLATE = (_MISTRAL_START,)
    STARTS = (_MISTRAL_START,)
    ENDS_WITH_ANSWER = True
    ID_CHARS = 9  # its chat templates refuse ids of another length

    def steps(self) -> Steps[None]:
        """Parse content and calls in turn."""
        while (yield from self._input.until(_MISTRAL_STARTS, self.show)):
            yield from self.or_content(self._calls(), _MISTRAL_START)

    def _calls(self) -> Steps[None]:
        yield from self._input.skip_space()
        if (yield from self._input.next_char()) in ("[", "{"):
            yield from JsonCallReader(self, self._input).array()
        else:
            yield from self._named()

    def _named(self) -> Steps[None]:
        name, marker = yield from self._input.short_until(_AFTER_MISTRAL_NAME)
        call_id = ""
        if marker == _MISTRAL_ID:
            call_id, marker = yield from self._input.short_until(_AFTER_MISTRAL_ID)
        if not name.strip() or "\n" in name.strip():
            raise BrokenCallError
        self.begin_call(name, call_id.strip())
        if marker == _MISTRAL_ARGUMENTS:
            yield from self._input.skip_space()
            yield from read_value(self._input, self.add_arguments)
        else:
            self.add_arguments(marker)
            yield from self._input.scanned(opened_object(), self.add_arguments)


def _deepseek_token(words: str) -> str:
    """Return a special token. DeepSeek writes a full-width bar for |, and a lower block for each space."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_DEEPSEEK_CALLS, _DEEPSEEK_CALLS_END = _deepseek_token("tool calls begin"), _deepseek_token("tool calls end")
_DEEPSEEK_CALL, _DEEPSEEK_CALL_END = _deepseek_token("tool call begin"), _deepseek_token("tool call end")
_DEEPSEEK_SEPARATOR = _deepseek_token("tool sep")
_DEEPSEEK_STARTS = Markers(_DEEPSEEK_CALLS, _DEEPSEEK_CALL)
_DEEPSEEK_SEPARATORS = Markers(_DEEPSEEK_SEPARATOR)
_LINE_ENDS = Markers("\n")
_FENCED_DEEPSEEK_ENDS = Markers(f"\n```{_DEEPSEEK_CALL_END}", f"```{_DEEPSEEK_CALL_END}", _DEEPSEEK_CALL_END)
_DEEPSEEK_ENDS = Markers(_DEEPSEEK_CALL_END)


@TOOL_PARSERS.register_function(
    "deepseek_v31",
    "DeepSeek-V3.1: a name and JSON between special tokens.",
    source="DeepSeek-V3.1's chat template",
)
class DeepSeekV31Parser(ToolParser):
    """Parses the name, a separator and JSON between the tokens of a call."""

    MARKERS = (_DEEPSEEK_CALLS, _DEEPSEEK_CALLS_END, _DEEPSEEK_CALL, _DEEPSEEK_CALL_END, _DEEPSEEK_SEPARATOR)
    TEMPLATE: ClassVar[tuple[str, ...]] = (_DEEPSEEK_CALLS, _DEEPSEEK_CALL)
    STARTS = (_DEEPSEEK_CALLS, _DEEPSEEK_CALL)

    def steps(self) -> Steps[None]:
        """Parse content and lists of calls in turn."""
        while marker := (yield from self._input.until(_DEEPSEEK_STARTS, self.show)):
            is_call = yield from self.or_content(self._first(marker), marker)
            while is_call:
                is_call = yield from self.or_content(self._next())

    def _first(self, marker: str) -> Steps[None]:
        if marker == _DEEPSEEK_CALLS:
            yield from self._input.skip_space()
            if not (yield from self._input.take_if(_DEEPSEEK_CALL)):
                raise BrokenCallError
        yield from self._call()

    def _next(self) -> Steps[None]:
        """Parse another call of the list.

        Raises:
            BrokenCallError: The list has ended, or something else follows.
        """
        yield from self._input.skip_space()
        marker = yield from self._input.take_if(_DEEPSEEK_CALL, _DEEPSEEK_CALLS_END)
        if marker == _DEEPSEEK_CALLS_END:
            self._input.forget()
        if marker != _DEEPSEEK_CALL:
            raise BrokenCallError
        yield from self._call()

    def _call(self) -> Steps[None]:
        name, _ = yield from self._input.short_until(_DEEPSEEK_SEPARATORS)
        self.begin_call(name)
        yield from self._input.skip_space()
        if not (yield from self._input.until(_DEEPSEEK_ENDS, self.add_arguments)):
            raise BrokenCallError


@TOOL_PARSERS.register_function(
    "deepseek_v3",
    "DeepSeek-V3 and R1: a name and a block of JSON between special tokens.",
    source="DeepSeek-V3's chat template",
)
class DeepSeekV3Parser(DeepSeekV31Parser):
    """Parses the type of the tool, a separator, its name, and the arguments as a fenced block of JSON."""

    TEMPLATE = (_DEEPSEEK_CALLS, _DEEPSEEK_CALL, "```json")

    def _call(self) -> Steps[None]:
        yield from self._input.short_until(_DEEPSEEK_SEPARATORS)
        name, _ = yield from self._input.short_until(_LINE_ENDS)
        self.begin_call(name)
        if (yield from self._input.take_if("```")):
            yield from self._input.take_if("json")
        yield from self._input.skip_space()
        if not (yield from self._input.until(_FENCED_DEEPSEEK_ENDS, self.add_arguments)):
            raise BrokenCallError
