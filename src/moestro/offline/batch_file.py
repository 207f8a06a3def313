"""OpenAI's batch files: a request in each line of the input, and an answer or an error in a line of the output."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from moestro.errors import ConfigError, RequestError, shown
from moestro.offline.any_server import AnyServer
from moestro.offline.api_client import ApiClient, UnreachableServerError

BATCH_PATHS = ("/v1/chat/completions", "/v1/completions")
MAX_LINES_IN_FLIGHT = 256  # Lines at the server at once, as in vLLM's run-batch.


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
        """Whether the line has the answer that was asked for."""
        return self.response is not None and self.response.status_code == 200


class _BatchBody(msgspec.Struct):
    stream: object = None


@dataclass(slots=True)
class BatchCounts:
    """Numbers of lines with an answer and with an error."""

    num_good: int = 0
    num_failed: int = 0


_decode_line = msgspec.json.Decoder(BatchLine).decode
_decode_body = msgspec.json.Decoder(_BatchBody).decode


def open_files(input_file: Path, output_file: Path) -> tuple[BinaryIO, BinaryIO]:
    """Open both files; the output loses what it had.

    Raises:
        ConfigError: A file cannot be opened, or both are the same.
    """
    source = None
    try:
        source = input_file.open("rb")
        if output_file.exists() and output_file.samefile(input_file):
            raise ConfigError(f"--output-file {output_file} is the input: give another file")
        return source, output_file.open("wb")
    except BaseException as error:
        if source is not None:
            source.close()
        if isinstance(error, OSError):
            raise ConfigError(f"cannot open {error.filename}: {error.strerror}") from error
        raise


def count_requests(source: BinaryIO) -> int:
    """Return the number of lines that are not blank, and go back to the first."""
    count = sum(1 for _ in _requests(source))
    source.seek(0)
    return count


async def run_lines(server: AnyServer, source: BinaryIO, target: BinaryIO, advance: Callable[[], None]) -> BatchCounts:
    """Write one answer for each request of `source` to `target`, as answers arrive.

    Args:
        advance: Function that is called after each answer.
    """
    requests, counts = _requests(source), BatchCounts()

    async def work() -> None:
        for line in requests:
            answer = await answer_line(client, line)
            target.write(msgspec.json.encode(answer) + b"\n")
            target.flush()
            if answer.is_good:
                counts.num_good += 1
            else:
                counts.num_failed += 1
            advance()

    async with server.client() as client, asyncio.TaskGroup() as workers:
        for _ in range(MAX_LINES_IN_FLIGHT):
            workers.create_task(work())
    return counts


async def answer_line(client: ApiClient, line: bytes) -> BatchAnswer:
    """Send the request of one line and return the answer; every error becomes an answer."""
    answer = BatchAnswer(f"batch_req_{uuid.uuid4().hex}", None)
    try:
        given = _decode_line(line)
        answer.custom_id = given.custom_id
        path, body = _checked(given)
        response = await client.post(path, body)
        one_line = msgspec.Raw(msgspec.json.format(_valid(response.body), indent=-1))
        answer.response = BatchResponse(response.status, response.request_id, one_line)
    except RequestError as error:
        answer.error = BatchError(error.code or "invalid_value", error.message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        answer.error = BatchError("invalid_json", f"The line is not a JSON object: {shown(error)}.")
    except UnreachableServerError as error:
        answer.error = BatchError("no_answer", f"{error}.")
    return answer


def _requests(source: BinaryIO) -> Iterator[bytes]:
    return (line for line in source if line.strip())


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
