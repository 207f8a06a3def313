"""The server of a verb: a running one by its URL, or one that is started for the verb."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moestro.errors import ConfigError
from moestro.offline.api_client import ApiClient, api_root
from moestro.offline.owned_server import OwnedServer


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
