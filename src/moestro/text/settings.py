"""The settings of chats. A docstring under a field is its text in `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from moestro.core.setting_checks import CheckedSettings
from moestro.errors import ConfigError
from moestro.text.parser_registry import REASONING_PARSERS, TOOL_PARSERS

_CALLS = f"Format in which the model calls tools; for --enable-auto-tool-choice.\n\n{TOOL_PARSERS.help_text()}"
_REASONING = (
    "Format in which the model reasons; the API then gives its reasoning apart from its answer."
    f"\n\n{REASONING_PARSERS.help_text()}"
)


@dataclass(frozen=True, kw_only=True)
class ChatSettings(CheckedSettings):
    """Chat templates, calls of tools, and reasoning. Names and meanings are vLLM's."""

    chat_template: str | None = None
    "File with a chat template, or its text. Unset: the model's own."
    trust_request_chat_template: bool = False
    "Accept a chat_template in a request. A template is a program: its time and memory are bounded."
    default_chat_template_kwargs: str | None = None
    """JSON object of variables for the chat template, which a request can override: '{"enable_thinking": false}'."""
    enable_auto_tool_choice: bool = False
    'Let the model decide whether it calls tools ("tool_choice": "auto"); needs --tool-call-parser.'
    tool_call_parser: Annotated[str | None, Parameter(help=_CALLS)] = None
    exclude_tools_when_tool_choice_none: bool = False
    'Leave the tools out of the prompt if a request has "tool_choice": "none".'
    reasoning_parser: Annotated[str | None, Parameter(help=_REASONING)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ConfigError(
                "--enable-auto-tool-choice needs --tool-call-parser, which says how the model calls tools: give one of"
                f" {', '.join(TOOL_PARSERS.names())}"
            )
        if self.tool_call_parser is not None:
            TOOL_PARSERS.make(self.tool_call_parser)
        if self.reasoning_parser is not None:
            REASONING_PARSERS.make(self.reasoning_parser)
        self.template_variables()

    def template_variables(self) -> dict[str, Any]:
        """Return the default variables of the chat template.

        Raises:
            ConfigError: They are no JSON object.
        """
        given = self.default_chat_template_kwargs
        try:
            return {} if given is None else msgspec.json.decode(given, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise ConfigError(f"--default-chat-template-kwargs is no JSON object: {error}") from None
