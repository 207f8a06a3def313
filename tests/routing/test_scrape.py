"""Figures out of `/metrics`, as the known servers write them and as no server should."""

from __future__ import annotations

import random
import time

import pytest

from moestro.core.load_figures import FIGURES, ROUTED_FIGURES, LoadFigures
from moestro.routing.scrape import (
    MAX_BYTES,
    MAX_RANKS,
    SCRAPED_FIGURES,
    EngineTotals,
    MetricsReader,
    ScrapedLoad,
    scrape,
    scrape_ranks,
)

VLLM = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 100.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:prompt_tokens_total{engine="0",model_name="m"} 1e+03
vllm:prompt_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:generation_tokens_total{engine="0",model_name="m"} 24.0
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_gpu_blocks="1000"} 1.0
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="1",num_gpu_blocks="500"} 1.0
"""
SGLANG = b"""\
sglang:num_running_reqs{model_name="a{b} c"} 7
sglang:num_queue_reqs{model_name="a{b} c"} 2 1700000000000
sglang:token_usage{model_name="a{b} c"} 0.75
sglang:max_total_num_tokens{model_name="a{b} c"} 30000
sglang:generation_tokens_total{model_name="a{b} c"} 5"""


def test_vllm_with_two_ranks_behind_one_address_is_summed_and_usage_is_their_mean():
    assert scrape(VLLM) == ScrapedLoad(
        figures=LoadFigures(num_running=7, num_waiting=1, kv_usage=0.375),
        totals=EngineTotals(num_generated_tokens=24),
        num_tokens_computed=1024.0,
        block_size=32,
        num_kv_tokens=48_000,
    )


def test_sglang_with_timestamps_strange_labels_and_no_last_newline():
    assert scrape(SGLANG) == ScrapedLoad(
        figures=LoadFigures(num_running=7, num_waiting=2, kv_usage=0.75),
        totals=EngineTotals(num_generated_tokens=5),
        num_tokens_computed=5.0,
        num_kv_tokens=30_000,
    )


def test_each_routed_figure_of_a_rank_is_in_the_metrics():
    """A router once missed the queued prefill tokens of our own engines, which only their /load had."""
    routed = {name for name in ROUTED_FIGURES if FIGURES[name].is_from_rank}
    assert routed <= SCRAPED_FIGURES
    text = b"moestro:queued_prefill_tokens 70\nmoestro:context_tokens 900\n"
    assert scrape(text).figures == LoadFigures(queued_prefill_tokens=70, num_tokens=900)


def series(name: str, **values: float) -> bytes:
    """One line for each set of labels, written as `tp0_dp1`."""
    lines = []
    for ranks, value in values.items():
        labels = ",".join(f'{rank[:2]}_rank="{rank[2:]}"' for rank in ranks.split("_"))
        lines.append(f'{name}{{engine_type="unified",model_name="m",{labels}}} {value}\n')
    return "".join(lines).encode()


def test_series_of_ranks_that_compute_one_engine_are_one_figure():
    text = series("sglang:num_running_reqs", tp0_pp0=7, tp1_pp0=7, tp2_pp0=6, tp0_pp1=0)
    text += series("sglang:num_queue_reqs", tp0_pp0=2, tp1_pp0=2) + series("sglang:token_usage", tp0=0.5, tp1=0.5)
    text += series("sglang:max_total_num_tokens", tp0=1000, tp1=1000)
    assert scrape(text) == ScrapedLoad(
        figures=LoadFigures(num_running=7, num_waiting=2, kv_usage=0.5), num_kv_tokens=1000
    )


def test_data_parallel_engines_of_several_ranks_are_summed():
    text = series("sglang:num_running_reqs", tp0_dp0=7, tp1_dp0=7, tp2_dp1=5, tp3_dp1=5)
    text += series("sglang:token_usage", tp0_dp0=0.5, tp1_dp0=0.5, tp2_dp1=0.1, tp3_dp1=0.1)
    assert scrape(text).figures == LoadFigures(num_running=12, kv_usage=0.3)


def test_requests_of_each_priority_are_not_added_to_their_sum():
    text = b"""sglang:num_queue_reqs{model_name="m",priority="",tp_rank="0"} 5
