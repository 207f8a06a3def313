"""docs/accuracy.md judges no prediction on what it was fitted on."""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tools")]
from accuracy.loads import FITTED_NAME, FITTED_SEED, JUDGED_SEEDS, LOADS, write_trace  # noqa: E402 (no package)
from accuracy_tables import estimates_table, summary_table  # noqa: E402 (no package)

RESULTS = sorted((ROOT / "bench" / "results" / "accuracy").glob("*.json"))
SOURCES = (
    r"probed.*|/metrics|/v1/models|a lower bound: not identified|assumed: not identified"
    r"|all of the KV cache.*|time of .*|and for .*"
)


@pytest.fixture(params=RESULTS, ids=lambda path: path.stem)
def result(request):
    return json.loads(request.param.read_text())


def test_what_is_judged_has_another_name_and_another_seed_than_what_is_fitted():
    assert FITTED_NAME not in LOADS
    assert FITTED_SEED not in JUDGED_SEEDS


def test_stored_rows_are_held_out(result):
    fitted = result["fitted_on"]
    assert (fitted["name"], fitted["seed"]) == (FITTED_NAME, FITTED_SEED)
    for row in result["rows"]:
        assert row["load"] in LOADS
        assert row["seed"] in JUDGED_SEEDS
        assert row["seed"] != fitted["seed"]
        assert row["load"] != fitted["name"]


def test_the_fit_was_complete_before_the_first_load_was_measured(result):
    fitted = datetime.fromisoformat(result["fitted_on"]["started_at"])
    assert all(datetime.fromisoformat(row["started_at"]) > fitted for row in result["rows"])


def test_every_prediction_is_made_from_the_table_of_the_probes(result):
    assert {row["table"] for row in result["rows"]} == {result["table_digest"]}


def test_every_number_of_the_description_comes_from_the_probes_or_the_server(result):
    sources = re.findall(r"^\w+ = [^#\n]+  # (.*)$", result["description"], re.MULTILINE)
    assert len(sources) >= 6
    assert all(re.fullmatch(SOURCES, source) for source in sources), sources


def test_each_load_of_a_system_has_every_seed(result):
    seeds = {row["load"]: set() for row in result["rows"]}
    for row in result["rows"]:
        seeds[row["load"]].add(row["seed"])
    assert all(found == set(JUDGED_SEEDS) for found in seeds.values())


def test_a_load_with_the_seed_of_the_probes_is_refused(tmp_path):
    with pytest.raises(AssertionError):
        write_trace(tmp_path / "trace.jsonl", LOADS["mixed, 0.3"], FITTED_SEED, 1.0)


def test_the_summary_counts_the_loads_of_each_system_and_the_runs_of_late_clients(result):
    (line,) = [line for line in summary_table().splitlines() if line.startswith(f"| {result['system']} |")]
    late = sum(not row["client_is_valid"] for row in result["rows"])
    loads = len({row["load"] for row in result["rows"]})
    assert f"| {loads} of {len(LOADS)} | {late} of {len(result['rows'])} |" in line


def test_a_cost_at_its_lower_limit_is_not_called_exact(result):
    costs = [each for each in result["estimates"] if each["unit"] and each["value"] == each["high"] == 0]
    table = [line for line in estimates_table().splitlines() if any(each["title"] in line for each in costs)]
    assert all("(lower limit)" in line for line in table)
    assert not any("0 us (exact)" in line or "0 ns (exact)" in line for line in table)


PAGE = (ROOT / "docs" / "accuracy.md").read_text()
RELATIVE = ("ttft_mean_ms", "ttft_p99_ms", "tpot_mean_ms")
GOALS = {"ttft_mean_ms": 0.15, "tpot_mean_ms": 0.05}
HIT_GOAL = 0.02
VLLM = ("vllm_cpu", "vllm_cpu_dense", "vllm_cpu_dense_wide", "vllm_cpu_wide")  # in the order of the sentence


def rows_of(name: str, load: str | None = None) -> list[dict]:
    rows = json.loads((RESULTS[0].parent / f"{name}.json").read_text())["rows"]
    return [row for row in rows if load in (None, row["load"])]


def errors_of(name: str, figure: str, load: str | None = None) -> list[float]:
    """Relative errors of predictions."""
    return [row["predicted"][figure] / row["measured"][figure] - 1 for row in rows_of(name, load)]


def mean_error(name: str, figure: str, load: str) -> float:
    return 100 * statistics.fmean(map(abs, errors_of(name, figure, load)))


def num_within(name: str) -> int:
    """Runs within all goals."""
    hits = [abs(row["predicted"]["hit_ratio"] - row["measured"]["hit_ratio"]) <= HIT_GOAL for row in rows_of(name)]
    near = [[abs(error) <= goal for error in errors_of(name, figure)] for figure, goal in GOALS.items()]
    return sum(map(all, zip(hits, *near, strict=True)))


