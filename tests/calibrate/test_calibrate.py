"""`moestro calibrate`: which shapes it measures, and that what it writes is a cost model."""

from __future__ import annotations

import io
import time
from functools import partial

import numpy as np
import pytest
from rich.console import Console

from moestro.calibrate.host_work import StepTimer
from moestro.calibrate.runner import CalibrateSettings, calibrate, mean_and_spread, measure, times_ns
from moestro.calibrate.settings import MeasuredModel, Measuring, Range
from moestro.calibrate.shapes import (
    Limits,
    about,
    check_batches,
    chunk,
    decode_grid,
    decodes,
    forward,
    prefill_grid,
    short_chunks,
    short_chunks_grid,
    spread_contexts,
)
from moestro.core.work import StepResult
from moestro.cost.model import Batch
from moestro.cost.tables import MeasuredCost, load_table
from moestro.errors import ConfigError


def limits(**changes) -> Limits:
    values = {"max_model_len": 512, "max_num_seqs": 24, "max_num_batched_tokens": 400, "num_blocks": 600}
    return Limits(**values | {"block_size": 16, "vocab_size": 99} | changes)


def test_the_grids_reach_the_limits_and_stay_within_them():
    bounds = limits()
    assert max(new for new, _ in prefill_grid(bounds)) == 400
    assert all(new + cached <= 512 for new, cached in prefill_grid(bounds))
    assert max(n for n, _ in decode_grid(bounds)) == 24
    assert max(short_chunks_grid(bounds)) == 384
    scarce = limits(num_blocks=100)
    for n, context in decode_grid(scarce):
        assert scarce.fits(decodes(spread_contexts(n, context)))
    assert len(decode_grid(scarce)) < len(decode_grid(bounds))


@pytest.mark.parametrize("seed", range(5))
def test_batches_to_check_with_fit_and_are_of_four_kinds(seed):
    bounds = limits()
    batches = check_batches(bounds, 16, np.random.default_rng(seed))
    kinds = set()
    for batch in batches:
        assert bounds.fits(batch)
        assert batch.num_tokens.sum() <= bounds.max_num_batched_tokens + bounds.max_num_seqs
        is_decode = batch.num_tokens == 1
        kinds.add((bool(is_decode.any()), min(int((~is_decode).sum()), 2)))
    assert {(True, 0), (False, 1), (False, 2)} < kinds


