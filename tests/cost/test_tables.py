"""Measured tables: what was measured is priced as it was, between points and beyond them lines go on."""

import json

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.cost import tables
from moestro.cost.gpus import gpu_named
from moestro.cost.model import Batch
from moestro.cost.networks import network_named
from moestro.cost.roofline import Roofline, RooflineSettings
from moestro.cost.tables import (
    FORMAT,
    DecodePoint,
    HostTimes,
    MeasuredCost,
    OtherGpuCost,
    PrefillPoint,
    ShortChunksPoint,
    Table,
    load_table,
)
from moestro.errors import ConfigError

SIZES, CACHED = (1, 16, 64, 256, 1024), (0, 500, 1000)
COUNTS, CONTEXTS = (1, 4, 16, 64), (16, 500, 2000)


def true_ns(start, num_tokens) -> float:
    """A device that the table's form fits exactly: 2 ms, 10 us a token, attention, 3 us for each sampled token."""
    ns = 2e6 + 1e4 * num_tokens.sum()
    for s, n in zip(start.tolist(), num_tokens.tolist(), strict=True):
        ns += 20.0 * (s + 1) + 3000 if n == 1 else 5.0 * n * (s + n / 2)
    return ns


def table(device=true_ns, **changes) -> Table:
    def prefill(new, cached):
        # One token is measured as a chunk, too: its attention is a chunk's.
        ns = device(np.array([cached]), np.array([new])) if new > 1 else 2e6 + 1e4 + 5.0 * (cached + 0.5)
        return PrefillPoint(new=new, cached=cached, ns=float(ns), spread=0.0)

    def decode(sequences, context):
        start = np.full(sequences, context - 1)
        return DecodePoint(
            sequences=sequences, context=context, ns=float(device(start, np.ones_like(start))), spread=0.0
        )

    def short_chunks(tokens):
        num_tokens = np.full(tokens // 64, 64)
        ns = float(device(np.zeros_like(num_tokens), num_tokens))
        return ShortChunksPoint(tokens=tokens, chunk=64, ns=ns, spread=0.0)

    values = {
        "format": FORMAT,
        "model": "made up",
        "device": "cpu",
        "prefill": tuple(prefill(new, cached) for new in SIZES for cached in CACHED),
        "short_chunks": tuple(short_chunks(tokens) for tokens in (128, 256, 1024)),
        "decode": tuple(decode(n, context) for n in COUNTS for context in CONTEXTS),
        "host": HostTimes(step_ns=50_000, sequence_ns=1000),
    }
    return Table(**values | changes)


def batch(*rows: tuple[int, int]) -> Batch:
    start, num_tokens = zip(*rows, strict=True)
    return Batch(np.array(start, np.int32), np.array(num_tokens, np.int32))


@pytest.mark.parametrize(
    "rows",
    [
        [(15, 1)],
        [(799, 1)] * 10,
        [(100, 1), (900, 1), (35, 1)],
        [(0, 64)],
        [(0, 100), (700, 300)],
        [(0, 333), *[(400, 1)] * 5],
        [(5000, 1)] * 100,
        [(3000, 4000)],
    ],
    ids=[
        "a point",
        "between",
        "mixed contexts",
        "a chunk",
        "two chunks",
        "chunk and decodes",
        "beyond",
        "beyond, chunk",
    ],
)
def test_a_device_that_the_form_fits_is_priced_as_it_is(rows):
    step = batch(*rows)
    host = 50_000 + 1000 * len(rows)
    expected = true_ns(step.start, step.num_tokens) + host
    assert MeasuredCost(table()).step_ns(step) == pytest.approx(expected, rel=0.015)


def test_each_chunk_takes_the_host_time_of_its_own():
    plain, with_chunks = (
        MeasuredCost(table(host=HostTimes(step_ns=5e4, sequence_ns=1e3, chunk_ns=ns))) for ns in (0, 7e3)
    )
    for rows, num_chunks in (([(15, 1)] * 3, 0), ([(0, 100), (700, 300), (40, 1)], 2)):
        assert with_chunks.step_ns(batch(*rows)) == plain.step_ns(batch(*rows)) + 7000 * num_chunks


def test_it_says_what_was_measured_at_most():
    assert MeasuredCost(table()).largest == {"chunk": 1024, "tokens": 1024, "sequences": 64, "context": 2000}


def test_the_warning_states_how_far_steps_exceed_the_table():
    cost = MeasuredCost(table())
    cost.step_ns(batch((0, 1024)))
    cost.step_ns(batch(*((1999, 1),) * 64))
    cost.decode_steps_ns(np.array([1000, 1000]), 1000)
    assert cost.beyond() == {}
    cost.step_ns(batch((0, 1500), (0, 600), (4000, 1)))
    assert cost.beyond() == {"chunk": (1500, 1024), "tokens": (2101, 1024), "context": (4001, 2000)}
    cost.decode_steps_ns(np.full(65, 5000), 10)
    assert cost.beyond()["sequences"] == (65, 64)
    assert cost.beyond()["context"] == (5010, 2000)


def noisy_table(rng: np.random.Generator) -> Table:
    """Points that were disturbed, and some that are missing where a device could not hold them."""
    full = table(lambda start, num_tokens: true_ns(start, num_tokens) * rng.uniform(0.8, 1.25))
    prefill = tuple(point for point in full.prefill if point.new + point.cached <= 1500)
    decode = tuple(point for point in full.decode if point.sequences * point.context <= 64_000)
    return msgspec.structs.replace(full, prefill=prefill, decode=decode)


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_many_steps_at_once_are_the_single_steps_and_more_work_is_never_cheaper(seed):
    rng = np.random.default_rng(seed)
    cost = MeasuredCost(noisy_table(rng))
    start = rng.integers(0, 4000, rng.integers(1, 90)).astype(np.int32)
    single = [cost.step_ns(Batch(start + i, np.ones_like(start))) for i in range(40)]
    assert cost.decode_steps_ns(start, 40).tolist() == single
    assert single == sorted(single), "contexts grow"
    chunks = [(int(rng.integers(0, 3000)), int(rng.integers(2, 3000))) for _ in range(3)]
    steps = [cost.step_ns(batch(*chunks[:n])) for n in (1, 2, 3)]
    assert steps == sorted(steps), "a chunk more"
    (cached, new), *_ = chunks
    assert cost.step_ns(batch((cached + 100, new))) >= cost.step_ns(batch((cached, new)))
    assert cost.step_ns(batch((cached, new + 100))) >= cost.step_ns(batch((cached, new)))
    with_decodes = Batch(np.append(start, cached).astype(np.int32), np.append(np.ones_like(start), new))
    assert cost.step_ns(with_decodes) >= cost.step_ns(batch((cached, new)))


def test_a_table_survives_its_file(tmp_path):
    path = tmp_path / "table.json"
    path.write_bytes(msgspec.json.encode(table(about={"machine": "mine"})))
    assert load_table(path) == table(about={"machine": "mine"})


def test_files_that_are_no_table_are_refused_with_the_reason(tmp_path):
    path = tmp_path / "table.json"
    with pytest.raises(ConfigError, match=r"table\.json cannot be read: No such file"):
        load_table(path)
    path.write_text(json.dumps({"format": FORMAT, "model": "m", "device": "cpu", "prefill": [{"new": "many"}]}))
    with pytest.raises(ConfigError, match=r"no cost table of `moestro calibrate`: .*prefill"):
        load_table(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda points: points + points[-1:], "table.json: the cost table has two points of decode for 64 and 2000"),
        (lambda points: [{**points[0], "ns": -5.0}, *points[1:]], "Expected `float` > 0.0 - at `$.decode[0].ns`"),
        (lambda points: [{**points[0], "ns": 1e30}, *points[1:]], "<= 10000000000000.0 - at `$.decode[0].ns`"),
        (lambda points: points[:1], "table.json: the cost table needs decode points"),
    ],
)
def test_points_that_cannot_have_been_measured_are_refused(tmp_path, change, words):
    """A run ended in a traceback, or was priced with negative times."""
    path = tmp_path / "table.json"
    fields = msgspec.to_builtins(table())
    path.write_text(json.dumps({**fields, "decode": change(list(fields["decode"]))}))
    with pytest.raises(ConfigError) as refused:
        load_table(path)
    assert words in str(refused.value)


