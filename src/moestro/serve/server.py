"""`moestro serve`: engines and front door brought up, run until a signal, and taken down in order."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import uvloop
from aiohttp import web
from rich.console import Console

from moestro import __version__
from moestro.config import ServeSettings
from moestro.errors import ConfigError, EngineDiedError, NoEngineError
from moestro.serve.banner import Started, print_banner
from moestro.serve.engines import Engines
from moestro.serve.frontdoor import FrontDoor
from moestro.serve.launch_spec import LaunchSpec
from moestro.serve.messages import ModelInfo, Shutdown
from moestro.serve.prepare import ServedModel
from moestro.serve.rank_socket import RankSocket
from moestro.serve.ranks import WORKER, Ranks, now_ns, private_address
from moestro.serve.refusals import DrainingError
from moestro.serve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_FAREWELL_S = 1.0  # for answers that are complete to reach their clients


def serve(settings: ServeSettings, command: Sequence[str] = WORKER) -> None:
    """Serve until SIGTERM or SIGINT; a second one does not wait for requests to finish.

    Args:
        command: what a rank process runs.

    Raises:
        ConfigError: the settings cannot be honoured; the text says what to do.
        EngineDiedError: an engine failed before it was ready; the text is its cause.
    """
    level = settings.server.log_level.upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    with contextlib.suppress(asyncio.CancelledError):
        uvloop.run(_Server(settings, command).run())


class _Server:
    """One run of the server."""

    def __init__(self, settings: ServeSettings, command: Sequence[str]) -> None:
        self._settings = settings
        self._command = command
        self._started = time.monotonic()
        self._stop = asyncio.Event()
        self._is_serving = False

    async def run(self) -> None:
        main = asyncio.current_task()
        assert main is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, main)
        with _bound_socket(self._settings.server.host, self._settings.server.port) as listener:
            async with self._engines() as engines:
                model, infos = await self._load(engines)
                await self._serve(FrontDoor(engines, model), listener, engines, infos)

    def _on_signal(self, main: asyncio.Task[None]) -> None:
        if self._is_serving and not self._stop.is_set():
            self._stop.set()
        else:
            main.cancel()

    @contextlib.asynccontextmanager
    async def _engines(self) -> AsyncIterator[Engines]:
        """Engines whose processes are started; none of them outlives the block."""
        count = self._settings.server.engines
        with private_address() as address, contextlib.closing(RankSocket(address, count)) as wire:
            engines = Engines(count, self._settings.server.route_policy, wire.send)
            wire.listen(engines.on_message)
            ranks = Ranks(engines.on_exit, self._command)
            try:
                await ranks.start([self._spec(rank, address) for rank in range(count)])
                yield engines
            except BaseException:
                ranks.kill()
                raise
            finally:
                await ranks.stop(lambda rank: _dismiss(wire, rank))

    def _spec(self, rank: int, address: str) -> LaunchSpec:
        return LaunchSpec(
            rank=rank,
            address=address,
            launched_ns=now_ns(),
            log_level=self._settings.server.log_level,
            model=self._settings.model,
            limits=self._settings.limits,
        )

    async def _load(self, engines: Engines) -> tuple[ServedModel, list[ModelInfo]]:
        """Read the tokenizer while the engines load."""
        server = self._settings.server
        tokenizer = await asyncio.to_thread(Tokenizer, server.tokenizer or Path(self._settings.model.model))
        try:
            async with asyncio.timeout(server.startup_timeout):
                infos = await engines.all_ready()
        except TimeoutError:
            raise EngineDiedError(
                f"the engines were not ready within {server.startup_timeout:g} s: raise --startup-timeout"
            ) from None
        model = ServedModel(
            names=server.served_model_name,
            root=self._settings.model.model,
            created=int(time.time()),
            fingerprint=_fingerprint(self._settings, infos[0]),
            info=infos[0],
            tokenizer=tokenizer,
        )
        return model, infos

    async def _serve(
        self, front: FrontDoor, listener: socket.socket, engines: Engines, infos: Sequence[ModelInfo]
    ) -> None:
        runner = web.AppRunner(
            front.app(self._settings.server.api_key),
            handler_cancellation=True,  # a client that leaves frees its sequence
            access_log=None,
            shutdown_timeout=_FAREWELL_S,
        )
        await runner.setup()
        try:
            site = web.SockSite(runner, listener)
            await site.start()
            self._is_serving = True
            self._greet(listener, engines, infos)
            await self._stop.wait()
            await site.stop()
            patience_s = self._settings.server.shutdown_timeout
            if front.num_answering:
                logger.info("stopping: %d requests have %g s to finish", front.num_answering, patience_s)
            await front.drain(patience_s)
            engines.fail_all(DrainingError())  # the rest hear why
        finally:
            await runner.cleanup()
            front.close()

    def _greet(self, listener: socket.socket, engines: Engines, infos: Sequence[ModelInfo]) -> None:
        server = self._settings.server
        host, port = listener.getsockname()[:2]
        if not server.api_key and host not in ("127.0.0.1", "::1"):
            logger.warning("listening on %s without --api-key: whoever reaches this machine can use it", host)
        started = Started(
            infos=infos,
            phases=engines.phases[0],
            names=server.served_model_name,
            url=f"http://{f'[{host}]' if ':' in host else host}:{port}",
            needs_key=bool(server.api_key),
            seconds=time.monotonic() - self._started,
        )
        print_banner(Console(stderr=True), started)


def _dismiss(wire: RankSocket, rank: int) -> None:
    with contextlib.suppress(NoEngineError):
        wire.send(rank, Shutdown())


def _bound_socket(host: str, port: int) -> socket.socket:
    """Bound before anything is loaded, so that a taken port is known at once; it listens once there is an answer."""
    listener = None
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        text = f"cannot listen on {host}:{port} ({error.strerror}): give another --host or --port"
        raise ConfigError(text) from error
    return listener


def _fingerprint(settings: ServeSettings, info: ModelInfo) -> str:
    """Changes with whatever may change an answer."""
    parts = (__version__, str(settings.model), info.dtype, info.device)
    return "fp_" + hashlib.blake2b("\0".join(parts).encode(), digest_size=5).hexdigest()
