"""What all attacks share: the servers under attack, the honest clients beside them, and the figures.

An attack is a script in this folder. Its docstring says what the stranger does and what must hold. It calls `run`,
which starts nothing by itself: the attack starts the servers that it needs with `serving` and `routing`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[2]))
from shared.results import make_parser, save
from shared.server import MOESTRO, Server, free_port, started

from moestro.config.run_record import run_record

ANSWER_S = 60.0
STRANGER = "127.0.0.2"  # Servers identify clients without a key by their addresses.
Attack = Callable[["Place"], Awaitable[dict[str, object]]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an attack happens.

    Attributes:
        source: `src` folder of the checkout whose `moestro` is attacked.
        directory: private directory of this run; logs of servers are in it.
        seconds: duration of an attack that goes on until it is stopped.
        seed: seed of what an attack draws.
        only: kinds of the attack to run; () runs all.
    """

    source: Path
    directory: Path
    seconds: float = 20.0
    seed: int = 0
    only: tuple[str, ...] = ()

    def serving(
        self, *flags: str, name: str = "serve", **environment: str
    ) -> contextlib.AbstractContextManager[Server]:
        """Start `moestro serve` on a free port; its log is NAME.log."""
        return self._started("serve", flags, name, environment)

    def routing(self, *engines: Server, flags: tuple[str, ...] = (), name: str = "route", **environment: str):
        """Start `moestro route` before `engines` on free ports; its log is NAME.log."""
        urls = [part for engine in engines for part in ("--engine", engine.url)]
        admin = () if "--admin-port" in flags else ("--admin-port", str(free_port()))
        return self._started("route", (*urls, *admin, *flags), name, environment)

    def log(self, name: str) -> str:
        """Return what the server called `name` has logged."""
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def _started(self, verb: str, flags: tuple[str, ...], name: str, environment: dict[str, str]):
        port = free_port()
        own = str(self.directory)
        there = {"PYTHONPATH": str(self.source), "TMPDIR": own, "XDG_STATE_HOME": own, "OMP_NUM_THREADS": "1"}
        there |= environment
        log = self.directory / f"{name}.log"
        return started([MOESTRO, verb, "--port", str(port), *flags], port, log, **there)


@contextlib.asynccontextmanager
async def sending(send: Callable[[aiohttp.ClientSession, int], Awaitable[None]], num_clients: int, **options: Any):
    """Run `send(session, number)` for each of several clients while the block runs; `options` are the session's."""
    async with aiohttp.ClientSession(**options) as session:
        tasks = [asyncio.create_task(send(session, number)) for number in range(num_clients)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def from_stranger() -> aiohttp.TCPConnector:
    """Return a connector whose connections have the stranger's address, for the options of `sending`."""
    return aiohttp.TCPConnector(limit=0, local_addr=(STRANGER, 0))


@dataclass(slots=True)
class Neighbours:
    """Honest clients: each sends one small request after the other, and counts how they end and how long they take.

    Attributes:
        url: address of the server.
        num_clients: clients at once.
        pause_s: pause of each client between two requests.
        path: path of the request.
        body: body of the request; None sends a GET.
        headers: headers of the request.
        ends: number of requests by status, or by the kind of failure.
        seconds: duration of each request that was answered with 200.
    """

    url: str
    num_clients: int = 2
    pause_s: float = 0.05
    path: str = "/v1/completions"
    body: dict[str, object] | None = field(default_factory=lambda: {"prompt": "import os\n", "max_tokens": 4})
    headers: dict[str, str] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def busy(self):
        """Send requests while the block runs."""
        async with sending(self._forever, self.num_clients, timeout=aiohttp.ClientTimeout(total=ANSWER_S)):
            yield self

    async def for_(self, seconds: float) -> Neighbours:
        """Send requests for `seconds`."""
        async with self.busy():
            await asyncio.sleep(seconds)
        return self

    def figures(self) -> dict[str, object]:
        """Return the ends by kind, and the median and longest duration in seconds."""
        ordered = sorted(self.seconds)
        found: dict[str, object] = {"ends": dict(self.ends)}
        if ordered:
            found |= {"p50_s": round(statistics.median(ordered), 4), "max_s": round(ordered[-1], 4)}
        return found

    async def _forever(self, session: aiohttp.ClientSession, _: int) -> None:
        method = "GET" if self.body is None else "POST"
        while True:
            began = time.monotonic()
            try:
                async with session.request(method, self.url + self.path, json=self.body, headers=self.headers) as got:
                    await got.read()
                    end = str(got.status)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                end = type(error).__name__
            self.ends[end] += 1
            if end == "200":
                self.seconds.append(time.monotonic() - began)
            await asyncio.sleep(self.pause_s)


def run(attack: Attack, about: str | None) -> None:
    """Run `attack` on this checkout, or on that of --source, and print and store its figures."""
    parser = make_parser(about)
    here = Path(__file__).parents[3] / "src"
    parser.add_argument("--source", type=Path, default=here, help="src folder of another checkout, to compare with")
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of attacks that do not end by themselves")
    parser.add_argument("--seed", type=int, default=0, help="seed of what the attack draws")
    parser.add_argument(
        "--only", nargs="*", default=(), metavar="KIND", help="kinds of the attack, where it has several"
    )
    options = parser.parse_args()
    conditions = run_record("measured")
    with _directory() as directory:
        place = Place(options.source.resolve(), directory, options.seconds, options.seed, tuple(options.only))
        figures = asyncio.run(attack(place))
        num_tracebacks = {
            log.stem: log.read_text(errors="replace").count("Traceback") for log in directory.glob("*.log")
        }
        figures = {**figures, "num_tracebacks": num_tracebacks}
        print(json.dumps(figures, indent=1))
    save(options.json, conditions, figures)


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="moestro-attack-") as name:
        yield Path(name)


def resident_bytes(pid: int) -> int:
    """Return the memory that a process holds."""
    with Path(f"/proc/{pid}/statm").open() as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
