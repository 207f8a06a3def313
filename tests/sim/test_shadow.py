"""A shadow's record: lengths and means from what engines counted, and the change by hour and tenant."""

from __future__ import annotations

from statistics import stdev

import msgspec
import numpy as np
import pytest
from support.routers import request

from moestro.core.clock import NS_PER_S, ClockPair
from moestro.core.request import SamplingParams
from moestro.core.rng import student_t_quantile
from moestro.errors import ConfigError
from moestro.routing.decision_record import EngineCounted, PolicyText, RecordedRouter, Served, Uncopied
from moestro.routing.scrape import EngineTotals
from moestro.routing.settings import EngineSpec, RouterSettings
from moestro.sim.figures import block_half_width
from moestro.sim.records import is_router_record, is_shadow_record, read_shadow_record
from moestro.sim.replay import IN_USE, WhatIfSettings, shadow_what_if

COST = "h20/qwen3-30b-a3b"
WALL_NS = 1_700_000_000 * NS_PER_S  # 22:13:20 UTC
NUM, STEP_NS, TTFT_S, EVENT_BYTES = 240, 30 * NS_PER_S, 0.2, 50
OUTPUTS = (10, 20, 30)


def counted(engine: int, num: int, now_ns: int, **more: float) -> EngineCounted:
    totals = EngineTotals(
        num_first_tokens=num,
        first_token_s=num * TTFT_S,
        num_queried_tokens=num * 480,
        num_hit_tokens=num * 120,
        num_generated_tokens=num * 20,
    )
    return EngineCounted(engine, totals, now_ns)


def shadow_file(
    path, *, num_uncopied=0, num_others=0, first_s=None, restarts_at=None, has_counts=True, num_requests=NUM
):
    """Two hours: six conversations in turn over two engines, so that session affinity halves the first turns."""
    entries = []
    router = RecordedRouter(
        PolicyText("session_affinity"), RouterSettings(), entries.append, ClockPair(WALL_NS, 0), key_id="k"
    )
    for _ in range(2):
        router.set_routable(router.add_engine(EngineSpec(num_blocks=4000)), routable=True)
    since = [0, 0]
    if has_counts:
        entries += [counted(engine, 0, 1) for engine in (0, 1)]
    for i in range(num_requests):
        now_ns, name, session = (i + 1) * STEP_NS, f"r{i}", i % 6
        prompt = [session] * 160 + [100 + i] * 80
        fields = {"session_id": f"s{session}", "tenant": ("alice", "bob")[i % 2] if i % 3 else None}
        router.submit(request(name, prompt=prompt, sampling=SamplingParams(max_tokens=64), **fields), now_ns)
        router.ended(name, now_ns + NS_PER_S)
        engine, num_bytes = i // 6 % 2, OUTPUTS[i % 3] * EVENT_BYTES
        entries.append(
            Served(
                request_id=name, engine=engine, seconds=1.0, first_s=first_s, status=200 if i % 20 else 500,
                num_answer_bytes=num_bytes, is_stream=True,
            )
        )  # fmt: skip
        since[engine] += 1
        if has_counts and i % 12 == 11:
            if i == restarts_at:
                since = [0, 0]
            entries += [counted(each, since[each] + num_others, now_ns + NS_PER_S) for each in (0, 1)]
    if num_uncopied:
        entries += [Uncopied(1, now_ns), Uncopied(num_uncopied, now_ns)]
    path.write_bytes(msgspec.json.Encoder().encode_lines(entries))
    return path


def test_lengths_follow_from_bytes_and_the_means_that_engines_count(tmp_path):
    path = shadow_file(tmp_path / "shadow.jsonl")
    assert is_shadow_record(path)
    assert is_router_record(path), "moestro replay reads it as any other"
    shadow = read_shadow_record(path)
    assert len(shadow.record) == NUM * 19 // 20
    assert any("12 failed" in note for note in shadow.record.notes)
    lengths = {each.num_output_tokens for each in shadow.record.requests}
    assert lengths == set(OUTPUTS), "20 in the mean, by bytes"
    assert {each.num_prompt_tokens for each in shadow.record.requests} == {480}, "twice what the shadow expected"
    assert shadow.wall_ns[0] == WALL_NS + 2 * STEP_NS


def test_counts_of_a_restarted_engine_begin_at_nothing(tmp_path):
    whole = read_shadow_record(shadow_file(tmp_path / "a.jsonl")).gain()
    assert (whole.num_first_tokens, whole.ttft_ms, whole.hit_ratio) == (NUM, pytest.approx(200), 0.25)
    restarted = read_shadow_record(shadow_file(tmp_path / "b.jsonl", restarts_at=119)).gain()
    assert restarted.num_first_tokens == NUM - 12, "those of the interval of the restart are lost"
    assert restarted.ttft_ms == pytest.approx(200)


