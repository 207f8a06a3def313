"""The experiment of `moestro calibrate --server` on virtual time, against engines whose constants are known."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.known_engine import KnownConstants, KnownEngine, VirtualServer, run_design

from moestro.calibrate.probing.design import IdleDesign
from moestro.calibrate.probing.estimate import (
    DecodeTime,
    FirstTokenTime,
    KnotSteps,
    LinearSteps,
    MixedTime,
    StepDurations,
    chunk_count,
    chunks_of,
    decode_time,
    fit,
)
from moestro.calibrate.probing.findings import ServerFindings, find
from moestro.calibrate.probing.probes import (
    ProbeAnswer,
    ProbedServer,
    ProbeLimits,
    ProbeRequest,
    RequestTimes,
    ServerFigures,
    prompt_tokens,
)
from moestro.calibrate.probing.verb import BesideDesign
from moestro.cost.model import Batch
from moestro.cost.tables import MeasuredCost
from moestro.errors import MoestroError


def calibrated(constants: KnownConstants, *, shows_figures: bool = True, **limits) -> ServerFindings:
    server = VirtualServer(KnownEngine(constants), shows_figures=shows_figures)
    known = ProbedServer(model="known", max_model_len=4096, figures=server.figures())
    bounds = ProbeLimits(**{"seconds": 240.0, "max_concurrency": 64, "max_prompt_tokens": 4000} | limits)
    design = IdleDesign(known, bounds)
    run_design(design, server)
    return find(design.observed, known)


def estimate(found: ServerFindings, name: str):
    return next(each for each in found.estimates if each.name == name)


def drawn(seed: int) -> KnownConstants:
    draw = random.Random(seed)
    return KnownConstants(
        step_ns=draw.uniform(2e6, 20e6),
        row_ns=draw.uniform(20e3, 500e3),
        context_ns=draw.uniform(50, 800),
        prompt_ns=draw.uniform(15e3, 60e3),
        api_ns=draw.uniform(1e6, 10e6),
        api_token_ns=draw.choice([0.0, 2000.0]),
        budget=draw.choice([256, 384, 512, 1024, 2048]),
        max_rows=draw.randint(3, 50),
        block_size=draw.choice([8, 16, 32]),
        num_blocks=draw.randint(900, 1500),
        noise=draw.choice([0.0, 0.01, 0.03]),
    )


COSTS = {
    "step": ("step_ns", 1e6),
    "row": ("row_ns", 1e3),
    "context_token": ("context_ns", 1e3),
    "prompt_token": ("prompt_ns", 1e3),
    "api": ("api_ns", 1e6),
    "api_token": ("api_token_ns", 1e3),
}


@pytest.mark.parametrize("seed", range(12))
def test_known_constants_lie_within_their_intervals(seed):
    constants = drawn(seed)
    found = calibrated(constants)
    outside = []
    for name, (field, scale) in COSTS.items():
        each, truth = estimate(found, name), getattr(constants, field) / scale
        assert each.value is not None, name
        # Times are whole nanoseconds, and a chunk of one token is priced as a row.
        width = (each.high - each.low) / 2 + 0.005 * truth + 1e-6
        if not each.low - 1e-6 - 0.005 * truth <= truth <= each.high + 1e-6 + 0.005 * truth:
            outside.append(name)
            assert abs(each.value - truth) < 3 * width, f"{name}: {each.words}, and it is {truth}"
    assert len(outside) <= 1, f"95 % intervals without the truth: {outside}"
    assert estimate(found, "max_num_batched_tokens").value == constants.budget
    assert estimate(found, "max_num_seqs").value == constants.max_rows
    assert estimate(found, "block_size").value == constants.block_size
    held = estimate(found, "num_kv_tokens")
    assert (held.low or 0) <= constants.num_blocks * constants.block_size
    assert held.high is None or held.high >= constants.num_blocks * constants.block_size
    assert np.abs(found.errors).mean() < 0.05


def test_the_table_prices_steps_as_the_engine_does():
    constants = KnownConstants(noise=0.0)
    found = calibrated(constants)
    cost = MeasuredCost(found.table)
    rng = np.random.default_rng(0)
    for _ in range(20):
        rows = int(rng.integers(1, 25))
        starts = rng.integers(1, 2000, size=rows)
        new = np.ones(rows, np.int64)
        if rng.random() < 0.5:
            new[0] = rng.integers(2, 512 - rows)
            starts[0] = rng.integers(0, 4) * 16
        priced = cost.step_ns(Batch(starts, new))
        known = constants.price_ns(list(zip(starts.tolist(), new.tolist(), strict=True)))
        assert priced == pytest.approx(known, rel=0.02)


def test_what_the_probes_do_not_reach_is_named():
    constants = KnownConstants(budget=8192, max_rows=100, num_blocks=100_000)
    found = calibrated(constants, max_concurrency=8, max_prompt_tokens=600, seconds=60.0)
    budget, rows = estimate(found, "max_num_batched_tokens"), estimate(found, "max_num_seqs")
    assert (budget.value, budget.low) == (None, 601)
    assert "--max-prompt-tokens" in budget.words
    assert (rows.value, rows.low) == (None, 8)
    assert "--max-concurrency" in rows.words
    held = estimate(found, "num_kv_tokens")
    assert held.value is None
    assert 0 < held.low < 100_000 * 16
    assert "there was time" in held.words
    assert found.sizes["num_blocks"].source == "a lower bound: not identified"


def test_without_a_prefix_cache_its_blocks_and_the_capacity_are_not_identified():
    found = calibrated(KnownConstants(caches=False))
    assert found.caches_prefixes is False
    for name in ("block_size", "num_kv_tokens"):
        assert estimate(found, name).value is None
        assert estimate(found, name).why


def test_a_prefix_cache_is_noticed_by_its_speed_where_the_server_reports_no_hits():
    found = calibrated(KnownConstants(faults=["no usage details"]), shows_figures=False)
    assert found.caches_prefixes is True
    assert estimate(found, "block_size").value is None
    assert "neither in usage nor in /metrics" in estimate(found, "block_size").words
    assert any("other traffic would not be noticed" in note for note in found.notes)


def test_a_server_that_is_too_slow_for_the_time_is_refused():
    with pytest.raises(MoestroError, match=r"too slow for --seconds 30: 0 of 3 rounds .* Give more --seconds"):
        calibrated(KnownConstants(step_ns=300e6), seconds=30.0)


@pytest.mark.parametrize("phase_s", [0.3, 0.7, 1.5, 2.0, 3.0])
def test_a_server_whose_steps_vary_is_refused(phase_s):
    with pytest.raises(MoestroError, match=r"not steady: the same step took [\d.]+ to [\d.]+ times its median"):
        calibrated(KnownConstants(step_ns=5e6, phase_s=phase_s), max_concurrency=8, max_prompt_tokens=512, seconds=20.0)


def test_a_server_of_one_request_at_a_time_is_calibrated_without_its_budget():
    found = calibrated(KnownConstants(max_requests=1))
    assert estimate(found, "max_requests").value == 1
    assert estimate(found, "max_num_batched_tokens").value is None
    assert estimate(found, "step").value == pytest.approx(6, rel=0.02)
    assert estimate(found, "row").value == pytest.approx(150, rel=0.1)
    assert any("prompts beyond 256 tokens are extrapolated" in note for note in found.notes)


def test_sequences_that_wait_for_kv_are_no_maximum_batch():
    found = calibrated(KnownConstants(max_rows=60, num_blocks=100), max_concurrency=64, max_prompt_tokens=512)
    rows = estimate(found, "max_num_seqs")
    assert rows.value is None
    assert "KV cache of about 1,5" in rows.words


def test_several_engines_behind_an_address_are_refused():
    known = ProbedServer(model="known", max_model_len=4096, figures=ServerFigures(num_running=0, num_engines=2))
    with pytest.raises(MoestroError, match="the address serves 2 engines, among which the probes would be divided"):
        IdleDesign(known, ProbeLimits(seconds=60, max_concurrency=8, max_prompt_tokens=512))


@pytest.mark.parametrize("figures", [None, ServerFigures(num_running=3)])
def test_probes_beside_traffic_need_figures_of_the_traffic(figures):
    known = ProbedServer(model="known", max_model_len=4096, figures=figures)
    limits = ProbeLimits(seconds=60, max_concurrency=8, max_prompt_tokens=512, max_added_load=0.1)
    with pytest.raises(MoestroError, match="--max-added-load needs a server whose /metrics show"):
        BesideDesign(known, limits)


def test_an_engine_whose_steps_bend_is_priced_along_its_bends():
    """Experts make few rows expensive: the cost of a row falls with their number."""

    class Bending(KnownConstants):
        def price_ns(self, rows):
            num_tokens = sum(num for _, num in rows)
            return super().price_ns(rows) + 8e6 * (1 - 0.9**num_tokens)

    constants = Bending(noise=0.005)
    found = calibrated(constants)
    cost = MeasuredCost(found.table)
    for rows in (1, 2, 4, 6, 8, 12, 16, 24):
        known = constants.price_ns([(100, 1)] * rows)
        priced = cost.step_ns(Batch(np.full(rows, 100), np.ones(rows, np.int64)))
        assert priced == pytest.approx(known, rel=0.04), rows


# --- parts ---------------------------------------------------------------------------------------------------------


def times(sent: int, *deliveries: int) -> RequestTimes:
    return RequestTimes(
        sent_ns=sent, deliveries=np.array(deliveries), num_prompt_tokens=4, num_output_tokens=len(deliveries)
    )


def test_steps_of_a_prompt_are_counted_between_the_tokens_of_another_answer():
    decoding = times(0, 10, 20, 30, 40, 50, 60, 70, 170, 270, 300, 310, 320)
    found = chunk_count(ProbeAnswer(requests=(decoding, times(65, 300)), elapsed_s=1.0))
    assert (found.num_steps, found.first_ns) == (3, 100)
    in_one = times(0, 10, 20, 30, 40, 50, 60, 70, 170, 180, 190)
    assert chunk_count(ProbeAnswer(requests=(in_one, times(65, 170)), elapsed_s=1.0)).num_steps == 1


def test_steps_that_do_not_differ_are_not_counted():
    decoding = times(0, *range(10, 200, 10))
    assert chunk_count(ProbeAnswer(requests=(decoding, times(65, 80)), elapsed_s=1.0)).num_steps is None
    apart = times(0, 10, 20, 30, 40, 50, 60, 70, 170, 270)
    assert chunk_count(ProbeAnswer(requests=(apart, times(65, 230)), elapsed_s=1.0)).num_steps is None


def test_decodes_that_hardly_overlap_are_not_timed():
    apart = (times(0, *range(10, 100, 10)), times(0, *range(80, 200, 10)))
    assert decode_time(ProbeAnswer(requests=apart, elapsed_s=1.0)) is None
    together = (times(0, *range(10, 200, 10)), times(0, *range(10, 200, 10)))
    found = decode_time(ProbeAnswer(requests=together, elapsed_s=1.0))
    assert (found.rows, found.ns) == (2, 10)
    assert found.context == 2 * (4 + 9.5)  # the tokens 1 to 18 of each


def test_tokens_that_arrive_in_bunches_have_the_mean_gap_of_all():
    bunches = times(0, *(at for at in range(40, 400, 40) for _ in range(4)))
    assert decode_time(ProbeAnswer(requests=(bunches,), elapsed_s=1.0)).ns == pytest.approx(320 / 35)
    stalled = times(0, *range(10, 200, 10), 1000)
    assert decode_time(ProbeAnswer(requests=(stalled,), elapsed_s=1.0)).ns == 10


def test_an_inseparable_parameter_has_no_value():
    decodes = [DecodeTime(rows=2, context=100, ns=5e6), DecodeTime(rows=2, context=200, ns=6e6)]
    found = fit(StepDurations(decodes, [], [], [], None), LinearSteps())
    assert found.values.keys() == {"context_token"}
    assert found.values["context_token"] == pytest.approx(1e4)


def test_no_cost_is_negative():
    decodes = [DecodeTime(rows=rows, context=10 * rows, ns=1e7 - 1e5 * rows) for rows in (1, 2, 4, 8, 16)]
    decodes += [DecodeTime(rows=rows, context=100 * rows, ns=1e7 - 1e5 * rows) for rows in (1, 2, 4, 8, 16)]
    found = fit(StepDurations(decodes, [], [], [], None), LinearSteps())
    assert found.values["row"] == 0
    assert all(value >= 0 for value in found.values.values())


def test_the_two_forms_agree_on_an_engine_that_is_linear():
    def ns(rows, context, new=0):
        return 5e6 + 1e5 * rows + 200 * context + 2e4 * new

    decodes = [DecodeTime(rows=n, context=n * c, ns=ns(n, n * c)) for n in (1, 4, 16) for c in (10, 500)]
    firsts = [FirstTokenTime(new=n, cached=0, ns=2e6 + ns(0, 0, n)) for n in (8, 64, 128, 256)]
    firsts += [FirstTokenTime(new=1, cached=0, ns=2e6 + ns(1, 1))]
    mixed = [MixedTime(context=20, new=n, ns=ns(1, 20, n)) for n in (64, 128)]
    durations = StepDurations(decodes, firsts, mixed, [], None)
    linear, bent = fit(durations, LinearSteps()), fit(durations, KnotSteps((1, 4, 16), (1, 64, 256)))
    assert linear.values["api"] == pytest.approx(2e6, rel=1e-3)
    assert bent.values["api"] == pytest.approx(2e6, rel=1e-3)
    assert bent.values["rows 16"] == pytest.approx(ns(16, 0), rel=1e-3)
    assert bent.values["new 256"] == pytest.approx(ns(0, 0, 256), rel=1e-3)


def test_a_prompt_is_divided_into_full_chunks_and_the_rest():
    assert chunks_of(10, 0, None) == [(10, 0)]
    assert chunks_of(10, 16, 4) == [(4, 16), (4, 20), (2, 24)]


def test_prompts_begin_alike_exactly_where_they_should():
    first = prompt_tokens(ProbeRequest(key=1, num_tokens=50, max_tokens=1), 4096)
    again = prompt_tokens(ProbeRequest(key=1, num_tokens=50, max_tokens=1, own_key=2, num_shared=30), 4096)
    assert first[:30] == again[:30]
    assert first[30] != again[30]
    assert first == prompt_tokens(ProbeRequest(key=1, num_tokens=50, max_tokens=1), 4096)
