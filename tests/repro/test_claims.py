"""When a claim of LMetric's holds: every rule on figures by hand, and the stored result by the rules of today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from moestro.repro.lmetric.claims import claims_of
from moestro.repro.lmetric.experiment import TUNED
from moestro.repro.lmetric.findings import (
    FIGURES,
    NETWORK,
    OTHER_NETWORK,
    Classes,
    Course,
    Difference,
    Errors,
    Hotspots,
    LmetricCell,
    LmetricFindings,
    Pair,
    Sweep,
)
from moestro.repro.papers import papers
from moestro.repro.results import Reproduced
from moestro.repro.testbed import Latency, ServingFigures

ROOT = Path(__file__).parents[2]
STORED = ROOT / "bench" / "results" / "repro" / "lmetric.json"
NEARLY_BELOW, BELOW, NEARLY_ABOVE, ABOVE = 0.985, 0.975, 1.015, 1.025


def figures(ttft=1.0, tpot=1.0, *, p50=None, imbalance=1.0, unlike=(2.0, 1.0), hits=0.5) -> ServingFigures:
    """A run of which all but these are alike."""
    return ServingFigures(
        num_requests=100,
        num_counted=90,
        span_s=10.0,
        ttft_ms=Latency(100 * ttft, 100 * (p50 or ttft), 100 * ttft),
        tpot_ms=Latency(10 * tpot, 10 * tpot, 10 * tpot),
        hit_ratio=hits,
        request_imbalance=imbalance,
        prefill_imbalance=1.0,
        unlike_prefill_s=unlike,
        requests_per_s=1.0,
    )


def cell(load, system, measured, *, share=0.5, noise=0.0) -> LmetricCell:
    """A run whose batches differ from its mean by `noise`, alternately more and less."""
    values = {name: of(measured) for name, of in FIGURES.items()}
    return LmetricCell(
        load=load, is_generated=True, network=NETWORK, share=share, rate=1.0, system=system, seed=101,
        measured=measured,
        batches={name: (value * (1 - noise), value * (1 + noise)) * 2 for name, value in values.items()},
    )  # fmt: skip


def cells(load, *, noise=0.0, **measured) -> LmetricFindings:
    """Runs at half of the capacity, of which the paper's policy has noise."""
    return LmetricFindings(
        cells=[
            cell(load, name.replace("_", "-"), each, noise=noise if name == "lmetric" else 0.0)
            for name, each in measured.items()
        ]
    )


def sweep(*pairs) -> LmetricFindings:
    """A sweep of lambda; the filter's range makes no difference."""
    ranges = Sweep(policy="aibrix", parameter="max_range", values=[(most, figures()) for most in (2, 4, 16)])
    weights = Sweep(policy="bailian", parameter="hit_weight", values=list(pairs))
    return LmetricFindings(sweeps={"chat": {"bailian": weights, "aibrix": ranges}})


RIVALS = ("vllm-0.26", "bailian", "dynamo", "llm-d")


def five_policies(ttft_of_lmetric, *, share=0.5, load="chat", tpot_of_lmetric=0.5, noise=0.0):
    """Runs of the paper's five policies at one rate."""
    ours = cell(load, "lmetric", figures(ttft_of_lmetric, tpot_of_lmetric), share=share, noise=noise)
    return [ours, *(cell(load, name, figures(), share=share) for name in RIVALS)]


def main_claim(figure, share, *cells):
    return judged(LmetricFindings(cells=list(cells)), f"section 6, {figure} at {share:.0%}")


@pytest.mark.parametrize(("ttft", "noise", "holds"), [(BELOW, 0.0, True), (ABOVE, 0.0, False), (BELOW, 0.1, None)])
def test_the_main_claim_needs_every_rival_on_every_load(ttft, noise, holds):
    runs = [*five_policies(0.5), *five_policies(ttft, load="coder", noise=noise)]
    assert main_claim("TTFT mean", 0.5, *runs).holds is holds
    assert main_claim("TPOT mean", 0.5, *runs).holds is True


