"""Follows the lists of engines while the router runs: a file, and names in DNS each of whose addresses is an engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moestro.core.processes import in_address
from moestro.errors import ConfigError
from moestro.gateway.discovery.lists import MAX_FILE_BYTES, EngineEntry, parse_file, selected
from moestro.gateway.settings import EngineUrl
from moestro.web.ports.tls import WatchedFiles

logger = logging.getLogger(__name__)


_TICK_S = 0.5
_AGAIN_S = 1.0
_SHOWN_CHARS = 300


class ListListener(Protocol):
    """Receives what a source finds."""

    def report(self, entries: Sequence[EngineEntry] | None, fault: str = "") -> None:
        """Take in a whole list.

        Args:
            entries: The list; None means that none can be had now, and the last one stays.
            fault: What went wrong, empty if nothing did.
        """


class EngineSource(Protocol):
    """A list of engines that changes.

    Attributes:
        name: Name of the source, one of `SOURCES`.
        what: Its flag and value, for the log.
    """

    name: str
    what: str

    async def follow(self, listener: ListListener) -> None:
        """Report every list until cancelled."""


class Discovery(Collector):
    """The sources of one router.

    Args:
        take: Called with a source's name and its list.
        tick: Called twice a second with the time, for engines that are listed no more.
    """

    def __init__(
        self,
        sources: Sequence[EngineSource],
        take: Callable[[str, Sequence[EngineEntry]], None],
        tick: Callable[[int], None],
    ) -> None:
        self._take = take
        self._tick = tick
        self._followers = [_Follower(source, take) for source in sources]

    @contextlib.asynccontextmanager
    async def running(self, first_s: float) -> AsyncIterator[None]:
        """Follow the sources inside the block, which begins when each has reported once.

        Args:
            first_s: Longest wait for the first reports, seconds.
        """
        if not self._followers:
            yield
            return
        tasks = [asyncio.create_task(follower.run()) for follower in self._followers]
        tasks.append(asyncio.create_task(self._tick_forever()))
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(first_s):
                    await asyncio.gather(*(follower.has_reported.wait() for follower in self._followers))
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                self._tick(time.monotonic_ns())
            except Exception:
                logger.exception("the removal of engines that are listed no more failed; it continues")

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the sources."""
        now_s = time.monotonic()
        engines = GaugeMetricFamily(
            "moestro:route_discovery_engines", "Engines in the last good list of the source.", labels=("source",)
        )
        age = GaugeMetricFamily(
            "moestro:route_discovery_age_seconds",
            "Time since the source was last read without a fault.",
            labels=("source",),
        )
        reads = CounterMetricFamily(
            "moestro:route_discovery_reads",
            "Reads of the source, by result: changed, same, or failed, which leaves the last list in place.",
            labels=("source", "result"),
        )
        for follower in self._followers:
            name = follower.source.name
            engines.add_metric((name,), len(follower.entries))
            age.add_metric((name,), now_s - follower.read_s)
            for result in ("changed", "same", "failed"):
                reads.add_metric((name, result), follower.counts[result])
        yield from (engines, age, reads)


class _Follower:
    """Follows one source.

    Attributes:
        entries: Its last good list.
        read_s: Time on `time.monotonic` of the last good read.
        counts: Reads by result.
        has_reported: Set by the first report.
    """

    def __init__(self, source: EngineSource, take: Callable[[str, Sequence[EngineEntry]], None]) -> None:
        self.source = source
        self._take = take
        self._fault = ""
        self._has_list = False
        self.entries: tuple[EngineEntry, ...] = ()
        self.read_s = time.monotonic()
        self.counts: Counter[str] = Counter()
        self.has_reported = asyncio.Event()

    async def run(self) -> None:
        while True:
            try:
                await self.source.follow(self)
            except ConfigError as error:
                self.report(None, str(error))
            except Exception:
                logger.exception("%s could not be followed; it is tried again", self.source.what)
                self.report(None, "an unexpected error")
            await asyncio.sleep(_AGAIN_S)

    def report(self, entries: Sequence[EngineEntry] | None, fault: str = "") -> None:
        """Implement `ListListener.report`. A fault that lasts is logged once."""
        fault = fault[:_SHOWN_CHARS]
        if entries is not None:
            listed = tuple(entries)
            has_changed = listed != self.entries or not self._has_list
            self.entries, self._has_list = listed, True
            self.counts["changed" if has_changed else "same"] += 1
            if has_changed:
                self._take(self.source.name, listed)
        if fault:
            self.counts["failed"] += 1
        else:
            self.read_s = time.monotonic()
        self._log(fault)
        self.has_reported.set()

    def _log(self, fault: str) -> None:
        before, self._fault = self._fault, fault
        if fault and fault != before:
            kept = f"; the last list of {len(self.entries)} engines stays in place" if self._has_list else ""
            logger.warning("%s: %s%s", self.source.what, fault, kept)
        elif before and not fault:
            logger.info("%s can be read again: %d engines", self.source.what, len(self.entries))


_LOOK_S = 0.5


class EngineFile:
    """EngineSource that follows a file.

    A change counts when it is complete (`WatchedFiles`), so that a list that is being written in place is not taken for
    a short one. A missing file, before the first list, means that there are no engines yet.

    Args:
        labels: Labels of the lines that count.
    """

    name = "file"

    def __init__(self, path: Path, labels: Mapping[str, str]) -> None:
        self._path = path
        self._labels = labels
        self._key_files: tuple[Path, ...] = ()
        self.what = f"--engine-file {path}"

    def read(self) -> Sequence[EngineEntry]:
        """Return the engines of the file.

        Raises:
            ConfigError: The file cannot be read, or is no list of engines.
        """
        try:
            with self._path.open("rb") as file:
                text = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ConfigError(error.strerror or str(error)) from None
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError(f"it has more than {MAX_FILE_BYTES} bytes")
        found = parse_file(text, self._path.parent)
        self._key_files = found.key_files
        return selected(found.entries, self._labels)

    def check(self) -> None:
        """Read the file at the start, when a wrong one is an error. It may also appear later.

        Raises:
            ConfigError: The file is no list of engines.
        """
        if not self._path.exists():
            return
        try:
            self.read()
        except ConfigError as error:
            raise ConfigError(f"{self.what}: {error}") from None

    async def follow(self, listener: ListListener) -> None:
        """Implement `EngineSource.follow`."""
        while True:
            paths = (self._path, *self._key_files)
            watched = WatchedFiles(paths)
            await self._report(listener)
            if paths != (self._path, *self._key_files):
                continue  # The list names other keys now: read it once more, with them watched.
            while not watched.are_to_be_read():  # noqa: ASYNC110 - no event tells of a change on every file system
                await asyncio.sleep(_LOOK_S)

    async def _report(self, listener: ListListener) -> None:
        try:
            entries = await asyncio.to_thread(self.read)  # YAML takes a second for a few thousand engines.
        except ConfigError as error:
            listener.report(None, str(error))
        else:
            listener.report(entries)


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
