"""Prepares what chat templates read: calls of earlier turns, and variables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from moestro.text.chats.efforts import EFFORT_VARIABLE, THINKING_VARIABLE
from moestro.text.json_values import decoded


def calls_for_templates(calls: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls with their arguments as objects, which chat templates expect; clients send them as text.

    Text that is no JSON object becomes an empty one, as in vLLM: a model wrote it in an earlier turn, and a refusal
    would end the whole conversation.
    """
    return [_with_object(call) for call in calls]


def as_system_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the role `system` in place of `developer`, for templates that do not know the latter.

    Messages that then follow each other as `system` become one, because many templates take only one.
    """
    made: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "developer":
            made.append(message)
        elif made and made[-1]["role"] == "system":
            made[-1] = made[-1] | {"content": f"{made[-1]['content']}\n\n{message['content']}"}
        else:
            made.append(message | {"role": "system"})
    return made


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    value = decoded(arguments) if isinstance(arguments, str) else arguments
    return {**call, "function": {**function, "arguments": value if isinstance(value, dict) else {}}}


def template_variables(effort: str | None, given: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of a chat template. As in vLLM, an effort also turns thinking on or off.

    Args:
        effort: Effort of reasoning; None leaves it to the template.
        given: Variables of the request, which override all others.
        defaults: Variables of the operator.
    """
    if effort is None:
        return defaults | given
    return defaults | {EFFORT_VARIABLE: effort, THINKING_VARIABLE: effort != "none"} | given
