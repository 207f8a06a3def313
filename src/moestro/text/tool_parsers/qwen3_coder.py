"""Calls as Qwen3-Coder and Qwen 3.5 write them: tags for the function and for each parameter."""

from __future__ import annotations

from moestro.text.parsing.argument_types import ArgumentsWriter
from moestro.text.parsing.output_parser import TOOL_PARSERS, ToolParser
from moestro.text.parsing.parser_input import BrokenCallError, Markers, Steps

_START, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_STARTS = Markers(_START, _FUNCTION)
_CLOSING = Markers(">", "\n")
_NEXT = Markers(_PARAMETER, _FUNCTION_END, _END)
_VALUE_ENDS = Markers(_PARAMETER_END, _PARAMETER, _FUNCTION_END)


@TOOL_PARSERS.register_function(
    "qwen3_coder",
    "Qwen3-Coder, Qwen 3.5: `<function=...>` with a `<parameter=...>` tag for each argument.",
    source="Qwen3-Coder's chat template",
)
class Qwen3CoderParser(ToolParser):
    """Parses calls in tags. The outer tag may be missing."""

    MARKERS = (_START, _END)
    TEMPLATE = (_START, _FUNCTION, _PARAMETER)
    STARTS = (_START, _FUNCTION)

    def steps(self) -> Steps[None]:
        """Parse content and calls in turn."""
        while marker := (yield from self._input.until(_STARTS, self.show)):
            yield from self.or_content(self._call(marker), marker)

    def _call(self, marker: str) -> Steps[None]:
        if marker == _START:
            yield from self._input.skip_space()
            if not (yield from self._input.take_if(_FUNCTION)):
                raise BrokenCallError
        name, closing = yield from self._input.short_until(_CLOSING)
        if closing != ">":
            raise BrokenCallError
        self.begin_call(name)
        writer = ArgumentsWriter(self.tools.get(name.strip()), self.add_arguments, is_framed=True)
        marker = yield from self._parameters(writer)
        if not marker:
            raise BrokenCallError
        if marker == _FUNCTION_END:
            yield from self._input.skip_space()
            yield from self._input.take_if(_END)

    def _parameters(self, writer: ArgumentsWriter) -> Steps[str]:
        """Write the arguments, and return the tag that ended them; "" if the answer ended first."""
        marker = yield from self._input.until(_NEXT, self.show)
        while marker == _PARAMETER:
            key, closing = yield from self._input.short_until(_CLOSING)
            if closing != ">":
                raise BrokenCallError
            writer.begin(key.strip())
            marker = yield from self._value(writer)
        if marker:
            writer.close()
        return marker

    def _value(self, writer: ArgumentsWriter) -> Steps[str]:
        """Write one value, and return the tag after it; "" if the answer ended within it.

        A tag ends the value at the start of a line; the end tag may be missing there. Within a line, only an end tag
        that another tag follows does: values may be code with such tags.
        """
        while ending := (yield from self._input.until(_VALUE_ENDS, writer.add)):
            if ending != _PARAMETER_END and writer.is_at_line_start:
                writer.end()
                return ending
            if ending == _PARAMETER_END:
                is_end, space = writer.is_at_line_start, (yield from self._input.skip_space())
                following = yield from self._input.take_if(_PARAMETER, _FUNCTION_END, _END)
                if following or is_end:
                    writer.end()
                    return following or (yield from self._input.until(_NEXT, self.show))
                ending += space
            writer.add(ending)
        return ""
