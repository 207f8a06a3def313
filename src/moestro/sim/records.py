"""Records of a router and of its shadow as workloads.

`moestro route --record FILE` writes a record, and `moestro sim --replay` simulates it. A shadow's record has the
requests of the router in use, with what engines counted meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np

from moestro.core.hashing import HASH_BYTES, name_key
from moestro.core.request import Request
from moestro.errors import ConfigError
from moestro.files.text_files import open_lines
from moestro.routing.decision_log import RequestTrace
from moestro.routing.decision_record import (
    EngineAdded,
    EngineCounted,
    Entry,
    FirstTokenCame,
    Gap,
    Head,
    RequestEnded,
    Served,
    SpecSet,
    Submitted,
    Uncopied,
    decode_entry,
)
from moestro.routing.scrape import EngineTotals
from moestro.routing.settings import EngineSpec
from moestro.workload.rows import Int64s
from moestro.workload.traces.request_record import (
    ROUTER,
    Header,
    RecordedRequest,
    RecordRun,
    RequestRecord,
    cut_off_note,
    gap_note,
    join_runs,
    read_request_record,
)

_ROUTER, _SERVER = '{"type":"Head"', '{"format":'  # beginnings of the lines that say whose record it is
_FRESHEST = 0.1  # quantile of the ages of what routers know of each other, when a message has just come
_FIRST_BYTE = (
    "A router's record has the first byte of each answer in place of its first token, and no queues of engines."
)


@dataclass(slots=True)
class RoutedRequest:
    """One request of a router, as far as its record tells. 0 means no such moment, None no such count.

    Attributes:
        served: what the router in use did with it, beside a shadow.
    """

    request: Request
    arrival_ns: int
    engine: int
    first_ns: int = 0
    ended_ns: int = 0
    num_output_tokens: int | None = None
    num_prompt_tokens: int | None = None
    num_hit_tokens: int = 0
    status: int | None = None
    served: Served | None = None

    @property
    def fault(self) -> str | None:
        """Why it cannot be replayed; None if it can."""
        if self.status not in {None, 200} or (self.ended_ns and not self.first_ns):
            return "failed"
        if not self.ended_ns:
            return "had not ended"
        return "have answers without usage" if self.num_output_tokens is None else None


@dataclass(slots=True)
class RouterStart:
    """The lines of one start of a router.

    Attributes:
        cut_off: note of a line that is.
        counted: what engines had counted, as a shadow noted it.
        num_uncopied: answers in the access log of a shadow without a copy of their request.
        ages_s: age of what was known of each other router, at each decision.
    """

    path: Path
    line: int
    head: Head
    specs: dict[int, EngineSpec] = field(default_factory=dict)
    requests: list[RoutedRequest] = field(default_factory=list)
    by_id: dict[str, RoutedRequest] = field(default_factory=dict)
    num_refused: int = 0
    cut_off: str = ""
    counted: list[EngineCounted] = field(default_factory=list)
    num_uncopied: int = 0
    ages_s: list[float] = field(default_factory=list)

    @property
    def is_shadow(self) -> bool:
        """Whether the router was a shadow of the router in use."""
        return bool(self.counted or self.num_uncopied) or any(each.served is not None for each in self.requests)

    def take(self, entry: Entry) -> None:
        """Note an entry."""
        match entry:
            case EngineAdded() | SpecSet():
                self.specs[entry.engine] = entry.spec
            case Submitted():
                self._submitted(entry)
            case FirstTokenCame():
                if (found := self.by_id.get(entry.request_id)) is not None:
                    found.first_ns = found.first_ns or entry.now_ns
            case RequestEnded():
                if (found := self.by_id.get(entry.request_id)) is not None:
                    found.ended_ns, found.num_output_tokens = entry.now_ns, entry.num_output_tokens
            case EngineCounted():
                self.counted.append(entry)
            case Uncopied():
                self.num_uncopied = entry.num_answers
            case Served() | RequestTrace():
                self._answered(entry)
            case _:
                pass

    def _answered(self, entry: Served | RequestTrace) -> None:
        found = self.by_id.get(entry.request_id)
        if found is None:
            return
        if isinstance(entry, Served):
            found.served = entry
            return
        for attempt in entry.attempts:
            self.ages_s += attempt.peer_ages_s.values()
        found.status = entry.status
        found.num_prompt_tokens = entry.usage.get("prompt_tokens")
        found.num_hit_tokens = entry.usage.get("cached_tokens", 0)

    def _submitted(self, entry: Submitted) -> None:
        if entry.decision is None:
            self.num_refused += 1
            return
        request_id = entry.request.request_id
        earlier = self.by_id.get(request_id)
        if earlier is not None and entry.exclude:  # a retry; without it a client has used an id again
            earlier.engine, earlier.first_ns, earlier.ended_ns = entry.decision.engine, 0, 0
            return
        self.by_id[request_id] = RoutedRequest(entry.request, entry.now_ns, entry.decision.engine)
        self.requests.append(self.by_id[request_id])


def is_router_record(path: Path) -> bool:
    """Whether a file holds decisions and no header of a server, whose record has decisions too.

    Raises:
        ConfigError: the file cannot be read.
    """
    has_decisions = False
    with open_lines(path) as lines:
        for line in lines:
            if line.startswith(_SERVER):
                return False
            has_decisions = has_decisions or line.startswith(_ROUTER)
    return has_decisions


def read_record(path: Path) -> RequestRecord | None:
    """Read the record of a server or of a router. None means that the file is none.

    Raises:
        ConfigError: the file cannot be read, or its record has no replayable request.
    """
    if not path.name.removesuffix(".zst").endswith(".jsonl"):
        return None
    with open_lines(path) as lines:
        if not next(iter(lines), "").startswith((_SERVER, '{"type":')):
            return None
    return read_router_record(path) if is_router_record(path) else read_request_record(path)


def read_router_record(path: Path, *others: Path) -> RequestRecord:
    """Read the record of a router as a workload, or join those of several routers before the same engines.

    Several records are joined on the wall clock. Lengths are those that engines reported. The router may have estimated
    prompts from their texts; its blocks then get the mean number of counted tokens, so that prompts share as much as
    their texts do.

    Raises:
        ConfigError: a file cannot be read, has no replayable request, is given twice, or holds routers with other
            settings or another key.
    """
    paths = (path, *others)
    if len({each.resolve() for each in paths}) < len(paths):
        raise ConfigError(f"the same record is given twice: {', '.join(map(str, paths))}")
    runs = [run for each in paths for run in router_runs(each) if run.requests]
    _check_key(runs)
    faults = Counter(fault for run in runs for each in run.requests if (fault := each.fault) is not None)
    faults["were refused"] = sum(run.num_refused for run in runs)
    joined = [(run, [each for each in run.requests if each.fault is None]) for run in runs]
    joined = [(run, requests) for run, requests in joined if requests]
    left_out = ", ".join(f"{count:,} {fault}" for fault, count in faults.items() if count)
    if not joined:
        names = ", ".join(map(str, paths))
        raise ConfigError(
            f"{names} has no request that can be replayed ({left_out or 'none was routed'}). A stream reports its"
            ' length only with "stream_options": {"include_usage": true}'
        )
    share = _tokens_counted(joined)
    record = as_record(joined, share, [_FIRST_BYTE, *left_out_note(faults)])
    if not others:
        return record
    ages_s = [age_s for run, _ in joined for age_s in run.ages_s]
    delay_ms = float(np.quantile(ages_s, _FRESHEST)) * 1e3 if ages_s else None
    return replace(record, num_routers=len(paths), router_delay_ms=delay_ms, notes=(*record.notes, _joined(delay_ms)))


def _check_key(runs: Sequence[RouterStart]) -> None:
    """Check that records of several files name equal blocks alike."""
    for run in runs[1:]:
        if run.path != runs[0].path and run.head.key_id != runs[0].head.key_id:
            raise ConfigError(
                f"{run.path} has block hashes of another key than {runs[0].path}, so shared prompts are not recognised:"
                " give all routers one --record-key-file"
            )


def _joined(delay_ms: float | None) -> str:
    if delay_ms is None:
        return "The routers exchanged nothing, and are simulated so."
    return (
        f"Messages between the routers are simulated with {delay_ms:.0f} ms, the age of what routers knew of each other"
        " that a tenth of the decisions were below."
    )


def left_out_note(faults: Counter[str]) -> list[str]:
    """Say how many requests of a record are left out, by the cause."""
    left_out = ", ".join(f"{count:,} {fault}" for fault, count in faults.items() if count)
    return [f"Requests of the record that are left out: {left_out}."] if left_out else []


def as_record(
    joined: Sequence[tuple[RouterStart, list[RoutedRequest]]], share: float, notes: Sequence[str]
) -> RequestRecord:
    """Return requests of a router, whose answers' lengths are known, in the form of a server's.

    Args:
        joined: each start of the router with its requests.
        share: tokens that engines counted for each token that the router expected.
        notes: what a reader of results has to know.
    """
    record = join_runs([[_as_server(run, requests, share) for run, requests in joined]])
    return replace(record, notes=(*notes, *record.notes))


def router_runs(path: Path) -> list[RouterStart]:
    """Read the starts of a router.

    Raises:
        ConfigError: the file cannot be read, or is damaged elsewhere than at the end of a start.
    """
    runs: list[RouterStart] = []
    damage, has_lost_head = "", False
    with open_lines(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                entry = decode_entry(line)
            except msgspec.MsgspecError as error:
                damage = f"line {number} is not an entry of a record: {error}"
                if runs:
                    runs[-1].cut_off = cut_off_note(path, number)
                continue
            if isinstance(entry, Head):
                runs.append(RouterStart(path, number, entry))
                damage, has_lost_head = "", False
            elif isinstance(entry, Gap):
                damage, has_lost_head = "", not runs
                if runs:
                    runs[-1].cut_off = gap_note(path, number, entry.num_lost)
            elif has_lost_head:
                continue
            elif damage or not runs:  # only the end of a run may be cut off
                raise ConfigError(f"{path}: {damage or f'line {number} comes before a header'}")
            else:
                runs[-1].take(entry)
    return runs


def _tokens_counted(joined: list[tuple[RouterStart, list[RoutedRequest]]]) -> float:
    """Return the tokens that engines counted for each token that the router expected."""
    both = [(each.num_prompt_tokens, each.request.num_prompt_tokens) for _, requests in joined for each in requests]
    known = [(counted, expected) for counted, expected in both if counted]
    return sum(counted for counted, _ in known) / sum(expected for _, expected in known) if known else 1.0


def _as_server(run: RouterStart, requests: list[RoutedRequest], share: float) -> RecordRun:
    settings = run.head.settings
    block_size = max(1, round(settings.block_size * share))
    sizes = {spec.num_blocks for spec in run.specs.values()}
    num_blocks = sizes.pop() if len(sizes) == 1 else None
    header = Header(
        model="",
        device=ROUTER,
        num_engines=1 + max(*run.specs, *(each.engine for each in requests), 0),
        block_size=block_size,
        num_blocks=0 if num_blocks is None else num_blocks * settings.block_size // block_size,
        max_model_len=0,
        limits={},
        route_policy=run.head.score or run.head.policy,
        clocks=run.head.clocks,
        key_id=run.head.key_id,
    )
    place = f"{run.path}, line {run.line}"
    recorded = [_recorded(each, block_size, share) for each in requests]
    return RecordRun(place, header, recorded, notes=[run.cut_off] if run.cut_off else [])


def _recorded(routed: RoutedRequest, block_size: int, share: float) -> RecordedRequest:
    request, num_output = routed.request, routed.num_output_tokens
    assert num_output is not None, "others are left out"
    num_prompt = routed.num_prompt_tokens or max(1, round(request.num_prompt_tokens * share))
    # An answer of no tokens is that of a scored prompt. The router assumes a limit where a client names none.
    max_tokens = max(request.sampling.max_tokens, num_output) if num_output else 0
    return RecordedRequest(
        request_id=request.request_id,
        arrival_ns=routed.arrival_ns,
        admitted_ns=0,
        first_token_ns=routed.first_ns if num_output else 0,
        last_token_ns=routed.ended_ns,
        engine=routed.engine,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        num_hit_tokens=min(routed.num_hit_tokens, num_prompt),
        max_tokens=max_tokens,
        block_hashes=b"".join(_blocks(request, num_prompt // block_size)),
        priority=request.priority,
        service_class=request.service_class,
        user=name_key(request.user),
        session=name_key(request.session_id),
        tenant=request.tenant or "",
    )


def _blocks(request: Request, num_blocks: int) -> Iterator[bytes]:
    """Yield a hash for each block; blocks beyond those that the router hashed belong to this request alone."""
    hashes = request.block_hashes
    for index in range(num_blocks):
        known = hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]
        yield known or blake2b(f"{request.request_id} {index}".encode(), digest_size=HASH_BYTES).digest()


_SHADOW = (
    '{"type":"Served"',
    '{"type":"EngineCounted"',
    '{"type":"Uncopied"',
)  # beginnings of lines that only a shadow writes
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
    runs = list(router_runs(path))
    num_uncopied = sum(run.num_uncopied for run in runs)
    if num_uncopied and not any(run.requests for run in runs):
        raise ConfigError(
            f"{path} has no request to compare: the shadow got no copy of any, and the {num_uncopied:,} answers in its"
            " access log say nothing of prompts. Let the router in use copy its requests to the shadow, with the"
            " request ids of the log as X-Request-ID (docs/shadow.md)"
        )
    runs = [run for run in runs if run.requests]
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
    notes = [*left_out_note(faults), *_uncopied_notes(len(requests), num_uncopied), *_count_notes(len(requests), whole)]
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


def _uncopied_notes(num_requests: int, num_uncopied: int) -> list[str]:
    if num_uncopied <= _OTHER_TRAFFIC * num_requests:
        return []  # those under way when the shadow started, and questions for the list of models
    text = (
        f"The access log has {num_uncopied:,} answers without a copy of their request, whose prompts are unknown: they"
        f" are left out, and {num_requests:,} are compared."
    )
    return [text]


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
