"""A server for offline use, a running one or a process that ends with this one, and a client of its API.

The client's requests wait while the server is full.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import aiohttp
import msgspec

from moestro.errors import ConfigError, EngineDiedError, MoestroError, RequestError
from moestro.loadgen.client import EventReader, error_words, unlimited_session
from moestro.web.errors import ErrorBody, ErrorFields

# Time for which a request is sent again while the server refuses it as full or as not ready. An engine that restarts
# takes less than its default --startup-timeout.
MAX_REFUSED_S = 600.0
_RETRIED = (429, 503)
_DEFAULT_PAUSE_S, _MAX_PAUSE_S = 1.0, 30.0
_JSON = {"Content-Type": "application/json"}


class ApiAnswer(NamedTuple):
    """One response, whatever its status."""

    status: int
    body: bytes
    request_id: str  # Empty if the server names none.


class UnreachableServerError(MoestroError):
    """The server could not be reached, or closed the connection before its response was complete."""


class ModelInList(msgspec.Struct):
    """One entry of `/v1/models`."""

    id: str
    max_model_len: int | None = None


class ModelsAnswer(msgspec.Struct):
    """Body of `/v1/models`."""

    data: list[ModelInList]


class ApiClient:
    """Connections to one server, open during an `async with`.

    Args:
        root: URL of the server, without /v1.
        api_key: Bearer token; None means that the server needs none.
    """

    def __init__(self, root: str, api_key: str | None) -> None:
        self._root = root
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def __aenter__(self) -> ApiClient:
        self._session = unlimited_session(self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def post(self, path: str, body: bytes) -> ApiAnswer:
        """Send `body`, again while the server refuses it as full, and return the answer, whatever its status.

        Raises:
            UnreachableServerError: There is no answer.
        """
        ends_at_s = time.monotonic() + MAX_REFUSED_S
        while True:
            with self._reached():
                async with self._session.post(self._root + path, data=body, headers=_JSON) as response:
                    answer = ApiAnswer(response.status, await response.read(), _request_id(response))
                    pause_s = _pause_s(response)
            if answer.status not in _RETRIED or time.monotonic() + pause_s > ends_at_s:
                return answer
            await asyncio.sleep(pause_s)

    async def stream(self, path: str, body: bytes) -> AsyncIterator[bytes]:
        """Send `body` and yield the data of each event of the answer, without the last `[DONE]`.

        Raises:
            RequestError: The server refuses the request, or ends the stream with an error.
            UnreachableServerError: There is no answer, or it breaks off.
        """
        events = EventReader()
        with self._reached():
            async with self._session.post(self._root + path, data=body, headers=_JSON) as response:
                if response.status != 200:
                    raise refusal_of(response.status, await response.read())
                while data := await response.content.readany():
                    for event in events.feed(data):
                        if event.data == b"[DONE]":
                            return
                        if event.kind == "error" or event.data.startswith(b'{"error"'):
                            raise refusal_of(500, event.data)
                        yield event.data
        raise UnreachableServerError(f"the answer of {self._root} breaks off")

    async def models(self) -> list[ModelInList]:
        """Return the served models.

        Raises:
            RequestError: The server refuses the request, for instance without a key.
            UnreachableServerError: There is no answer, or no list of models in it.
        """
        path = "/v1/models"
        with self._reached():
            async with self._session.get(self._root + path) as response:
                status, body = response.status, await response.read()
        if status != 200:
            raise refusal_of(status, body)
        try:
            return msgspec.json.decode(body, type=ModelsAnswer).data
        except msgspec.DecodeError as error:
            raise UnreachableServerError(f"{self._root}{path} answers no list of models: {error}") from None

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except (aiohttp.ClientError, OSError) as error:
            raise UnreachableServerError(f"no answer from {self._root} ({error or type(error).__name__})") from error


def refusal_of(status: int, body: bytes) -> RequestError:
    """Return the error that a response describes; any text is accepted."""
    try:
        fields = msgspec.json.decode(body, type=ErrorBody).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields = ErrorFields(f"{error_words(body)} (status {status})", "", None, None)
    error = RequestError(fields.message, param=fields.param, code=fields.code)
    error.http_status = status
    return error


def api_root(url: str) -> str:
    """Return a server's URL without a slash or /v1 at its end."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _request_id(response: aiohttp.ClientResponse) -> str:
    return response.headers.get("x-request-id", "")


def _pause_s(response: aiohttp.ClientResponse) -> float:
    try:
        return min(max(float(response.headers.get("Retry-After", "")), 0.0), _MAX_PAUSE_S)
    except ValueError:
        return _DEFAULT_PAUSE_S


# An event loop on a thread, so that synchronous functions also work where an event loop runs, as in notebooks.

T = TypeVar("T")


class BackgroundLoop:
    """Runs coroutines on one thread. It ends at `close`, with its garbage collection, or with the process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="moestro-offline", daemon=True)
        thread.start()
        self._finalizer = weakref.finalize(self, _end, self._loop, thread)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` and return its result. An interrupt of the caller, such as Ctrl-C, cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End the thread. Further calls do nothing."""
        self._finalizer()


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.run_until_complete(_settle())
    loop.close()