sglang:num_queue_reqs{model_name="m",priority="1",tp_rank="0"} 2
sglang:num_queue_reqs{model_name="m",priority="0",tp_rank="0"} 3
"""
    assert scrape(text).figures.num_waiting == 5
    assert scrape(text.replace(b'priority=""', b'priority="9"')).figures.num_waiting == 10


def test_each_rank_of_vllm_has_its_own_figures():
    assert scrape_ranks(VLLM) == {
        0: ScrapedLoad(
            figures=LoadFigures(num_running=3, num_waiting=1, kv_usage=0.5),
            totals=EngineTotals(num_generated_tokens=24),
            num_tokens_computed=1024.0,
            block_size=32,
            num_kv_tokens=32_000,
        ),
        1: ScrapedLoad(
            figures=LoadFigures(num_running=4, num_waiting=0, kv_usage=0.25), block_size=32, num_kv_tokens=16_000
        ),
    }


def test_ranks_follow_from_counters_while_there_are_no_gauges():
    """vLLM with several API servers shows no gauge before its first request."""
    text = b'vllm:generation_tokens_total{engine="0"} 0\nvllm:generation_tokens_total{engine="1"} 0\n'
    assert [*scrape_ranks(text)] == [0, 1]


def test_each_rank_of_sglang_has_the_figures_of_its_group():
    text = series("sglang:num_running_reqs", tp0_dp0=7, tp1_dp0=7, tp2_dp1=5, tp3_dp1=5)
    assert {rank: load.figures.num_running for rank, load in scrape_ranks(text).items()} == {0: 7, 1: 5}


@pytest.mark.parametrize("text", [b"", SGLANG, VLLM + VLLM.replace(b"vllm:", b"moestro:")])
def test_a_text_without_ranks_to_choose_names_none(text):
    assert scrape_ranks(text) == {}


def test_ranks_are_bounded_and_a_name_inside_of_a_value_is_none():
    lines = [b'vllm:num_requests_running{engine="%d"} 1' % rank for rank in range(3000)]
    assert len(scrape_ranks(b"\n".join(lines))) == MAX_RANKS
    assert scrape_ranks(b'vllm:num_requests_running{model_name="a,engine=\\"1\\""} 1') == {}


def test_totals_for_the_page_are_those_of_all_engines_of_an_address():
    text = b"""vllm:prefix_cache_queries_total{engine="0"} 100
vllm:prefix_cache_queries_total{engine="1"} 50
vllm:prefix_cache_hits_total{engine="0"} 30
vllm:prefix_cache_hits_total{engine="1"} 0
vllm:external_prefix_cache_hits_total{engine="1"} 12
vllm:request_prefill_time_seconds_sum{engine="0"} 0.5
vllm:request_prefill_kv_computed_tokens_sum{engine="0"} 1000
"""
    hits = {"num_hit_tokens": 42, "num_host_hit_tokens": 12}
    assert scrape(text).totals == EngineTotals(num_queried_tokens=150, prompt_token_s=0.0005, **hits)
    sglang = b"""sglang:prompt_tokens_total{model_name="m"} 70
