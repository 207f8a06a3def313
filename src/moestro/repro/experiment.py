"""The contract between the frame and a paper's experiment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Generic

from rich.console import RenderableType

from moestro.repro.results import Claim, FindingsT


class Experiment(ABC, Generic[FindingsT]):
    """One paper's experiment under given settings. The frame runs it load by load.

    Attributes:
        findings_type: type of the findings, with which kept parts are read.
        drawing: module with `pictures(experiment, findings)`, which returns matplotlib figures by name. The frame
            imports it only to draw, since matplotlib is optional.
    """

    findings_type: type[FindingsT]
    drawing: str

    @property
    @abstractmethod
    def loads(self) -> Sequence[str]:
        """The names of the loads, in the order in which they are run."""

    @abstractmethod
    def plan_of(self, load: str) -> object:
        """Everything that decides the findings of a load besides the code, as a value that JSON can hold."""

    @abstractmethod
    def num_runs(self, load: str) -> int:
        """The number of simulations of a load."""

    @abstractmethod
    def run(self, load: str, step: Callable[[str], None]) -> FindingsT:
        """Make the findings of one load.

        Args:
            step: called once for each simulation, with its description, as the simulation begins.
        """

    @abstractmethod
    def claims(self, findings: FindingsT) -> list[Claim]:
        """The paper's claims, judged by the findings of all loads."""

    @abstractmethod
    def tables(self, findings: FindingsT) -> Iterator[RenderableType]:
        """The findings as tables for a terminal."""
