"""A table of all simulated requests, one row each, as CSV or JSON lines."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import NS_PER_MS, NS_PER_S
from moestro.errors import ConfigError
from moestro.sim.figures.results import ANSWERED, NOT_YET_NS, REFUSED
from moestro.sim.runs import RunAnswer
from moestro.workload.traces.request_record import UNKNOWN

COLUMNS = (
    "policy", "seed", "row", "session", "class", "status", "engine", "arrival_s", "queue_ms", "ttft_ms", "tpot_ms",
    "e2e_ms", "prompt_tokens", "output_tokens", "hit_tokens", "preemptions",
)  # fmt: skip
_STATUS = {ANSWERED: "answered", REFUSED: "refused"}


def write_request_table(path: Path, answers: Iterable[RunAnswer]) -> None:
    """Write the requests of all runs, in COLUMNS; a CSV file has an empty cell for what a request does not have.

    Args:
        path: file whose name ends in .csv or .jsonl.

    Raises:
        ConfigError: the name has another end, or the file cannot be written.
    """
    check_table_name(path)
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            rows = (row for answer in answers for row in _rows(answer))
            _write_csv(file, rows) if path.suffix == ".csv" else _write_lines(file, rows)
    except OSError as error:
        raise ConfigError(f"--requests {path} cannot be written: {error.strerror}") from error


def check_table_name(path: Path) -> None:
    """Raise ConfigError for a name that tells no form."""
    if path.suffix not in {".csv", ".jsonl"}:
        raise ConfigError(f"--requests {path}: give a name that ends in .csv or .jsonl")


def _write_csv(file: TextIO, rows: Iterator[tuple[object, ...]]) -> None:
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    writer.writerows(rows)


def _write_lines(file: TextIO, rows: Iterator[tuple[object, ...]]) -> None:
    encode = msgspec.json.encode
    for row in rows:
        file.write(encode(dict(zip(COLUMNS, row, strict=True))).decode() + "\n")


def _rows(answer: RunAnswer) -> Iterator[tuple[object, ...]]:
    """Yield the rows of one run in the order of its workload."""
    results = answer.results
    num = len(results)
    ok = results.is_answered & (results.num_tokens > 0)
    gaps = results.num_tokens.astype(np.int64) - 1
    tpot_ns = np.full(num, np.nan)
    np.divide(results.last_token_ns - results.first_token_ns, gaps, out=tpot_ns, where=ok & (gaps > 0))
    is_admitted = results.admitted_ns != NOT_YET_NS
    sessions = [None] * num if answer.session is None else answer.session.tolist()
    columns = (
        [answer.title] * num,
        [answer.seed] * num,
        range(num),
        sessions,
        ["be" if is_be else "ls" for is_be in results.is_best_effort.tolist()],
        [_STATUS.get(status, "pending") for status in results.status.tolist()],
        [engine if engine >= 0 else None for engine in results.engine.tolist()],
        (results.arrival_ns / NS_PER_S).tolist(),
        _ms(results.admitted_ns - results.arrival_ns, is_admitted),
        _ms(results.first_token_ns - results.arrival_ns, ok),
        _ms(tpot_ns, ok & (gaps > 0)),
        _ms(results.last_token_ns - results.arrival_ns, ok),
        results.num_prompt_tokens.tolist(),
        results.num_tokens.tolist(),
        results.num_hit_tokens.tolist(),
        [None if num == UNKNOWN else num for num in results.num_preemptions.tolist()],
    )
    yield from zip(*columns, strict=True)


def _ms(values_ns: NDArray[np.int64] | NDArray[np.float64], is_known: NDArray[np.bool_]) -> list[float | None]:
    known = is_known.tolist()
    return [
        value if is_there else None for value, is_there in zip((values_ns / NS_PER_MS).tolist(), known, strict=True)
    ]