def test_the_main_claim_is_judged_at_each_rate_by_itself():
    runs = [*five_policies(0.5), *five_policies(2.0, share=0.9), *five_policies(0.5, share=1.2)]
    assert [main_claim("TTFT mean", share, *runs).holds for share in (0.5, 0.9, 1.2)] == [True, False, True]
    assert "chat +100% to vllm-0.26" in main_claim("TTFT mean", 0.9, *runs).ours
    assert "lowest of the five on 0 of 1 loads" in main_claim("TTFT mean", 0.9, *runs).ours


def test_the_main_claim_excepts_tool_agents_of_ttft_alone():
    runs = [*five_policies(0.5), *five_policies(2.0, load="tool_agent", tpot_of_lmetric=2.0)]
    assert main_claim("TTFT mean", 0.5, *runs).holds is True
    assert "4 better, 0 undecided, 4 worse" in main_claim("TTFT mean", 0.5, *runs).ours
    assert main_claim("TPOT mean", 0.5, *runs).holds is False


def test_the_main_claim_is_not_judged_without_a_rival():
    runs = five_policies(0.5)[:-1]
    assert not [each for each in claims_of(LmetricFindings(cells=runs)) if each.source.startswith("section 6,")]


def judged(findings, source):
    """The one claim of `source`."""
    [claim] = [claim for claim in claims_of(findings) if claim.source.startswith(source)]
    return claim


@pytest.mark.parametrize(
    ("ttft", "tpot", "noise", "holds"),
    [(BELOW, BELOW, 0.0, True), (BELOW, ABOVE, 0.0, False), (BELOW, BELOW, 0.1, None), (BELOW, 2.0, 0.1, False)],
)
def test_the_paper_s_policy_is_below_another_by_the_intervals_of_both(ttft, tpot, noise, holds):
    found = cells("chat", lmetric=figures(ttft, tpot), bailian=figures(), noise=noise)
    assert judged(found, "abstract").holds is holds


@pytest.mark.parametrize(("tpot", "holds"), [(BELOW, True), (ABOVE, False)])
def test_against_a_predictor_the_tail_of_the_time_per_token_is_judged(tpot, holds):
    claim = judged(cells("chat", lmetric=figures(ABOVE, tpot), llm_d=figures()), "abstract")
    assert claim.holds is holds
    assert "P99 TPOT" in claim.ours


@pytest.mark.parametrize(("late", "holds"), [(3.0, True), (1.5, False)])
def test_the_gap_grows_with_the_rate_or_the_claim_does_not_hold(late, holds):
    found = LmetricFindings(
        cells=[
            cell("chat", name, figures(ttft), share=share)
            for share, by_policy in (
                (0.5, {"lmetric": 1.0, "vllm-0.26": 2.0}),
                (0.9, {"lmetric": 1, "vllm-0.26": late}),
            )
            for name, ttft in by_policy.items()
        ]
    )
    assert judged(found, "Fig. 25").holds is holds


@pytest.mark.parametrize(
    ("ttft", "tpot", "holds"), [(ABOVE, BELOW, True), (BELOW, BELOW, False), (ABOVE, ABOVE, False)]
)
def test_the_exception_is_above_in_ttft_and_below_in_tpot(ttft, tpot, holds):
    found = cells("tool_agent", lmetric=figures(ttft, tpot), llm_d=figures())
    assert judged(found, "Fig. 25, ToolAgent").holds is holds


@pytest.mark.parametrize(("hits", "holds"), [(0.5, True), (0.44, False), (0.2, False)])
def test_the_product_hits_like_the_sum_and_above_the_blind_score(hits, holds):
    found = cells("chat", lmetric=figures(hits=hits), bailian=figures(), blind=figures())
    found.cells[-1] = cell("chat", "vllm-0.26", figures(2.0, 2.0, hits=0.2))
    assert judged(found, "Fig. 26").holds is holds


