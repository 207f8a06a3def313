"""Calls as Hermes 2 Pro, Qwen 2.5 and Qwen 3 write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from moestro.text.parsing.json_calls import JsonCallReader
from moestro.text.parsing.output_parser import TOOL_PARSERS, ToolParser
from moestro.text.parsing.parser_input import BrokenCallError, Markers, Steps

_START, _END = "<tool_call>", "</tool_call>"
_STARTS, _ENDS = Markers(_START), Markers(_END)


@TOOL_PARSERS.register_function(
    "hermes", "Hermes, Qwen 2.5 and Qwen 3: JSON objects in `<tool_call>` tags.", source="Qwen3's chat template"
)
class HermesParser(ToolParser):
    """Parses JSON objects in tags. A call whose JSON breaks ends at its end tag."""

    MARKERS = (_START, _END)
    TEMPLATE = (_START, "arguments")
    STARTS = (_START,)

    def steps(self) -> Steps[None]:
        """Parse content and calls in turn."""
        while (yield from self._input.until(_STARTS, self.show)):
            yield from self.or_content(self._call(), _START)

    def _call(self) -> Steps[None]:
        yield from self._input.skip_space()
        try:
            yield from JsonCallReader(self, self._input).call()
        except BrokenCallError:
            if self.may_be_content:
                raise
            if not (yield from self._input.until(_ENDS, self.add_arguments)):
                raise
        else:
            yield from self._input.skip_space()
            yield from self._input.take_if(_END)
