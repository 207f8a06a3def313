"""The claims of QLLM's paper as rows: what each compares, by which rule, and what the paper states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from moestro.repro.experiment import ClaimRow
from moestro.repro.qllm.loads import (
    AGE_S,
    EXPERT,
    EXPERT_AGED,
    EXPERT_MIXED,
    FCFS,
    FCFS_64,
    ITERATION,
    ITERATION_MIXED,
    RUN_TO_COMPLETION,
)
from moestro.repro.qllm.paper import (
    COMPARABLE,
    EQUAL,
    HELD_UP_TO,
    MEAN_FACTOR,
    MOST_FACTOR,
    READINGS,
    TURNAROUND_FACTOR,
    Figure,
    QllmFindings,
    SweepPoint,
    at_rates,
    be_ttft,
    be_turnaround,
    ls_ttft,
    paper_rates,
    ratios,
    sweep_point,
    throughput,
)
from moestro.repro.results import Claim

Row = ClaimRow[QllmFindings, Any]
_THROUGHPUT_BASELINES = READINGS | {FCFS_64: "continuous batching with as many places"}


def claims_of(findings: QllmFindings) -> list[Claim]:
    """The paper's claims, each for all loads, then our own goals.

    A claim of the paper is judged at the paper's rates. A load that was not run at all of them is not judged.
    """
    return [claim for row in CLAIMS for claim in row.judged(findings)]


# --- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Case:
    """A load with the paper's figures on it."""

    findings: QllmFindings
    point: SweepPoint

    def ratios(self, first: str, second: str, of: Figure, rates: list[float] | None = None) -> dict[float, float]:
        """The first engine's figure over the second's, by rate."""
        return ratios(self.findings, self.point.load, (first, second), of, rates)


def _loads(baseline: str = RUN_TO_COMPLETION, engine: str = EXPERT) -> Callable[[QllmFindings], Iterator[Any]]:
    """Cases: each load, beside a reading of the baseline, that an engine served."""

    def cases(findings: QllmFindings) -> Iterator[tuple[str, _Case]]:
        served = {cell.load for cell in findings.cells if cell.system == engine}
        for load in findings.loads:
            if load in served:
                yield load, _Case(findings, sweep_point(findings, load, baseline))

    return cases


def _together(baseline: str, findings: QllmFindings) -> Iterator[tuple[str, list[SweepPoint]]]:
    """The case: all loads beside one reading of the baseline."""
    yield "all loads", [sweep_point(findings, load, baseline) for load in findings.loads]


def _at_papers_rates(rule: Callable[[_Case], bool]) -> Callable[[_Case], bool | None]:
    return lambda case: rule(case) if case.point.is_judged else None


# --- texts and rules --------------------------------------------------------------------------------------------------


def _span(values: dict[float, float]) -> str:
    return f"{min(values.values()):.3g}x to {max(values.values()):.3g}x"


def _mean(values: dict[float, float]) -> float:
    return sum(values.values()) / len(values)


def _matching(points: list[SweepPoint]) -> list[SweepPoint]:
    return [point for point in points if point.is_judged and point.has_figure_2 and point.has_mean_factor]


def _together_text(points: list[SweepPoint]) -> str:
    found = [
        f"at {point.num_answer_tokens:.0f} tokens an answer: {point.mean_factor:.1f}x, throughput"
        f" {min(point.throughput.values()) - 1:+.0%} to {max(point.throughput.values()) - 1:+.0%}"
        for point in _matching(points)
    ]
    lengths = ", ".join(f"{point.num_answer_tokens:.0f}" for point in points if point.is_judged)
    return f"{'; '.join(found) or 'with no length of answers'}; tried with {lengths or 'no'} tokens"


def _together_holds(points: list[SweepPoint]) -> bool | None:
    return bool(_matching(points)) if any(point.is_judged for point in points) else None


def _ttft_text(case: _Case) -> str:
    text = f"{case.point.mean_factor:.1f}x lower on average, {_span(case.point.ttft)}"
    if case.point.baseline != FCFS:
        return text
    as_many = case.ratios(FCFS_64, EXPERT, ls_ttft)
    return f"{text}; with as many places as QLLM {_mean(as_many):.1f}x, {_span(as_many)}"


