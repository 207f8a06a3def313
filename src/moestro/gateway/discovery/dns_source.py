"""Names in DNS, each of whose addresses is an engine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from moestro.core.hosts import in_address
from moestro.errors import ConfigError
from moestro.gateway.discovery.discovery import ListListener
from moestro.gateway.discovery.entries import EngineEntry
from moestro.gateway.settings import EngineUrl

_MAX_ADDRESSES = 256  # Of one name.
_LOOKUP_S = 10.0


class DnsNames:
    """EngineSource that looks names up at an interval.

    A failed lookup leaves the last addresses of its name in place: health checks find out which of them are dead.

    Args:
        texts: Values of `--engine-dns`.
        resolve: Returns the addresses of a host and a port; OSError if there are none.

    Raises:
        ConfigError: A value is no URL with a host and a port.
    """

    name = "dns"

    def __init__(
        self, texts: Sequence[str], interval_s: float, resolve: Callable[[str, int], Awaitable[list[str]]] | None = None
    ) -> None:
        self._urls = [_parse(text) for text in texts]
        self._interval_s = interval_s
        self._resolve = resolve or _addresses
        self._found: dict[EngineUrl, list[EngineEntry]] = {}
        self.what = f"--engine-dns {' '.join(texts)}"

    async def follow(self, listener: ListListener) -> None:
        """Implement `EngineSource.follow`."""
        while True:
            faults = await asyncio.gather(*(self._look_up(url) for url in self._urls))
            entries: dict[str, EngineEntry] = {}
            for found in self._found.values():
                for entry in found:
                    entries.setdefault(entry.name, entry)
            listed = sorted(entries.values(), key=lambda entry: entry.name)
            listener.report(None if all(faults) else listed, "; ".join(fault for fault in faults if fault))
            await asyncio.sleep(self._interval_s)

    async def _look_up(self, url: EngineUrl) -> str:
        """Take in the addresses of a name. Returns the fault, empty if there is none."""
        try:
            async with asyncio.timeout(_LOOKUP_S):
                found = await self._resolve(url.host, url.port)
        except TimeoutError:
            return f"{url.host}: no answer within {_LOOKUP_S:g} s"
        except OSError as error:
            return f"{url.host}: {error.strerror or error}"
        hosts = sorted(set(found))
        if len(hosts) > _MAX_ADDRESSES:
            return f"{url.host}: it has {len(hosts)} addresses, and {_MAX_ADDRESSES} is the most"
        self._found[url] = [_entry(url, host) for host in hosts]
        return ""


async def _addresses(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def _parse(text: str) -> EngineUrl:
    name, separator, _ = text.partition("=")
    if separator and "/" not in name:
        raise ConfigError(f"--engine-dns {text}: give http://NAME:PORT alone, because each address is named by itself")
    return EngineUrl.parse(text, "--engine-dns")


def _entry(url: EngineUrl, host: str) -> EngineEntry:
    scheme = "https" if url.is_tls else "http"
    address = EngineUrl.parse(f"{scheme}://{in_address(host)}:{url.port}{url.path}", "--engine-dns")
    return EngineEntry(url=replace(address, traits=url.traits), server_name=url.host if url.is_tls else "")
