"""`moestro explain`: finds and prints the trace of a request, of a running router or server or of a record."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from http.client import HTTPException
from pathlib import Path
from urllib.parse import quote

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moestro.cli.admin_port import ask_admin
from moestro.cli.recorded.levels import tell_levels
from moestro.errors import ConfigError, MoestroError
from moestro.files.text_files import open_utf8
from moestro.routing.record.decision_record import decode_entry, is_entry
from moestro.routing.record.request_trace import Attempt, RequestTrace

_TIMEOUT_S = 10.0
_LEFT_STATUS = 499


class _AdminError(msgspec.Struct):
    message: str


class _AdminErrorBody(msgspec.Struct):
    error: _AdminError


def find_trace(request_id: str, *, admin_url: str, admin_api_key: str | None, record: Path | None) -> RequestTrace:
    """Find the trace of a request.

    Args:
        request_id: id of the request, or of its answer, of which the first choice is meant.
        admin_url: URL of the operators' port of a running router or server.
        record: file of `--record` to search instead; None means the running one.

    Raises:
        ConfigError: the request is unknown, or the file cannot be read.
    """
    if record is not None:
        return _from_file(request_id, record)
    return _from_router(request_id, admin_url.rstrip("/"), admin_api_key)


def tell(trace: RequestTrace, console: Console, *, as_json: bool = False) -> None:
    """Print the engines, the queue, preemptions, experts and the outcome of one request, or its trace as JSON."""
    if as_json:
        text = msgspec.json.format(msgspec.json.encode(trace)).decode()
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        return
    for line in _trace_lines(trace):
        console.print(line, highlight=False, soft_wrap=isinstance(line, str))


def _from_file(request_id: str, record: Path) -> RequestTrace:
    wanted, ids = request_id.encode(), {request_id, f"{request_id}-0"}
    found: RequestTrace | None = None
    try:
        with open_utf8(record) as lines:
            for number, line in enumerate(lines, 1):
                if wanted in line:
                    try:
                        entry = decode_entry(line) if is_entry(line) else None
                    except msgspec.MsgspecError as error:
                        raise ConfigError(f"{record}:{number} is not an entry of a record: {error}") from None
                    if isinstance(entry, RequestTrace) and entry.request_id in ids:
                        found = entry
    except OSError as error:
        raise ConfigError(f"--record {record} cannot be read: {error.strerror}") from None
    if found is None:
        raise ConfigError(f"request {request_id} is not in {record}")
    return found


def _from_router(request_id: str, admin_url: str, key: str | None) -> RequestTrace:
    url = f"{admin_url}/admin/explain/{quote(request_id, safe='')}"
    try:
        status, body = ask_admin(url, key, _TIMEOUT_S)
    except (OSError, HTTPException, ValueError) as error:
        raise MoestroError(
            f"nothing answers at {admin_url} ({error or 'timed out'}): give the --admin-url of a router or server with"
            " --admin-port, or --record FILE"
        ) from None
    try:
        if status == 200:
            return msgspec.json.decode(body, type=RequestTrace)
        raise ConfigError(msgspec.json.decode(body, type=_AdminErrorBody).error.message)
    except msgspec.MsgspecError:
        raise MoestroError(f"{admin_url} is not the operators' port of Moestro (status {status})") from None


def _trace_lines(story: RequestTrace) -> Iterator[str | Table]:
    when = datetime.fromtimestamp(story.time).astimezone().isoformat(sep=" ", timespec="milliseconds")
    tokens = f"{story.prompt_tokens:,} prompt tokens"
    tenant = f"  tenant {escape(story.tenant)}" if story.tenant else ""
    yield f"[bold]{escape(story.request_id)}[/bold]  {when}  {tokens}  {escape(story.policy)}{tenant}"
    for attempt in story.attempts:
        yield from _attempt_lines(attempt)
    yield from tell_levels(story)
    if story.not_resumable:
        yield f"its stream could not go on elsewhere: {escape(story.not_resumable)}"
    yield _outcome(story)


def _attempt_lines(attempt: Attempt) -> Iterator[str | Table]:
    because = f" ({escape(attempt.because)})" if attempt.because else ""
    wait = f", after {attempt.wait_s:.3f} s in the router's queue" if attempt.wait_s else ""
    yield f"to [bold]{escape(attempt.engine)}[/bold]{because}{wait}: {escape(attempt.reason)}"
    has_hosted = any(each.host_tokens for each in attempt.candidates)
    has_speeds = any((each.speed, each.decode_speed) != (1, 1) for each in attempt.candidates)
    more = (*(["on the host"] if has_hosted else ()), *(["prompt speed", "answer speed"] if has_speeds else ()))
    table = Table("engine", "score", "hit tokens", *more, box=None, padding=(0, 2))
    for candidate in attempt.candidates:
        chosen = "[bold]*[/bold] " if candidate.engine == attempt.engine else "  "
        score = "" if candidate.score is None else f"{candidate.score:,.6g}"
        row = [chosen + escape(candidate.engine), score, f"{candidate.hit_tokens:,}"]
        row += [f"{candidate.host_tokens:,}"] if has_hosted else []
        row += [f"{candidate.speed:.2f}", f"{candidate.decode_speed:.2f}"] if has_speeds else []
        table.add_row(*row)
    yield table
    if attempt.num_candidates > len(attempt.candidates):
        yield f"  and {attempt.num_candidates - len(attempt.candidates)} more with higher scores"
    for figure, engines in attempt.not_compared.items():
        yield f"  no engine was compared by {figure}, which {escape(', '.join(engines))} had not reported"
    if attempt.peer_ages_s:
        ages = ", ".join(f"{escape(name)} {age_s * 1e3:.0f} ms" for name, age_s in attempt.peer_ages_s.items())
        yield f"  age of what was known of other routers: {ages}"
    if attempt.regret is not None:
        than = "more" if attempt.regret <= 0 else "less: the score alone did not decide"
        yield f"  the runner-up would have scored {abs(attempt.regret):,.6g} {than}"


def _outcome(story: RequestTrace) -> str:
    if story.status is None:
        return "still running"
    end = "the client left" if story.status == _LEFT_STATUS else f"answered {story.status}"
    usage = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in story.usage.items())
    return f"{end} after {story.seconds or 0:.3f} s" + (f"; {usage}" if usage else "")
