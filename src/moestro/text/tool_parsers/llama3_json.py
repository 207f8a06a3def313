"""Calls as Llama 3.1 to 3.3 write them: JSON objects instead of an answer, perhaps after `<|python_tag|>`."""

from __future__ import annotations

from moestro.text.parsing.json_calls import JsonCallReader
from moestro.text.parsing.output_parser import TOOL_PARSERS, ToolParser
from moestro.text.parsing.parser_input import Markers, Steps

_TAG = "<|python_tag|>"
_TAGS = Markers(_TAG)


@TOOL_PARSERS.register_function(
    "llama3_json",
    "Llama 3.1 to 3.3: `{...}` with `name` and `parameters`; several are separated by `;`.",
    source="Llama 3.1's prompt format",
)
class Llama3JsonParser(ToolParser):
    """Parses JSON objects that name a tool of the request. Any other JSON is content: it may be the answer itself."""

    MARKERS = (_TAG,)
    TEMPLATE = ('"parameters": dictionary of argument name',)
    STARTS = (_TAG,)

    def steps(self) -> Steps[None]:
        """Parse calls at the start of the answer, and after each tag."""
        yield from self._input.skip_space()
        if (yield from self._input.next_char()) == "{":
            yield from self._calls("")
        while (yield from self._input.until(_TAGS, self.show)):
            yield from self._calls(_TAG)

    def _calls(self, marker: str) -> Steps[None]:
        while (yield from self.or_content(self._call(), marker, shows_cut=marker != _TAG)):
            yield from self._input.skip_space()
            marker = yield from self._input.take_if(";", ",")
            if not marker:
                return

    def _call(self) -> Steps[None]:
        yield from self._input.skip_space()
        yield from JsonCallReader(self, self._input).call()
