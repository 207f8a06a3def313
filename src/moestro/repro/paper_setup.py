"""The set-up of a paper as a declared table: the paper's words, their place, and the field of the experiment."""

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
