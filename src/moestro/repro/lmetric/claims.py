"""The claims of LMetric's paper beside our figures, with verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from moestro.repro.lmetric.findings import BASELINE, HALF, NETWORK, OUR_POLICY, PAPER_POLICY, RIVALS, LmetricFindings
from moestro.repro.results import Claim
from moestro.repro.testbed import ServingFigures

_EQUAL = 0.02  # figures that differ by less count as equal
_FEWEST_REQUESTS = 100  # fewest requests of tracked classes on which a claim is judged


def claims_of(findings: LmetricFindings) -> list[Claim]:
    """The claims in the order of the paper."""
    return [claim for checks in _CHECKS for claim in checks(findings)]


def _cells(findings: LmetricFindings, share: float = HALF) -> dict[str, dict[str, ServingFigures]]:
    """The figures of the first network and seed 0, by load and policy."""
    found: dict[str, dict[str, ServingFigures]] = {}
    for cell in findings.cells:
        if cell.share == share and cell.network == NETWORK and cell.seed == 0:
            found.setdefault(cell.load, {})[cell.system] = cell.measured
    return found


def _gain(ours: float, other: float) -> str:
    gain = ours / other - 1
    return f"{gain:+.1%}" if abs(gain) < 0.1 else f"{gain:+.0%}"


def _is_below(ours: float, other: float) -> bool:
    return ours < other * (1 - _EQUAL)


def _is_above(ours: float, other: float) -> bool:
    return ours > other * (1 + _EQUAL)


def _against(findings: LmetricFindings) -> Iterator[Claim]:
    """Judge the abstract and Fig. 21 to 24."""
    for load, by_policy in _cells(findings).items():
        if PAPER_POLICY not in by_policy:
            continue
        ours = by_policy[PAPER_POLICY]
        for other, paper in ((BASELINE, "TTFT -92 %, TPOT -24 % (chat)"), ("bailian", "TTFT -52 %, TPOT -20 %")):
            if other not in by_policy:
                continue
            theirs = by_policy[other]
            yield Claim(
                source=f"abstract, Fig. 21-24, {load}",
                paper=f"mean of {PAPER_POLICY} against {other}: {paper}",
                ours=f"TTFT {_gain(ours.ttft_ms.mean, theirs.ttft_ms.mean)},"
                f" TPOT {_gain(ours.tpot_ms.mean, theirs.tpot_ms.mean)}",
                holds=_is_below(ours.ttft_ms.mean, theirs.ttft_ms.mean)
                and _is_below(ours.tpot_ms.mean, theirs.tpot_ms.mean),
                why="both directions are judged; absolute gains hang on a testbed that cannot be had",
            )


def _tool_agent(findings: LmetricFindings) -> Iterator[Claim]:
    for load, by_policy in _cells(findings).items():
        if load != "tool_agent" or not {PAPER_POLICY, "llm-d"} <= by_policy.keys():
            continue
        ours, theirs = by_policy[PAPER_POLICY], by_policy["llm-d"]
        yield Claim(
            source="Fig. 25, ToolAgent",
            paper="the exception: mean TTFT 10 % above llm-d's, TPOT 30 % below",
            ours=f"TTFT {_gain(ours.ttft_ms.mean, theirs.ttft_ms.mean)},"
            f" TPOT {_gain(ours.tpot_ms.mean, theirs.tpot_ms.mean)}",
            holds=_is_above(ours.ttft_ms.mean, theirs.ttft_ms.mean)
            and _is_below(ours.tpot_ms.mean, theirs.tpot_ms.mean),
            why="both directions are judged",
        )


def _knee(findings: LmetricFindings) -> Iterator[Claim]:
    for load, sweep in findings.weights.items():
        best = min(sweep, key=lambda pair: pair[1].ttft_ms.mean)
        heaviest = sweep[-1]
        where = ", an end of the sweep: no knee is seen" if best[0] in {sweep[0][0], heaviest[0]} else ""
        yield Claim(
            source=f"Fig. 11, {load}",
            paper="a knee in lambda: TTFT is best at 0.7 (chat), 0.55 (API), and worse at 0.9",
            ours=f"best at {best[0]:g}{where}; at {heaviest[0]:g} TTFT"
            f" {_gain(heaviest[1].ttft_ms.mean, best[1].ttft_ms.mean)}",
            holds=_is_above(heaviest[1].ttft_ms.mean, best[1].ttft_ms.mean),
            why="that the heaviest is worse is judged, wherever the best lies",
        )
        (busy, idle), (most, least) = best[1].unlike_prefill_s, heaviest[1].unlike_prefill_s
        yield Claim(
            source=f"Fig. 10, {load}",
            paper="prefill seconds in 10 s of two unlike engines: 3.43 and 3.40 at 0.7, 3.57 and 2.17 at 0.9",
            ours=f"{busy:.2f} and {idle:.2f} at {best[0]:g}, {most:.2f} and {least:.2f} at {heaviest[0]:g}",
            holds=_is_above(most - least, busy - idle),
        )


def _range(findings: LmetricFindings) -> Iterator[Claim]:
    for load, sweep in findings.ranges.items():
        by_range = dict(sweep)
        best = min(sweep, key=lambda pair: pair[1].ttft_ms.mean)[0]
        yield Claim(
            source=f"Fig. 13, {load}",
            paper="the filter's range has to be tuned: on Coder 4 has a P50 TTFT 44 % below that of 16",
            ours=f"range 4 against 16: P50 TTFT {_gain(by_range[4].ttft_ms.p50, by_range[16].ttft_ms.p50)};"
            f" the best mean TTFT is at {best}",
            holds=_is_below(by_range[4].ttft_ms.p50, by_range[16].ttft_ms.p50) if load == "coder" else None,
        )


def _indicators(findings: LmetricFindings) -> Iterator[Claim]:
    for load, by_score in findings.indicators.items():
        ours = by_score["P-token * batch"]
        miss, tokens = by_score["(1 - hit) * batch"], by_score["P-token * tokens"]
        yield Claim(
            source=f"Fig. 18, {load}",
            paper="P-token instead of the miss ratio: P50 TTFT -14.4 %, P95 -42.8 %",
            ours=f"mean TTFT {_gain(ours.ttft_ms.mean, miss.ttft_ms.mean)},"
            f" P50 {_gain(ours.ttft_ms.p50, miss.ttft_ms.p50)}",
            holds=_is_below(ours.ttft_ms.mean, miss.ttft_ms.mean) and _is_below(ours.ttft_ms.p50, miss.ttft_ms.p50),
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
    by_kind = {errors.is_tuned: errors for errors in findings.errors}
    if len(by_kind) < 2:
        return
    tuned, other = by_kind[True], by_kind[False]
    yield Claim(
        source="Fig. 15, 16",
        paper="a predictor made for another network: tail TTFT 75.6 % and TPOT 79.7 % worse than tuned",
        ours=f"P99 TTFT {_gain(other.measured.ttft_ms.p99, tuned.measured.ttft_ms.p99)},"
        f" P99 TPOT {_gain(other.measured.tpot_ms.p99, tuned.measured.tpot_ms.p99)};"
        f" off by more than 20 %: {tuned.share_above_20_percent:.0%} tuned, {other.share_above_20_percent:.0%} not",
        holds=_is_above(other.measured.ttft_ms.p99, tuned.measured.ttft_ms.p99)
        and _is_above(other.measured.tpot_ms.p99, tuned.measured.tpot_ms.p99),
        why="both directions are judged",
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
        lost = [pair for pair in findings.pairs if pair.verdict == "worse"]
        num = Counter(pair.verdict for pair in findings.pairs)
        yield Claim(
            source="our own goal",
            paper=f"{OUR_POLICY} is in no cell significantly worse than the best of {', '.join(RIVALS)}"
            " (five more seeds, 95 %)",
            ours=f"not significantly worse in {len(findings.pairs) - len(lost)} of {len(findings.pairs)} cells:"
            f" {num['better']} better, {num['undecided']} undecided, {num['worse']} worse",
            holds=not lost,
            why="; ".join(f"{p.load} at {p.share:.0%}, {p.figure}: {p.mean:+.1%} to {p.other}" for p in lost),
        )


_CHECKS: tuple[Callable[[LmetricFindings], Iterator[Claim]], ...] = (
    _against, _tool_agent, _knee, _range, _indicators, _prediction, _classes, _detector, _ours,
)  # fmt: skip
