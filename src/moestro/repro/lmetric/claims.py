"""The claims of LMetric's paper as rows: what each compares, by which rule, and what the paper states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from moestro.repro.experiment import ClaimRow, PaperFigure
from moestro.repro.lmetric.findings import (
    BASELINE,
    FIGURES,
    HALF,
    HEAVY,
    KNEE,
    LIGHT,
    NETWORK,
    OTHER_NETWORK,
    OUR_POLICY,
    PAPER_POLICY,
    RIVALS,
    Classes,
    Course,
    Difference,
    Errors,
    Hotspots,
    LmetricCell,
    LmetricFindings,
    Pair,
    Sweep,
    difference,
    percent,
)
from moestro.repro.lmetric.paper import (
    AWARENESS,
    EQUAL,
    EXCEPTION,
    PREDICTOR_TAIL,
    RANGE_TPOT,
    RANGE_TTFT,
    TO_BAILIAN,
    TO_LLM_D,
    TO_VLLM,
    TOKENS_TTFT,
    TUNED_TPOT,
    TUNED_TTFT,
)
from moestro.repro.results import Claim
from moestro.repro.testbed import ServingFigures

_RANGE_LOADS = ("coder", "api_agent")  # of which the paper compares ranges
_FEWEST_REQUESTS = 100  # fewest requests of tracked classes on which a claim is judged
_NEAR_ERRORS = 0.2  # share of predictions off by over 20 % up to which a predictor is like the paper's (10 %)
_EXCEPTED = "tool_agent"  # the load that the paper's main claim excepts
_SHORT = {"TTFT mean": "TTFT", "TPOT mean": "TPOT", "TPOT P99": "P99 TPOT"}  # names of figures in a text
_SPREAD = (
    "seconds of the two engines that vary most between windows, as the paper selects them; judged is the spread over"
    " all engines, the mean over windows of standard deviation over mean"
)
_DIRECTIONS = "directions are judged, by 95 % intervals over the batches of a run"

Row = ClaimRow[LmetricFindings, Any]
Compared = tuple[LmetricCell, LmetricCell]
Cases = Callable[[LmetricFindings], Iterator[tuple[str, Compared]]]


def claims_of(findings: LmetricFindings) -> list[Claim]:
    """The claims in the order of the paper."""
    return [claim for row in CLAIMS for claim in row.judged(findings)]


# --- two policies on equal requests, by intervals ---------------------------------------------------------------------


def _runs(findings: LmetricFindings, load: str, network: str = NETWORK) -> dict[str, LmetricCell]:
    """By policy, the runs at half of the capacity; none where the paper's policy was not run."""
    by_policy = findings.by_policy(load, HALF, network)
    if PAPER_POLICY not in by_policy:
        return {}
    weighed = {_bailian(weight): cell for weight, cell in findings.by_weight(load).items()}
    return by_policy | (weighed if network == NETWORK else {})


def _bailian(weight: float) -> str:
    return f"bailian:hit_weight={weight:g}"


def _pair_of(first: str, other: str, network: str = NETWORK, load: str = "") -> Cases:
    """Cases: a pair of policies on each load, or on one, whose row then has its name.

    Args:
        load: the load. "" means all.
    """

    def cases(findings: LmetricFindings) -> Iterator[tuple[str, Compared]]:
        for each in findings.loads:
            runs = _runs(findings, each, network)
            if {first, other} <= runs.keys() and load in ("", each):
                label = "" if load else each if network == NETWORK else f"{each}, {network}"
                yield label, (runs[first], runs[other])

    return cases


def _compares(
    cases: Cases,
    figures: Mapping[str, PaperFigure | None],
    shown: tuple[str, ...] = (),
    *,
    undecided: bool | None = None,
) -> dict[str, Any]:
    """Cases, texts and rule of a row that compares two policies.

    Args:
        figures: paper's figure by one of FIGURES, all of which are judged; None means only that ours is lower.
        shown: further FIGURES that the text shows, before the judged ones.
        undecided: verdict where an interval includes 0 and none contradicts the paper.
    """

    def holds(pair: Compared) -> bool | None:
        differences = {name: difference(pair[0], pair[1], name) for name in figures}
        likes = [
            each.verdict if (figure := figures[name]) is None or figure.value < 0 else _OPPOSITE[each.verdict]
            for name, each in differences.items()
        ]
        return False if "worse" in likes else undecided if "undecided" in likes else True

    return {
        "cases": cases,
        "ours": lambda pair: ", ".join(
            f"{_SHORT[name]} {difference(pair[0], pair[1], name)}" for name in (*shown, *figures)
        ),
        "holds": holds,
        "figures": tuple(filter(None, figures.values())),
    }


