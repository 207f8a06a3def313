"""Calls as GLM-4.5, 4.6 and 4.7 write them: the name, then tags for each key and each value."""

from __future__ import annotations

from moestro.text.parsing.argument_types import ArgumentsWriter
from moestro.text.parsing.output_parser import TOOL_PARSERS, ToolParser
from moestro.text.parsing.parser_input import BrokenCallError, Markers, Steps

_START, _END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_STARTS = Markers(_START)
_AFTER_NAME = Markers("\n", _KEY, _END)
_NEXT = Markers(_KEY, _END)
_KEY_ENDS = Markers(_KEY_END)
_VALUE_ENDS = Markers(_VALUE_END)


@TOOL_PARSERS.register_function(
    "glm45", "GLM-4.5 to 4.7: `<arg_key>` and `<arg_value>` tags for each argument.", source="GLM-4.5's chat template"
)
class Glm45Parser(ToolParser):
    """Parses a name and tagged arguments."""

    MARKERS = (_START, _END, _KEY, _KEY_END, _VALUE, _VALUE_END)
    TEMPLATE = (_START, _KEY, _VALUE)
    STARTS = (_START,)

    def steps(self) -> Steps[None]:
        """Parse content and calls in turn."""
        while (yield from self._input.until(_STARTS, self.show)):
            yield from self.or_content(self._call(), _START)

    def _call(self) -> Steps[None]:
        yield from self._input.skip_space()
        name, marker = yield from self._input.short_until(_AFTER_NAME)
        if marker == "\n":
            yield from self._input.skip_space()
            marker = yield from self._input.take_if(_KEY, _END)
            if not marker:
                raise BrokenCallError
        self.begin_call(name)
        writer = ArgumentsWriter(self.tools.get(name.strip()), self.add_arguments)
        while marker == _KEY:
            key, _ = yield from self._input.short_until(_KEY_ENDS)
            yield from self._input.skip_space()
            if not (yield from self._input.take_if(_VALUE)):
                raise BrokenCallError
            writer.begin(key.strip())
            if not (yield from self._input.until(_VALUE_ENDS, writer.add)):
                raise BrokenCallError
            writer.end()
            marker = yield from self._input.until(_NEXT, self.show)
        if not marker:
            raise BrokenCallError
        writer.close()