def test_an_item_gives_each_sequence_blocks_of_its_own():
    bounds = limits()
    batch = Batch(np.array([40, 0, 15]), np.array([1, 100, 1]))
    units = forward(batch, bounds, np.random.default_rng(0)).units
    assert units.start.tolist() == [40, 0, 15]
    assert units.num_tokens.tolist() == [1, 100, 1]
    used = [row[: -(-end // 16)] for row, end in zip(units.block_tables, [41, 100, 16], strict=True)]
    assert np.concatenate(used).tolist() == list(range(3 + 7 + 1))
    assert len(units.token_ids) == 102
    assert units.token_ids.max() < 99


def test_no_two_repeats_are_alike_but_all_are_about_the_requested_shape():
    bounds, rng = limits(), np.random.default_rng(0)
    requested = Batch(np.array([40, 0, 15]), np.array([1, 160, 64]))
    sizes = np.array([about(requested, bounds, rng).num_tokens for _ in range(200)])
    assert sizes.min(0).tolist() == [1, 150, 60]
    assert sizes.max(0).tolist() == [1, 170, 68]
    full = chunk(bounds.max_model_len, 0)
    assert about(full, bounds, rng) is full
    one, other = (forward(requested, bounds, rng).units.token_ids for _ in range(2))
    assert (one != other).any()


class InstantDevice:
    """Has every result at once."""

    works_when_polled = True

    def __init__(self) -> None:
        self._results: list[StepResult] = []

    def launch(self, item, now_ns: int) -> None:
        self._results.append(StepResult(item.units.slot, np.zeros(len(item.units), np.int32)))

    def move_blocks(self, moves, now_ns: int) -> None:
        """Do nothing, because this device has no KV."""

    def poll(self, now_ns: int) -> list[StepResult]:
        results, self._results = self._results, []
        return results

    def ready_at_ns(self) -> None:
        return None


class CountingDevice(InstantDevice):
    def __init__(self) -> None:
        super().__init__()
        self.launched = []

    def launch(self, item, now_ns: int) -> None:
        self.launched.append(len(item.units))
        super().launch(item, now_ns)


def test_every_round_has_all_items_in_an_order_of_its_own_after_one_launch_that_does_not_count():
    device, ticks = CountingDevice(), []
    kinds, rounds = list(range(1, 7)), 8
    makers = [partial(forward, decodes([4] * n), limits(), np.random.default_rng(0)) for n in kinds]
    times = times_ns(device, makers, rounds, lambda: ticks.append(None), np.random.default_rng(0))
    assert device.launched[:6] == kinds
    repeats = [len(found) // rounds for found in times]
    left, orders = device.launched[6:], []
    for _ in range(rounds):
        order = []
        while len(order) < len(kinds):
            count = repeats[left[0] - 1]
            assert left[:count] == [left[0]] * count
            order.append(left[0])
            left = left[count:]
        orders.append(order)
    assert not left
    assert all(sorted(order) == kinds for order in orders)
    assert len({tuple(order) for order in orders}) > rounds // 2
    assert len(ticks) == len(kinds) * (rounds + 1)


def test_the_mean_of_times_leaves_the_outermost_ones_out():
    assert mean_and_spread(np.array([100, 10, 30, 20, 1]))[0] == 20
    assert mean_and_spread(np.array([10, 30]))[0] == 20
    times = np.arange(100)
    assert mean_and_spread(np.append(times[:-1], 10**9))[0] == times[5:95].mean()


class SlowDevice(InstantDevice):
    """Each poll works for 2 ms."""

    def poll(self, now_ns: int) -> list[StepResult]:
        if self._results:
            time.sleep(0.002)
        return super().poll(now_ns)


@pytest.mark.parametrize("works_when_polled", [True, False])
def test_a_step_has_the_time_without_work_before_it_and_its_own(works_when_polled):
    device = SlowDevice()
    device.works_when_polled = works_when_polled
    timer, rng = StepTimer(device), np.random.default_rng(0)
    for batch in (decodes([8]), chunk(8, 0), decodes([9]), decodes([10])):
        time.sleep(0.004)
        timer.launch(forward(batch, limits(), rng), 0)
        time.sleep(0.004)
        timer.poll(0)
    assert [step[:2] for step in timer.found] == [(True, False), (False, True), (False, False)]
    idle_ns, work_ns = (8e6, 2e6) if works_when_polled else (4e6, 6e6)
    assert min(step.gap_ns for step in timer.found) >= idle_ns
    assert min(step.work_ns for step in timer.found) >= work_ns
    assert timer.num_running == 0


def test_steps_that_are_launched_together_are_not_measured():
    device = InstantDevice()
    device.works_when_polled = False
    timer, rng = StepTimer(device), np.random.default_rng(0)
    for num_launched in (1, 2, 1):
        for _ in range(num_launched):
            timer.launch(forward(decodes([9]), limits(), rng), 0)
        timer.poll(0)
    assert len(timer.found) == 1


def test_what_is_measured_of_any_device_is_a_cost_model(tmp_path):
    how = Measuring(rounds=2, num_checks=4, out=tmp_path / "table.json")
    few = limits(max_model_len=192, max_num_seqs=8, max_num_batched_tokens=160)
    table, checked = measure(InstantDevice(), few, how)
    cost = MeasuredCost(table)
    assert cost.largest == {"chunk": 160, "tokens": 160, "sequences": 8, "context": 95}
    assert cost.step_ns(chunk(100, 20)) > 0
    assert cost.step_ns(short_chunks(128)) > 0
    assert table.host.step_ns > 0
    assert table.host.chunk_ns >= 0
    assert len(checked) == 4
    assert all(batch.measured_ns > 0 for batch in checked)


def test_the_demo_model_is_calibrated_and_its_file_says_how(short_demo, tmp_path):
    out, shown = tmp_path / "demo.json", io.StringIO()
    settings = CalibrateSettings(
        checkpoint=str(short_demo),
        name="demo",
        model=MeasuredModel(device="cpu", kv_cache_memory_bytes=1 << 24),
        range=Range(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=32),
        measuring=Measuring(rounds=2, num_checks=2, out=out),
    )
    table = calibrate(settings, Console(file=shown, width=100))
    assert load_table(out) == table
    assert (table.model, table.device) == ("demo", "cpu")
    assert table.about["kind"] == "measured"
    assert table.copies is not None
    assert table.copies.token_ns > 0
    assert table.copies.token_bytes == 1024  # 2 layers, 2 heads of 64, K and V, in bfloat16
    assert table.about["network"]["num_parameters"] > 3e6
    assert len(table.about["checked"]) == 2
    assert f"Written to {out}" in shown.getvalue()
    assert "priced with a mean error of" in shown.getvalue()


def test_what_cannot_be_measured_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match=r"--out .*: there is no directory"):
        Measuring(out=tmp_path / "missing" / "table.json")
    with pytest.raises(ConfigError, match=r"--out .* is a directory: name a file in it"):
        Measuring(out=tmp_path)
    with pytest.raises(ConfigError, match=r"--max-num-seqs must be at least 2, got 1"):
        Range(max_num_seqs=1)
    with pytest.raises(ConfigError, match="--rounds must be at least 2, got 1"):
        Measuring(rounds=1)
