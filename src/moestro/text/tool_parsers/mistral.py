"""Calls as Mistral's models write them: `[TOOL_CALLS]`, then a list of JSON objects, or each name with its JSON."""

from __future__ import annotations

from moestro.text.json_text import opened_object
from moestro.text.parsing.json_calls import JsonCallReader, read_value
from moestro.text.parsing.output_parser import TOOL_PARSERS, ToolParser
from moestro.text.parsing.parser_input import BrokenCallError, Markers, Steps

_START, _ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_STARTS = Markers(_START)
_AFTER_NAME = Markers(_ARGUMENTS, _ID, "{")
_AFTER_ID = Markers(_ARGUMENTS, "{")


@TOOL_PARSERS.register_function(
    "mistral",
    "Mistral, both forms: a list of JSON objects, or `NAME[ARGS]{...}`, after `[TOOL_CALLS]`.",
    source="mistral-common, tokenizers v3 to v13",
)
class MistralParser(ToolParser):
    """Parses the calls after `[TOOL_CALLS]`."""

    MARKERS = (_START, _ARGUMENTS, _ID)
    TEMPLATE = (_START,)
    STARTS = (_START,)
    ENDS_WITH_ANSWER = True
    ID_CHARS = 9  # its chat templates refuse ids of another length

    def steps(self) -> Steps[None]:
        """Parse content and calls in turn."""
        while (yield from self._input.until(_STARTS, self.show)):
            yield from self.or_content(self._calls(), _START)

    def _calls(self) -> Steps[None]:
        yield from self._input.skip_space()
        if (yield from self._input.next_char()) in ("[", "{"):
            yield from JsonCallReader(self, self._input).array()
        else:
            yield from self._named()

    def _named(self) -> Steps[None]:
        name, marker = yield from self._input.short_until(_AFTER_NAME)
        call_id = ""
        if marker == _ID:
            call_id, marker = yield from self._input.short_until(_AFTER_ID)
        if not name.strip() or "\n" in name.strip():
            raise BrokenCallError
        self.begin_call(name, call_id.strip())
        if marker == _ARGUMENTS:
            yield from self._input.skip_space()
            yield from read_value(self._input, self.add_arguments)
        else:
            self.add_arguments(marker)
            yield from self._input.scanned(opened_object(), self.add_arguments)