@pytest.mark.parametrize(
    ("ttft", "tpot", "hits", "faster", "hits_more"),
    [(BELOW, BELOW, 0.6, True, True), (BELOW, ABOVE, 0.505, False, False)],
)
def test_the_lightest_weight_of_the_paper_is_set_beside_the_blind_score(ttft, tpot, hits, faster, hits_more):
    found = cells("chat", lmetric=figures(), blind=figures())
    found.cells[-1] = cell("chat", "vllm-0.26", figures(hits=0.5))
    assert not [claim for claim in claims_of(found) if claim.source.startswith(("Fig. 7", "Fig. 8"))]
    found.weighed = [cell("chat", f"bailian:hit_weight={weight}", figures()) for weight in (0.4, 0.7, 0.9)]
    found.weighed[0] = cell("chat", "bailian:hit_weight=0.4", figures(ttft, tpot, hits=hits))
    assert judged(found, "Fig. 7").holds is faster
    assert judged(found, "Fig. 8").holds is hits_more


def test_the_second_network_is_judged_beside_its_own_rivals():
    found = cells("api_agent", lmetric=figures(ABOVE), dynamo=figures())
    dense = [cell("api_agent", name, figures(ttft, ttft)) for name, ttft in (("lmetric", BELOW), ("dynamo", 1.0))]
    found.cells += [msgspec.structs.replace(each, network=OTHER_NETWORK) for each in dense]
    assert judged(found, "Fig. 22").holds
    assert not judged(found, "abstract").holds


@pytest.mark.parametrize(("tail", "holds"), [(ABOVE, True), (BELOW, False)])
def test_the_tail_of_a_predictor_is_set_beside_the_sum_of_tool_agents(tail, holds):
    found = cells("tool_agent", lmetric=figures(), bailian=figures(), llm_d=figures(BELOW, tail))
    assert judged(found, "Fig. 15, section 4.6, ToolAgent").holds is holds
    assert judged(found, "Fig. 15, section 4.6, tool_agent").holds
    found = cells("chat", lmetric=figures(), bailian=figures(), llm_d=figures(ABOVE))
    assert judged(found, "Fig. 15, section 4.6").holds is False


def course(system, spread):
    """A run of two windows with this spread of prefill over engines."""
    return Course(
        load="chat", system=system, window_s=10.0, ttft_ms=(1.0,), tpot_ms=(1.0,), hit_ratio=(0.5, 0.5),
        prefill_s=((3.0, 4.0), (2.0, 1.0)), prefill_spread=spread,
    )  # fmt: skip


@pytest.mark.parametrize(("spread", "holds"), [(0.4, True), (0.495, False), (0.6, False)])
def test_prefill_is_spread_more_evenly_than_with_a_predictor(spread, holds):
    found = cells("chat", lmetric=figures())
    found.courses = [course("lmetric", spread), course("llm-d", 0.5)]
    assert judged(found, "Fig. 27").holds is holds
    assert judged(found, "Fig. 27").ours.startswith(f"3.50 and 1.50 s in 10 s, spread {spread:.2f}")


@pytest.mark.parametrize(("heaviest", "holds"), [(ABOVE, True), (NEARLY_ABOVE, False)])
def test_too_heavy_a_weight_costs_more_than_nothing(heaviest, holds):
    found = sweep((0.4, figures(2.0)), (0.7, figures()), (0.9, figures(heaviest)))
    assert judged(found, "Fig. 11").holds is holds
    assert "end of the sweep" not in judged(found, "Fig. 11").ours


@pytest.mark.parametrize("best", [0.4, 0.9])
def test_the_best_weight_at_an_end_of_the_sweep_is_no_knee(best):
    claim = judged(sweep(*((weight, figures(1.0 if weight == best else 2.0)) for weight in (0.4, 0.7, 0.9))), "Fig. 11")
    assert claim.holds is False
    assert f"best at {best:g}, an end of the sweep: no knee is seen" in claim.ours


def test_the_best_value_of_a_sweep_weighs_both_latencies_alike():
    values = [(0.1, figures(1.0, 2.0)), (0.5, figures(1.2, 1.5)), (0.9, figures(2.0, 1.0))]
    assert Sweep(policy="bailian", parameter="hit_weight", values=values).best[0] == 0.5


@pytest.mark.parametrize(("hits", "holds"), [(0.6, True), (0.5, False)])
def test_a_heavier_weight_finds_more_in_the_cache(hits, holds):
    assert judged(sweep((0.1, figures()), (0.9, figures(hits=hits))), "Fig. 9").holds is holds