_OPPOSITE = {"better": "worse", "worse": "better", "undecided": "undecided"}
_LOWER: dict[str, PaperFigure | None] = {"TTFT mean": None, "TPOT mean": None}


def _rivals(where: str, network: str = NETWORK) -> Iterator[Row]:
    """LMetric against each rival."""
    stated: tuple[tuple[str, Mapping[str, PaperFigure | None], tuple[str, ...], str], ...] = (
        (BASELINE, TO_VLLM, (), f"TTFT {TO_VLLM['TTFT mean']}, TPOT {TO_VLLM['TPOT mean']} (chat)"),
        ("bailian", TO_BAILIAN, (), f"TTFT {TO_BAILIAN['TTFT mean']}, TPOT {TO_BAILIAN['TPOT mean']}"),
        ("dynamo", _LOWER, (), "lower TTFT and TPOT"),
        ("llm-d", TO_LLM_D, ("TTFT mean",), f"a similar TTFT; P99 TPOT {TO_LLM_D['TPOT P99']} (chat)"),
    )
    for name, figures, shown, sentence in stated:
        yield ClaimRow(
            where=where, sentence=f"mean of {PAPER_POLICY} against {name}: {sentence}",
            **_compares(_pair_of(PAPER_POLICY, name, network), figures, shown),
            why=f"{_DIRECTIONS}; of llm-d, P99 TPOT",
        )  # fmt: skip


# --- all rivals, loads and rates --------------------------------------------------------------------------------------

Everything = tuple[str, dict[str, dict[str, LmetricCell]]]


def _everything(findings: LmetricFindings) -> Iterator[tuple[str, Everything]]:
    """Cases: a figure and, by load and policy, the runs at one rate; of loads that all rivals served."""
    for share in sorted({share for load in findings.loads for share in findings.shares(load)}):
        by_load = {load: findings.by_policy(load, share) for load in findings.loads}
        complete = {load: runs for load, runs in by_load.items() if {PAPER_POLICY, *RIVALS} <= runs.keys()}
        for figure in ("TTFT mean", "TPOT mean"):
            if complete:
                yield f"{figure} at {share:.0%}", (figure, complete)


def _against_all(case: Everything) -> dict[tuple[str, str], Difference]:
    """By load and rival, the difference of LMetric to it."""
    figure, by_load = case
    return {
        (load, name): difference(runs[PAPER_POLICY], runs[name], figure)
        for load, runs in by_load.items()
        for name in RIVALS
    }


def _judged(case: Everything) -> dict[tuple[str, str], Difference]:
    """The differences without those that the paper excepts."""
    excepted = _EXCEPTED if case[0] == "TTFT mean" else None
    return {pair: each for pair, each in _against_all(case).items() if pair[0] != excepted}


def _outperforms_text(case: Everything) -> str:
    figure, by_load = case
    of = FIGURES[figure]
    num_lowest = sum(
        all(of(runs[PAPER_POLICY].measured) <= of(runs[name].measured) for name in RIVALS) for runs in by_load.values()
    )
    num = Counter(each.verdict for each in _against_all(case).values())
    lost = [f"{load} {percent(each.mean)} to {name}" for (load, name), each in _judged(case).items() if each.low > 0]
    return (
        f"lowest of the five on {num_lowest} of {len(by_load)} loads; against each rival on each load"
        f" {num['better']} better, {num['undecided']} undecided, {num['worse']} worse"
        + (f" ({', '.join(lost)})" if lost else "")
    )


def _outperforms(case: Everything) -> bool | None:
    verdicts = {each.verdict for each in _judged(case).values()}
    return False if "worse" in verdicts else None if "undecided" in verdicts else True


def _gaps(findings: LmetricFindings) -> Iterator[tuple[str, dict[float, Difference]]]:
    """Cases: by share of the capacity, LMetric against vLLM on one load."""
    for load in findings.loads:
        found = {share: findings.by_policy(load, share) for share in findings.shares(load)}
        gaps = {
            share: difference(runs[PAPER_POLICY], runs[BASELINE], "TTFT mean")
            for share, runs in found.items()
            if {PAPER_POLICY, BASELINE} <= runs.keys()
        }
        if len(gaps) > 1:
            yield load, dict(sorted(gaps.items()))


