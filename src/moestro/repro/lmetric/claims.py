"""The claims of LMetric's paper beside our figures, with verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from moestro.repro.lmetric.courses import Course
from moestro.repro.lmetric.findings import (
    BASELINE,
    FIGURES,
    HALF,
    HEAVY,
    KNEE,
    LIGHT,
    OTHER_NETWORK,
    OUR_POLICY,
    PAPER_POLICY,
    Difference,
    LmetricCell,
    LmetricFindings,
    difference,
    percent,
)
from moestro.repro.results import Claim

_RANGE_LOADS = ("coder", "api_agent")  # of which the paper compares ranges
_EQUAL = 0.02  # figures that differ by less count as equal
_FEWEST_REQUESTS = 100  # fewest requests of tracked classes on which a claim is judged
_NEAR_ERRORS = 0.2  # share of predictions off by over 20 % up to which a predictor is like the paper's (10 %)
_EXCEPTED = "tool_agent"  # the load that the paper's main claim excepts
RIVALS = {
    BASELINE: "TTFT -92 %, TPOT -24 % (chat)",
    "bailian": "TTFT -52 %, TPOT -20 %",
    "dynamo": "lower TTFT and TPOT",
    "llm-d": "a similar TTFT; P99 TPOT -13 % (chat)",
}


_SPREAD = (
    "seconds of the two engines that vary most between windows, as the paper selects them; judged is the spread over"
    " all engines, the mean over windows of standard deviation over mean"
)


def claims_of(findings: LmetricFindings) -> list[Claim]:
    """The claims in the order of the paper."""
    return [claim for checks in _CHECKS for claim in checks(findings)]


def _gain(ours: float, other: float) -> str:
    return percent(ours / other - 1)


def _is_below(ours: float, other: float) -> bool:
    return ours < other * (1 - _EQUAL)


def _is_above(ours: float, other: float) -> bool:
    return ours > other * (1 + _EQUAL)


def _all_below(*differences: Difference) -> bool | None:
    """Whether every interval lies below 0. None if none lies above, but some include 0."""
    verdicts = {each.verdict for each in differences}
    return False if "worse" in verdicts else None if "undecided" in verdicts else True


def _at_half(findings: LmetricFindings) -> Iterator[tuple[str, dict[str, LmetricCell]]]:
    """By load, the runs at half of the capacity that include the paper's policy."""
    for load in findings.loads:
        by_policy = findings.by_policy(load, HALF)
        if PAPER_POLICY in by_policy:
            yield load, by_policy


def _both(ours: LmetricCell, other: LmetricCell) -> tuple[Difference, Difference]:
    return difference(ours, other, "TTFT mean"), difference(ours, other, "TPOT mean")


def _against(findings: LmetricFindings) -> Iterator[Claim]:
    """Judge the abstract and Fig. 21 to 24."""
    for load, by_policy in _at_half(findings):
        yield from _against_rivals(f"abstract, Fig. 21-24, {load}", by_policy)
        dense = findings.by_policy(load, HALF, OTHER_NETWORK)
        if PAPER_POLICY in dense:
            yield from _against_rivals(f"Fig. 22, {load}, {OTHER_NETWORK}", dense)


def _against_rivals(source: str, by_policy: dict[str, LmetricCell]) -> Iterator[Claim]:
    ours = by_policy[PAPER_POLICY]
    for name in (name for name in RIVALS if name in by_policy):
        ttft, tpot = _both(ours, by_policy[name])
        tail = difference(ours, by_policy[name], "TPOT P99")
        is_tail = name == "llm-d"
        yield Claim(
            source=source,
            paper=f"mean of {PAPER_POLICY} against {name}: {RIVALS[name]}",
            ours=f"TTFT {ttft}, " + (f"P99 TPOT {tail}" if is_tail else f"TPOT {tpot}"),
            holds=_all_below(tail) if is_tail else _all_below(ttft, tpot),
            why="directions are judged, by 95 % intervals over the batches of a run; of llm-d, P99 TPOT",
        )


