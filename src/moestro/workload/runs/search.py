"""Search for the highest rate that holds: double or halve until bracketed, then bisect."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Result of a probe at one rate."""

    HOLDS = "holds"
    FAILS = "fails"
    INVALID = "invalid"  # the client could not offer this rate, so the probe says nothing about the server


@dataclass(frozen=True, slots=True)
class Bracket:
    """Result of a search.

    Attributes:
        holds: highest rate that held; None if no tried rate held.
        above: lowest tried rate that did not hold; None if every tried rate held.
        is_client_bound: whether the client was unable to offer the rate `above`.
    """

    holds: float | None
    above: float | None
    is_client_bound: bool


def find_highest(
    probe: Callable[[float], Verdict], start: float, tolerance: float = 0.05, max_probes: int = 12
) -> Bracket:
    """Search upwards and downwards from `start`, with at most `max_probes` probes.

    The search trusts each probe. With a noisy server, whose verdicts do not fall monotonically with the rate, the
    result is a rate that held and, within the tolerance, one that did not.

    Args:
        tolerance: the search ends once `above` <= `holds` * (1 + tolerance).
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