def _widens(gaps: dict[float, Difference]) -> bool:
    return all(later.mean < earlier.mean for earlier, later in pairwise(gaps.values()))


# --- single figures, by more than EQUAL -------------------------------------------------------------------------------


def _gain(ours: float, other: float) -> str:
    return percent(ours / other - 1)


def _is_below(ours: float, other: float) -> bool:
    return ours < other * (1 - EQUAL)


def _is_above(ours: float, other: float) -> bool:
    return ours > other * (1 + EQUAL)


def _hits(findings: LmetricFindings) -> Iterator[tuple[str, dict[str, float]]]:
    """Cases: hit ratio by policy."""
    shown = (BASELINE, "bailian", "dynamo", "llm-d", PAPER_POLICY)
    for load in findings.loads:
        runs = _runs(findings, load)
        if {BASELINE, "bailian"} <= runs.keys():
            yield load, {name: runs[name].measured.hit_ratio for name in shown if name in runs}


Courses = tuple[Course, Course]


def _courses(first: str, other: str) -> Callable[[LmetricFindings], Iterator[tuple[str, Courses]]]:
    def cases(findings: LmetricFindings) -> Iterator[tuple[str, Courses]]:
        for load in findings.loads:
            pair = findings.course(load, first), findings.course(load, other)
            if pair[0] is not None and pair[1] is not None:
                yield load, (pair[0], pair[1])

    return cases


def _prefill(course: Course) -> str:
    first, second = course.mean_prefill_s
    return f"{first:.2f} and {second:.2f} s in 10 s, spread {course.prefill_spread:.2f}"


def _sweeps(findings: LmetricFindings) -> Iterator[tuple[str, Sweep]]:
    yield from ((load, by_policy["bailian"]) for load, by_policy in findings.sweeps.items())


def _weights_hits_text(sweep: Sweep) -> str:
    lightest, light = sweep.values[0]
    return f"{light.hit_ratio:.1%} at {lightest:g}, {sweep.at(HEAVY).hit_ratio:.1%} at {HEAVY:g}"


def _knee_text(sweep: Sweep) -> str:
    best, heavy = sweep.best, sweep.at(HEAVY)
    where = "" if sweep.is_best_inside else ", an end of the sweep: no knee is seen"
    return (
        f"best at {best[0]:g}{where}; at {HEAVY:g} TTFT {_gain(heavy.ttft_ms.mean, best[1].ttft_ms.mean)},"
        f" TPOT {_gain(heavy.tpot_ms.mean, best[1].tpot_ms.mean)}"
    )


Ranges = tuple[str, Sweep, ServingFigures]


def _ranges(findings: LmetricFindings) -> Iterator[tuple[str, Ranges]]:
    """Cases: load, sweep of the filter's range, and the best sum."""
    for load, by_policy in findings.sweeps.items():
        yield load, (load, by_policy["aibrix"], by_policy["bailian"].best[1])


def _range_text(case: Ranges) -> str:
    narrow, wide = case[1].at(4), case[1].at(16)
    return (
        f"16 against 4: P50 TTFT {_gain(wide.ttft_ms.p50, narrow.ttft_ms.p50)},"
        f" mean TPOT {_gain(wide.tpot_ms.mean, narrow.tpot_ms.mean)}; best at {case[1].best[0]:g}"
    )


def _range_holds(case: Ranges) -> bool | None:
    narrow, wide = case[1].at(4), case[1].at(16)
    if case[0] not in _RANGE_LOADS:
        return None
    return RANGE_TTFT.is_reached(wide.ttft_ms.p50 / narrow.ttft_ms.p50 - 1) and RANGE_TPOT.is_reached(
        wide.tpot_ms.mean / narrow.tpot_ms.mean - 1
    )


def _filter_text(case: Ranges) -> str:
    best = case[1].best[1]
    return (
        f"best filter against best sum: TTFT {_gain(best.ttft_ms.mean, case[2].ttft_ms.mean)},"
        f" TPOT {_gain(best.tpot_ms.mean, case[2].tpot_ms.mean)}"
    )