def _main(findings: LmetricFindings) -> Iterator[Claim]:
    """Judge the paper's main claim over all loads, at each rate (section 6, Fig. 21 to 25)."""
    shares = sorted({share for load in findings.loads for share in findings.shares(load)})
    for share in shares:
        by_load = {load: findings.by_policy(load, share) for load in findings.loads}
        complete = {load: runs for load, runs in by_load.items() if {PAPER_POLICY, *RIVALS} <= runs.keys()}
        for figure in ("TTFT mean", "TPOT mean"):
            if complete:
                yield _outperforms(complete, share, figure)


def _outperforms(by_load: dict[str, dict[str, LmetricCell]], share: float, figure: str) -> Claim:
    """Judge one figure at one rate against every rival on every load. The paper excepts one load, of TTFT."""
    of, num_lowest = FIGURES[figure], 0
    found: dict[tuple[str, str], Difference] = {}
    for load, by_policy in by_load.items():
        ours = by_policy[PAPER_POLICY]
        num_lowest += all(of(ours.measured) <= of(by_policy[name].measured) for name in RIVALS)
        found |= {(load, name): difference(ours, by_policy[name], figure) for name in RIVALS}
    judged = {pair: each for pair, each in found.items() if not (pair[0] == _EXCEPTED and figure == "TTFT mean")}
    lost = [f"{load} {percent(each.mean)} to {name}" for (load, name), each in judged.items() if each.low > 0]
    num = Counter(each.verdict for each in found.values())
    return Claim(
        source=f"section 6, {figure} at {share:.0%}",
        paper="LMetric outperforms all baselines (vLLM, Bailian, Dynamo, llm-d) across traces and rates, but for the"
        " TTFT of ToolAgent",
        ours=f"lowest of the five on {num_lowest} of {len(by_load)} loads; against each rival on each load"
        f" {num['better']} better, {num['undecided']} undecided, {num['worse']} worse"
        + (f" ({', '.join(lost)})" if lost else ""),
        holds=_all_below(*judged.values()),
        why="95 % intervals over the batches of a run decide each comparison",
    )


def _gap(findings: LmetricFindings) -> Iterator[Claim]:
    """Judge that the gap to other policies grows with the rate (Fig. 25)."""
    for load in findings.loads:
        gaps: dict[float, Difference] = {}
        for share in findings.shares(load):
            by_policy = findings.by_policy(load, share)
            if {PAPER_POLICY, BASELINE} <= by_policy.keys():
                gaps[share] = difference(by_policy[PAPER_POLICY], by_policy[BASELINE], "TTFT mean")
        if len(gaps) < 2:
            continue
        means = [gaps[share].mean for share in sorted(gaps)]
        yield Claim(
            source=f"Fig. 25, {load}",
            paper="the gap to the other policies widens with the rate",
            ours=f"TTFT against {BASELINE}: "
            + ", ".join(f"{percent(gaps[share].mean)} at {share:.0%}" for share in sorted(gaps)),
            holds=means[1] < means[0],
            why="the first two rates are judged",
        )


def _tool_agent(findings: LmetricFindings) -> Iterator[Claim]:
    for load, by_policy in _at_half(findings):
        if load == _EXCEPTED and "llm-d" in by_policy:
            ttft, tpot = _both(by_policy[PAPER_POLICY], by_policy["llm-d"])
            yield Claim(
                source="Fig. 25, ToolAgent",
                paper="the exception: mean TTFT 10 % above llm-d's, TPOT 30 % below",
                ours=f"TTFT {ttft}, TPOT {tpot}",
                holds=ttft.verdict == "worse" and tpot.verdict == "better",
                why="both directions are judged",
            )


