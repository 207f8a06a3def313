"""The claims of QLLM's paper beside our figures, with verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moestro.repro.qllm.engines import (
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
from moestro.repro.qllm.findings import QllmFindings, be_ttft, be_turnaround, ls_ttft, throughput
from moestro.repro.qllm.sweep import (
    MEAN_FACTOR,
    READINGS,
    TURNAROUND_FACTOR,
    SweepPoint,
    at_rates,
    paper_rates,
    ratios,
    sweep_point,
)
from moestro.repro.results import Claim

_EQUAL = 0.03  # throughputs that differ by less count as equal


def claims_of(findings: QllmFindings) -> list[Claim]:
    """The paper's claims over all loads, then in its order for each load, then our own goals.

    A claim of the paper is judged at the paper's rates. A load that was not run at all of them is not judged.
    """
    claims = []
    for baseline in READINGS:
        points = [sweep_point(findings, load, baseline) for load in findings.loads]
        claims.append(_together(points, baseline))
    for load in findings.loads:
        for baseline in READINGS:
            point = sweep_point(findings, load, baseline)
            claims += [claim for check in _READ_CHECKS for claim in check(findings, point)]
        point = sweep_point(findings, load)
        claims += [claim for check in _CHECKS for claim in check(findings, point)]
    return claims


def _span(values: dict[float, float]) -> str:
    return f"{min(values.values()):.3g}x to {max(values.values()):.3g}x"


def _judged(point: SweepPoint, *, verdict: bool) -> bool | None:
    return verdict if point.is_judged else None


def _together(points: list[SweepPoint], baseline: str) -> Claim:
    """Whether, with one reading of the baseline, any length of answers gives the figures that the paper has at once."""
    judged = [point for point in points if point.is_judged]
    matching = [point for point in judged if point.has_figure_2 and point.has_mean_factor]
    found = [
        f"at {point.num_answer_tokens:.0f} tokens an answer: {point.mean_factor:.1f}x, throughput"
        f" {min(point.throughput.values()) - 1:+.0%} to {max(point.throughput.values()) - 1:+.0%}"
        for point in matching
    ]
    lengths = ", ".join(f"{point.num_answer_tokens:.0f}" for point in judged)
    return Claim(
        source="abstract and Fig. 2, all loads",
        paper=f"{MEAN_FACTOR:g}x on average, 3 s held up to 7 requests/s, and never by the baseline: all at once;"
        f" baseline: {READINGS[baseline]}",
        ours=f"{'; '.join(found) or 'with no length of answers'}; tried with {lengths or 'no'} tokens",
        holds=bool(matching) if judged else None,
        why="the paper does not state the length of answers, and each of the three bounds it",
    )


def _ttft(findings: QllmFindings, point: SweepPoint) -> Iterator[Claim]:
    as_many = ratios(findings, point.load, (FCFS_64, EXPERT), ls_ttft)
    places = f"; with as many places as QLLM {_mean(as_many):.1f}x, {_span(as_many)}" if point.baseline == FCFS else ""
    yield Claim(
        source=f"abstract, {point.load}",
        paper=f"TTFT of LS is {MEAN_FACTOR:g}x lower on average (up to 101.6x); baseline: {READINGS[point.baseline]}",
        ours=f"{point.mean_factor:.1f}x lower on average, {_span(point.ttft)}{places}",
        holds=_judged(point, verdict=point.has_mean_factor),
        why="the factor is how long a batch keeps newcomers out, or how long requests wait for a place: it grows with"
        " the length of answers and with how long an overloaded baseline is watched, and tells little of preemption",
    )


def _mean(values: dict[float, float]) -> float:
    return sum(values.values()) / len(values)


def _slo_of_baseline(findings: QllmFindings, point: SweepPoint) -> Iterator[Claim]:
    del findings
    yield Claim(
        source=f"Fig. 2, {point.load}",
        paper=f"the baseline's mean TTFT of LS is not below 3 s, at any rate; baseline: {READINGS[point.baseline]}",
        ours=f"it is {at_rates(point.held_by_baseline)}",
        holds=_judged(point, verdict=not point.held_by_baseline),
        why="half of a batch's time is waited for: with short answers that is less than 3 s"
        if point.baseline == RUN_TO_COMPLETION
        else "a free place is taken at the next iteration, so that only an overload makes requests wait",
    )


def _slo(findings: QllmFindings, point: SweepPoint) -> Iterator[Claim]:
    rates = paper_rates(findings, point.load)
    yield Claim(
        source=f"Fig. 2, {point.load}",
        paper="QLLM's mean TTFT of LS is below 3 s up to 7 requests/s",
        ours=f"{at_rates(point.held)}, of {at_rates(rates).removeprefix('at ')}",
        holds=_judged(point, verdict=point.held == rates),
        why="Algorithm 1 lets no prompt in while 32 LS answers are being generated: long ones fill these places",
    )


def _throughput(findings: QllmFindings, point: SweepPoint) -> Iterator[Claim]:
    for other, name in (*READINGS.items(), (FCFS_64, "continuous batching with as many places")):
        shares = ratios(findings, point.load, (EXPERT, other), throughput)
        yield Claim(
            source=f"Fig. 3, {point.load}",
            paper=f"throughput is comparable or slightly higher; baseline: {name}",
            ours=", ".join(f"{share - 1:+.0%} at {rate:g}/s" for rate, share in shares.items()),
            holds=_judged(point, verdict=min(shares.values()) >= 1 - _EQUAL),
            why="an iteration costs nearly the same for one token as for 32: what passes on its own, and batches of"
            " prompts alone (Algorithm 1), take the time of a full one",
        )


def _turnaround(findings: QllmFindings, point: SweepPoint) -> Iterator[Claim]:
    yield Claim(
        source=f"Fig. 4, {point.load}",
        paper=f"turnaround of LS is up to {TURNAROUND_FACTOR:g}x lower",
        ours=_span(point.turnaround),
        holds=_judged(point, verdict=max(point.turnaround.values()) >= TURNAROUND_FACTOR),
    )
    base, fcfs = (ratios(findings, point.load, (EXPERT, other), be_turnaround) for other in (RUN_TO_COMPLETION, FCFS))
    yield Claim(
        source=f"Fig. 4, {point.load}",
        paper="BE pays: its turnaround rises (the figure is lost from every text of the paper)",
        ours=f"{_span(base)} of run-to-completion's, {_span(fcfs)} of continuous batching's",
        holds=_judged(point, verdict=max(base.values()) > 1),
    )


def _grain(findings: QllmFindings, point: SweepPoint) -> Iterator[Claim]:
    waits = ratios(findings, point.load, (ITERATION, EXPERT), ls_ttft)
    yield Claim(
        source=f"section 2.4, {point.load}",
        paper="priorities between iterations still wait for one: preempting inside it lowers TTFT of LS",
        ours=f"iteration_priority's is {_span(waits)} of expert_level's",
        holds=_judged(point, verdict=min(waits.values()) > 1),
        why="of a TTFT whose own prefill takes 0.4 s, preemption saves half an iteration, 0.18 s; where an LS prompt"
        " meets parked best-effort prompts it goes on with them, as in QLLM's code, and pays for their rows",
    )


def _ageing(findings: QllmFindings, point: SweepPoint) -> Iterator[Claim]:
    if not _was_run(findings, point, EXPERT_AGED):
        return
    be, ls = (ratios(findings, point.load, (EXPERT_AGED, EXPERT), of) for of in (be_ttft, ls_ttft))
    yield Claim(
        source=f"section 6, {point.load}",
        paper="starvation of BE is an open problem",
        ours=f"with ageing after {AGE_S:g} s: TTFT of BE {_span(be)} of that without, of LS {_span(ls)}",
        holds=None,
    )


def _ours(findings: QllmFindings, point: SweepPoint) -> Iterator[Claim]:
    """Judge our own goals, at all rates that were run."""
    if not _was_run(findings, point, EXPERT_MIXED):
        return
    lower = f"{EXPERT_MIXED}: LS below continuous batching with"
    for other, goal in (
        (FCFS, f"{lower} 32 places at every rate, throughput within 3 %"),
        (FCFS_64, f"{lower} as many places at every rate, throughput within 3 %"),
        (
            ITERATION_MIXED,
            f"preemption itself lowers TTFT of LS: {EXPERT_MIXED} beside {ITERATION_MIXED}, the same without",
        ),
    ):
        ls, be, rate = (
            ratios(findings, point.load, (EXPERT_MIXED, other), of, findings.rates(point.load))
            for of in (ls_ttft, be_turnaround, throughput)
        )
        yield Claim(
            source=f"our own goal, {point.load}",
            paper=goal,
            ours=f"TTFT of LS {_span(ls)}, turnaround of BE {_span(be)}, throughput {_span(rate)}",
            holds=max(ls.values()) < 1 and min(rate.values()) >= 1 - _EQUAL,
            why="32 of its 64 places are for LS alone, which is a fifth of the requests: under overload it runs smaller"
            " batches than an engine that gives all places to anybody"
            if other == FCFS_64
            else "",
        )


def _was_run(findings: QllmFindings, point: SweepPoint, engine: str) -> bool:
    return any((cell.load, cell.system) == (point.load, engine) for cell in findings.cells)


# Claims that depend on what the baseline is, and those that do not or that name theirs.
_READ_CHECKS: tuple[Callable[[QllmFindings, SweepPoint], Iterator[Claim]], ...] = (_ttft, _slo_of_baseline)
_CHECKS: tuple[Callable[[QllmFindings, SweepPoint], Iterator[Claim]], ...] = (
    _slo, _throughput, _turnaround, _grain, _ageing, _ours,
)  # fmt: skip