Predictors = tuple[Errors, Errors]


def _predictors(findings: LmetricFindings) -> Iterator[tuple[str, Predictors]]:
    """Cases: the predictor of the network, and that of another one."""
    for load in dict.fromkeys(errors.load for errors in findings.errors):
        by_kind = {errors.is_tuned: errors for errors in findings.errors if errors.load == load}
        if len(by_kind) > 1:
            yield load, (by_kind[True], by_kind[False])


def _predictors_text(pair: Predictors) -> str:
    tuned, other = (each.measured for each in pair)
    return (
        f"P99 TTFT {_gain(tuned.ttft_ms.p99, other.ttft_ms.p99)},"
        f" P99 TPOT {_gain(tuned.tpot_ms.p99, other.tpot_ms.p99)};"
        f" off by more than 20 %: {pair[0].share_above_20_percent:.0%} tuned, {pair[1].share_above_20_percent:.0%} not"
    )


def _predictors_hold(pair: Predictors) -> bool | None:
    tuned, other = (each.measured for each in pair)
    if pair[0].share_above_20_percent > _NEAR_ERRORS:
        return None
    return TUNED_TTFT.is_reached(tuned.ttft_ms.p99 / other.ttft_ms.p99 - 1) and TUNED_TPOT.is_reached(
        tuned.tpot_ms.p99 / other.tpot_ms.p99 - 1
    )


Scores = tuple[ServingFigures, ServingFigures]


def _scores(other: str) -> Callable[[LmetricFindings], Iterator[tuple[str, Scores]]]:
    """Cases: LMetric's score and another one."""
    return lambda findings: (
        (load, (by_score["P-token * batch"], by_score[other])) for load, by_score in findings.indicators.items()
    )


def _tokens_text(pair: Scores) -> str:
    ours, miss = pair
    return (
        f"mean TTFT {_gain(ours.ttft_ms.mean, miss.ttft_ms.mean)},"
        f" P50 {_gain(ours.ttft_ms.p50, miss.ttft_ms.p50)}, P99 {_gain(ours.ttft_ms.p99, miss.ttft_ms.p99)};"
        f" hits {ours.hit_ratio:.1%} and {miss.hit_ratio:.1%}"
    )


def _tokens_hold(pair: Scores) -> bool:
    ours, miss = pair
    return _is_below(ours.ttft_ms.mean, miss.ttft_ms.mean) and TOKENS_TTFT.is_reached(
        ours.ttft_ms.p50 / miss.ttft_ms.p50 - 1
    )


def _batch_text(pair: Scores) -> str:
    ours, tokens = pair
    return f"TTFT {_gain(ours.ttft_ms.mean, tokens.ttft_ms.mean)}, TPOT {_gain(ours.tpot_ms.mean, tokens.tpot_ms.mean)}"


def _classes(findings: LmetricFindings) -> Iterator[tuple[str, Classes]]:
    yield from ((load, classes) for load, classes in findings.classes.items() if classes.class_share)


def _classes_text(classes: Classes) -> str:
    num_requests = len(classes.class_share)
    few = "" if num_requests >= _FEWEST_REQUESTS else ": too few to say"
    return f"of {num_requests} requests of tracked classes {classes.benign:.0%} keep it{few}"


Detectors = tuple[Hotspots, Hotspots]


def _detectors(findings: LmetricFindings) -> Iterator[tuple[str, Detectors]]:
    """The case: the run without the detector's filter, and the one with it."""
    by_mitigation = {found.mitigation: found for found in findings.hotspots}
    if {"off", "filter"} <= by_mitigation.keys():
        yield "", (by_mitigation["off"], by_mitigation["filter"])


def _detectors_text(pair: Detectors) -> str:
    off, on = pair
    return (
        f"{on.num_first_alarms} first and {on.num_second_alarms} second alarms; requests, max/mean:"
        f" {off.measured.request_imbalance:.2f} without, {on.measured.request_imbalance:.2f} with;"
        f" P99 TPOT {_gain(on.measured.tpot_ms.p99, off.measured.tpot_ms.p99)}"
    )


def _pairs(findings: LmetricFindings) -> Iterator[tuple[str, Counter[str]]]:
    """The case: verdicts of our policy against the best other one of each cell."""
    if findings.pairs:
        yield "", Counter(_verdict(pair) for pair in findings.pairs)