def test_tables_with_too_few_points_are_refused():
    with pytest.raises(ConfigError, match=r"'moestro-cost-table-0'.*calibrate again"):
        MeasuredCost(table(format="moestro-cost-table-0"))
    with pytest.raises(ConfigError, match="prefill points of two chunk sizes"):
        MeasuredCost(table(prefill=table().prefill[:4]))
    with pytest.raises(ConfigError, match="decode points of two numbers of sequences"):
        MeasuredCost(table(decode=table().decode[:4]))


@settings(max_examples=100)
@given(values=st.lists(st.floats(0, 100), min_size=1, max_size=12))
def test_disturbed_knots_share_their_mean_and_stay_as_near_as_can_be(values):
    y = np.array(values)
    fitted = tables._never_falling(y)
    assert (np.diff(fitted) >= 0).all()
    assert fitted.mean() == pytest.approx(y.mean())
    # The oracle: the greatest mean over intervals that end later, of the least over those that begin earlier.
    oracle = [max(min(y[i : j + 1].mean() for j in range(k, len(y))) for i in range(k + 1)) for k in range(len(y))]
    np.testing.assert_allclose(fitted, oracle, atol=1e-9)


def test_a_table_on_another_gpu_has_the_ratio_of_two_models_and_its_own_warning():
    measured = MeasuredCost(table())
    here, there = (
        Roofline(RooflineSettings(network=network_named("qwen2-7b"), gpu=gpu_named(name))) for name in ("a100", "h200")
    )
    cost = OtherGpuCost(measured, here, there)
    start = np.array([10, 400, 9000])
    for batch in (Batch(start, np.ones(3, np.int64)), Batch(np.zeros(1, np.int64), np.array([500]))):
        ratio = there.step_ns(batch) / here.step_ns(batch)
        assert ratio < 1
        assert cost.step_ns(batch) == round(measured.step_ns(batch) * ratio)
    single = [cost.step_ns(Batch(start + step, np.ones(3, np.int64))) for step in range(4)]
    assert cost.decode_steps_ns(start, 4).tolist() == single
    assert cost.warning() == measured.warning()
    assert "context of up to" in cost.warning()