sglang:cached_tokens_total{cache_source="device",model_name="m"} 20
sglang:cached_tokens_total{cache_source="host",model_name="m"} 5
"""
    assert scrape(sglang).totals == EngineTotals(num_queried_tokens=70, num_hit_tokens=25)


def test_a_server_that_has_two_names_for_one_figure_is_counted_once():
    assert scrape(VLLM + VLLM.replace(b"vllm:", b"moestro:")) == scrape(VLLM)


def test_the_older_name_of_the_kv_usage_is_known():
    assert scrape(b"vllm:gpu_cache_usage_perc 0.5\n").figures.kv_usage == 0.5


@pytest.mark.parametrize("value", [b"NaN", b"-1", b"+Inf", b"1e300", b"x", b"", b"}"])
def test_what_is_no_possible_value_is_not_there(value):
    assert scrape(VLLM + b"vllm:num_requests_running " + value + b"\n").figures.num_running is None


def test_the_expert_pressure_of_an_address_is_the_mean_of_its_ranks():
    text = b"""moestro:expert_pressure{engine="0",model_name="m"} 1.75
moestro:expert_pressure{engine="1",model_name="m"} 0.5
moestro:expert_local_share{engine="0",model_name="m"} 0.25
"""
    assert scrape(text).figures == LoadFigures(expert_pressure=1.125, expert_local_share=0.25)
    assert scrape(VLLM).figures.expert_pressure is None


def test_a_usage_above_one_is_one():
    assert scrape(b"sglang:token_usage 1.25\n").figures.kv_usage == 1.0


def test_a_text_with_the_same_figures_as_the_last_is_not_parsed_again():
    reader = MetricsReader(b"process_cpu_seconds_total 1\n" + VLLM)
    load, by_rank = reader.load, reader.by_rank
    reader.take(b"process_cpu_seconds_total 2\n" + VLLM)
    assert reader.load is load
    assert reader.by_rank is by_rank
    changed = VLLM.replace(b"} 3.0", b"} 9.0")
    reader.take(changed)
    assert reader.load == scrape(changed) != load
    assert reader.by_rank == scrape_ranks(changed) != by_rank
    reader.take(b"")
    assert (reader.load, reader.by_rank) == (ScrapedLoad(), {})


def test_law_texts_in_a_row_are_read_as_each_of_them_alone():
    """Lines come, go and change anywhere, also where the needed ones of the last text stay as they are."""
    rng = random.Random(1)
    lines = [*VLLM.splitlines(), b"process_cpu_seconds_total 1", b"", b"vllm:num_requests_running 1", b"x" * 40]
    reader, shown = MetricsReader(), list(lines)
    for _ in range(500):
        for _ in range(rng.randrange(3)):
            at = rng.randrange(len(shown) + 1)
            shown[at : at + rng.randrange(2)] = [rng.choice(lines)] * rng.randrange(2)
        text = b"\n".join(shown)[: rng.choice([None, None, -1, -30])]
        reader.take(text)
        assert reader.load == scrape(text)
        assert reader.by_rank == scrape_ranks(text)
        shown = shown or list(lines)


def test_an_endless_text_is_looked_at_up_to_a_bound():
    assert scrape(b"x" * MAX_BYTES + b"\n" + VLLM) == ScrapedLoad()


@pytest.mark.parametrize("piece", [b"a", b',a="\\"', b'a="', b',a="b",', b"{", b'"'])
def test_hostile_labels_take_no_longer_than_others(piece):
    line = b"vllm:num_requests_running{" + piece * (MAX_BYTES // len(piece) - 100) + b"} 1\n"
    lines = (b"vllm:num_requests_running{" + piece * (900 // len(piece)) + b"} 1\n") * 4000
    begin = time.process_time()
    assert scrape(line).figures.num_running is None
    scrape(lines)
    assert time.process_time() - begin < 5


def test_law_any_bytes_are_read_without_failing():
    rng = random.Random(0)
    for _ in range(500):
        text = bytearray(VLLM + SGLANG)
        for _ in range(rng.randrange(1, 30)):
            text[rng.randrange(len(text))] = rng.randrange(256)
        start = rng.randrange(len(text))
        for found in (scrape(bytes(text[start:])), *scrape_ranks(bytes(text[start:])).values()):
            assert found.figures.kv_usage is None or 0 <= found.figures.kv_usage <= 1
            assert found.figures.num_running is None or found.figures.num_running >= 0
