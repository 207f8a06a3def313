"""Calls and reasoning of gpt-oss, in the harmony format: messages to `functions.NAME`, and the analysis channel."""

from __future__ import annotations

from collections.abc import Container

from moestro.text.parsing.answer_grammars import HARMONY_THOUGHT
from moestro.text.parsing.call_readers import CHANNEL, HARMONY_MARKERS, MESSAGE, HarmonyReader
from moestro.text.parsing.output_parser import REASONING_PARSERS, TOOL_PARSERS, ReasoningParser, ToolParser
from moestro.text.parsing.parser_input import Steps


@TOOL_PARSERS.register_function("openai", "vLLM's name of `gpt-oss`.", source="vLLM 0.33")
@TOOL_PARSERS.register_function(
    "gpt-oss", "gpt-oss: the harmony format, with its reasoning.", source="OpenAI's harmony guide"
)
class GptOssToolParser(ToolParser):
    """Parses reasoning, content and calls of harmony."""

    MARKERS = HARMONY_MARKERS
    TEMPLATE = (CHANNEL, MESSAGE)
    STARTS = (CHANNEL,)
    ENDS_WITH_ANSWER = True
    SEPARATES_REASONING = True

    def steps(self) -> Steps[None]:
        """Parse all messages."""
        yield from HarmonyReader(self, self._input, self).messages()


@REASONING_PARSERS.register_function("openai_gptoss", "vLLM's name of `gpt-oss`.", source="vLLM 0.33")
@REASONING_PARSERS.register_function(
    "gpt-oss", "gpt-oss: the analysis channel of the harmony format.", source="OpenAI's harmony guide"
)
class GptOssReasoningParser(ReasoningParser):
    """Parses reasoning and content of harmony, where the request has no tools."""

    MARKERS = HARMONY_MARKERS
    TEMPLATE = (CHANNEL, MESSAGE)

    def steps(self) -> Steps[None]:
        """Parse all messages."""
        yield from HarmonyReader(self, self._input).messages()

    def thought(self, special: Container[str]) -> str:
        """Return the rules of an analysis, if there is one, and of the head of the final message."""
        return HARMONY_THOUGHT
