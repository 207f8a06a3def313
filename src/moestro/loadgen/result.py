"""The result of a bench: figures, and the conditions under which they hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from moestro.config.run_record import RunRecord, run_record
from moestro.errors import ConfigError
from moestro.loadgen.client import Endpoint
from moestro.loadgen.settings import BenchSettings
from moestro.workload.run_records import Records, Report, Verdict

_HIDDEN = "***"


class BenchConditions(RunRecord, frozen=True, kw_only=True):
    """Conditions of a bench: those of the client's process, and the server that it measured.

    Attributes:
        pace_dilation: factor on the durations of a paced server. Rates and durations of the result are not corrected.
    """

    url: str
    model: str
    pace_dilation: float = 1.0


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """One rate of a search."""

    rate: float
    verdict: Verdict
    report: Report


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a search: the highest rate that held, the lowest above it that did not, and which side limited it."""

    rate: float | None
    above: float | None
    is_client_bound: bool
    slo_share: float


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The whole result. A search has `found` and `probes`, and the report of its best rate, if any."""

    conditions: BenchConditions
    settings: dict[str, object]
    num_skipped: int  # a trace's requests left out by --skip-too-long
    notes: tuple[str, ...] = ()  # what of a trace is not in its requests
    is_generated: bool = False  # whether a generator made the requests, rather than a trace
    report: Report | None
    found: Found | None = None
    probes: tuple[Probe, ...] = ()
    requests: dict[str, list[object]] | None = None


def make_conditions(endpoint: Endpoint) -> BenchConditions:
    """The conditions of this process, before the run."""
    record = run_record("paced" if endpoint.is_paced else "measured")
    return BenchConditions(
        **msgspec.structs.asdict(record),
        url=endpoint.url,
        model=endpoint.model,
        pace_dilation=endpoint.pace_dilation,
    )


def shown_settings(settings: BenchSettings) -> dict[str, object]:
    """All settings, with the key's value hidden."""
    shown: dict[str, object] = msgspec.to_builtins(settings, enc_hook=str)
    endpoint = shown["endpoint"]
    assert isinstance(endpoint, dict)
    if endpoint["api_key"] is not None:
        endpoint["api_key"] = _HIDDEN
    return shown


def detailed(records: Records) -> dict[str, list[object]]:
    """Times of each request as columns, milliseconds after the first arrival; None where it failed."""
    lines, ok = records.timelines, records.is_ok
    start_ns = lines.arrival_ns.min()

    def column(values: Sequence[float]) -> list[object]:
        return [value if good else None for value, good in zip(values, ok.tolist(), strict=True)]

    return {
        "arrival_ms": ((lines.arrival_ns - start_ns) / 1e6).tolist(),
        "late_ms": (records.late_ns / 1e6).tolist(),
        "end_ms": ((records.end_ns - start_ns) / 1e6).tolist(),
        "first_token_ms": column(((lines.first_token_ns - start_ns) / 1e6).tolist()),
        "last_token_ms": column(((lines.last_token_ns - start_ns) / 1e6).tolist()),
        "input_tokens": column(records.num_prompt_tokens.tolist()),
        "cached_tokens": column(records.num_cached_tokens.tolist()),
        "output_tokens": column(lines.num_tokens.tolist()),
    }


def write_json(path: Path, result: Result) -> None:
    """Write `result`, indented. Raises ConfigError if the directory does not exist."""
    text = msgspec.json.format(msgspec.json.encode(result, enc_hook=str), indent=2)
    try:
        path.write_bytes(text + b"\n")
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}") from error
