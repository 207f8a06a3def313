"""The highest rate that still holds: double or halve until it is bracketed, then bisect."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What a probe at one rate found."""

    HOLDS = "holds"
    FAILS = "fails"
    INVALID = "invalid"  # the client could not offer this rate, so nothing is known of the server


@dataclass(frozen=True, slots=True)
class Bracket:
    """What a search found.

    Attributes:
        holds: the highest rate that held; None: none of those tried.
        above: the lowest rate tried that did not; None: none was found.
        is_client_bound: `above` is a rate that the client could not offer.
    """

    holds: float | None
    above: float | None
    is_client_bound: bool


def find_highest(
    probe: Callable[[float], Verdict], start: float, tolerance: float = 0.05, max_probes: int = 12
) -> Bracket:
    """Search upwards and downwards from `start`, probing at most `max_probes` rates.

    A probe is taken at its word: where verdicts do not fall from holds to fails with the rate (a noisy server), the
    answer is a rate that held and beside it, within the tolerance, one that did not.

    Args:
        tolerance: stop once `above` <= `holds` * (1 + tolerance).
    """
    low: float | None = None
    high: float | None = None
    last = Verdict.FAILS
    rate = start
    for _ in range(max_probes):
        verdict = probe(rate)
        if verdict is Verdict.HOLDS:
            low = rate
        else:
            high, last = rate, verdict
        if low is not None and high is not None and high <= low * (1 + tolerance):
            break
        rate = _next_rate(rate, low, high)
    return Bracket(low, high, high is not None and last is Verdict.INVALID)


def _next_rate(rate: float, low: float | None, high: float | None) -> float:
    if low is None:
        return rate / 2
    return rate * 2 if high is None else math.sqrt(low * high)
