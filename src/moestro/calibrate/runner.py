"""`moestro calibrate`: loads the network, times the grid, checks the table on other shapes, and writes it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table as Rows

from moestro.calibrate.host_work import CalibratedDevice, host_times
from moestro.calibrate.settings import MeasuredModel, Measuring, Range
from moestro.calibrate.shapes import (
    SHORT_CHUNK,
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
from moestro.config.run_record import RunRecord, run_record
from moestro.core.request import ModelInfo
from moestro.core.work import Device, Forward
from moestro.cost.model import Batch
from moestro.cost.tables import (
    FORMAT,
    DecodePoint,
    HostCopies,
    HostTimes,
    MeasuredCost,
    PrefillPoint,
    ShortChunksPoint,
    Table,
)
from moestro.errors import ConfigError
from moestro.model.device import open_device
from moestro.model.settings import LocalRank, ModelSettings
from moestro.workload.progress import progress


def print_table(console: Console, table: Table, errors: Sequence[float]) -> None:
    """Print the grids in milliseconds, the rank's own work, and the errors on other shapes."""
    prefill = {(point.new, point.cached): point.ns for point in table.prefill}
    decode = {(point.sequences, point.context): point.ns for point in table.decode}
    console.print(_grid("one prefill chunk, ms", "new tokens", "cached", prefill))
    short = {(point.tokens, point.chunk): point.ns for point in table.short_chunks}
    console.print(_grid("short prefill chunks, ms", "tokens", "in chunks of", short))
    console.print(_grid("decodes, ms", "sequences", "mean context", decode))
    sizes = np.abs(errors)
    spreads = [point.spread for point in table.prefill] + [point.spread for point in table.decode]
    for name, text in (
        (
            "rank's work",
            "{:.0f} us a step, {:.1f} us a sequence and {:.0f} us a chunk".format(
                *(ns / 1e3 for ns in msgspec.structs.astuple(table.host))
            ),
        ),
        ("spread", f"{np.median(spreads):.1%} of the median between repeats (interquartile, median of all points)"),
        (
            "other shapes",
            f"{len(errors)} batches priced with a mean error of {sizes.mean():.1%}, {sizes.max():.1%} at most",
        ),
    ):
        console.print(f"{name:<14} {text}", markup=False, highlight=False, soft_wrap=True)


def _grid(title: str, row_name: str, column_name: str, ns: dict[tuple[int, int], float]) -> Rows:
    columns = sorted({column for _, column in ns})
    shown = Rows(title=title, title_justify="left")
    shown.add_column(row_name, justify="right")
    for column in columns:
        shown.add_column(f"{column_name} {column}", justify="right")
    for row in sorted({row for row, _ in ns}):
        cells = [f"{ns[row, column] / 1e6:.2f}" if (row, column) in ns else "" for column in columns]
        shown.add_row(str(row), *cells)
    return shown


ClockNs = Callable[[], int]
_MOST_REPEATS, _ENOUGH_NS = 5, 20_000_000  # for one item in one round; short items repeat more often
Times = NDArray[np.int64]


def once_ns(device: Device, item: Forward, clock_ns: ClockNs = time.perf_counter_ns) -> int:
    """Nanoseconds from launch to result. A result exists only when its work is done, on an accelerator too."""
    started = clock_ns()
    device.launch(item, started)
    while not device.poll(clock_ns()):
        pass
    return clock_ns() - started


