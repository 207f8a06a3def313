"""A shadow's record as a workload: the requests of the router in use, with what engines counted meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from moestro.errors import ConfigError
from moestro.routing.decision_record import EngineCounted
from moestro.routing.scrape import EngineTotals
from moestro.sim.load.router_record import RoutedRequest, RouterStart, as_record, left_out_note, router_runs
from moestro.workload.files import open_lines
from moestro.workload.rows import Int64s
from moestro.workload.traces.request_record import RequestRecord

_SHADOW = ('{"type":"Served"', '{"type":"EngineCounted"')  # beginnings of lines that only a shadow writes
_BYTES_PER_TOKEN = 4.0  # of an answer in one piece
_BYTES_PER_EVENT = 250.0  # of a stream, where engines count no tokens
_OTHER_TRAFFIC = 0.1  # share of requests that engines may count beyond those of the log, from streams under way


class CountedGain(msgspec.Struct, frozen=True, kw_only=True):
    """What the engines counted in some time.

    Attributes:
        num_first_tokens: requests that had a first token.
        first_token_s: sum of their times to it, seconds.
        num_queried_tokens, num_hit_tokens: prompt tokens looked up, and found, in prefix caches.
        num_generated_tokens: tokens of answers.
    """

    num_first_tokens: int = 0
    first_token_s: float = 0.0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_generated_tokens: int = 0

    def __add__(self, other: CountedGain) -> CountedGain:
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return CountedGain(**dict(zip(self.__struct_fields__, (a + b for a, b in pairs), strict=True)))

    @property
    def ttft_ms(self) -> float | None:
        """Mean time to first token, ms; None if the engines count none."""
        return self.first_token_s / self.num_first_tokens * 1e3 if self.num_first_tokens else None

    @property
    def hit_ratio(self) -> float | None:
        """Share of the prompt tokens found in prefix caches; None if engines look none up."""
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else None


@dataclass(frozen=True, slots=True, eq=False)
class ShadowRecord:
    """The record of a shadow.

    Attributes:
        record: requests that the router in use served, each with its engine there. Of those whose first byte the log
            has, it stands for the first token; others have 0. The route policy is that of the shadow.
        wall_ns: int64[n], time of each arrival, ns since 1970.
        gains: time of the end, ns since 1970, and what engines counted, of each minute or so.
    """

    record: RequestRecord
    wall_ns: Int64s
    gains: list[tuple[int, CountedGain]]

    def gain(self, begin_ns: int | None = None, end_ns: int | None = None) -> CountedGain:
        """Return what engines counted from `begin_ns` to `end_ns`; None means the whole record."""
        found = CountedGain()
        for at_ns, each in self.gains:
            if (begin_ns is None or at_ns > begin_ns) and (end_ns is None or at_ns <= end_ns):
                found += each
        return found


def is_shadow_record(path: Path) -> bool:
    """Whether a shadow wrote a file.

    Raises:
        ConfigError: the file cannot be read.
    """
    with open_lines(path) as lines:
        return any(line.startswith(_SHADOW) for line in lines)


def read_shadow_record(path: Path) -> ShadowRecord:
    """Read the record of a shadow.

    An access log has bytes of answers, and the router may have estimated prompts from their texts. Mean lengths are
    those that the engines counted; a request has its share of them by its bytes.

    Raises:
        ConfigError: the file cannot be read, has no request with a line of the access log, or has no clocks.
    """
    runs = [run for run in router_runs(path) if run.requests]
    joined = [(run, [each for each in run.requests if _is_whole(each)]) for run in runs]
    joined = [(run, requests) for run, requests in joined if requests]
    faults = Counter({"were refused by the shadow": sum(run.num_refused for run in runs)})
    for run in runs:
        for each in run.requests:
            if not _is_whole(each):
                faults["have no line in the access log" if each.served is None else "failed"] += 1
    if not joined:
        raise ConfigError(
            f"{path} has no request with a line of the access log: the copies need the log's request ids as"
            " X-Request-Id; moestro:route_shadow_log_lines_total counts what does not match"
        )
    gains = [gain for run in runs for gain in _gains(run)]
    whole = sum((gain for _, gain in gains), CountedGain())
    requests = [each for _, some in joined for each in some]
    _measure_answers(requests, whole)
    notes = [*left_out_note(faults), *_count_notes(len(requests), whole)]
    record = as_record(joined, _prompt_share(requests, whole), notes)
    offset_ns = 0 if len(joined) > 1 else _offset_ns(path, joined[0][0])
    times = np.array([each.arrival_ns for each in record.requests], np.int64)
    return ShadowRecord(record, times + offset_ns, gains)


def _is_whole(routed: RoutedRequest) -> bool:
    return routed.served is not None and routed.served.status == 200


def _offset_ns(path: Path, run: RouterStart) -> int:
    if run.head.clocks is None:
        raise ConfigError(f"{path}, line {run.line}: the header lacks its wall-clock time")
    return run.head.clocks.offset_ns


def _gains(run: RouterStart) -> Iterator[tuple[int, CountedGain]]:
    """Yield what engines counted between two entries. A restarted engine begins at 0."""
    before: dict[int, EngineTotals] = {}
    offset_ns = 0 if run.head.clocks is None else run.head.clocks.offset_ns
    for entry in run.counted:
        if (earlier := before.get(entry.engine)) is not None:
            yield entry.now_ns + offset_ns, _gain(earlier, entry)
        before[entry.engine] = entry.totals


def _gain(earlier: EngineTotals, entry: EngineCounted) -> CountedGain:
    now = entry.totals
    is_new = (now.num_first_tokens or 0) < (earlier.num_first_tokens or 0)
    gains = {
        name: (getattr(now, name) or 0) - (0 if is_new else getattr(earlier, name) or 0)
        for name in CountedGain.__struct_fields__
    }
    return CountedGain(**gains)


def _measure_answers(requests: Sequence[RoutedRequest], counted: CountedGain) -> None:
    """Give each request the times of the log and a length by its bytes, so that the mean is what engines counted."""
    num_bytes = dict.fromkeys((False, True), 0)
    for each in requests:
        assert each.served is not None, "others are left out"
        num_bytes[each.served.is_stream] += each.served.num_answer_bytes
    per_byte = 1 / _BYTES_PER_EVENT
    if counted.num_first_tokens and num_bytes[True]:
        mean = counted.num_generated_tokens / counted.num_first_tokens
        in_streams = mean * len(requests) - num_bytes[False] / _BYTES_PER_TOKEN
        per_byte = in_streams / num_bytes[True] if in_streams > 0 else per_byte
    for each in requests:
        served = each.served
        assert served is not None, "others are left out"
        tokens = served.num_answer_bytes * (per_byte if served.is_stream else 1 / _BYTES_PER_TOKEN)
        each.num_output_tokens = max(1, round(tokens))
        each.engine = served.engine
        each.ended_ns = each.arrival_ns + round(served.seconds * 1e9)
        each.first_ns = 0 if served.first_s is None else each.arrival_ns + round(served.first_s * 1e9)


def _prompt_share(requests: Sequence[RoutedRequest], counted: CountedGain) -> float:
    """Return the tokens that engines counted for each token that the shadow expected."""
    if not counted.num_first_tokens or not counted.num_queried_tokens:
        return 1.0
    expected = sum(each.request.num_prompt_tokens for each in requests) / len(requests)
    return counted.num_queried_tokens / counted.num_first_tokens / expected


def _count_notes(num_requests: int, counted: CountedGain) -> list[str]:
    if not counted.num_first_tokens:
        return ["Engines count no first tokens in /metrics: lengths are estimated from bytes, and TTFT is simulated."]
    if abs(counted.num_first_tokens / num_requests - 1) <= _OTHER_TRAFFIC:
        return []
    text = (
        f"Engines counted {counted.num_first_tokens:,} requests, and {num_requests:,} are compared: others reached them"
        " past the router in use, or were not copied. Measured means are those of all."
    )
    return [text]
