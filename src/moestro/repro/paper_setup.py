"""A paper as declared tables: its set-up beside the experiment's, and its figures with what ours must reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupRow:
    """One value of a paper's set-up.

    Attributes:
        what: what is set.
        where: section, figure or table of the paper.
        quote: the paper's own words.
        value: the value of the experiment. It is the paper's unless `differs` is set.
        ours: reads the value from the whole experiment, and from requests that it draws where they decide.
        differs: reason why the experiment has another value than the paper, or a value that the paper does not state.
            "" means that it has the paper's.
    """

    what: str
    where: str
    quote: str
    value: object
    ours: Callable[[Any], object]
    differs: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperFigure:
    """A figure that a paper states.

    Attributes:
        what: the figure.
        where: section or figure of the paper.
        quote: the paper's own words; "" where no text of the paper has the figure.
        value: the figure; a change is negative where the paper has a decrease.
        least: value that ours must exceed in the paper's direction.
    """

    what: str
    where: str
    quote: str
    value: float
    least: float

    def is_reached(self, found: float) -> bool:
        """Return whether a figure of ours counts as the paper's."""
        return (found if self.value > 0 else -found) > self.least
