"""`moestro route`: brought up, run until a signal, and taken down in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time

import uvloop

from moestro.cluster.breaker import BreakerRules
from moestro.cluster.health import HealthRules
from moestro.cluster.retry_budget import RetryBudget, RetryRules
from moestro.cluster.router import Router
from moestro.cluster.settings import RouterSettings
from moestro.policy.routing.registry import make_policy
from moestro.serve.connections import accept, allow_open_files, bound_socket
from moestro.serve.keys import ApiKeys
from moestro.serve.route.asked import BYTES_PER_TOKEN, request_from_text
from moestro.serve.route.client import ClientLimits, Clients
from moestro.serve.route.counts import Counts
from moestro.serve.route.exchange import ExchangeRules, Shared
from moestro.serve.route.fleet import Fleet
from moestro.serve.route.heads import EngineHead
from moestro.serve.route.journal import Journal
from moestro.serve.route.proxy import Proxy, Reading, sweep_forever
from moestro.serve.route.settings import EngineUrl, RouteSettings
from moestro.serve.route.upstream import Address, Pool
from moestro.serve.route.watch import HealthWatch, MetricsWatch, Watch, WatchRules

logger = logging.getLogger(__name__)

_SWEEP_S = 0.25


def route(settings: RouteSettings) -> None:
    """Route until SIGTERM or SIGINT; a second one does not wait for requests to finish.

    Raises:
        ConfigError: the settings cannot be honoured; the text says what to do.
    """
    level = settings.front.log_level.upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    with contextlib.suppress(asyncio.CancelledError):
        uvloop.run(_Server(settings).run())


class _Server:
    """One run."""

    def __init__(self, settings: RouteSettings) -> None:
        self._settings = settings
        self._stop = asyncio.Event()
        self._is_serving = False

    async def run(self) -> None:
        main = asyncio.current_task()
        assert main is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, main)
        urls = self._settings.engines.urls
        with bound_socket(self._settings.front.host, self._settings.front.port) as listener:
            await self._serve(listener, urls)

    def _on_signal(self, main: asyncio.Task[None]) -> None:
        if self._is_serving and not self._stop.is_set():
            self._stop.set()
        else:
            main.cancel()

    async def _serve(self, listener: socket.socket, urls: tuple[EngineUrl, ...]) -> None:
        s = self._settings
        block_tokens = max(1, s.routing.text_block_bytes // BYTES_PER_TOKEN)
        router = Router(
            make_policy(s.routing.route_policy),
            RouterSettings(block_size=block_tokens, seed=s.routing.seed, index_bytes=s.routing.index_memory_bytes),
        )
        rules = HealthRules(
            stall_ns=int(s.reliability.stall_timeout * 1e9),
            slow_start_ns=int(s.reliability.slow_start * 1e9),
            breaker=BreakerRules(num_in_row=s.reliability.breaker_failures),
        )
        fleet = Fleet(router, block_tokens, rules, time.monotonic_ns)
        shared = Shared(
            fleet=fleet,
            rules=ExchangeRules(
                max_retries=s.reliability.max_retries,
                first_byte_s=s.reliability.first_byte_timeout,
                idle_s=s.reliability.idle_timeout,
                shows_route=s.front.route_headers,
            ),
            budget=RetryBudget(RetryRules(share=s.reliability.retry_share), time.monotonic_ns()),
            counts=Counts(),
            journal=Journal(),
            active={},
        )
        reading = Reading(prepare=lambda a, i, n: request_from_text(a, i, n, s.routing.text_block_bytes))
        proxy = Proxy(shared, reading, ApiKeys(s.front.api_key), frozenset(s.front.open_path), lambda: b"")
        clients = Clients(
            proxy,
            ClientLimits(
                max_body_bytes=s.front.max_body_bytes, body_s=s.front.body_timeout, write_s=s.front.write_timeout
            ),
        )
        wr = WatchRules(
            health_s=s.engines.health_interval, timeout_s=s.engines.probe_timeout, metrics_s=s.engines.metrics_interval
        )
        watch = Watch([HealthWatch(fleet, wr), MetricsWatch(fleet, wr)])
        for url in urls:
            pool = Pool(Address(url.host, url.port, None), s.engines.connect_timeout)
            watch.begin(fleet.add(url.name, url.url, pool, EngineHead(host=f"{url.host}:{url.port}".encode())))
        sweeper = asyncio.create_task(sweep_forever(shared, clients.sweep, _SWEEP_S))
        allow_open_files(2 * s.front.max_connections)
        door = await accept(clients, listener)
        self._is_serving = True
        print("serving", listener.getsockname(), flush=True)
        await self._stop.wait()
