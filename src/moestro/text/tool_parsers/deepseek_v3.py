"""Calls as DeepSeek-V3, R1 and V3.1 write them: special tokens around the name and the JSON of the arguments."""

from __future__ import annotations

from typing import ClassVar

from moestro.text.parsing.output_parser import TOOL_PARSERS, ToolParser
from moestro.text.parsing.parser_input import BrokenCallError, Markers, Steps


def _token(words: str) -> str:
    """Return a special token. DeepSeek writes a full-width bar for |, and a lower block for each space."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_CALLS, _CALLS_END = _token("tool calls begin"), _token("tool calls end")
_CALL, _CALL_END = _token("tool call begin"), _token("tool call end")
_SEPARATOR = _token("tool sep")
_STARTS = Markers(_CALLS, _CALL)
_SEPARATORS = Markers(_SEPARATOR)
_LINE_ENDS = Markers("\n")
_FENCED_ENDS = Markers(f"\n```{_CALL_END}", f"```{_CALL_END}", _CALL_END)
_ENDS = Markers(_CALL_END)


@TOOL_PARSERS.register_function(
    "deepseek_v31",
    "DeepSeek-V3.1: a name and JSON between special tokens.",
    source="DeepSeek-V3.1's chat template",
)
class DeepSeekV31Parser(ToolParser):
    """Parses the name, a separator and JSON between the tokens of a call."""

    MARKERS = (_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR)
    TEMPLATE: ClassVar[tuple[str, ...]] = (_CALLS, _CALL)
    STARTS = (_CALLS, _CALL)

    def steps(self) -> Steps[None]:
        """Parse content and lists of calls in turn."""
        while marker := (yield from self._input.until(_STARTS, self.show)):
            is_call = yield from self.or_content(self._first(marker), marker)
            while is_call:
                is_call = yield from self.or_content(self._next())

    def _first(self, marker: str) -> Steps[None]:
        if marker == _CALLS:
            yield from self._input.skip_space()
            if not (yield from self._input.take_if(_CALL)):
                raise BrokenCallError
        yield from self._call()

    def _next(self) -> Steps[None]:
        """Parse another call of the list.

        Raises:
            BrokenCallError: The list has ended, or something else follows.
        """
        yield from self._input.skip_space()
        marker = yield from self._input.take_if(_CALL, _CALLS_END)
        if marker == _CALLS_END:
            self._input.forget()
        if marker != _CALL:
            raise BrokenCallError
        yield from self._call()

    def _call(self) -> Steps[None]:
        name, _ = yield from self._input.short_until(_SEPARATORS)
        self.begin_call(name)
        yield from self._input.skip_space()
        if not (yield from self._input.until(_ENDS, self.add_arguments)):
            raise BrokenCallError


@TOOL_PARSERS.register_function(
    "deepseek_v3",
    "DeepSeek-V3 and R1: a name and a block of JSON between special tokens.",
    source="DeepSeek-V3's chat template",
)
class DeepSeekV3Parser(DeepSeekV31Parser):
    """Parses the type of the tool, a separator, its name, and the arguments as a fenced block of JSON."""

    TEMPLATE = (_CALLS, _CALL, "```json")

    def _call(self) -> Steps[None]:
        yield from self._input.short_until(_SEPARATORS)
        name, _ = yield from self._input.short_until(_LINE_ENDS)
        self.begin_call(name)
        if (yield from self._input.take_if("```")):
            yield from self._input.take_if("json")
        yield from self._input.skip_space()
        if not (yield from self._input.until(_FENCED_ENDS, self.add_arguments)):
            raise BrokenCallError
