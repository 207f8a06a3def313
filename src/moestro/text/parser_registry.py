"""The parsers by name, as operators choose them with `--tool-call-parser` and `--reasoning-parser`."""

from __future__ import annotations

from moestro.core.policy_registry import PolicyKind
from moestro.text.output_parser import ReasoningParser, ToolParser

TOOL_PARSERS: PolicyKind[type[ToolParser]] = PolicyKind(
    "tool call parser", "--tool-call-parser", "moestro.text.tool_parsers"
)
REASONING_PARSERS: PolicyKind[type[ReasoningParser]] = PolicyKind(
    "reasoning parser", "--reasoning-parser", "moestro.text.reasoning_parsers"
)
