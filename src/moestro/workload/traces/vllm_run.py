"""A real vLLM server's own record of each request: lengths, and times of queueing, scheduling and answering."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from moestro.core.clock import NS_PER_S, Timelines
from moestro.errors import ConfigError
from moestro.workload.files import open_lines, read_jsonl
from moestro.workload.rows import Int64s, Rows

_Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class _Record(msgspec.Struct):
    input_toks: _Count
    output_toks: _Count
    arrival_time: float  # seconds of the front end's wall clock
    queued_ts: float  # seconds of the engine's clock, as the following fields
    scheduled_ts: float
    first_token_ts: float
    last_token_ts: float


@dataclass(frozen=True, slots=True, eq=False)
class VllmRun:
    """n requests of one run, in the order in which the engine queued them.

    Arrivals are times of the front end's clock, the rest are times of the engine's clock, and the offset between the
    two is unknown. All times here except `rows.timestamp_ns` are the engine's, counted from the first request's
    queueing. TTFT and E2E therefore exclude tokenizing and the way to the engine.

    Attributes:
        rows: lengths, and arrivals on the front end's clock, from 0.
        timelines: timelines whose arrival is the queueing.
        scheduled_ns: int64[n], start of prefill.
    """

    rows: Rows
    timelines: Timelines
    scheduled_ns: Int64s


def read_vllm_run(path: Path) -> VllmRun:
    """Read a run recorded as one JSON object a request: input_toks, output_toks, arrival_time and four engine times.

    Raises:
        ConfigError: the file has another form; the text names the file and the line.
    """
    records = []
    with open_lines(path) as lines:
        for number, fields in read_jsonl(path, lines):
            try:
                records.append(msgspec.convert(fields, _Record))
            except msgspec.ValidationError as error:
                needed = ", ".join(_Record.__struct_fields__)
                raise ConfigError(f"{path}, line {number}: {error}; expected a record with {needed}") from None
    if not records:
        raise ConfigError(f"{path} holds no requests")
    records.sort(key=lambda record: record.queued_ts)

    def times(name: str, since: float) -> Int64s:
        seconds = np.array([getattr(record, name) for record in records])
        return np.rint((seconds - since) * NS_PER_S).astype(np.int64)

    start, num_output = records[0].queued_ts, np.array([record.output_toks for record in records], np.int64)
    rows = Rows(
        num_prompt_tokens=np.array([record.input_toks for record in records], np.int64),
        num_output_tokens=num_output,
        timestamp_ns=times("arrival_time", min(record.arrival_time for record in records)),
    )
    timelines = Timelines(
        times("queued_ts", start), times("first_token_ts", start), times("last_token_ts", start), num_output
    )
    return VllmRun(rows, timelines, times("scheduled_ts", start))