def _awareness(findings: LmetricFindings) -> Iterator[Claim]:
    """Judge that a policy that follows the cache is better than one that does not (Fig. 7, 8)."""
    for load, by_policy in _at_half(findings):
        aware, blind = findings.by_weight(load).get(LIGHT), by_policy.get(BASELINE)
        if aware is None or blind is None:
            continue
        ttft, tpot = _both(aware, blind)
        hits, few = aware.measured.hit_ratio, blind.measured.hit_ratio
        yield Claim(
            source=f"Fig. 7, {load}",
            paper=f"following the cache (the sum with lambda = {LIGHT:g}) against vLLM's score: mean TTFT -84 %, TPOT"
            " -17 % (chat)",
            ours=f"TTFT {ttft}, TPOT {tpot}",
            holds=_all_below(ttft, tpot),
            why="directions are judged",
        )
        yield Claim(
            source=f"Fig. 8, {load}",
            paper="following the cache raises the hit ratio over that of vLLM's score",
            ours=f"{hits:.1%} at lambda = {LIGHT:g}, {few:.1%} with {BASELINE}",
            holds=_is_above(hits, few),
        )


def _hits(findings: LmetricFindings) -> Iterator[Claim]:
    for load, by_policy in _at_half(findings):
        if not {BASELINE, "bailian"} <= by_policy.keys():
            continue
        shown = (BASELINE, "bailian", "dynamo", "llm-d", PAPER_POLICY)
        hits = {name: by_policy[name].measured.hit_ratio for name in shown if name in by_policy}
        yield Claim(
            source=f"Fig. 26, {load}",
            paper="LMetric's hit ratio is like that of the policies that follow the cache, and far above vLLM's",
            ours=", ".join(f"{name} {ratio:.1%}" for name, ratio in hits.items()),
            holds=_is_above(hits[PAPER_POLICY], hits[BASELINE]) and hits[PAPER_POLICY] >= 0.9 * hits["bailian"],
            why="judged: above vLLM's, and at least 0.9 of Bailian's",
        )


def _balance(findings: LmetricFindings) -> Iterator[Claim]:
    for load in findings.loads:
        ours, other = (findings.course(load, name) for name in (PAPER_POLICY, "llm-d"))
        if ours is not None and other is not None:
            yield Claim(
                source=f"Fig. 27, {load}",
                paper="prefill work is better balanced than with llm-d (chat; a picture of two engines)",
                ours=f"{_prefill(ours)}; with llm-d {_prefill(other)}",
                holds=_is_below(ours.prefill_spread, other.prefill_spread),
                why=_SPREAD,
            )


def _prefill(course: Course) -> str:
    first, second = course.mean_prefill_s
    return f"{first:.2f} and {second:.2f} s in 10 s, spread {course.prefill_spread:.2f}"


def _knee(findings: LmetricFindings) -> Iterator[Claim]:
    for load, by_policy in findings.sweeps.items():
        sweep = by_policy["bailian"]
        best, heavy = sweep.best, sweep.at(HEAVY)
        lightest, light = sweep.values[0]
        yield Claim(
            source=f"Fig. 9, {load}",
            paper="the hit ratio grows with lambda",
            ours=f"{light.hit_ratio:.1%} at {lightest:g}, {heavy.hit_ratio:.1%} at {HEAVY:g}",
            holds=_is_above(heavy.hit_ratio, light.hit_ratio),
        )
        where = "" if sweep.is_best_inside else ", an end of the sweep: no knee is seen"
        yield Claim(
            source=f"Fig. 11, {load}",
            paper="a knee in lambda: TTFT is best at 0.7 (chat), 0.55 (API), and worse at 0.9",
            ours=f"best at {best[0]:g}{where}; at {HEAVY:g} TTFT {_gain(heavy.ttft_ms.mean, best[1].ttft_ms.mean)},"
            f" TPOT {_gain(heavy.tpot_ms.mean, best[1].tpot_ms.mean)}",
            holds=sweep.is_best_inside and _is_above(heavy.ttft_ms.mean, best[1].ttft_ms.mean),
            why="best: the least product of mean TTFT and mean TPOT; a best value inside of the sweep and a higher"
            " TTFT beyond it are judged",
        )


def _imbalance(findings: LmetricFindings) -> Iterator[Claim]:
    for load in findings.loads:
        knee, heavy = (findings.course(load, f"bailian:hit_weight={weight:g}") for weight in (KNEE, HEAVY))
        if knee is not None and heavy is not None:
            yield Claim(
                source=f"Fig. 10, {load}",
                paper="prefill of two engines, seconds in 10 s: 3.43 and 3.40 at 0.7, 3.57 and 2.17 at 0.9 (chat)",
                ours=f"{_prefill(knee)} at {KNEE:g}; {_prefill(heavy)} at {HEAVY:g}",
                holds=_is_above(heavy.prefill_spread, knee.prefill_spread),
                why=_SPREAD,
            )


