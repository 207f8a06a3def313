"""Tables of docs/repro.md that are made from the stored run of LMetric's experiment."""

from __future__ import annotations

from functools import cache

from gimbal_tables import table_of_rows
from repro_tables import stored

from moestro.repro.lmetric.experiment import POLICIES, TUNED
from moestro.repro.lmetric.findings import FIGURES, LmetricFindings, percent


@cache
def _findings() -> LmetricFindings:
    found: LmetricFindings = stored("lmetric", LmetricFindings).findings
    return found


def capacities_table() -> str:
    """By load: its capacity, how many requests were counted, and the tuned parameters."""
    findings, rows = _findings(), []
    for load in findings.loads:
        best, capacity = findings.capacity[load]
        runs = [findings.by_policy(load, share)[POLICIES[0]].measured for share in findings.shares(load)]
        counted = f"{runs[0].num_counted:,}: {', '.join(f'{run.span_s:,.0f} s' for run in runs)}"
        tuned = [f"{findings.sweeps[load][policy].best[0]:g}" for policy in ("bailian", "dynamo", "aibrix")]
        rows.append([load, f"{capacity:.1f}", f"`{best}`", counted, *tuned])
    assert list(TUNED) == ["bailian", "dynamo", "aibrix"]
    counted = "requests counted, and the time in which they arrived at 50, 90 and 120 %"
    heads = ["load", "capacity, requests/s", "best under", counted, "lambda", "Dynamo's weight", "AIBrix' range"]
    return table_of_rows(heads, rows)


def latencies_table() -> str:
    """By load and rate: TTFT and TPOT of the policies that ran at all rates, the least of each in bold."""
    findings, rows = _findings(), []
    for load in findings.loads:
        for share in findings.shares(load):
            runs = {name: findings.by_policy(load, share)[name].measured for name in POLICIES}
            least = {name: min(map(of, runs.values())) for name, of in FIGURES.items()}
            cells = []
            for run in runs.values():
                shown = []
                for name, of in FIGURES.items():
                    text = f"{of(run):,.0f}" if name.startswith("TTFT") else f"{of(run):,.1f}"
                    shown.append(f"**{text}**" if of(run) == least[name] else text)
                cells.append(f"{shown[0]} / {shown[1]}, {shown[2]} / {shown[3]}")
            rows.append([f"{load}, {share:.0%}", *cells])
    return table_of_rows(["load, share of the capacity", *(f"`{name}`" for name in POLICIES)], rows)


def worse_table() -> str:
    """Cells in which `moestro` is worse than the best other policy."""
    rows = [
        [f"{pair.load}, {pair.share:.0%}", pair.figure, f"`{pair.other}`", str(pair.difference)]
        for pair in _findings().pairs
        if pair.difference.verdict == "worse"
    ]
    return table_of_rows(["load, share", "figure", "best other", "ours is more by (95 %)"], rows)


def ages_table() -> str:
    """How much each policy loses where engines report their figures at intervals."""
    findings, rows = _findings(), []
    for aged in findings.ages:
        shown = []
        for of in FIGURES.values():
            value, fresh = of(aged.measured), of(findings.fresh(aged))
            shown.append(f"{value:,.1f} ms" if aged.period_ms == 0 else percent(value / fresh - 1))
        every = f"{aged.period_ms:,g}" if aged.period_ms else "step"
        rows.append([f"{aged.load}, {aged.share:.0%}", f"`{aged.policy}`", every, *shown])
    return table_of_rows(["load, share", "policy", "figures every, ms", *FIGURES], rows)
