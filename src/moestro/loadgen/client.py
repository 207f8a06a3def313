"""The HTTP side: sends one request, and timestamps the bytes of its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType

import aiohttp
import msgspec

from moestro.errors import ConfigError
from moestro.loadgen.answer import AnswerReader, error_words, refusal
from moestro.loadgen.settings import EndpointSettings
from moestro.workload.run_records import Outcome

_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
# Below uvicorn's 5 s, so that no request uses a connection that the server is about to close.
_KEEPALIVE_S = 4.0
_ERROR_BYTES = 1 << 16


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    device: str = ""  # Moestro's servers send it, and the dilation of paced ones
    pace_dilation: float = 1.0


class _Cards(msgspec.Struct):
    data: list[_Card]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A model to measure.

    Attributes:
        max_model_len: most tokens of prompt and answer, where the server tells.
        is_paced: whether the server's steps take a modelled time, so that its figures are not measured ones.
        pace_dilation: factor on these times.
    """

    url: str
    model: str
    max_model_len: int | None
    is_paced: bool = False
    pace_dilation: float = 1.0


def unlimited_session(headers: Mapping[str, str]) -> aiohttp.ClientSession:
    """Open a session of any number of connections that no timeout ends. `headers` accompany each request."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


class BenchClient:
    """Connections to one server, open during an `async with`."""

    def __init__(self, settings: EndpointSettings) -> None:
        self._settings = settings
        self._headers = {"Content-Type": "application/json"}
        if settings.api_key:
            self._headers["Authorization"] = f"Bearer {settings.api_key}"

    async def __aenter__(self) -> BenchClient:
        self._session = unlimited_session(self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def ask(
        self,
        url: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        timeout_s: float | None = None,
        on_delivery: Callable[[int], None] = lambda _: None,
    ) -> Outcome:
        """Send `body` to `url` and read the whole answer. Every error becomes the outcome's `failure`.

        Args:
            timeout_s: seconds for the whole answer. None means those of the settings.
            on_delivery: called with the number of deliveries so far whenever bytes arrive.
        """
        reader, timeout_s = AnswerReader(), timeout_s or self._settings.timeout
        try:
            async with asyncio.timeout(timeout_s):
                async with self._session.post(url, data=body, headers=headers) as response:
                    if response.status != 200:
                        return refusal(response.status, await response.content.read(_ERROR_BYTES))
                    # Read past [DONE] to the end of the body: only then can another request use the connection.
                    while data := await response.content.readany():
                        reader.feed(data, time.monotonic_ns())
                        on_delivery(reader.num_deliveries)
        except TimeoutError:
            reader.fail("timeout", f"no complete answer within {timeout_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            reader.fail("connection", f"{type(error).__name__}: {error}")
        return reader.outcome()

    async def find_endpoint(self) -> Endpoint:
        """Find the model to measure: the named one, or the first that the server lists.

        Raises:
            ConfigError: no server answers, the answer is no list of models, or the list lacks the model.
        """
        cards = await self._models()
        model, names = self._settings.model, [card.id for card in cards]
        if not names or (model is not None and model not in names):
            raise ConfigError(f"{self._settings.root} serves {', '.join(names) or 'no model'}: give one as --model")
        card = cards[0] if model is None else cards[names.index(model)]
        url = self._settings.root + _PATHS[self._settings.endpoint_type]
        return Endpoint(url, card.id, card.max_model_len, card.device.startswith("paced"), card.pace_dilation)

    async def read(self, path: str) -> bytes | None:
        """Return the body of a path of the server; None: it has none there, or does not answer."""
        try:
            async with asyncio.timeout(self._settings.timeout), self._session.get(self._settings.root + path) as answer:
                return await answer.read() if answer.status == 200 else None
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None

    async def _models(self) -> list[_Card]:
        url = f"{self._settings.root}/v1/models"
        try:
            async with asyncio.timeout(self._settings.timeout), self._session.get(url) as response:
                body = await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ConfigError(
                f"no server answers at {url} ({error or type(error).__name__}):"
                " start one, for instance with moestro serve, or give its --base-url"
            ) from error
        if response.status == 401:
            raise ConfigError(f"{url} needs a key: set MOESTRO_API_KEY, or give --api-key")
        try:
            if response.status == 200:
                return msgspec.json.decode(body, type=_Cards).data
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
        text = f"{url} answers {response.status} and no list of models ({error_words(body)}): check --base-url"
        raise ConfigError(text)
