"""Calls in harmony, the format of gpt-oss: messages to `functions.NAME`."""

from __future__ import annotations

from moestro.text.parsing.harmony import CHANNEL, MARKERS, MESSAGE, HarmonyReader
from moestro.text.parsing.output_parser import TOOL_PARSERS, ToolParser
from moestro.text.parsing.parser_input import Steps


@TOOL_PARSERS.register_function("openai", "vLLM's name of `gpt-oss`.", source="vLLM 0.33")
@TOOL_PARSERS.register_function(
    "gpt-oss", "gpt-oss: the harmony format, with its reasoning.", source="OpenAI's harmony guide"
)
class GptOssToolParser(ToolParser):
    """Parses reasoning, content and calls of harmony."""

    MARKERS = MARKERS
    TEMPLATE = (CHANNEL, MESSAGE)
    STARTS = (CHANNEL,)
    ENDS_WITH_ANSWER = True
    SEPARATES_REASONING = True

    def steps(self) -> Steps[None]:
        """Parse all messages."""
        yield from HarmonyReader(self, self._input, self).messages()
