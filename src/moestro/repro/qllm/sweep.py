"""What the paper states, beside what was found with each length of answers."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from moestro.repro.qllm.engines import EXPERT, FCFS, RUN_TO_COMPLETION, SLO_S
from moestro.repro.qllm.findings import Figure, QllmFindings, ls_ttft, ls_turnaround, num_answer_tokens, throughput
from moestro.repro.qllm.loads import PAPER_RATES
from moestro.repro.qllm.paper import HELD_UP_TO, MEAN_FACTOR, MOST_FACTOR, TURNAROUND_FACTOR

# The paper's text has two baselines: Q1 says that TGI runs batches to completion; sections 2.3 and 3.2 and Fig. 1a
# describe continuous batching.
READINGS = {RUN_TO_COMPLETION: "run-to-completion (Q1)", FCFS: "continuous batching (2.3, 3.2, Fig. 1a)"}


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """The paper's figures with one length of answers and one baseline, each by rate and a mean over seeds.

    Attributes:
        load: the load.
        baseline: engine of the baseline, one of READINGS.
        num_answer_tokens: mean length of its answers, tokens.
        is_judged: whether it was run at all of the paper's rates.
        ttft: TTFT of LS of the baseline over that of QLLM.
        turnaround: turnaround of LS, likewise.
        throughput: throughput of QLLM over that of the baseline.
        held: rates at which QLLM's mean TTFT of LS meets the objective.
        held_by_baseline: rates at which the baseline's does.
    """

    load: str
    baseline: str
    num_answer_tokens: float
    is_judged: bool
    ttft: dict[float, float]
    turnaround: dict[float, float]
    throughput: dict[float, float]
    held: list[float]
    held_by_baseline: list[float]

    @property
    def mean_factor(self) -> float:
        """Mean of `ttft` over the rates."""
        return sum(self.ttft.values()) / len(self.ttft)

    @property
    def has_figure_2(self) -> bool:
        """Whether QLLM meets the objective at every rate of the point, and the baseline at none."""
        return set(self.held) == set(self.ttft) and not self.held_by_baseline

    @property
    def has_mean_factor(self) -> bool:
        """Whether the factor on average is the paper's or more."""
        return MEAN_FACTOR.is_reached(self.mean_factor)


def ratios(
    findings: QllmFindings, load: str, engines: tuple[str, str], of: Figure, rates: list[float] | None = None
) -> dict[float, float]:
    """The first engine's figure over the second's by rate, each the mean over seeds.

    Args:
        rates: rates at which the load was run. None means the paper's.
    """
    first, second = engines
    return {
        rate: float(findings.values(load, rate, first, of).mean() / findings.values(load, rate, second, of).mean())
        for rate in (paper_rates(findings, load) if rates is None else rates)
    }


def paper_rates(findings: QllmFindings, load: str) -> list[float]:
    """The paper's rates at which a load was run; all of its rates if there is none."""
    rates = findings.rates(load)
    return [rate for rate in rates if rate in PAPER_RATES] or rates


def sweep_point(findings: QllmFindings, load: str, baseline: str = RUN_TO_COMPLETION) -> SweepPoint:
    """Compare QLLM with a reading of the paper's baseline on a load."""
    compared = (baseline, EXPERT)
    return SweepPoint(
        load=load,
        baseline=baseline,
        num_answer_tokens=float(findings.values(load, findings.rates(load)[0], EXPERT, num_answer_tokens).mean()),
        is_judged=set(PAPER_RATES) <= set(findings.rates(load)),
        ttft=ratios(findings, load, compared, ls_ttft),
        turnaround=ratios(findings, load, compared, ls_turnaround),
        throughput=ratios(findings, load, (EXPERT, baseline), throughput),
        held=_held(findings, load, EXPERT),
        held_by_baseline=_held(findings, load, baseline),
    )


def _held(findings: QllmFindings, load: str, engine: str) -> list[float]:
    rates = paper_rates(findings, load)
    return [rate for rate in rates if findings.values(load, rate, engine, ls_ttft).mean() <= SLO_S * 1e3]


def sweep_table(points: list[SweepPoint]) -> Table:
    """The paper's figures over the length of answers."""
    table = Table(
        "load", "tokens an answer", "TTFT of LS, x lower", "QLLM holds 3 s", "baseline holds 3 s", "throughput",
        "LS turnaround, x lower", title="The paper's figures over the length of answers, which it does not state",
        caption="simulated; QLLM beside run_to_completion, one reading of the paper's baseline, at its rates; means"
        " over seeds",
    )  # fmt: skip
    table.add_row("the paper", "?", f"{MEAN_FACTOR.value:g} on average, up to {MOST_FACTOR.value:g}",
                  f"up to {HELD_UP_TO.value:g}/s", "at no rate", "comparable or slightly higher",
                  f"up to {TURNAROUND_FACTOR.value:g}", end_section=True)  # fmt: skip
    for point in points:
        table.add_row(
            point.load,
            f"{point.num_answer_tokens:.0f}",
            f"{point.mean_factor:.1f} on average, up to {max(point.ttft.values()):.1f}",
            at_rates(point.held),
            at_rates(point.held_by_baseline),
            f"{min(point.throughput.values()) - 1:+.0%} to {max(point.throughput.values()) - 1:+.0%}",
            f"{min(point.turnaround.values()):.1f} to {max(point.turnaround.values()):.1f}",
        )
    return table


def at_rates(rates: list[float]) -> str:
    """Write rates in words."""
    return f"at {', '.join(f'{rate:g}' for rate in rates)}/s" if rates else "at no rate"