def _held_text(case: _Case) -> str:
    rates = paper_rates(case.findings, case.point.load)
    return f"{at_rates(case.point.held)}, of {at_rates(rates).removeprefix('at ')}"


def _is_held(case: _Case) -> bool:
    return case.point.held == paper_rates(case.findings, case.point.load)


def _throughput_text(other: str, case: _Case) -> str:
    shares = case.ratios(EXPERT, other, throughput)
    return ", ".join(f"{share - 1:+.0%} at {rate:g}/s" for rate, share in shares.items())


def _is_comparable(other: str, case: _Case) -> bool:
    return COMPARABLE.is_reached(min(case.ratios(EXPERT, other, throughput).values()))


def _be_turnaround_text(case: _Case) -> str:
    base, fcfs = (_span(case.ratios(EXPERT, other, be_turnaround)) for other in (RUN_TO_COMPLETION, FCFS))
    return f"{base} of run-to-completion's, {fcfs} of continuous batching's"


def _be_pays(case: _Case) -> bool:
    return max(case.ratios(EXPERT, RUN_TO_COMPLETION, be_turnaround).values()) > 1


def _grain_text(case: _Case) -> str:
    return f"iteration_priority's is {_span(case.ratios(ITERATION, EXPERT, ls_ttft))} of expert_level's"


def _is_finer_better(case: _Case) -> bool:
    return min(case.ratios(ITERATION, EXPERT, ls_ttft).values()) > 1


def _ageing_text(case: _Case) -> str:
    be, ls = (_span(case.ratios(EXPERT_AGED, EXPERT, of)) for of in (be_ttft, ls_ttft))
    return f"with ageing after {AGE_S:g} s: TTFT of BE {be} of that without, of LS {ls}"


def _ours_beside(other: str, case: _Case) -> list[dict[float, float]]:
    """By rate, at all that were run: TTFT of LS, turnaround of BE and throughput of our engine over another's."""
    rates = case.findings.rates(case.point.load)
    return [case.ratios(EXPERT_MIXED, other, of, rates) for of in (ls_ttft, be_turnaround, throughput)]


def _ours_text(other: str, case: _Case) -> str:
    ls, be, rate = map(_span, _ours_beside(other, case))
    return f"TTFT of LS {ls}, turnaround of BE {be}, throughput {rate}"


def _is_ours_better(other: str, case: _Case) -> bool:
    ls, _, rate = _ours_beside(other, case)
    return max(ls.values()) < 1 and min(rate.values()) >= 1 - EQUAL


# --- the rows ---------------------------------------------------------------------------------------------------------


def _of_reading(baseline: str, name: str) -> tuple[Row, Row]:
    """Claims that depend on what the baseline is."""
    return (
        ClaimRow(
            where="abstract",
            sentence=f"TTFT of LS is {MEAN_FACTOR.value:g}x lower on average (up to {MOST_FACTOR.value:g}x); baseline:"
            f" {name}",
            figures=(MEAN_FACTOR, MOST_FACTOR), cases=_loads(baseline), ours=_ttft_text,
            holds=_at_papers_rates(lambda case: case.point.has_mean_factor),
            why="the factor is how long a batch keeps newcomers out, or how long requests wait for a place: it grows"
            " with the length of answers and with how long an overloaded baseline is watched, and tells little of"
            " preemption",
        ),
        ClaimRow(
            where="Fig. 2",
            sentence=f"the baseline's mean TTFT of LS is not below 3 s, at any rate; baseline: {name}",
            cases=_loads(baseline), ours=lambda case: f"it is {at_rates(case.point.held_by_baseline)}",
            holds=_at_papers_rates(lambda case: not case.point.held_by_baseline),
            why="half of a batch's time is waited for: with short answers that is less than 3 s"
            if baseline == RUN_TO_COMPLETION
            else "a free place is taken at the next iteration, so that only an overload makes requests wait",
        ),
    )  # fmt: skip


