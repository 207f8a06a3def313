"""A client of one server with OpenAI's API: requests that wait while the server is full, and streams."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import aiohttp
import msgspec

from moestro.errors import MoestroError, RequestError
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
