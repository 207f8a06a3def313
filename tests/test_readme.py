"""README.md: its figures are those of the stored files, and it stays short."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
README = (ROOT / "README.md").read_text()
KINDS = ("*measured*", "*paced*", "*simulated*")


def stored(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def vllm_ratios(*names: str) -> list[float]:
    """Medians of vLLM's tokens per second over Moestro's, in order."""
    rows = [row for name in names for row in stored(f"serving/{name}.json")["rows"] if row["system"] == "vllm"]
    return sorted(row["output_tokens_per_s_over_moestro"]["median"] for row in rows)


def span(values: list[float]) -> str:
    return f"{values[0]:.2f} to {values[-1]:.2f}"


def kills() -> str:
    ways = [stored("robustness/failures.json")["ways"][way] for way in ("expert_worker", "expert_worker_two_copies")]
    assert all(len(way["kills"]) == 100 for way in ways)
    num_answers = sum(sum(way["answers"].values()) for way in ways)
    return f"{num_answers - sum(way['answers']['equal'] for way in ways)} of {num_answers}"


def preemption(over: str) -> str:
    (row,) = [
        row
        for row in stored("serving/preemption_640m_kernels.json")["summary"]
        if row["system"] == "expert-level preemption"
    ]
    return f"{row[f'over {over}']['ls_ttft_ms_mean']['median']:.2f}"


def poison() -> str:
    runs = stored("robustness/strangers.json")["poison"]
    return "; ".join(
        f"{runs[when]['num_honest_failed']:,} of {runs[when]['num_honest']:,}" for when in ("before", "after")
    )


def near_best() -> str:
    """Cells of four latencies in which `moestro` is within 5 % of the best policy of those that ran at all rates."""
    groups: dict[tuple[str, float], dict[str, dict]] = {}
    for cell in stored("repro/lmetric.json")["findings"]["cells"]:
        if cell["network"] == "qwen3-30b-a3b":
            groups.setdefault((cell["load"], cell["rate"]), {})[cell["policy"]] = cell["measured"]
    policies = set.intersection(*(set(group) for group in groups.values()))
    assert len(policies) == 7
    cells = [
        {policy: group[policy][figure][statistic] for policy in policies}
        for group in groups.values()
        for figure in ("ttft_ms", "tpot_ms")
        for statistic in ("mean", "p99")
    ]
    return f"{sum(cell['moestro'] <= 1.05 * min(cell.values()) for cell in cells)} of {len(cells)}"


# What a row's claim contains, and what its figure is.
FIGURES: dict[str, Callable[[], str]] = {
    "1 to 32 users, AMD": lambda: span(vllm_ratios("engine_cpu_demo", "engine_cpu_640m")),
    "Intel CPU with AVX-512": lambda: span(vllm_ratios("engine_avx512_demo", "engine_avx512_640m")),
    "100 kills of expert workers": kills,
    "as a multiple of FCFS": lambda: preemption("continuous, FCFS"),
    "iteration-level priority": lambda: preemption("iteration-level priority"),
    "whose requests poison engines": poison,
    "LMetric's set-up": near_best,
}


def rows() -> list[tuple[str, str, str]]:
    """Claim, figure and kind of each row of the table of figures."""
    found = []
    (table,) = re.findall(r"<!-- figures.*?-->\n(.*?)<!-- end -->", README, re.DOTALL)
    for line in table.splitlines()[2:]:
        claim, figure, kind = (part.strip() for part in line.strip("|").split("|"))
        found.append((claim, figure, kind))
    return found


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:60])
def test_each_figure_is_the_stored_one_and_names_its_kind(row):
    claim, figure, kind = row
    (compute,) = [compute for part, compute in FIGURES.items() if part in claim]
    assert figure == compute()
    assert kind in KINDS


def test_readme_is_short():
    lines = README.splitlines()
    assert len(lines) <= 150
    bullets = [line for line in lines if line.startswith("* ")]
    assert [line for line in bullets if len(line.split()) > 40] == []