def _all_at_once(baseline: str, name: str) -> Row:
    return ClaimRow(
        where="abstract and Fig. 2",
        sentence=f"{MEAN_FACTOR.value:g}x on average, 3 s held up to {HELD_UP_TO.value:g} requests/s, and never by the"
        f" baseline: all at once; baseline: {name}",
        figures=(MEAN_FACTOR, HELD_UP_TO), cases=partial(_together, baseline), ours=_together_text,
        holds=_together_holds, why="the paper does not state the length of answers, and each of the three bounds it",
    )  # fmt: skip


def _throughput_row(other: str, name: str) -> Row:
    return ClaimRow(
        where="Fig. 3", sentence=f"throughput is comparable or slightly higher; baseline: {name}",
        figures=(COMPARABLE,), cases=_loads(), ours=partial(_throughput_text, other),
        holds=_at_papers_rates(partial(_is_comparable, other)),
        why="an iteration costs nearly the same for one token as for 32: what passes on its own, and batches of"
        " prompts alone (Algorithm 1), take the time of a full one",
    )  # fmt: skip


def _our_goal(other: str, goal: str, why: str = "") -> Row:
    return ClaimRow(
        where="our own goal", sentence=goal, cases=_loads(engine=EXPERT_MIXED), ours=partial(_ours_text, other),
        holds=partial(_is_ours_better, other), why=why,
    )  # fmt: skip


_LOWER = f"{EXPERT_MIXED}: LS below continuous batching with"
CLAIMS: tuple[Row, ...] = (
    *(_all_at_once(baseline, name) for baseline, name in READINGS.items()),
    *(row for baseline, name in READINGS.items() for row in _of_reading(baseline, name)),
    ClaimRow(
        where="Fig. 2",
        sentence=f"QLLM's mean TTFT of LS is below 3 s up to {HELD_UP_TO.value:g} requests/s",
        figures=(HELD_UP_TO,), cases=_loads(), ours=_held_text, holds=_at_papers_rates(_is_held),
        why="Algorithm 1 lets no prompt in while 32 LS answers are being generated: long ones fill these places",
    ),
    *(_throughput_row(other, name) for other, name in _THROUGHPUT_BASELINES.items()),
    ClaimRow(
        where="Fig. 4", sentence=f"turnaround of LS is up to {TURNAROUND_FACTOR.value:g}x lower",
        figures=(TURNAROUND_FACTOR,), cases=_loads(), ours=lambda case: _span(case.point.turnaround),
        holds=_at_papers_rates(lambda case: TURNAROUND_FACTOR.is_reached(max(case.point.turnaround.values()))),
    ),
    ClaimRow(
        where="Fig. 4",
        sentence="BE pays: its turnaround rises (the figure is lost from every text of the paper)",
        cases=_loads(), ours=_be_turnaround_text, holds=_at_papers_rates(_be_pays),
    ),
    ClaimRow(
        where="section 2.4",
        sentence="priorities between iterations still wait for one: preempting inside it lowers TTFT of LS",
        cases=_loads(), ours=_grain_text, holds=_at_papers_rates(_is_finer_better),
        why="of a TTFT whose own prefill takes 0.4 s, preemption saves half an iteration, 0.18 s; where an LS prompt"
        " meets parked best-effort prompts it goes on with them, as in QLLM's code, and pays for their rows",
    ),
    ClaimRow(
        where="section 6", sentence="starvation of BE is an open problem", cases=_loads(engine=EXPERT_AGED),
        ours=_ageing_text, holds=lambda _: None,
    ),
    _our_goal(FCFS, f"{_LOWER} 32 places at every rate, throughput within 3 %"),
    _our_goal(
        FCFS_64, f"{_LOWER} as many places at every rate, throughput within 3 %",
        "32 of its 64 places are for LS alone, which is a fifth of the requests: under overload it runs smaller"
        " batches than an engine that gives all places to anybody",
    ),
    _our_goal(
        ITERATION_MIXED,
        f"preemption itself lowers TTFT of LS: {EXPERT_MIXED} beside {ITERATION_MIXED}, the same without",
    ),
)  # fmt: skip