def _range(findings: LmetricFindings) -> Iterator[Claim]:
    for load, by_policy in findings.sweeps.items():
        ranges, linear = by_policy["aibrix"], by_policy["bailian"].best[1]
        narrow, wide, best = ranges.at(4), ranges.at(16), ranges.best
        yield Claim(
            source=f"Fig. 12, {load}",
            paper="the filter's range has to be tuned: on Coder 16 has a P50 TTFT 44 % below that of 4, and a TPOT"
            " 15 % below; on API 16 is better than 4",
            ours=f"16 against 4: P50 TTFT {_gain(wide.ttft_ms.p50, narrow.ttft_ms.p50)},"
            f" mean TPOT {_gain(wide.tpot_ms.mean, narrow.tpot_ms.mean)}; best at {best[0]:g}",
            holds=_is_below(wide.ttft_ms.p50, narrow.ttft_ms.p50) and _is_below(wide.tpot_ms.mean, narrow.tpot_ms.mean)
            if load in _RANGE_LOADS
            else None,
            why="the paper says it of Coder and API",
        )
        yield Claim(
            source=f"Fig. 12, {load}",
            paper="the filter is slower than a tuned sum",
            ours=f"best filter against best sum: TTFT {_gain(best[1].ttft_ms.mean, linear.ttft_ms.mean)},"
            f" TPOT {_gain(best[1].tpot_ms.mean, linear.tpot_ms.mean)}",
            holds=_is_above(best[1].ttft_ms.mean, linear.ttft_ms.mean),
            why="mean TTFT is judged",
        )


def _indicators(findings: LmetricFindings) -> Iterator[Claim]:
    for load, by_score in findings.indicators.items():
        ours = by_score["P-token * batch"]
        miss, tokens = by_score["(1 - hit) * batch"], by_score["P-token * tokens"]
        yield Claim(
            source=f"Fig. 18, {load}",
            paper="P-token instead of the miss ratio: P50 TTFT -14.4 %, P95 -42.8 %",
            ours=f"mean TTFT {_gain(ours.ttft_ms.mean, miss.ttft_ms.mean)},"
            f" P50 {_gain(ours.ttft_ms.p50, miss.ttft_ms.p50)}, P99 {_gain(ours.ttft_ms.p99, miss.ttft_ms.p99)};"
            f" hits {ours.hit_ratio:.1%} and {miss.hit_ratio:.1%}",
            holds=_is_below(ours.ttft_ms.mean, miss.ttft_ms.mean) and _is_below(ours.ttft_ms.p50, miss.ttft_ms.p50),
            why="mean and P50 are judged; P95 is not kept",
        )
        yield Claim(
            source=f"Fig. 19, {load}",
            paper="the batch is a better factor than its tokens",
            ours=f"TTFT {_gain(ours.ttft_ms.mean, tokens.ttft_ms.mean)},"
            f" TPOT {_gain(ours.tpot_ms.mean, tokens.tpot_ms.mean)}",
            holds=_is_below(ours.tpot_ms.mean, tokens.tpot_ms.mean),
            why="TPOT is judged",
        )


def _prediction(findings: LmetricFindings) -> Iterator[Claim]:
    for load in dict.fromkeys(errors.load for errors in findings.errors):
        by_kind = {errors.is_tuned: errors for errors in findings.errors if errors.load == load}
        if len(by_kind) < 2:
            continue
        tuned, other = by_kind[True], by_kind[False]
        is_near = tuned.share_above_20_percent <= _NEAR_ERRORS
        yield Claim(
            source=f"Fig. 15, 16, {load}",
            paper="a predictor made for another network: tail TTFT 75.6 % and TPOT 79.7 % worse than tuned",
            ours=f"P99 TTFT {_gain(other.measured.ttft_ms.p99, tuned.measured.ttft_ms.p99)},"
            f" P99 TPOT {_gain(other.measured.tpot_ms.p99, tuned.measured.tpot_ms.p99)};"
            f" off by more than 20 %: {tuned.share_above_20_percent:.0%} tuned, {other.share_above_20_percent:.0%} not",
            holds=(
                _is_above(other.measured.ttft_ms.p99, tuned.measured.ttft_ms.p99)
                and _is_above(other.measured.tpot_ms.p99, tuned.measured.tpot_ms.p99)
            )
            if is_near
            else None,
            why="both directions are judged where at most 20 % of the tuned predictions are off by more than 20 %"
            " (the paper: 10 %)",
        )


