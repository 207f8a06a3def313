"""Servers' records of their answered requests: Moestro's own, which the simulator replays, and that of a vLLM server.

`moestro serve --record FILE` writes one. Each line is a JSON object: first a `Header`, then a `RecordedRequest` for
each request, in the order of their ends. A restarted server appends another header and continues. Lines with a `type`
are the decisions of the server, which `moestro explain` and `moestro replay` read. Here they tell how often each
request was preempted. The record holds no prompt and no answer: blocks appear as keyed hashes, users and sessions as
numbers. Several servers' records are merged on the wall clock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from moestro.core.clock import NS_PER_S, ClockPair, Timelines
from moestro.core.request import Request, SamplingParams, Script, ServiceClass
from moestro.core.scheduling_events import RequestEvent, SequenceAdmitted, SequencePreempted
from moestro.core.work import request_key
from moestro.errors import ConfigError
from moestro.files.text_files import open_lines, read_jsonl
from moestro.workload.rows import Int64s, Rows

FORMAT = "moestro-requests-1"
ROUTER = "router"  # device of a record that a router wrote, which does not know its engines
UNKNOWN = -1  # preemptions of a request
_TAGGED = '{"type":'  # lines of the decision record, `routing.decision_record`, which the same file holds
_GAP = "Gap"  # tag of the place where lines are missing, after which a header follows
_TRACE = "Story"  # tag of a request's trace, `routing.decision_log`, among them
_TIMES = ("arrival_ns", "admitted_ns", "first_token_ns", "last_token_ns")


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The server that wrote the following lines.

    Attributes:
        format: FORMAT.
        model: served model name.
        device: device as its engines call it; the name of a paced one begins with "paced". ROUTER means a router's
            record, of which `num_blocks` and `max_model_len` may be 0, unknown, and `limits` are empty.
        pace_dilation: factor on the durations of a paced device, by which all times of the record are longer.
        num_engines, block_size, num_blocks, max_model_len: sizes of the server and of each engine.
        kv_offloading_size: GiB of host memory of each engine for the KV of preempted requests.
        limits: settings of each engine's scheduler, by the names of `SchedulerSettings`.
        stepping: step settings of each engine, by the names of the flags; empty means whole steps.
        route_policy: policy that chose the engine of each request.
        clocks: start of the record on both clocks; None in records of older versions.
        key_id: fingerprint of the key of all block hashes; empty in records of older versions, which have the names.
    """

    format: str = FORMAT
    model: str
    device: str
    pace_dilation: float = 1.0
    num_engines: int
    block_size: int
    num_blocks: int
    max_model_len: int
    kv_offloading_size: float = 0.0
    limits: dict[str, object]
    stepping: dict[str, object] = {}
    route_policy: str
    clocks: ClockPair | None = None
    key_id: str = ""


class RecordedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request with a complete answer. Times are nanoseconds of the server's monotonic clock.

    Attributes:
        request_id: id that the server gave.
        arrival_ns: arrival at the API server.
        admitted_ns: first allocation of KV blocks; 0 if unknown.
        first_token_ns, last_token_ns: arrival of the tokens at the API server; 0 if it requested no token. Such a
            request of a router has the end of its answer as `last_token_ns`.
        engine: number of the engine that answered.
        num_prompt_tokens, num_output_tokens, num_hit_tokens: tokens of prompt, answer, and prefix-cache hit.
        max_tokens: requested limit.
        block_hashes: packed hashes of the prompt's full blocks; base64 in the file.
        priority, service_class: as requested.
        user, session: numbers of the user and of the conversation, from `core.hashing.name_key`, so that they are the
            same on every server; 0 if the request named none.
        tenant: tenant of the request's key, which a router records; empty if it has none.
    """

    request_id: str
    arrival_ns: int
    admitted_ns: int
    first_token_ns: int
    last_token_ns: int
    engine: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_hit_tokens: int
    max_tokens: int
    block_hashes: bytes
    priority: int = 0
    service_class: ServiceClass = ServiceClass.LS
    user: int = 0
    session: int = 0
    tenant: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class RequestRecord:
    """Records of one or more servers as a workload: each request, with its answer's length as its hidden future.

    The record lacks the hashes of answers. In a replay, a turn of a conversation therefore hits the prompts of earlier
    turns and not their answers.

    Attributes:
        headers: first header of each server. They differ in `num_engines` and `clocks` at most.
        requests: requests of all servers in order of arrival. Engines are numbered through the servers in order.
        server: int64[n], server of each request.
        num_preemptions: int64[n], sequence preemptions of each request. UNKNOWN means that the record lacks its events.
        notes: what a reader of results has to know of the record.
        num_routers: routers that sent the requests to the same engines.
        router_delay_ms: time of a message between them, ms; None means that they exchanged nothing.
    """

    headers: tuple[Header, ...]
    requests: list[RecordedRequest]
    server: Int64s
    num_preemptions: Int64s
    notes: tuple[str, ...] = ()
    num_routers: int = 1
    router_delay_ms: float | None = None

    @property
    def header(self) -> Header:
        """Header of the first server."""
        return self.headers[0]

    @property
    def num_engines(self) -> int:
        """Engines of all servers."""
        return sum(header.num_engines for header in self.headers)

    @property
    def session(self) -> Int64s:
        """int64[n], session of each request; 0 if it named none."""
        return np.array([request.session for request in self.requests], np.int64)

    def part(self, server: int) -> RequestRecord:
        """Return the record of one server, with its engines numbered from 0."""
        rows = np.flatnonzero(self.server == server).tolist()
        first = sum(header.num_engines for header in self.headers[:server])
        requests = [self.requests[row] for row in rows]
        if first:
            requests = [msgspec.structs.replace(each, engine=each.engine - first) for each in requests]
        return RequestRecord(
            (self.headers[server],), requests, np.zeros(len(rows), np.int64), self.num_preemptions[rows]
        )

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def arrival_ns(self) -> Int64s:
        """int64[n], nanoseconds after the first arrival."""
        times: Int64s = np.array([request.arrival_ns for request in self.requests], np.int64)
        times -= times[0]
        return times

    def make(self, index: int, arrival_ns: int) -> tuple[Request, Script]:
        """Build request `index` with the given arrival, and its script."""
        recorded = self.requests[index]
        request = Request(
            request_id=f"row-{index}",
            num_prompt_tokens=recorded.num_prompt_tokens,
            sampling=SamplingParams(max_tokens=recorded.max_tokens),
            arrival_ns=arrival_ns,
            block_hashes=recorded.block_hashes,
            priority=recorded.priority,
            service_class=recorded.service_class,
            user=f"user-{recorded.user}" if recorded.user else None,
            session_id=f"session-{recorded.session}" if recorded.session else None,
        )
        return request, Script(max(recorded.num_output_tokens, 1), request_key=request_key(index))


@dataclass(frozen=True, slots=True)
class RecordRun:
    """The lines of one start of a server.

    Attributes:
        place: file and line of its header, for messages.
        header: header.
        requests: requests, in any order.
        num_preemptions: sequence preemptions of each request whose events are in the record, by its id.
        notes: where lines are missing.
    """

    place: str
    header: Header
    requests: list[RecordedRequest] = field(default_factory=list)
    num_preemptions: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class _EngineEvent(msgspec.Struct):
    event: RequestEvent


class _Tagged(msgspec.Struct):
    """Fields of a tagged line; only traces have all of them."""

    type: str
    request_id: str = ""
    events: list[_EngineEvent] = []
    num_lost: int = 0
    num_omitted_events: int = 0


def read_request_record(path: Path, *others: Path) -> RequestRecord:
    """Read the record in `path`, or merge the records of several servers, one file each.

    Starts of a server with equal settings, and servers, are joined on the wall clock. The time in which none ran stays
    in the arrivals. Times of dilated paced servers are divided by their dilation.

    Raises:
        ConfigError: a file cannot be read, is no record, is given twice, or holds servers that cannot be joined; the
            text names the line.
    """
    paths = (path, *others)
    if len({each.resolve() for each in paths}) < len(paths):
        raise ConfigError(f"the same record is given twice: {', '.join(map(str, paths))}")
    servers = []
    for each in paths:
        runs = [run for run in _runs(each) if run.requests]
        if not runs:
            raise ConfigError(f"{each} holds no requests")
        servers.append(runs)
    return join_runs(servers)


def join_runs(servers: Sequence[Sequence[RecordRun]]) -> RequestRecord:
    """Join the starts of one or more servers, each with requests.

    Raises:
        ConfigError: two starts have different settings, or lack their wall-clock times.
    """
    first = servers[0][0]
    for runs in servers:
        if runs[0] is not first:
            _check_joins(first, runs[0], is_same_server=False)
        for run in runs[1:]:
            _check_joins(runs[0], run, is_same_server=True)
    is_one = len(servers) == len(servers[0]) == 1
    found: list[tuple[int, RecordedRequest, int]] = []
    first_engine = 0
    for number, runs in enumerate(servers):
        for run in runs:
            counted = run.num_preemptions
            found += [
                (number, _moved(each, run, first_engine, is_one=is_one), counted.get(each.request_id, UNKNOWN))
                for each in run.requests
            ]
        first_engine += runs[0].header.num_engines
    found.sort(key=lambda each: (each[1].arrival_ns, each[1].request_id))
    requests = [request for _, request, _ in found]
    if first.header.pace_dilation != 1:
        requests = list(_undilated(requests, first.header.pace_dilation))
    headers = tuple(runs[0].header for runs in servers)
    return RequestRecord(
        headers,
        requests,
        np.array([number for number, _, _ in found], np.int64),
        np.array([num for _, _, num in found], np.int64),
        tuple(note for runs in servers for run in runs for note in run.notes),
    )


def _runs(path: Path) -> list[RecordRun]:
    """Split the file at its headers. A truncated line at the end of a run (from a kill or a full disk) is noted."""
    runs: list[RecordRun] = []
    cut_off = ""
    with open_lines(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            if line.startswith(_TAGGED):
                _take_tagged(path, number, line, runs)
                continue
            try:
                entry = _decoded(line)
            except msgspec.ValidationError as error:
                raise _damaged(path, f"line {number}: {error}", runs) from None
            except msgspec.DecodeError as error:
                _note_cut_off(path, number, runs)
                cut_off = cut_off or f"line {number}: {error}"
                continue
            if isinstance(entry, Header):
                runs.append(_begun(path, number, entry))
                cut_off = ""
            elif cut_off or not runs:
                raise _damaged(path, cut_off or f"line {number} comes before a header", runs)
            else:
                runs[-1].requests.append(entry)
    if not runs:
        raise _damaged(path, cut_off or "it is empty", runs)
    return runs


def _begun(path: Path, number: int, header: Header) -> RecordRun:
    if header.format != FORMAT:
        raise ConfigError(f"{path} is a record of format {header.format!r}; this version reads {FORMAT!r}")
    return RecordRun(f"{path}, line {number}", header)


def _take_tagged(path: Path, number: int, line: str, runs: list[RecordRun]) -> None:
    """Note the preemptions of a request, if the line is its trace with all its events."""
    try:
        tagged = _decode_tagged(line)
    except msgspec.ValidationError:
        return  # an event of another version, so its request's preemptions stay unknown
    except msgspec.DecodeError:
        _note_cut_off(path, number, runs)  # the requests after it are whole
        return
    if tagged.type == _GAP and runs:
        runs[-1].notes.append(gap_note(path, number, tagged.num_lost))
    events = [each.event for each in tagged.events]
    # Engines that report no events, and earlier versions, write traces without an admission.
    is_whole = tagged.num_omitted_events == 0 and any(isinstance(event, SequenceAdmitted) for event in events)
    if runs and tagged.type == _TRACE and is_whole:
        preempted = [each for each in events if isinstance(each, SequencePreempted)]
        runs[-1].num_preemptions[tagged.request_id] = sum(each.request_id == tagged.request_id for each in preempted)


def _note_cut_off(path: Path, number: int, runs: list[RecordRun]) -> None:
    if runs:
        runs[-1].notes.append(cut_off_note(path, number))


def cut_off_note(path: Path, number: int) -> str:
    """Say that a line of a record ends too early."""
    return f"{path}, line {number} is cut off, by a kill or a full disk: what should follow it is missing."


def gap_note(path: Path, number: int, num_lost: int) -> str:
    """Say that a record has a gap."""
    return f"{path}, line {number}: {num_lost:,} lines are missing, because the disk was full or did not keep up."


def _damaged(path: Path, how: str, runs: list[RecordRun]) -> ConfigError:
    what = "is damaged" if runs else "is no record of `moestro serve --record`"
    return ConfigError(f"{path} {what}: {how}")


_decode_request = msgspec.json.Decoder(RecordedRequest).decode
_decode_header = msgspec.json.Decoder(Header).decode
_decode_tagged = msgspec.json.Decoder(_Tagged).decode


def _decoded(line: str) -> Header | RecordedRequest:
    try:
        return _decode_request(line)
    except msgspec.ValidationError as error:
        with contextlib.suppress(msgspec.ValidationError):
            return _decode_header(line)
        raise error from None


def _check_joins(first: RecordRun, run: RecordRun, *, is_same_server: bool) -> None:
    where = f"{run.place}: another server's record begins here,"
    if run.header.key_id != first.header.key_id:
        if not is_same_server:
            raise ConfigError(
                f"{where} whose block hashes have another key, so shared prompts are not recognised: replay it on its"
                " own. Servers with one --record-key-file have one key"
            )
        run.notes.append(
            f"From {run.place} on, block hashes have another key: prompts before and after it count as different."
        )
    free = {"clocks", "key_id"} if is_same_server else {"clocks", "num_engines", "key_id"}
    names = [name for name in Header.__struct_fields__ if name not in free]
    changed = [name for name in names if getattr(run.header, name) != getattr(first.header, name)]
    if changed:
        raise ConfigError(f"{where} with another {', '.join(changed)}: replay it on its own")
    if run.header.clocks is None or first.header.clocks is None:
        raise ConfigError(
            f"{where} and one of the two headers lacks its wall-clock time, so they cannot be joined: replay it on its"
            " own"
        )


def _undilated(requests: list[RecordedRequest], dilation: float) -> Iterator[RecordedRequest]:
    start_ns = requests[0].arrival_ns
    for request in requests:
        times = {name: getattr(request, name) for name in _TIMES}
        moved = {name: start_ns + round((time_ns - start_ns) / dilation) for name, time_ns in times.items() if time_ns}
        yield msgspec.structs.replace(request, **moved)


def _moved(request: RecordedRequest, run: RecordRun, first_engine: int, *, is_one: bool) -> RecordedRequest:
    """Return a request with times on the wall clock and its engine's number among those of all servers."""
    if is_one:
        return request
    assert run.header.clocks is not None, "checked before"
    offset_ns = run.header.clocks.offset_ns
    times = {name: getattr(request, name) for name in _TIMES}
    moved = {name: time_ns + offset_ns for name, time_ns in times.items() if time_ns}  # 0 means no such moment
    return msgspec.structs.replace(request, engine=request.engine + first_engine, **moved)


# A real vLLM server's own record: lengths, and times of queueing, scheduling and answering.

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