def times_ns(
    device: Device,
    makers: Sequence[Callable[[], Forward]],
    rounds: int,
    tick: Callable[[], None],
    rng: np.random.Generator,
    clock_ns: ClockNs = time.perf_counter_ns,
) -> list[Times]:
    """Measure each kind of item: one uncounted launch of each, then rounds of all kinds in random order.

    A server alternates decodes and chunks. A decode takes up to a fifth longer after a chunk than after a decode,
    likely because the chunk replaced what the CPU's caches held. A random order gives all
    kinds of predecessors to each item.

    Args:
        makers: one function a kind, called before each launch and outside of the measured time.
        tick: called after each kind in each round, the uncounted one included.
        rng: draws the orders.
        clock_ns: clock that measures.
    """
    repeats = []
    for make in makers:
        first = once_ns(device, make(), clock_ns)
        repeats.append(int(np.clip(_ENOUGH_NS // max(first, 1), 1, _MOST_REPEATS)))
        tick()
    times: list[list[int]] = [[] for _ in makers]
    for _ in range(rounds):
        for kind in rng.permutation(len(makers)).tolist():
            times[kind] += [once_ns(device, makers[kind](), clock_ns) for _ in range(repeats[kind])]
            tick()
    return [np.array(found) for found in times]


def mean_and_spread(times: Times) -> tuple[float, float]:
    """Return the mean without the outermost times, and the interquartile range divided by the median.

    Load is a sum of steps. Some of them take much longer than most, so the median is up to 5 % below the mean. The
    longest and the shortest twentieth (at least one of each, of three or more) do not count: a busy neighbour can
    lengthen a step many times.
    """
    cut = min(max(len(times) // 20, 1), (len(times) - 1) // 2)
    low, median, high = np.percentile(times, [25, 50, 75]).tolist()
    return float(np.sort(times)[cut : len(times) - cut].mean()), (high - low) / median


_HOST_GIB = 0.25  # host memory beside the KV cache, so that the device measures its copy
_NO_HOST = HostTimes(step_ns=0.0, sequence_ns=0.0)


@dataclass(frozen=True, kw_only=True)
class CalibrateSettings:
    """All settings of `moestro calibrate`."""

    checkpoint: str
    name: str
    model: MeasuredModel
    range: Range
    measuring: Measuring


class CheckedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that the table does not hold, measured and priced."""

    start: list[int]
    num_tokens: list[int]
    measured_ns: float
    priced_ns: int

    @property
    def error(self) -> float:
        """Error of the price, as a fraction of the measured time."""
        return self.priced_ns / self.measured_ns - 1


def calibrate(settings: CalibrateSettings, console: Console) -> Table:
    """Measure, write `--out`, and print the result.

    Raises:
        ConfigError: the network cannot be loaded, or the file cannot be written.
    """
    model, measured_range = settings.model, settings.range
    with console.status("loading the network"):
        device, info = open_device(
            ModelSettings(
                model=settings.checkpoint,
                dtype=model.dtype,
                device=model.device,
                load_format=model.load_format,
                max_model_len=measured_range.max_model_len,
                block_size=model.block_size,
                kv_cache_memory_bytes=model.kv_cache_memory_bytes,
                kv_offloading_size=_HOST_GIB,
            ),
            local=LocalRank(max_tokens=measured_range.max_num_batched_tokens, max_seqs=measured_range.max_num_seqs),
        )
        device.network.finish_kernels()
    limits = Limits(
        max_model_len=info.max_model_len,
        max_num_seqs=measured_range.max_num_seqs,
        max_num_batched_tokens=measured_range.max_num_batched_tokens,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        vocab_size=info.vocab_size,
    )
    conditions = run_record("measured")  # before the measurement, which raises the load average
    table, checked = measure(device, limits, settings.measuring)
    table = msgspec.structs.replace(
        table,
        model=settings.name,
        device=info.device,
        copies=host_copies(info),
        about=_about(settings, conditions, info, checked),
    )
    write_table(settings.measuring.out, table)
    print_table(console, table, [batch.error for batch in checked])
    console.print(f"Written to {settings.measuring.out}.", markup=False, highlight=False, soft_wrap=True)
    return table


def measure(
    device: CalibratedDevice, limits: Limits, how: Measuring, clock_ns: ClockNs = time.perf_counter_ns
) -> tuple[Table, list[CheckedBatch]]:
    """Measure the table of this device, and its errors on other shapes.

    Args:
        limits: range of shapes, and what the device holds.
        clock_ns: clock that measures. That of a process leaves out the work of others.
    """
    rng = np.random.default_rng(how.seed)
    chunks, totals, running = prefill_grid(limits), short_chunks_grid(limits), decode_grid(limits)
    others = check_batches(limits, how.num_checks, rng)
    batches = [
        *(chunk(*point) for point in chunks),
        *(short_chunks(total) for total in totals),
        *(decodes(spread_contexts(*point)) for point in running),
        *others,
    ]
    makers = [partial(_like, batch, limits, rng) for batch in batches]
    with progress("steps measured", len(makers) * (how.rounds + 1)) as tick:
        found = iter([mean_and_spread(times) for times in times_ns(device, makers, how.rounds, tick, rng, clock_ns)])
    table = Table(
        format=FORMAT,
        model="",
        device="",
        prefill=tuple(
            PrefillPoint(new=new, cached=cached, ns=ns, spread=round(spread, 4))
            for (new, cached), (ns, spread) in zip(chunks, islice(found, len(chunks)), strict=True)
        ),
        short_chunks=tuple(
            ShortChunksPoint(tokens=total, chunk=SHORT_CHUNK, ns=ns, spread=round(spread, 4))
            for total, (ns, spread) in zip(totals, islice(found, len(totals)), strict=True)
        ),
        decode=tuple(
            DecodePoint(sequences=n, context=context, ns=ns, spread=round(spread, 4))
            for (n, context), (ns, spread) in zip(running, islice(found, len(running)), strict=True)
        ),
        host=_NO_HOST,
    )
    checked = _check(MeasuredCost(table), others, [ns for ns, _ in found])
    host = host_times(device, limits, rng, clock_ns)
    return msgspec.structs.replace(table, host=host), checked


def host_copies(info: ModelInfo) -> HostCopies | None:
    """Return what the device measured of the copy of a block at its start. None without host memory."""
    if info.host_block_ns is None:
        return None
    block_size = info.block_size
    return HostCopies(token_ns=info.host_block_ns / block_size, token_bytes=info.block_bytes / block_size)


def _like(batch: Batch, limits: Limits, rng: np.random.Generator) -> Forward:
    return forward(about(batch, limits, rng), limits, rng)


def _check(cost: MeasuredCost, batches: list[Batch], measured: list[float]) -> list[CheckedBatch]:
    return [
        CheckedBatch(
            start=batch.start.tolist(),
            num_tokens=batch.num_tokens.tolist(),
            measured_ns=ns,
            priced_ns=cost.step_ns(batch),
        )
        for batch, ns in zip(batches, measured, strict=True)
    ]


def _about(
    settings: CalibrateSettings, conditions: RunRecord, info: ModelInfo, checked: list[CheckedBatch]
) -> dict[str, object]:
    errors = [abs(batch.error) for batch in checked]
    return {
        **msgspec.to_builtins(conditions),
        "num_threads": os.environ.get("OMP_NUM_THREADS", "unset"),
        "network": {"model_type": info.model_type, "dtype": info.dtype, "num_parameters": info.num_parameters},
        "settings": msgspec.to_builtins([settings.model, settings.range, settings.measuring], enc_hook=str),
        "mean_error": float(np.mean(errors)),
        "largest_error": float(np.max(errors)),
        "checked": msgspec.to_builtins(checked),
    }


def write_table(path: Path, table: Table) -> None:
    """Write `table`, indented.

    Raises:
        ConfigError: the directory does not exist.
    """
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror}") from error
