"""When a claim of LMetric's holds: every rule on figures by hand, and the stored result by the rules of today."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from moestro.repro.lmetric.claims import claims_of
from moestro.repro.lmetric.experiment import RANGES, WEIGHTS
from moestro.repro.lmetric.findings import NETWORK, Classes, Errors, Hotspots, LmetricCell, LmetricFindings, Pair
from moestro.repro.results import Reproduced
from moestro.repro.testbed import Latency, ServingFigures

STORED = Path(__file__).parents[2] / "bench" / "results" / "repro" / "lmetric.json"
NEARLY_BELOW, BELOW, NEARLY_ABOVE, ABOVE = 0.985, 0.975, 1.015, 1.025


def figures(ttft=1.0, tpot=1.0, *, p50=None, imbalance=1.0, unlike=(2.0, 1.0)) -> ServingFigures:
    """A run of which all but these are alike."""
    return ServingFigures(
        num_requests=100,
        ttft_ms=Latency(100 * ttft, 100 * (p50 or ttft), 100 * ttft),
        tpot_ms=Latency(10 * tpot, 10 * tpot, 10 * tpot),
        hit_ratio=0.5,
        request_imbalance=imbalance,
        prefill_imbalance=1.0,
        unlike_prefill_s=unlike,
        requests_per_s=1.0,
    )


def cells(load, **measured) -> LmetricFindings:
    return LmetricFindings(
        cells=[
            LmetricCell(
                load=load, is_generated=True, network=NETWORK, share=0.5, rate=1.0, system=name.replace("_", "-"),
                seed=0, measured=each,
            )
            for name, each in measured.items()
        ]
    )  # fmt: skip


def sweep(*pairs) -> LmetricFindings:
    return LmetricFindings(weights={"chat": list(pairs)})


def judged(findings, source):
    """The one claim of `source`."""
    [claim] = [claim for claim in claims_of(findings) if claim.source.startswith(source)]
    return claim


@pytest.mark.parametrize(
    ("ttft", "tpot", "holds"),
    [(BELOW, BELOW, True), (BELOW, NEARLY_BELOW, False), (NEARLY_BELOW, BELOW, False), (BELOW, ABOVE, False)],
)
def test_the_paper_s_policy_is_below_another_in_both_or_the_claim_does_not_hold(ttft, tpot, holds):
    found = cells("chat", lmetric=figures(ttft, tpot), bailian=figures())
    assert judged(found, "abstract").holds is holds


@pytest.mark.parametrize(
    ("ttft", "tpot", "holds"), [(ABOVE, BELOW, True), (NEARLY_ABOVE, BELOW, False), (ABOVE, NEARLY_BELOW, False)]
)
def test_the_exception_is_above_in_ttft_and_below_in_tpot(ttft, tpot, holds):
    found = cells("tool_agent", lmetric=figures(ttft, tpot), llm_d=figures())
    assert judged(found, "Fig. 25").holds is holds


@pytest.mark.parametrize(("heaviest", "holds"), [(ABOVE, True), (NEARLY_ABOVE, False)])
def test_too_heavy_a_weight_costs_more_than_nothing(heaviest, holds):
    found = sweep((0.4, figures(2.0)), (0.7, figures()), (0.9, figures(heaviest)))
    assert judged(found, "Fig. 11").holds is holds
    assert "end of the sweep" not in judged(found, "Fig. 11").ours


def test_the_best_weight_at_an_end_of_the_sweep_is_said_to_be_no_knee():
    claim = judged(sweep((0.4, figures()), (0.9, figures(2.0))), "Fig. 11")
    assert claim.holds
    assert "best at 0.4, an end of the sweep: no knee is seen" in claim.ours
    falling = judged(sweep((0.4, figures(2.0)), (0.9, figures())), "Fig. 11")
    assert falling.holds is False
    assert "an end of the sweep" in falling.ours


@pytest.mark.parametrize(("idle", "holds"), [(0.5, True), (0.99, False)])
def test_engines_differ_more_under_too_heavy_a_weight(idle, holds):
    found = sweep((0.4, figures()), (0.9, figures(2.0, unlike=(2.0, idle))))
    assert judged(found, "Fig. 10").holds is holds


@pytest.mark.parametrize(
    ("load", "p50", "holds"), [("coder", BELOW, True), ("coder", NEARLY_BELOW, False), ("chat", BELOW, None)]
)
def test_ranges_are_judged_on_the_paper_s_load(load, p50, holds):
    found = LmetricFindings(ranges={load: [(most, figures(p50=p50 if most == 4 else 1.0)) for most in RANGES]})
    assert judged(found, "Fig. 13").holds is holds


@pytest.mark.parametrize(
    ("ours", "source", "holds"),
    [
        (figures(BELOW), "Fig. 18", True),
        (figures(NEARLY_BELOW, p50=BELOW), "Fig. 18", False),
        (figures(BELOW, p50=NEARLY_BELOW), "Fig. 18", False),
        (figures(1.0, BELOW), "Fig. 19", True),
        (figures(1.0, NEARLY_BELOW), "Fig. 19", False),
    ],
)
def test_indicators_are_better_by_more_than_nothing(ours, source, holds):
    scores = {"P-token * batch": ours, "(1 - hit) * batch": figures(), "P-token * tokens": figures()}
    assert judged(LmetricFindings(indicators={"chat": scores}), source).holds is holds


@pytest.mark.parametrize(("ttft", "tpot", "holds"), [(ABOVE, ABOVE, True), (ABOVE, 1.0, False), (1.0, ABOVE, False)])
def test_a_predictor_of_another_network_is_worse_in_both(ttft, tpot, holds):
    errors = [
        Errors(is_tuned=is_tuned, p50=0.1, p90=0.2, share_above_20_percent=0.1, curve=(), measured=measured)
        for is_tuned, measured in ((True, figures()), (False, figures(ttft, tpot)))
    ]
    assert judged(LmetricFindings(errors=errors), "Fig. 15").holds is holds


@pytest.mark.parametrize(
    ("num_requests", "class_share", "holds"), [(99, 0.1, None), (100, 0.1, True), (100, 0.3, False), (99, 0.3, None)]
)
def test_of_few_requests_of_hot_classes_nothing_is_said(num_requests, class_share, holds):
    classes = Classes(class_share=(class_share,) * num_requests, holder_share=(0.2,) * num_requests)
    claim = judged(LmetricFindings(classes={"chat": classes}), "Fig. 20")
    assert claim.holds is holds
    assert ("too few to say" in claim.ours) is (holds is None)


@pytest.mark.parametrize(("imbalance", "holds"), [(2 * BELOW, True), (2 * NEARLY_BELOW, False)])
def test_the_detector_spreads_requests_by_more_than_nothing(imbalance, holds):
    hotspots = [
        Hotspots(load="chat", mitigation=name, num_first_alarms=1, num_second_alarms=0, measured=measured)
        for name, measured in (("off", figures(imbalance=2.0)), ("filter", figures(imbalance=imbalance)))
    ]
    assert judged(LmetricFindings(hotspots=hotspots), "section 5.2").holds is holds


def test_not_significantly_worse_is_not_called_as_good():
    intervals = ((-0.3, -0.1), (-1.0, 3.0), (-0.1, 0.1), (0.1, 0.2))
    pairs = [
        Pair(load="chat", share=0.5, figure="TTFT mean", other="llm-d", mean=(low + high) / 2, low=low, high=high)
        for low, high in intervals
    ]
    claim = judged(LmetricFindings(pairs=pairs), "our own goal")
    assert claim.holds is False
    assert claim.ours == "not significantly worse in 3 of 4 cells: 1 better, 2 undecided, 1 worse"
    assert judged(LmetricFindings(pairs=pairs[:3]), "our own goal").holds


def test_the_stored_claims_are_what_today_s_rules_say_of_the_stored_findings():
    stored = msgspec.json.decode(STORED.read_bytes(), type=Reproduced[LmetricFindings])
    assert stored.claims == claims_of(stored.findings)
    assert stored.parts.keys() == stored.findings.saturation.keys()
    assert all(each.commit and each.moestro for each in (stored.conditions, *stored.parts.values()))
    assert len(stored.findings.weights["chat"]) == len(WEIGHTS)


def test_the_document_has_the_verdicts_of_the_stored_claims():
    words = {True: "holds", False: "**does not**", None: "not judged"}
    rows = [
        line for line in (STORED.parents[3] / "docs" / "repro.md").read_text().splitlines() if line.startswith("| ")
    ]
    for claim in json.loads(STORED.read_text())["claims"]:
        assert any(
            row.startswith(f"| {claim['source']} |") and row.endswith(f"| {claim['ours']} | {words[claim['holds']]} |")
            for row in rows
        ), claim
