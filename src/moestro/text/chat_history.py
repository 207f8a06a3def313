"""Prepares what chat templates read: calls of earlier turns, and variables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from moestro.text.json_calls import decoded


def calls_for_templates(calls: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls with their arguments as objects, which chat templates expect; clients send them as text.

    Text that is no JSON object becomes an empty one, as in vLLM: a model wrote it in an earlier turn, and a refusal
    would end the whole conversation.
    """
    return [_with_object(call) for call in calls]


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
        effort: Effort of reasoning that the request asks for.
        given: Variables of the request, which override all others.
        defaults: Variables of the operator.
    """
    if effort is None:
        return defaults | given
    return defaults | {"reasoning_effort": effort, "enable_thinking": effort != "none"} | given
