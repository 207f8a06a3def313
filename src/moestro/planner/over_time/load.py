"""The requests of a plan with their times: those of a trace or of a record, or Poisson arrivals of equal requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import NS_PER_S
from moestro.errors import ConfigError
from moestro.planner.settings import PlanSettings
from moestro.sim.cluster import Workload
from moestro.sim.load.arrivals import AtTimes
from moestro.sim.load.router_record import read_record
from moestro.workload.generated.draws import at_rate, faster, poisson, replay
from moestro.workload.requests import RequestForm, RequestMaker
from moestro.workload.rows import Rows, equal_rows
from moestro.workload.traces.reading import read_trace
from moestro.workload.traces.request_record import RequestRecord

Int64s = NDArray[np.int64]

_NUM_GENERATED = 2000  # requests, where no file has any


@dataclass(frozen=True, slots=True, eq=False)
class DayLoad:
    """Requests with their times.

    Attributes:
        source: short description.
        arrival_ns: arrivals, int64[n], ascending from 0.
        num_prompt_tokens, num_output_tokens: tokens of each request, int64[n].
        longest: most tokens of prompt and requested answer.
        workload: makes the requests in a form.
        block_size: tokens of a block in the file, where engines must have the same. None means any.
        is_generated: whether the arrivals were drawn.
        notes: what of the file has no effect.
    """

    source: str
    arrival_ns: Int64s
    num_prompt_tokens: Int64s
    num_output_tokens: Int64s
    longest: int
    workload: Callable[[RequestForm], Workload]
    block_size: int | None = None
    is_generated: bool = False
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.arrival_ns)

    @property
    def duration_s(self) -> float:
        """Seconds from the first to the last arrival, at least a nanosecond."""
        return max(int(self.arrival_ns[-1]), 1) / NS_PER_S

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second that are requested, in the mean."""
        return float(self.num_output_tokens.sum()) / self.duration_s

    def arrivals(self, factor: float) -> AtTimes:
        """Return the arrivals at a multiple of the rate: the same requests in the same order, closer together."""
        return AtTimes(faster(self.arrival_ns, factor))


def read_load(settings: PlanSettings) -> DayLoad:
    """Read or make the requests that the settings name, at `--load-factor` times their rate.

    Raises:
        ConfigError: a file cannot be read, or neither a file nor --request-rate says when requests arrive.
    """
    traffic = settings.traffic
    if traffic.dataset_path is None:
        if traffic.request_rate is None:
            raise ConfigError(f"--find {settings.finds} needs times: give --dataset-path with times, or --request-rate")
        rows = equal_rows(_NUM_GENERATED, traffic.isl, traffic.osl)
        return _of_rows(rows, f"{len(rows):,} requests of {traffic.isl:,} and {traffic.osl:,} tokens", settings)
    record = read_record(traffic.dataset_path)
    if record is not None:
        return _of_record(record, traffic.dataset_path.name, settings)
    rows = read_trace(traffic.dataset_path)
    if rows.texts is not None:
        raise ConfigError(f"--dataset-path {traffic.dataset_path} holds texts, whose tokens are unknown: give lengths")
    answered = np.flatnonzero((rows.num_output_tokens >= 1) & (rows.num_prompt_tokens >= 1))
    if not len(answered):
        raise ConfigError(f"--dataset-path {traffic.dataset_path} has no request with a prompt and an answer")
    if rows.timestamp_ns is None and traffic.request_rate is None:
        raise ConfigError(
            f"--dataset-path {traffic.dataset_path} has no times: give --request-rate for Poisson arrivals"
        )
    return _of_rows(rows.select(answered), traffic.dataset_path.name, settings)


def _of_rows(rows: Rows, source: str, settings: PlanSettings) -> DayLoad:
    rate, notes = settings.traffic.request_rate, [f"--dataset-path: {note}" for note in rows.notes]
    rng = np.random.default_rng([settings.search.seed, len(rows)])
    if rows.timestamp_ns is None:
        assert rate is not None, "checked by the caller"
        times = poisson(len(rows), rate, rng)
        source += f", Poisson arrivals at {rate:g} requests/s"
    else:
        times = replay(rows.timestamp_ns, rng)
        times = times if rate is None else at_rate(times, rate)

    return DayLoad(
        source=source,
        arrival_ns=faster(times, settings.traffic.load_factor),
        num_prompt_tokens=rows.num_prompt_tokens,
        num_output_tokens=rows.num_output_tokens,
        longest=int(rows.num_prompt_tokens.max() + rows.num_output_tokens.max()),
        workload=partial(RequestMaker, rows),
        is_generated=rows.is_generated or rows.timestamp_ns is None,
        notes=tuple(notes),
    )


def _of_record(record: RequestRecord, source: str, settings: PlanSettings) -> DayLoad:
    rate, times = settings.traffic.request_rate, record.arrival_ns
    prompts, outputs, limits = (
        np.array([getattr(each, name) for each in record.requests], np.int64)
        for name in ("num_prompt_tokens", "num_output_tokens", "max_tokens")
    )
    return DayLoad(
        source=f"{source}, recorded",
        arrival_ns=faster(times if rate is None else at_rate(times, rate), settings.traffic.load_factor),
        num_prompt_tokens=prompts,
        num_output_tokens=np.maximum(outputs, 1),
        longest=int((prompts + np.maximum(limits, 1)).max()),
        workload=lambda form: record,
        block_size=record.header.block_size,
        notes=record.notes,
    )