def test_traffic_past_the_router_in_use_is_noted(tmp_path):
    shadow = read_shadow_record(shadow_file(tmp_path / "a.jsonl", num_others=60))
    assert any("Engines counted 360 requests, and 228 are compared" in note for note in shadow.record.notes)
    bare = read_shadow_record(shadow_file(tmp_path / "b.jsonl", has_counts=False))
    assert any("Engines count no first tokens" in note for note in bare.record.notes)
    assert bare.gain().ttft_ms is None


def test_answers_without_a_copy_are_noted_where_they_are_many(tmp_path):
    few = read_shadow_record(shadow_file(tmp_path / "a.jsonl", num_uncopied=20))
    assert not any("without a copy" in note for note in few.record.notes)
    many = read_shadow_record(shadow_file(tmp_path / "b.jsonl", num_uncopied=80))
    assert any("80 answers without a copy of their request" in note for note in many.record.notes)


def answer_of(path, **settings):
    return shadow_what_if(read_shadow_record(path), WhatIfSettings(cost=COST, **settings))


def test_the_router_in_use_is_simulated_with_its_own_choices(tmp_path):
    path = shadow_file(tmp_path / "shadow.jsonl")
    answer = answer_of(path)
    (title, in_use), (policy_title, affine) = answer.runs
    assert (title, policy_title) == (IN_USE, "session_affinity (simulated)")
    chosen = [each.engine for each in read_shadow_record(path).record.requests]
    assert in_use.engine.tolist() == chosen
    (groups,) = answer.report.changes.values()
    whole = groups[0]
    assert whole.moved == pytest.approx(float((np.array(chosen) != affine.engine).mean()))
    assert whole.hit_ratio.simulated_after > whole.hit_ratio.simulated_before, "six first turns in place of twelve"
    assert whole.ttft_ms.change < 0
    assert whole.ttft_ms.predicted == pytest.approx(200 * (1 + whole.ttft_ms.change))
    assert whole.hit_ratio.predicted == pytest.approx(0.25 + whole.hit_ratio.change)
    assert 0 < whole.ttft_ms.half_width < abs(whole.ttft_ms.change) * 3
    assert "hits 25.0 -> " in answer.sentences()[0]


def test_changes_are_given_by_hour_and_by_tenant(tmp_path):
    (groups,) = answer_of(shadow_file(tmp_path / "shadow.jsonl")).report.changes.values()
    hours = [f"2023-11-{day} {hour}:00 UTC" for day, hour in ((14, 22), (14, 23), (15, "00"))]
    assert [each.name for each in groups] == ["all", *hours, "without a tenant", "tenant alice", "tenant bob"]
    assert sum(each.num_requests for each in groups[1:4]) == groups[0].num_requests
    assert sum(each.num_requests for each in groups[4:]) == groups[0].num_requests
    assert all(each.ttft_ms.measured == pytest.approx(200) for each in groups[:4]), "engines count by hour"
    assert all(each.ttft_ms.measured is None for each in groups[4:]), "and not by tenant"


def test_a_log_with_first_bytes_gives_the_ttft_of_tenants(tmp_path):
    (groups,) = answer_of(shadow_file(tmp_path / "shadow.jsonl", first_s=0.3)).report.changes.values()
    assert all(each.ttft_ms.measured == pytest.approx(300) for each in groups)


def test_a_simulation_far_from_the_measured_mean_is_a_warning(tmp_path):
    path = shadow_file(tmp_path / "shadow.jsonl", first_s=30.0)
    assert ["predicted change is doubtful" in warning for warning in answer_of(path).warnings()] == [True]
    assert answer_of(shadow_file(tmp_path / "bare.jsonl", has_counts=False)).warnings() == []


def test_few_requests_have_no_interval(tmp_path):
    (groups,) = answer_of(shadow_file(tmp_path / "shadow.jsonl", num_requests=36)).report.changes.values()
    assert groups[0].ttft_ms.half_width is None


def test_copies_without_a_line_are_no_record_to_compare(tmp_path):
    path = shadow_file(tmp_path / "shadow.jsonl", num_requests=12)
    lines = [line for line in path.read_bytes().splitlines(keepends=True) if b'"type":"Served"' not in line]
    path.write_bytes(b"".join(lines))
    with pytest.raises(ConfigError, match="no request with a line of the access log"):
        read_shadow_record(path)


def test_the_interval_of_a_mean_over_blocks_is_student_ts():
    values = [3.0, 5.0, 4.0, 8.0, 1.0]
    without = [(sum(values) - each) / 4 for each in values]
    assert block_half_width(without) == pytest.approx(student_t_quantile(0.975, 4) * stdev(values) / 5**0.5)
