"""What is reported of a run: its figures, and what a reader has to know of them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from rich.console import Console

from moestro.cost.tables import FORMAT, DecodePoint, HostTimes, PrefillPoint, Table
from moestro.sim.figures import outcome_of, print_report
from moestro.sim.results import ANSWERED, WINDOW_NS, Results
from moestro.sim.settings import read_settings
from moestro.sim.verb import simulate

S = 1_000_000_000


def results_of(engine: list[int], arrival_s: list[float], end_s: list[float]) -> Results:
    results = Results(len(engine), max(engine) + 1)
    results.engine[:] = engine
    results.arrival_ns[:] = np.array(arrival_s) * S
    for column in (results.admitted_ns, results.first_token_ns, results.last_token_ns):
        column[:] = np.array(end_s) * S
    results.num_prompt_tokens[:], results.num_tokens[:] = 10, 1
    results.status[:] = ANSWERED
    return results


def test_a_long_time_in_which_hardly_anybody_is_there_does_not_make_engines_alike():
    outcome = outcome_of("", results_of([0, 0, 1], [0, 0, 0], [2, 4, 3]), None)
    assert outcome.load_imbalance == pytest.approx(6 / 4.5)
    results = results_of([0, 0, 1, 0, 1], [0, 0, 0, 90_000, 90_000], [2, 4, 3, 90_000.01, 90_000.01])
    late = outcome_of("", results, None)
    assert late.load_imbalance == pytest.approx(6 / 4.5, rel=0.01)


def test_the_time_on_an_engine_is_the_area_under_its_requests_in_flight():
    rng = np.random.default_rng(0)
    engine, arrival_s, takes_s = (rng.integers(low, high, 200) for low, high in ((0, 3), (0, 1000), (1, 50)))
    results = results_of(engine.tolist(), arrival_s.tolist(), (arrival_s + takes_s).tolist())
    at_ns = np.arange(1100) * S
    areas = [results.in_flight(engine, at_ns).sum() for engine in range(3)]
    assert results.request_seconds() == pytest.approx(areas)


def test_prefill_is_reported_for_the_windows_in_which_there_was_some():
    results = results_of([0, 1], [0, 0], [1, 1])
    results.prefilled(0, 0, 4 * S)
    results.prefilled(1, 0, S)
    results.prefilled(0, 500 * WINDOW_NS, 2 * S)
    prefill = outcome_of("", results, None).prefill
    assert (prefill.most_engine, prefill.least_engine) == (0, 1)
    assert (prefill.most_s, prefill.least_s) == (3.0, 0.5)
    assert outcome_of("", results_of([0], [0], [1]), None).prefill is None, "no engine served any"


SCENARIO = """
[workload]
prompt_tokens = 300
output_tokens = 4
num_requests = 3
rate = 1.0
[engines]
table = "table.json"
num_blocks = 100
max_num_batched_tokens = 256
"""


@pytest.mark.parametrize(("chunk", "is_beyond"), [(300, False), (128, True)])
def test_steps_beyond_a_table_are_reported_once(tmp_path, chunk, is_beyond):
    points = ((64, 0, 1e6), (64, 400, 1.1e6), (chunk, 0, 2e6), (chunk, 400, 2.1e6))
    table = Table(
        format=FORMAT,
        model="any",
        device="cpu",
        prefill=tuple(PrefillPoint(new=new, cached=cached, ns=ns, spread=0.0) for new, cached, ns in points),
        short_chunks=(),
        decode=tuple(
            DecodePoint(sequences=num, context=context, ns=1e6 + num, spread=0.0)
            for num in (1, 8)
            for context in (100, 400)
        ),
        host=HostTimes(step_ns=1e5, sequence_ns=0.0),
    )
    (tmp_path / "table.json").write_bytes(msgspec.json.encode(table))
    (tmp_path / "scenario.toml").write_text(SCENARIO)
    report = simulate(read_settings(tmp_path / "scenario.toml"), tmp_path).report
    console = Console(record=True, width=200)
    print_report(console, report)
    printed = [line for line in console.export_text().splitlines() if line.startswith("note: ")]
    assert len(printed) == len(report.notes) == is_beyond
    if is_beyond:
        assert "chunk of up to 256, measured up to 128" in printed[0]
