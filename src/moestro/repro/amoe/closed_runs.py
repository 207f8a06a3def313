"""Runs with constant numbers of requests, from which throughput over concurrency follows."""

from __future__ import annotations

from dataclasses import dataclass

from moestro.repro.amoe.beds import Bed
from moestro.repro.amoe.findings import ClosedRun
from moestro.repro.amoe.loads import LengthRanges, closed_load
from moestro.repro.amoe.serving import closed_throughput
from moestro.repro.amoe.systems import build


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Constant numbers of requests on a testbed.

    Attributes:
        load: name of the load in the findings.
        bed: testbed.
        lengths: lengths of prompts and answers.
        numbers: numbers of requests, ascending.
        passes: tokens of each request, in the mean, before a run is observed and while it is.
        num_sensitive: latency-sensitive requests in each run; the others are best effort. None means that all are.
        computes_prompts: whether prompts are computed, except those of the requests in progress at the start.
    """

    load: str
    bed: Bed
    lengths: LengthRanges
    numbers: tuple[int, ...]
    passes: tuple[int, int]
    num_sensitive: int | None = None
    computes_prompts: bool = False

    def run(self, system: str, seed: int) -> list[ClosedRun]:
        """Measure a system with each number of requests that fits, and with the most that fit.

        Raises:
            ConfigError: the network does not fit the GPUs of this system.
        """
        limits, found = (self.lengths.mean_context, self.lengths.longest), []
        most = build(system, self.bed, limits, seed).most_requests
        fitting = {number for number in self.numbers if number < most}
        for number in sorted({*fitting, min(most, self.numbers[-1])}):
            load = closed_load(self.lengths, number, self._num_replacing(number), seed, self.num_sensitive)
            built = build(system, self.bed, limits, seed)
            rates = closed_throughput(built, load, self.passes, computes_prompts=self.computes_prompts)
            run = ClosedRun(
                load=self.load, system=system, seed=seed, num_requests=number, tokens_per_s=rates.tokens_per_s,
                num_sensitive=self.num_sensitive, sensitive_tokens_per_s=rates.sensitive_tokens_per_s,
            )  # fmt: skip
            found.append(run)
        return found

    def _num_replacing(self, num_requests: int) -> int:
        """New requests that surely suffice."""
        return 1 + round(2 * num_requests * sum(self.passes) / self.lengths.mean_output) + num_requests // 4
