"""The effort of reasoning that a chat template takes, for the effort that a client asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moestro.errors import RequestError

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
