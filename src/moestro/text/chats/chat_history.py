"""Prepares what chat templates read: calls of earlier turns, variables, and the effort of reasoning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from moestro.errors import RequestError
from moestro.text.json_text import decoded

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # In rising order.
DEFAULT_EFFORT = "medium"  # Many clients always send it, so it requests nothing where a template knows no efforts.
# Variables of a template that an effort sets.
EFFORT_VARIABLE, THINKING_VARIABLE = "reasoning_effort", "enable_thinking"

# (effort) -> None. Raises RequestError if the template refuses the effort.
Trial = Callable[[str], None]


def taken_efforts(trial: Trial) -> tuple[str, ...]:
    """Return the efforts that a chat template takes, in rising order.

    Templates state their efforts only by refusing others, so each effort is tried. A template that refuses all of them
    refuses the trial's messages for another reason, so it counts as one that takes all.

    Args:
        trial: Renders a short chat with an effort.
    """
    taken = []
    for effort in EFFORTS:
        try:
            trial(effort)
        except RequestError:
            continue
        taken.append(effort)
    return tuple(taken) or EFFORTS


def nearest_effort(wanted: str, taken: Sequence[str]) -> str | None:
    """Return the effort of `taken` that is nearest to `wanted`; of two the higher one. None if `taken` is empty."""
    return min(
        taken,
        key=lambda effort: (abs(EFFORTS.index(effort) - EFFORTS.index(wanted)), -EFFORTS.index(effort)),
        default=None,
    )


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
