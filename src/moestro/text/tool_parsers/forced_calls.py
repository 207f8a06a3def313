"""Calls in JSON that a grammar enforces: `tool_choice: "required"` and a named tool.

Such an answer has one format for all models, as in vLLM.
"""

from __future__ import annotations

from moestro.text.parsing.json_calls import JsonCallReader
from moestro.text.parsing.output_parser import ToolParser
from moestro.text.parsing.parser_input import Steps


class RequiredCallsParser(ToolParser):
    """Parses `[{"name": ..., "parameters": {...}}, ...]`."""

    def steps(self) -> Steps[None]:
        """Parse the list."""
        yield from self._input.skip_space()
        yield from self.or_content(JsonCallReader(self, self._input).array())


class NamedCallParser(ToolParser):
    """Parses an answer that is nothing but the arguments of the only tool in `tools`."""

    def steps(self) -> Steps[None]:
        """Pass the answer on as arguments."""
        yield from self._input.skip_space()
        if (yield from self._input.next_char()):
            self.begin_call(next(iter(self.tools)))
        while (yield from self._input.next_char()):
            self.add_arguments(self._input.all_at_hand())
