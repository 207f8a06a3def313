"""Calls as Granite 3 writes them: a list of JSON objects, usually after `<|tool_call|>`."""

from __future__ import annotations

from moestro.text.parsing.json_calls import JsonCallReader
from moestro.text.parsing.output_parser import TOOL_PARSERS, ToolParser
from moestro.text.parsing.parser_input import Markers, Steps

_TOKEN, _TAG = "<|tool_call|>", "<tool_call>"
_STARTS = Markers(_TOKEN, _TAG)


@TOOL_PARSERS.register_function(
    "granite",
    "Granite 3.0 to 3.3: a list of JSON objects, at the start or after `<|tool_call|>`.",
    source="Granite 3's chat template",
)
class GraniteParser(ToolParser):
    """Parses lists of calls. A list without a marker counts at the start of the answer alone."""

    MARKERS = (_TOKEN,)
    TEMPLATE = (_TOKEN, "<|start_of_role|>")
    STARTS = (_TOKEN, _TAG)

    def steps(self) -> Steps[None]:
        """Parse content and lists of calls in turn."""
        yield from self.lists_of_calls(_STARTS, self._calls)

    def _calls(self) -> Steps[None]:
        yield from self._input.skip_space()
        yield from JsonCallReader(self, self._input).array()
