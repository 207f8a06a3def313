"""A paper as declared tables: its set-up beside the experiment's, its figures, and its claims with their rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from moestro.repro.results import Claim


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
        least: value that ours must exceed in the paper's direction; 0 where the direction alone is judged.
    """

    what: str
    where: str
    quote: str
    value: float
    least: float

    def is_reached(self, found: float) -> bool:
        """Return whether a figure of ours counts as the paper's."""
        return (found if self.value > 0 else -found) > self.least

    def __str__(self) -> str:
        """A change as a page shows it, and any other figure as it is."""
        return f"{self.value:+.3g}" if abs(self.value) >= 1 else f"{100 * self.value:+.3g} %"


CaseT = TypeVar("CaseT")
FoundT = TypeVar("FoundT")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRow(Generic[FoundT, CaseT]):
    """One sentence of a paper, with the rule that judges it by each case of the findings.

    Attributes:
        where: section or figure of the paper.
        sentence: what the paper states.
        cases: reads the cases with their labels, such as a load each, from the findings.
        ours: writes our figures of a case.
        holds: judges a case. None as its result means that the case is not judged.
        figures: figures of the paper in the sentence.
        quote: the paper's own words where the sentence has figures that no rule compares; "" elsewhere.
        why: what decides.
    """

    where: str
    sentence: str
    cases: Callable[[FoundT], Iterable[tuple[str, CaseT]]]
    ours: Callable[[CaseT], str]
    holds: Callable[[CaseT], bool | None]
    figures: tuple[PaperFigure, ...] = ()
    quote: str = ""
    why: str | Callable[[CaseT], str] = ""

    def judged(self, findings: FoundT) -> Iterator[Claim]:
        """Judge each case."""
        for label, case in self.cases(findings):
            yield Claim(
                source=", ".join(filter(None, (self.where, label))),
                paper=self.sentence,
                ours=self.ours(case),
                holds=self.holds(case),
                why=self.why if isinstance(self.why, str) else self.why(case),
            )
