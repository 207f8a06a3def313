"""The experiment of `moestro calibrate --server` on virtual time, against engines whose constants are known."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace

import numpy as np
import pytest
from support.known_engine import KnownConstants, KnownEngine, VirtualServer, run_design

from moestro.calibrate.probing import findings
from moestro.calibrate.probing.design import Bounds, IdleDesign, Observed
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
    ServerProbe,
    prompt_tokens,
)
from moestro.calibrate.probing.verb import BesideDesign, ProbingClient
from moestro.cost.model import Batch
from moestro.cost.tables import MeasuredCost
from moestro.errors import MoestroError
from moestro.loadgen.client import Endpoint
from moestro.workload.run_records import Outcome


def calibrated(constants: KnownConstants, *, shows_figures: bool = True, **limits) -> ServerFindings:
    server = VirtualServer(KnownEngine(constants), shows_figures=shows_figures)
    known = ProbedServer(model="known", max_model_len=4096, figures=server.figures())
    bounds = ProbeLimits(**{"seconds": 120.0, "max_concurrency": 64, "max_prompt_tokens": 4000} | limits)
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


@pytest.mark.parametrize(
    ("bounds", "source"),
    [
        (Bounds(172, 172), "probed"),
        (Bounds(172, 256), "probed: 172 to 256"),
        (Bounds(172), "a lower bound: not identified"),
    ],
)
def test_a_token_budget_within_bounds_is_not_called_unknown(bounds, source):
    """The report had 214 (172 to 256), and the engine file none."""
    assert findings._source(bounds) == source


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


class Altered:
    """A server on virtual time whose answers are altered by a function of the answer, the probe and its number."""

    def __init__(self, alter, **constants):
        self.server, self._alter, self.num_probes = VirtualServer(KnownEngine(KnownConstants(**constants))), alter, 0

    def __call__(self, probe):
        self.num_probes += 1
        return self._alter(self.server(probe), probe, self.num_probes)

    def calibrated(self, max_model_len=4096, **limits):
        figures = replace(self.server.figures(), is_late=self._alter is with_late_gauges)
        known = ProbedServer(model="known", max_model_len=max_model_len, figures=figures)
        bounds = ProbeLimits(**{"seconds": 60.0, "max_concurrency": 32, "max_prompt_tokens": 2000} | limits)
        design = IdleDesign(known, bounds)
        run_design(design, self)
        return find(design.observed, known)


def with_counts(**changed):
    """Alter the counts of each request; a function gets the request."""

    def alter(answer, probe, _):
        values = [{name: count(each) for name, count in changed.items()} for each in probe.requests]
        return replace(
            answer, requests=tuple(replace(each, **value) for each, value in zip(answer.requests, values, strict=True))
        )

    return alter


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"num_prompt_tokens": lambda _: 0}, "counts 0 tokens in a prompt of 8: it shortens or extends prompts"),
        ({"num_prompt_tokens": lambda each: min(each.num_tokens, 500)}, r"counts 500 tokens in a prompt of \d+"),
        ({"num_cached_tokens": lambda each: each.num_tokens}, "reports 75 cached tokens of a prompt that has 67 in co"),
        ({"num_cached_tokens": lambda _: -16}, "reports -16 cached tokens"),
    ],
)
def test_a_server_that_counts_tokens_wrongly_is_refused(counts, words):
    with pytest.raises(MoestroError, match=words):
        Altered(with_counts(**counts)).calibrated()


def with_late_gauges(answer, probe, _):
    figures = replace(answer.after, num_running=len(probe.requests), is_late=True)
    return replace(answer, after=figures)


def test_requests_that_sglang_still_shows_when_it_is_idle_are_no_other_traffic():
    found = Altered(with_late_gauges).calibrated()
    assert estimate(found, "step").value == pytest.approx(6, rel=0.02)
    assert any("SGLang's /metrics show the requests of its last logged step" in note for note in found.notes)


def test_more_requests_than_the_probe_had_are_other_traffic_on_sglang_too():
    def alter(answer, probe, number):
        answer = with_late_gauges(answer, probe, number)
        return replace(answer, after=replace(answer.after, num_running=len(probe.requests) + 1))

    with pytest.raises(MoestroError, match="the server is busy"):
        Altered(alter).calibrated()


def test_metrics_that_end_in_the_middle_are_compared_with_the_tokens_until_then():
    def alter(answer, probe, number):
        return answer if number < 20 else replace(answer, before=None, after=None)

    found = Altered(alter).calibrated()
    assert any("did not always show its /metrics" in note for note in found.notes)
    assert estimate(found, "row").value == pytest.approx(150, rel=0.02)


def test_counts_that_begin_again_are_those_of_a_restarted_server():
    def alter(answer, probe, number):
        return answer if number < 30 else replace(answer, after=replace(answer.after, num_tokens=100 * (number - 29)))

    with pytest.raises(MoestroError, match=r"/metrics count 100 tokens after [\d,]+: the server was restarted"):
        Altered(alter).calibrated()


class LimitedRate:
    """Takes so many requests a second, and at most so many at once; refuses others with 429."""

    def __init__(self, rate, burst):
        self._rate, self._burst, self._left, self._at_s = rate, burst, burst, 0.0

    def __call__(self, server, probe):
        now_s = server.now_ns / 1e9
        self._left, self._at_s = min(self._left + (now_s - self._at_s) * self._rate, self._burst), now_s
        num_taken = min(len(probe.requests), int(self._left))
        self._left -= num_taken
        refused = RequestTimes(sent_ns=0, deliveries=np.zeros(0, np.int64), failure="http_429", message="slow down")
        missing = (refused,) * (len(probe.requests) - num_taken)
        if not num_taken:
            figures = server.figures()
            return ProbeAnswer(requests=missing, elapsed_s=now_s - 1, before=figures, after=figures)
        answer = server(replace(probe, requests=probe.requests[:num_taken]))
        return replace(answer, requests=answer.requests + missing)


@pytest.mark.parametrize(
    ("rate", "burst", "words"),
    [
        (20, 20, "refused a probe .* with 429"),
        (60, 10, "requests of a probe .*, after it had taken as many and as long ones at once: it limits their rate"),
    ],
)
def test_a_limit_of_the_rate_is_no_limit_of_requests_at_once(rate, burst, words):
    limited = LimitedRate(rate, burst)
    server = VirtualServer(KnownEngine(KnownConstants()))
    known = ProbedServer(model="known", max_model_len=4096, figures=server.figures())
    design = IdleDesign(known, ProbeLimits(seconds=60, max_concurrency=32, max_prompt_tokens=2000))
    with pytest.raises(MoestroError, match=words):
        run_design(design, lambda probe: limited(server, probe))


def test_a_server_of_chats_alone_is_refused_by_what_it_lacks():
    def alter(answer, *_):
        failed = RequestTimes(sent_ns=0, deliveries=np.zeros(0, np.int64), failure="http_404", message="Not Found")
        return replace(answer, requests=(failed,))

    with pytest.raises(MoestroError, match=r"has no /v1/completions, .* \(Not Found\): a server of chats alone"):
        Altered(alter).calibrated()


def test_a_refusal_for_the_rate_identifies_no_queue():
    def alter(answer, _, __):
        refused = [replace(each, failure="http_429") if each.failure else each for each in answer.requests]
        return replace(answer, requests=tuple(refused))

    found = Altered(alter, max_requests=10).calibrated()
    most = estimate(found, "max_requests")
    assert (most.value, most.low) == (None, 10)
    assert "6 of 16 requests at once got 429, which may limit their rate" in most.words
    assert "max_num_queued_reqs" not in found.sizes


def test_an_identified_number_of_requests_has_no_reason_why_it_is_missing():
    assert estimate(calibrated(KnownConstants(max_requests=10)), "max_requests").words == "10"


def test_sequences_that_are_too_short_for_probes_are_refused():
    with pytest.raises(MoestroError, match="takes sequences of 40 tokens, and probes need 64"):
        Altered(lambda answer, *_: answer).calibrated(max_model_len=40)


@pytest.mark.parametrize(("max_model_len", "max_prompt_tokens"), [(64, 2000), (100, 2000), (4096, 64)])
def test_no_probe_is_longer_than_the_server_and_the_operator_allow(max_model_len, max_prompt_tokens):
    def alter(answer, probe, _):
        assert all(each.num_tokens + each.max_tokens <= max_model_len for each in probe.requests)
        assert all(each.num_tokens <= max_prompt_tokens for each in probe.requests)
        return answer

    Altered(alter).calibrated(max_model_len=max_model_len, max_prompt_tokens=max_prompt_tokens)


def test_a_block_size_that_few_hits_leave_open_is_not_identified():
    found = Altered(lambda answer, *_: answer).calibrated(max_model_len=100)
    size = estimate(found, "block_size")
    assert size.value is None
    assert "hits of 64 of 67 tokens fit blocks of 4 or 8 or 16 or 32 or 64" in size.words
    assert found.caches_prefixes


def test_prompts_that_are_computed_before_decodes_hide_the_budget_and_no_cost():
    found = calibrated(KnownConstants(prefills_first=True))
    assert "or the server computes prompts before decodes" in estimate(found, "max_num_batched_tokens").words
    for name, truth in (("step", 6), ("row", 150), ("prompt_token", 20), ("api", 3)):
        assert estimate(found, name).value == pytest.approx(truth, rel=0.02)


class FakeClient:
    """Answers each request with its tokens at once; /metrics answers so many times, and then not."""

    def __init__(self, num_reads):
        self.num_reads, self._left = 0, num_reads

    async def ask(self, url, body, headers, *, timeout_s, on_delivery):
        on_delivery(1)
        await asyncio.sleep(0.02)
        outcome = Outcome(num_output_tokens=2)
        outcome.delivery_ns.extend([time.monotonic_ns(), time.monotonic_ns()])
        return outcome

    async def read(self, path, *, timeout_s):
        self.num_reads += 1
        self._left -= 1
        return b"vllm:num_requests_running 4\n" if self._left >= 0 else None


def driven(client, num_probes, seconds=60.0, **limits):
    """Send probes by the client, and return their answers."""
    bounds = ProbeLimits(seconds=seconds, max_concurrency=8, max_prompt_tokens=64, **limits)
    endpoint, answers = Endpoint("http://x", "m", -1), []

    def probing():
        for number in range(num_probes):
            answer = yield ServerProbe("test", (ProbeRequest(key=number, num_tokens=8, max_tokens=2),))
            answers.append(answer)

    async def drive():
        prober = ProbingClient(client, endpoint, bounds, vocab_size=9, seed=0)
        server = await prober.find_server()
        await asyncio.wait_for(prober.drive(probing(), lambda *_: None), 60)
        return server

    return asyncio.run(drive()), answers


def test_metrics_are_read_again_after_a_failure_and_not_for_ever():
    client = FakeClient(2)
    server, answers = driven(client, 10)
    assert server.max_model_len is None  # -1 means no limit
    assert [each.after is not None for each in answers] == [False] * 10
    assert client.num_reads == 2 + 3  # two that were answered, and three in vain


def test_traffic_beside_a_short_probe_is_seen_and_no_pause_outlasts_the_time():
    client = FakeClient(1000)
    _, (answer,) = driven(client, 1, seconds=1.0, max_added_load=1e-4)
    assert [each.num_running for each in answer.meanwhile] == [4]


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


def test_a_cost_that_the_durations_would_make_negative_is_at_its_limit_and_not_exact():
    sizes = [(rows, rows * length) for rows in (1, 2, 4, 8) for length in (50, 100, 400)]
    decodes = [DecodeTime(rows=rows, context=context, ns=10e6 - 1e5 * rows + 10 * context) for rows, context in sizes]
    observed = Observed(decodes=decodes)
    found = find(observed, ProbedServer(model="m", max_model_len=None))
    assert any("at its lower limit" in each.words for each in found.estimates)


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