def worst_on_vllm() -> str:
    """Least and most mean error of TTFT in the two loads that are predicted worst."""
    worst = [mean_error(name, "ttft_mean_ms", load) for name in VLLM for load in ("mixed, 0.8", "long answers, 0.5")]
    return f"{min(worst):.0f} to {max(worst):.0f} %"


def times_longer(figure: str) -> str:
    """The largest measured figure of `moestro serve` over its prediction."""
    return f"{max(1 / (1 + error) for error in errors_of('moestro_cpu', figure)):.1f}"


def largest(name: str, figure: str, load: str) -> str:
    return f"{100 * max(map(abs, errors_of(name, figure, load))):.0f} %"


def mean_check(name: str) -> str:
    errors = json.loads((RESULTS[0].parent / f"{name}.json").read_text())["errors_on_other_sizes"]
    return f"{100 * statistics.fmean(map(abs, errors)):.0f} %"


def misses(name: str) -> str:
    """Mean error of TTFT and TPOT over mixed loads and long answers, in %."""
    loads = ("mixed, 0.3", "mixed, 0.6", "mixed, 0.8", "long answers, 0.5")
    errors = (mean_error(name, figure, load) for figure in GOALS for load in loads)
    return f"{statistics.fmean(errors):.0f}"


def within_goals() -> tuple[object, ...]:
    (paced,) = {num_within(name) for name in ("moestro_paced", "moestro_preemptive")}
    return paced, *map(num_within, VLLM)


def largest_paced() -> tuple[object, ...]:
    return (
        largest("moestro_preemptive", "ttft_mean_ms", "prefill first, 0.6"),
        largest("moestro_paced", "ttft_p99_ms", "long answers, 0.5"),
    )


def checks_of_16() -> tuple[object, ...]:
    return mean_check("vllm_cpu_wide"), mean_check("vllm_cpu_dense_wide")


def misses_of_16() -> tuple[object, ...]:
    return misses("vllm_cpu_wide"), misses("vllm_cpu_dense_wide")


def dense_misses() -> tuple[object, ...]:
    return misses("vllm_cpu_dense"), mean_check("vllm_cpu_dense")


def on_two_engines() -> tuple[object, ...]:
    return tuple(f"{mean_error('moestro_cpu', figure, 'two engines, 0.6'):.0f}" for figure in GOALS)


def on_one_engine() -> tuple[object, ...]:
    loads = {row["load"] for row in rows_of("moestro_cpu")} - {"two engines, 0.6"}
    errors = sorted(mean_error("moestro_cpu", "ttft_mean_ms", load) for load in loads)
    return f"{errors[0]:.0f}", f"{errors[-1]:.0f}"


def in_a_slow_phase() -> tuple[object, ...]:
    means = [statistics.fmean(map(abs, errors_of("slow_phase/moestro_cpu", figure))) for figure in GOALS]
    return mean_check("slow_phase/moestro_cpu"), *(f"{100 * mean:.0f} %" for mean in means)


def times_longer_than_predicted() -> tuple[object, ...]:
    return times_longer("tpot_mean_ms"), times_longer("ttft_mean_ms")


# Sentences with gaps, and what stands in them.
SENTENCES: dict[str, Callable[[], tuple[object, ...]]] = {
    "within all three: {} of 24 of each paced system, {}, {}, {} and {} of 18 of vLLM's in the order": within_goals,
    "and {} of 24 of `moestro serve` on a core.": lambda: (num_within("moestro_cpu"),),
    "TTFT by {} in one of `prefill first`, its P99 by {} in one of `long answers`.": largest_paced,
    "is predicted worst with two engines (TTFT {} %, TPOT {} % in the mean)": on_two_engines,
    "On one engine TTFT misses by {} to {} % in the mean of a load.": on_one_engine,
    "Measured TPOT is up to {} times the prediction, TTFT up to {} times;": times_longer_than_predicted,
    'own check missed by {} ("Do not rely on them"), TTFT by {} and TPOT by {}.': in_a_slow_phase,
    "worst near saturation and for long answers** ({} in the mean of each system).": lambda: (worst_on_vllm(),),
    "With 16 sequences it missed other sizes by {} and, of the dense model, by {};": checks_of_16,
    "mixed loads and long answers then missed by {} and {} % in the mean.": misses_of_16,
    "The dense model with 8 sequences had {} % there, with errors of {} in its check.": dense_misses,
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_sentence_of_the_page_has_the_stored_figures(sentence):
    assert sentence.format(*SENTENCES[sentence]()) in PAGE