def _predictor(findings: LmetricFindings) -> Iterator[Claim]:
    """Judge the tuned predictor beside the tuned sum (section 4.6, Fig. 15)."""
    for load, by_policy in _at_half(findings):
        if not {"llm-d", "bailian"} <= by_policy.keys():
            continue
        predictor, linear = by_policy["llm-d"], by_policy["bailian"]
        ttft, tail = difference(predictor, linear, "TTFT mean"), difference(predictor, linear, "TPOT P99")
        yield Claim(
            source=f"Fig. 15, section 4.6, {load}",
            paper="a tuned predictor outperforms the tuned sum on some traces",
            ours=f"mean TTFT {ttft}",
            holds=_all_below(ttft),
        )
        if load == _EXCEPTED:
            yield Claim(
                source="Fig. 15, section 4.6, ToolAgent",
                paper="the tuned predictor's tail TPOT is 71.1 % above that of the best sum",
                ours=f"P99 TPOT {tail}",
                holds={"worse": True, "better": False, "undecided": None}[tail.verdict],
                why="the direction is judged",
            )


def _classes(findings: LmetricFindings) -> Iterator[Claim]:
    for load, classes in findings.classes.items():
        num_requests = len(classes.class_share)
        if num_requests:
            is_judged = num_requests >= _FEWEST_REQUESTS
            yield Claim(
                source=f"Fig. 20, {load}",
                paper="no class is hotter than the engines that hold it can bear: x / (1 - x) <= |M| / (the others)",
                ours=f"of {num_requests} requests of tracked classes {classes.benign:.0%} keep it"
                + ("" if is_judged else ": too few to say"),
                holds=classes.benign > 0.95 if is_judged else None,
                why="requests are counted, 95 % of them taken for all; the first of a class meet few holders",
            )


def _detector(findings: LmetricFindings) -> Iterator[Claim]:
    by_mitigation = {found.mitigation: found for found in findings.hotspots}
    if not {"off", "filter"} <= by_mitigation.keys():
        return
    off, on = by_mitigation["off"], by_mitigation["filter"]
    yield Claim(
        source="section 5.2",
        paper="under an adversarial hot prefix the detector keeps the product from piling up on its holders",
        ours=f"{on.num_first_alarms} first and {on.num_second_alarms} second alarms; requests, max/mean:"
        f" {off.measured.request_imbalance:.2f} without, {on.measured.request_imbalance:.2f} with;"
        f" P99 TPOT {_gain(on.measured.tpot_ms.p99, off.measured.tpot_ms.p99)}",
        holds=_is_below(on.measured.request_imbalance, off.measured.request_imbalance),
    )


def _ours(findings: LmetricFindings) -> Iterator[Claim]:
    if findings.pairs:
        num = Counter(pair.difference.verdict for pair in findings.pairs)
        yield Claim(
            source="our own goal",
            paper=f"{OUR_POLICY} is in no cell (load, rate, figure) worse than the best of the others (95 %)",
            ours=f"{num['better']} better, {num['undecided']} undecided, {num['worse']} worse",
            holds=not num["worse"],
            why="95 % intervals decide each cell; the pairs of the findings name them",
        )


_CHECKS: tuple[Callable[[LmetricFindings], Iterator[Claim]], ...] = (
    _against, _main, _gap, _tool_agent, _awareness, _knee, _imbalance, _range, _predictor, _prediction, _indicators,
    _classes, _detector, _hits, _balance, _ours,
)  # fmt: skip