def _verdict(pair: Pair) -> str:
    return pair.difference.verdict


_LIGHT = _bailian(LIGHT)
CLAIMS: tuple[Row, ...] = (
    *_rivals("abstract, Fig. 21-24"),
    *_rivals("Fig. 22", OTHER_NETWORK),
    ClaimRow(
        where="section 6",
        sentence="LMetric outperforms all baselines (vLLM, Bailian, Dynamo, llm-d) across traces and rates, but for the"
        " TTFT of ToolAgent",
        cases=_everything, ours=_outperforms_text, holds=_outperforms,
        why="95 % intervals over the batches of a run decide each comparison",
    ),
    ClaimRow(
        where="Fig. 25", sentence="the gap to the other policies widens with the rate", cases=_gaps,
        ours=lambda gaps: f"TTFT against {BASELINE}: "
        + ", ".join(f"{percent(gap.mean)} at {share:.0%}" for share, gap in gaps.items()),
        holds=_widens, why="the gap to vLLM alone is judged, from each rate to the next; past the capacity all queue",
    ),
    ClaimRow(
        where="Fig. 25, ToolAgent",
        sentence=f"the exception, against llm-d: mean TTFT {EXCEPTION['TTFT mean']}, TPOT {EXCEPTION['TPOT mean']}",
        **_compares(_pair_of(PAPER_POLICY, "llm-d", load=_EXCEPTED), EXCEPTION, undecided=False),
        why="both directions are judged",
    ),
    ClaimRow(
        where="Fig. 7",
        sentence=f"following the cache (the sum with lambda = {LIGHT:g}) against vLLM's score: mean TTFT"
        f" {AWARENESS['TTFT mean']}, TPOT {AWARENESS['TPOT mean']} (chat)",
        **_compares(_pair_of(_LIGHT, BASELINE), AWARENESS), why="directions are judged",
    ),
    ClaimRow(
        where="Fig. 8", sentence="following the cache raises the hit ratio over that of vLLM's score",
        cases=_pair_of(_LIGHT, BASELINE),
        ours=lambda pair: f"{pair[0].measured.hit_ratio:.1%} at lambda = {LIGHT:g}, {pair[1].measured.hit_ratio:.1%}"
        f" with {BASELINE}",
        holds=lambda pair: _is_above(pair[0].measured.hit_ratio, pair[1].measured.hit_ratio),
    ),
    ClaimRow(
        where="Fig. 9", sentence="the hit ratio grows with lambda", cases=_sweeps, ours=_weights_hits_text,
        holds=lambda sweep: _is_above(sweep.at(HEAVY).hit_ratio, sweep.values[0][1].hit_ratio),
    ),
    ClaimRow(
        where="Fig. 11",
        sentence="a knee in lambda: TTFT is best at 0.7 (chat), 0.55 (API), and worse at 0.9",
        quote="in ChatBot the optimal weight is 0.7, while in API it is 0.55",
        cases=_sweeps, ours=_knee_text,
        holds=lambda sweep: sweep.is_best_inside
        and _is_above(sweep.at(HEAVY).ttft_ms.mean, sweep.best[1].ttft_ms.mean),
        why="best: the least product of mean TTFT and mean TPOT; a best value inside of the sweep and a higher"
        " TTFT beyond it are judged",
    ),
    ClaimRow(
        where="Fig. 10",
        sentence="prefill of two engines, seconds in 10 s: 3.43 and 3.40 at 0.7, 3.57 and 2.17 at 0.9 (chat)",
        quote="the average prefill time is 3.43s vs. 3.40s for the two instances",
        cases=_courses(_bailian(KNEE), _bailian(HEAVY)),
        ours=lambda pair: f"{_prefill(pair[0])} at {KNEE:g}; {_prefill(pair[1])} at {HEAVY:g}",
        holds=lambda pair: _is_above(pair[1].prefill_spread, pair[0].prefill_spread), why=_SPREAD,
    ),
    ClaimRow(
        where="Fig. 12",
        sentence=f"the filter's range has to be tuned: on Coder 16 against 4 has P50 TTFT {RANGE_TTFT}, TPOT"
        f" {RANGE_TPOT}; on API 16 is better than 4",
        figures=(RANGE_TTFT, RANGE_TPOT), cases=_ranges, ours=_range_text, holds=_range_holds,
        why="the paper says it of Coder and API",
    ),
    ClaimRow(
        where="Fig. 12", sentence="the filter is slower than a tuned sum", cases=_ranges, ours=_filter_text,
        holds=lambda case: _is_above(case[1].best[1].ttft_ms.mean, case[2].ttft_ms.mean), why="mean TTFT is judged",
    ),
    ClaimRow(
        where="Fig. 15, section 4.6", sentence="a tuned predictor outperforms the tuned sum on some traces",
        **_compares(_pair_of("llm-d", "bailian"), {"TTFT mean": None}),
    ),
    ClaimRow(
        where="Fig. 15, section 4.6, ToolAgent",
        sentence=f"the tuned predictor against the best sum: tail TPOT {PREDICTOR_TAIL['TPOT P99']}",
        **_compares(_pair_of("llm-d", "bailian", load=_EXCEPTED), PREDICTOR_TAIL), why="the direction is judged",
    ),
    ClaimRow(
        where="Fig. 15, 16",
        sentence=f"a predictor that is made for the network, against one made for another: tail TTFT {TUNED_TTFT}, TPOT"
        f" {TUNED_TPOT}",
        figures=(TUNED_TTFT, TUNED_TPOT), cases=_predictors, ours=_predictors_text, holds=_predictors_hold,
        why="both directions are judged where at most 20 % of the tuned predictions are off by more than 20 %"
        " (the paper: 10 %)",
    ),
    ClaimRow(
        where="Fig. 18", sentence=f"P-token instead of the miss ratio: P50 TTFT {TOKENS_TTFT}, P95 -42.8 %",
        figures=(TOKENS_TTFT,), quote="a 42.8% lower P95 TTFT compared to using", cases=_scores("(1 - hit) * batch"),
        ours=_tokens_text, holds=_tokens_hold, why="mean and P50 are judged; P95 is not kept",
    ),
    ClaimRow(
        where="Fig. 19", sentence="the batch is a better factor than its tokens", cases=_scores("P-token * tokens"),
        ours=_batch_text, holds=lambda pair: _is_below(pair[0].tpot_ms.mean, pair[1].tpot_ms.mean),
        why="TPOT is judged",
    ),
    ClaimRow(
        where="Fig. 20",
        sentence="no class is hotter than the engines that hold it can bear: x / (1 - x) <= |M| / (the others)",
        cases=_classes, ours=_classes_text,
        holds=lambda classes: classes.benign > 0.95 if len(classes.class_share) >= _FEWEST_REQUESTS else None,
        why="requests are counted, 95 % of them taken for all; the first of a class meet few holders",
    ),
    ClaimRow(
        where="section 5.2",
        sentence="under an adversarial hot prefix the detector keeps the product from piling up on its holders",
        cases=_detectors, ours=_detectors_text,
        holds=lambda pair: _is_below(pair[1].measured.request_imbalance, pair[0].measured.request_imbalance),
    ),
    ClaimRow(
        where="Fig. 26",
        sentence="LMetric's hit ratio is like that of the policies that follow the cache, and far above vLLM's",
        cases=_hits, ours=lambda hits: ", ".join(f"{name} {ratio:.1%}" for name, ratio in hits.items()),
        holds=lambda hits: _is_above(hits[PAPER_POLICY], hits[BASELINE])
        and hits[PAPER_POLICY] >= 0.9 * hits["bailian"],
        why="judged: above vLLM's, and at least 0.9 of Bailian's",
    ),
    ClaimRow(
        where="Fig. 27", sentence="prefill work is better balanced than with llm-d (chat; a picture of two engines)",
        cases=_courses(PAPER_POLICY, "llm-d"),
        ours=lambda pair: f"{_prefill(pair[0])}; with llm-d {_prefill(pair[1])}",
        holds=lambda pair: _is_below(pair[0].prefill_spread, pair[1].prefill_spread), why=_SPREAD,
    ),
    ClaimRow(
        where="our own goal",
        sentence=f"{OUR_POLICY} is in no cell (load, rate, figure) worse than the best of the others (95 %)",
        cases=_pairs,
        ours=lambda num: f"{num['better']} better, {num['undecided']} undecided, {num['worse']} worse",
        holds=lambda num: not num["worse"], why="95 % intervals decide each cell; the pairs of the findings name them",
    ),
)  # fmt: skip
