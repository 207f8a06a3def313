"""An experiment that takes no time, in a module that spawned processes can import."""

from __future__ import annotations

from moestro.repro.experiment import GridExperiment
from moestro.repro.results import Cell, Claim, Column, Findings


class Timed(Cell, frozen=True, kw_only=True):
    seconds: float


class SmallPaper(GridExperiment[Findings[Timed]]):
    findings_type = Findings[Timed]
    columns = (Column("time, ms", lambda cell: cell.seconds, 1e-3),)
    num_loads_made = 0

    def served(self, load, seed):
        self.num_loads_made += 1
        return lambda rate, system: Timed(
            load=load.name, rate=rate, system=system, seed=seed, seconds=rate * (2 if system == "second" else 1) + seed
        )

    def claims(self, findings):
        return [Claim(source="here", paper="faster", ours=f"{len(findings.cells)} runs", holds=True)]
