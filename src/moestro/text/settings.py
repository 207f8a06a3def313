"""The settings of chats. A docstring under a field is its text in `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from moestro.core.setting_checks import CheckedSettings
from moestro.errors import ConfigError
from moestro.text.parsing.output_parser import NO_PARSER, REASONING_PARSERS, TOOL_PARSERS, check_parser

_BY_TEMPLATE = "Unset: the format that the chat template asks for, if it is one of these."
_CALLS = (
    f"Format in which the model calls tools. {_BY_TEMPLATE}\n\n{TOOL_PARSERS.help_text()}"
    f"\n\n* {NO_PARSER}: Calls are not parsed and stay text."
)
_REASONING = (
    "Format in which the model reasons; the API then gives its reasoning apart from its answer."
    f" {_BY_TEMPLATE}\n\n{REASONING_PARSERS.help_text()}\n\n* {NO_PARSER}: Reasoning stays in the answer."
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
    enable_auto_tool_choice: bool = True
    'Let the model decide whether it calls tools ("tool_choice": "auto").'
    tool_call_parser: Annotated[str | None, Parameter(help=_CALLS)] = None
    exclude_tools_when_tool_choice_none: bool = False
    'Leave the tools out of the prompt if a request has "tool_choice": "none".'
    reasoning_parser: Annotated[str | None, Parameter(help=_REASONING)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parser(TOOL_PARSERS, self.tool_call_parser)
        check_parser(REASONING_PARSERS, self.reasoning_parser)
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
