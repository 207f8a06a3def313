"""OpenAI's batch files: a request in each line of the input, and an answer or an error in a line of the output."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from moestro.errors import ConfigError, RequestError, shown, shown_literal
from moestro.files.text_files import open_utf8
from moestro.offline.server import AnyServer, ApiClient, UnreachableServerError

BATCH_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
MAX_LINES_IN_FLIGHT = 256  # Lines at the server at once, as in vLLM's run-batch.
_MOST_NAMED = 8  # Lines that one message names.

NumberedLine = tuple[int, bytes]


class BatchLine(msgspec.Struct):
    """One line of the input, of any types, so that an error can still name its `custom_id`."""

    custom_id: object = None
    method: object = "POST"
    url: object = None
    body: msgspec.Raw = msgspec.Raw(b"null")


class BatchResponse(msgspec.Struct):
    """Response of the server, whatever its status. An error's body has the field `error`."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(msgspec.Struct):
    """Cause for which a line has no response."""

    code: str
    message: str


class BatchAnswer(msgspec.Struct):
    """One line of the output, which has either a response or an error."""

    id: str
    custom_id: object
    response: BatchResponse | None = None
    error: BatchError | None = None

    @property
    def is_good(self) -> bool:
        """Whether the line has the requested answer."""
        return self.response is not None and self.response.status_code == 200


class _BatchBody(msgspec.Struct):
    stream: object = None


@dataclass(slots=True)
class BatchCounts:
    """Number of lines with an answer, and the numbers of the lines with an error."""

    num_good: int = 0
    failed: list[int] = field(default_factory=list)


_decode_line = msgspec.json.Decoder(BatchLine).decode
_decode_body = msgspec.json.Decoder(_BatchBody).decode


def read_batch(path: Path) -> list[NumberedLine]:
    """Return the lines of a batch file that are not blank, by their numbers from 1.

    Raises:
        ConfigError: The file cannot be read, or several lines have one `custom_id`.
    """
    try:
        with open_utf8(path) as file:
            lines = [(number, line) for number, line in enumerate(file, 1) if line.strip()]
    except OSError as error:
        raise ConfigError(f"cannot open {path}: {error.strerror}") from error
    except UnicodeError as error:
        raise ConfigError(f"{path} begins as UTF-16 and is not: {error}") from error
    _refuse_equal_ids(path, lines)
    return lines


def open_output(input_file: Path, output_file: Path) -> BinaryIO:
    """Open the file for the answers, which loses what it had.

    Raises:
        ConfigError: The file cannot be opened, or is the input.
    """
    try:
        if output_file.exists() and output_file.samefile(input_file):
            raise ConfigError(f"--output-file {output_file} is the input: give another file")
        return output_file.open("wb")
    except OSError as error:
        raise ConfigError(f"cannot open {error.filename}: {error.strerror}") from error


async def run_lines(
    server: AnyServer, lines: Iterable[NumberedLine], target: BinaryIO, advance: Callable[[], None]
) -> BatchCounts:
    """Write one answer for each of `lines` to `target`, as answers arrive.

    Args:
        advance: Function that is called after each answer.
    """
    requests, counts = iter(lines), BatchCounts()

    async def work() -> None:
        for number, line in requests:
            answer = await answer_line(client, number, line)
            target.write(msgspec.json.encode(answer) + b"\n")
            target.flush()
            if answer.is_good:
                counts.num_good += 1
            else:
                counts.failed.append(number)
            advance()

    async with server.client() as client, asyncio.TaskGroup() as workers:
        for _ in range(MAX_LINES_IN_FLIGHT):
            workers.create_task(work())
    return counts


async def answer_line(client: ApiClient, number: int, line: bytes) -> BatchAnswer:
    """Send the request of one line and return the answer; every error becomes an answer, which names the line."""
    answer = BatchAnswer(f"batch_req_{uuid.uuid4().hex}", None)
    try:
        given = _decode_line(line)
        answer.custom_id = given.custom_id
        path, body = _checked(given)
        response = await client.post(path, body)
        one_line = msgspec.Raw(msgspec.json.format(_valid(response.body), indent=-1))
        answer.response = BatchResponse(response.status, response.request_id, one_line)
    except RequestError as error:
        answer.error = BatchError(error.code or "invalid_value", f"Line {number}: {error.message}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        answer.error = BatchError("invalid_json", f"Line {number} is not a JSON object: {shown(error)}.")
    except UnreachableServerError as error:
        answer.error = BatchError("no_answer", f"Line {number}: {error}.")
    return answer


def summary(counts: BatchCounts) -> str:
    """Return how many lines were answered, and the numbers of the first others."""
    num_failed = len(counts.failed)
    text = f"{counts.num_good} answered of {counts.num_good + num_failed}, {num_failed} errors"
    return f"{text} ({_lines(sorted(counts.failed))})" if num_failed else text


def _refuse_equal_ids(path: Path, lines: Iterable[NumberedLine]) -> None:
    numbers_of: dict[str, list[int]] = {}
    for number, line in lines:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            custom_id = _decode_line(line).custom_id
            if isinstance(custom_id, str):
                numbers_of.setdefault(custom_id, []).append(number)
    equal = [(custom_id, numbers) for custom_id, numbers in numbers_of.items() if len(numbers) > 1]
    if equal:
        named = "; ".join(
            f"{shown_literal(custom_id)}: {_lines(numbers)}" for custom_id, numbers in equal[:_MOST_NAMED]
        )
        further = f"; and {len(equal) - _MOST_NAMED:,} more" if len(equal) > _MOST_NAMED else ""
        raise ConfigError(
            f"{path} has lines with equal custom_id, by which answers are found ({named}{further}):"
            " give each line a custom_id of its own"
        )


def _lines(numbers: Sequence[int]) -> str:
    shown_numbers = ", ".join(map(str, numbers[:_MOST_NAMED]))
    further = f" and {len(numbers) - _MOST_NAMED:,} more" if len(numbers) > _MOST_NAMED else ""
    return f"{'line' if len(numbers) == 1 else 'lines'} {shown_numbers}{further}"


def _checked(line: BatchLine) -> tuple[str, bytes]:
    """Return path and body of the request; RequestError says what is wrong with the line."""
    if not isinstance(line.custom_id, str):
        raise _invalid("custom_id", "must be a text, which names the answer")
    if line.method != "POST":
        raise _invalid("method", f"must be POST, got {shown(line.method)}")
    if line.url not in BATCH_PATHS:
        raise _invalid("url", f"must be one of {', '.join(BATCH_PATHS)}, got {shown(line.url)}")
    body = bytes(line.body)
    try:
        fields = _decode_body(body)
    except msgspec.DecodeError:
        raise _invalid("body", "must be a JSON object, the body of a request") from None
    if fields.stream:
        raise _invalid("body.stream", "must be false, because a batch has whole answers")
    return str(line.url), body


def _invalid(param: str, text: str) -> RequestError:
    return RequestError(f"{param} {text}.", param=param, code="invalid_value")


def _valid(body: bytes) -> bytes:
    """Return the body of a response if it is JSON, as an error of a proxy may not be."""
    try:
        msgspec.json.decode(body, type=Any)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = f"The server's response is not JSON: {shown(error)}."
        raise RequestError(text, code="invalid_response") from None
    return body