@pytest.mark.parametrize(("spread", "holds"), [(0.6, True), (0.505, False)])
def test_engines_differ_more_under_too_heavy_a_weight(spread, holds):
    found = cells("chat", lmetric=figures())
    found.courses = [course("bailian:hit_weight=0.7", 0.5), course("bailian:hit_weight=0.9", spread)]
    assert judged(found, "Fig. 10").holds is holds


@pytest.mark.parametrize(
    ("load", "p50", "tpot", "holds"),
    [("coder", BELOW, BELOW, True), ("coder", NEARLY_BELOW, BELOW, False), ("coder", BELOW, 1.0, False),
     ("api_agent", BELOW, BELOW, True), ("chat", BELOW, BELOW, None)],
)  # fmt: skip
def test_ranges_are_judged_on_the_paper_s_load(load, p50, tpot, holds):
    ranges = [(2, figures()), (4, figures()), (16, figures(1.0, tpot, p50=p50))]
    by_policy = {
        "aibrix": Sweep(policy="aibrix", parameter="max_range", values=ranges),
        "bailian": Sweep(policy="bailian", parameter="hit_weight", values=[(0.1, figures()), (0.9, figures(BELOW))]),
    }
    tuned, slower = [c for c in claims_of(LmetricFindings(sweeps={load: by_policy})) if c.source.startswith("Fig. 12")]
    assert tuned.holds is holds
    assert slower.holds


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


@pytest.mark.parametrize(
    ("ttft", "tpot", "off", "holds"),
    [(ABOVE, ABOVE, 0.1, True), (ABOVE, 1.0, 0.1, False), (1.0, ABOVE, 0.1, False), (ABOVE, ABOVE, 0.3, None)],
)
def test_a_predictor_of_another_network_is_judged_beside_one_that_is_nearly_right(ttft, tpot, off, holds):
    errors = [
        Errors(
            load="chat", is_tuned=is_tuned, p50=0.1, p90=0.2, share_above_20_percent=off, curve=(), measured=measured
        )
        for is_tuned, measured in ((True, figures()), (False, figures(ttft, tpot)))
    ]
    assert judged(LmetricFindings(errors=errors), "Fig. 15").holds is holds


@pytest.mark.parametrize(
    ("num_requests", "class_share", "holds"), [(99, 0.1, None), (100, 0.1, True), (100, 0.3, False), (99, 0.3, None)]
)
def test_few_requests_of_hot_classes_give_no_verdict(num_requests, class_share, holds):
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


def test_undecided_is_not_called_as_good():
    intervals = ((-0.3, -0.1), (-1.0, 3.0), (-0.1, 0.1), (0.1, 0.2))
    pairs = [
        Pair(
            load="chat", share=0.5, figure="TTFT mean", other="llm-d",
            difference=Difference((low + high) / 2, low, high),
        )
        for low, high in intervals
    ]  # fmt: skip
    claim = judged(LmetricFindings(pairs=pairs), "our own goal")
    assert claim.holds is False
    assert claim.ours == "1 better, 2 undecided, 1 worse"
    assert judged(LmetricFindings(pairs=pairs[:3]), "our own goal").holds


def test_the_stored_run_of_lmetric_is_complete():
    stored = msgspec.json.decode(STORED.read_bytes(), type=Reproduced[LmetricFindings])
    assert list(stored.parts) == stored.findings.loads
    assert all(each.commit and each.moestro for each in (stored.conditions, *stored.parts.values()))
    assert all(by_policy.keys() == TUNED.keys() for by_policy in stored.findings.sweeps.values())


def test_stored_verdicts_are_those_of_today_s_rules():
    check = [sys.executable, ROOT / "tools" / "judge_claims.py", "--check"]
    found = subprocess.run(check, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("paper", papers(), ids=lambda paper: paper.name)
def test_a_stored_claim_is_found_by_its_place_and_sentence(paper):
    claims = paper.stored_claims()
    assert claims
    assert len({(claim.source, claim.paper) for claim in claims}) == len(claims)