async def _settle() -> None:
    """Cancel what still runs and wait for it, so that connections are closed."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# A server process that belongs to this one: it is started for `LLM` or a verb.

OWNED_SERVER = (sys.executable, "-m", "moestro.cli.owned_server")
# The process has its own limit for a stop: the running requests' time and 10 s. This one is for a broken process.
_STOP_S = 40.0
# The address and the key are chosen here. The others end the process without serving.
_OWN_SETTINGS = ("host", "port", "api_key", "print_config", "help", "version")


class ServerReport(msgspec.Struct, omit_defaults=True):
    """One line from the server process.

    Attributes:
        url: Address, once the server takes requests.
        error: Cause of the process's end.
        is_config: Whether other settings would avoid the error.
    """

    url: str = ""
    error: str = ""
    is_config: bool = False


class OwnedServer:
    """A running server process.

    The constructor returns once the server takes requests. Ctrl-C does not reach the process, which ends at `close`,
    with a `with` block, with the garbage collection of this object, or with this process, even if it is killed.

    Args:
        arguments: Arguments of `moestro serve`.

    Attributes:
        url: Address of the server, on this machine.
        api_key: Random key; the server refuses requests without it.

    Raises:
        ConfigError: The settings cannot be honoured; the text says what to do.
        EngineDiedError: An engine failed before it was ready.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        _refuse_own_settings(arguments)
        self.api_key = secrets.token_urlsafe(32)
        self._process = subprocess.Popen(  # noqa: S603 the arguments are those of the program that runs
            [*OWNED_SERVER, *arguments, "--host=127.0.0.1", "--port=0"],
            stdin=subprocess.PIPE,  # Its end tells the server that this process has ended.
            stdout=subprocess.PIPE,
            env={"MOESTRO_LOG_LEVEL": "warning"} | os.environ | {"MOESTRO_API_KEY": self.api_key},
            start_new_session=True,
        )
        self._finalizer = weakref.finalize(self, _stop, self._process)
        try:
            self.url = self._report().url
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> OwnedServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the server and wait for its end. Further calls do nothing."""
        self._finalizer()

    @property
    def process_id(self) -> int:
        """Id of the process, for `ps` and `kill`."""
        return self._process.pid

    def raise_if_closed(self) -> None:
        """Raise EngineDiedError after `close`."""
        if not self._finalizer.alive:
            raise EngineDiedError("the server of this object is closed: make a new one")

    def raise_if_ended(self) -> None:
        """Raise EngineDiedError with the cause if the process has ended, or is about to."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)  # A refused connection may precede the end of the process.
        if self._process.poll() is not None:
            self._report()

    def _report(self) -> ServerReport:
        """Wait for the next report and return it; an error, or the end of the process, is raised."""
        stdout = self._process.stdout
        assert stdout is not None
        if not (line := stdout.readline()):
            raise EngineDiedError(f"the server ended with status {self._process.wait(_STOP_S)}; its log has the cause")
        report = msgspec.json.decode(line, type=ServerReport)
        if report.error:
            kind: type[MoestroError] = ConfigError if report.is_config else EngineDiedError
            raise kind(report.error)
        return report


def flags_from(settings: Mapping[str, object]) -> list[str]:
    """Return settings as arguments of `moestro serve`: `max_num_seqs=8` becomes `--max-num-seqs=8`.

    None leaves a setting at its default, True and False become a flag with and without `--no-`, a list repeats the
    flag, and a dictionary becomes JSON.
    """
    return [flag for name, value in settings.items() for flag in _flags(name.replace("_", "-"), value)]


def _flags(name: str, value: object) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list | tuple):
        return [flag for each in value for flag in _flags(name, each)]
    return [f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"]


def _refuse_own_settings(arguments: Sequence[str]) -> None:
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.startswith("--") and name[2:].replace("-", "_") in _OWN_SETTINGS:
            raise ConfigError(f"{name} is not for a server that is started here and that no other program uses")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the process, and kill it if it does not end by itself. Its engines end with it."""
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


# The server of a verb: a running one by its URL, or one that is started for the verb.


@dataclass(frozen=True, slots=True)
class AnyServer:
    """A server that takes requests. `owned` is its process, if it was started for this one."""

    root: str
    api_key: str | None
    owned: OwnedServer | None = None

    def client(self) -> ApiClient:
        """Return a client, which is not yet open."""
        return ApiClient(self.root, self.api_key)

    def raise_if_ended(self) -> None:
        """Raise EngineDiedError with the cause if the process that was started has ended."""
        if self.owned is not None:
            self.owned.raise_if_ended()


@contextlib.contextmanager
def any_server(url: str | None, api_key: str | None, arguments: Sequence[str]) -> Iterator[AnyServer]:
    """Open the server at `url`; without a URL, start one, which ends with the block.

    Args:
        api_key: Bearer token of a running server.
        arguments: Arguments of `moestro serve` for a server that is started.

    Raises:
        ConfigError: The URL is none, there are both a URL and arguments, or the arguments cannot be honoured.
        EngineDiedError: An engine failed before it was ready.
    """
    if url is None:
        with OwnedServer(arguments) as owned:
            yield AnyServer(owned.url, owned.api_key, owned)
        return
    if arguments:
        raise ConfigError(f"{arguments[0]} is for a server that is started here: leave it or --url out")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url must begin with http:// or https://, got {url}")
    yield AnyServer(api_root(url), api_key)
