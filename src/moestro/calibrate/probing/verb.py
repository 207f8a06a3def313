"""`moestro calibrate --server`: probes a running server, writes its cost table and its description, and prints both.

The client sends the probes of a design, and times the tokens of the answers.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import uvloop
from rich.console import Console

from moestro.calibrate.probing.design import SHORT, IdleDesign, ProbeDesign
from moestro.calibrate.probing.estimate import BesideTime, DecodeTime, decode_time
from moestro.calibrate.probing.findings import ServerFindings, find
from moestro.calibrate.probing.probes import (
    ProbeAnswer,
    ProbedServer,
    ProbeLimits,
    ProbeRequest,
    Probing,
    RequestTimes,
    ServerFigures,
    ServerProbe,
    prompt_tokens,
)
from moestro.calibrate.settings import Measuring, ServerProbing
from moestro.config.run_record import RunRecord, run_record, without_user
from moestro.cost.tables import Table
from moestro.errors import ConfigError, MoestroError
from moestro.loadgen.client import BenchClient, Endpoint
from moestro.loadgen.settings import EndpointSettings
from moestro.routing.scrape import scrape
from moestro.workload.run_records import Outcome

_LOOK_S = 0.2  # between reads of /metrics while a probe runs beside traffic
_LOOKS = 5  # after a probe, until no request is left: some servers show the end of one a moment later
_LOOK_AGAIN_S = 0.1
_READ_S, _MOST_FAILED_READS = 2.0, 3  # for /metrics, and reads in a row that show nothing, after which none follows
_LEAST_TIMEOUT_S = 1.0
_GRACE = 0.2  # of the time, beyond it, for the last probe
_ALL = 1 << 62  # deliveries, more than any request waits for
_ENGINE = re.compile(rb'num_(?:requests_running|running_reqs)\{[^}\n]*?(?:engine|dp_rank)="(\d{1,4})"')


class ProbingClient:
    """The side of the experiment that has effects.

    Args:
        client: an open client.
        endpoint: the model.
        limits: bounds of the experiment.
        vocab_size, seed: of the tokens of prompts.
    """

    def __init__(
        self, client: BenchClient, endpoint: Endpoint, limits: ProbeLimits, *, vocab_size: int, seed: int
    ) -> None:
        self._client, self._endpoint, self._limits = client, endpoint, limits
        self._vocab_size, self._seed = vocab_size, seed
        self._began_s = time.monotonic()
        self._number = 0
        self._figures: ServerFigures | None = None
        self._num_failed_reads = _MOST_FAILED_READS  # in a row; a page that shows nothing at first is not read again

    async def find_server(self) -> ProbedServer:
        """Read what the server shows of itself."""
        self._figures, length = await self._read_figures(), self._endpoint.max_model_len
        # Some servers list 0 or -1 where they have no limit.
        longest = length if length is not None and length > 0 else None
        return ProbedServer(model=self._endpoint.model, max_model_len=longest, figures=self._figures)

    async def drive(self, probing: Probing, on_probe: Callable[[str, float], None]) -> None:
        """Send all probes of a design.

        Args:
            on_probe: called with the kind and the elapsed seconds after each.
        """
        self._began_s = time.monotonic()
        probe = next(probing)
        while True:
            answer = await self._send(probe)
            on_probe(probe.kind, answer.elapsed_s)
            try:
                probe = probing.send(answer)
            except StopIteration:
                return

    async def _send(self, probe: ServerProbe) -> ProbeAnswer:
        self._number += 1
        events = {after: asyncio.Event() for after in (1, *(request.after for request in probe.requests))}

        def on_delivery(count: int) -> None:
            for after, event in events.items():
                if count >= after:
                    event.set()

        async def one(number: int, request: ProbeRequest, body: bytes) -> RequestTimes:
            if request.after:
                await events[request.after].wait()
            sent_ns = time.monotonic_ns()
            outcome = await self._client.ask(
                self._endpoint.url,
                body,
                {"x-request-id": f"calibrate-{self._seed}-{self._number}-{number}"},
                timeout_s=max((1 + _GRACE) * self._limits.seconds - self._elapsed_s(), _LEAST_TIMEOUT_S),
                on_delivery=on_delivery if number == 0 else lambda _: None,
            )
            if number == 0:
                on_delivery(_ALL)  # whatever became of it, those that wait for its tokens go on
            return _times(sent_ns, outcome)

        sending = [one(number, request, self._body(request)) for number, request in enumerate(probe.requests)]
        is_beside = self._limits.max_added_load is not None
        looking = asyncio.create_task(self._look(events[1])) if is_beside else None
        began_s = time.monotonic()
        times = await asyncio.gather(*sending)
        meanwhile = await _stopped(looking)
        before, self._figures = self._figures, await self._figures_after()
        elapsed_s = self._elapsed_s()
        if self._limits.max_added_load is not None:
            pause_s = (time.monotonic() - began_s) * (1 / self._limits.max_added_load - 1)
            # Behind the last probe, there is nothing to wait for.
            await asyncio.sleep(max(min(pause_s, self._limits.seconds - elapsed_s), 0.0))
            elapsed_s = self._elapsed_s()
        return ProbeAnswer(
            requests=tuple(times), elapsed_s=elapsed_s, before=before, after=self._figures, meanwhile=tuple(meanwhile)
        )

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def _body(self, request: ProbeRequest) -> bytes:
        return msgspec.json.encode(
            {
                "model": self._endpoint.model,
                "prompt": prompt_tokens(request, self._vocab_size, self._seed),
                "max_tokens": request.max_tokens,
                "temperature": 1.0,  # greedy answers may repeat a few tokens, which visit few experts
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )

    async def _figures_after(self) -> ServerFigures | None:
        if self._num_failed_reads >= _MOST_FAILED_READS:
            return None
        for _ in range(1 if self._limits.max_added_load is not None else _LOOKS):
            found = await self._read_figures()
            if found is None or found.is_late or not (found.num_running or found.num_waiting):
                break
            await asyncio.sleep(_LOOK_AGAIN_S)
        return found

    async def _look(self, first_token: asyncio.Event) -> list[ServerFigures]:
        found: list[ServerFigures] = []
        try:
            await first_token.wait()  # then the probe runs, too, and a fast server ends it before a pause is over
            while True:
                if (figures := await self._read_figures()) is not None:
                    found.append(figures)
                await asyncio.sleep(_LOOK_S)
        except asyncio.CancelledError:
            return found

    async def _read_figures(self) -> ServerFigures | None:
        text = await self._client.read("/metrics", timeout_s=_READ_S)
        found = None if text is None else figures_of(text)
        self._num_failed_reads = self._num_failed_reads + 1 if found is None else 0
        return found


def figures_of(text: bytes) -> ServerFigures | None:
    """Read a server's figures from the text of its `/metrics`; None: it has no figure of requests."""
    load = scrape(text)
    if load.figures.num_running is None and load.num_tokens_computed is None:
        return None
    return ServerFigures(
        num_running=load.figures.num_running,
        num_waiting=load.figures.num_waiting,
        kv_usage=load.figures.kv_usage,
        num_tokens=load.num_tokens_computed,
        num_hit_tokens=load.totals.num_hit_tokens,
        num_kv_tokens=load.num_kv_tokens,
        block_size=load.block_size,
        num_engines=max(len(set(_ENGINE.findall(text))), 1),
        is_late=b"sglang:num_running_reqs" in text and b"moestro:" not in text,
    )


async def _stopped(looking: asyncio.Task[list[ServerFigures]] | None) -> Sequence[ServerFigures]:
    if looking is None:
        return ()
    looking.cancel()
    return await looking


def _times(sent_ns: int, outcome: Outcome) -> RequestTimes:
    return RequestTimes(
        sent_ns=sent_ns,
        deliveries=np.frombuffer(outcome.delivery_ns, np.int64).copy(),
        num_prompt_tokens=outcome.num_prompt_tokens,
        num_output_tokens=outcome.num_output_tokens,
        num_cached_tokens=outcome.num_cached_tokens,
        failure=outcome.failure,
        message=outcome.message,
    )


# The experiment beside other traffic: one request at a time, and no more of the time than the operator allows.
#
# What other requests do is not chosen but read: the engine's own figures say how many sequences run, and how many
# tokens they hold, while a probe is under way. So only costs are estimated, and the server has to show these figures.

_ANSWER = 24
_SIZES = (SHORT, 64, 256, 1024)
_LEAST_DURATIONS = 12
_NOT_PROBED = "not probed beside traffic, which would suffer from it: calibrate the idle server"


class BesideDesign(ProbeDesign):
    """The experiment beside traffic.

    Args:
        server: what is known of the server.
        limits: bounds of the experiment.
        seed: seed of the order of sizes.

    Attributes:
        observed: what it has observed.

    Raises:
        MoestroError: the server does not show what else runs.
    """

    def __init__(self, server: ProbedServer, limits: ProbeLimits, seed: int = 0) -> None:
        figures = server.figures
        if figures is None or figures.num_running is None or figures.kv_usage is None:
            raise MoestroError(
                "--max-added-load needs a server whose /metrics show its running requests and the use of its KV cache,"
                " and this one does not: calibrate it when it is idle, without the flag"
            )
        super().__init__(server, limits, _ANSWER, seed)
        for bounds in ("budget", "max_rows", "max_requests", "block_size", "capacity"):
            getattr(self.observed, bounds).why = _NOT_PROBED
        self._num_kv_tokens = figures.num_kv_tokens
        self._sizes = [size for size in _SIZES if size <= self._longest]

    def run(self) -> Probing:
        """Yield single requests until the time is over.

        Raises:
            MoestroError: the server refuses or fails a probe, or too few of them found room in the time.
        """
        seen = self.observed
        while not self._is_over(1):
            for size in self._rng.permutation(self._sizes).tolist():
                answer = yield from self._send("beside", self._alone(size, _ANSWER))
                self._read(answer)
                if self._is_over(1):
                    break
            seen.num_rounds += 1
        if len(seen.decodes) < _LEAST_DURATIONS:
            raise MoestroError(
                f"only {len(seen.decodes)} of {_LEAST_DURATIONS} durations could be measured in"
                f" --seconds {self._limits.seconds:g} with --max-added-load {self._limits.max_added_load:g}: give more"
                " of one of them"
            )
        self._honesty.at_end(seen.decodes, None, None)

    def _read(self, answer: ProbeAnswer) -> None:
        running = [each.num_running for each in answer.meanwhile if each.num_running]
        usage = [each.kv_usage for each in answer.meanwhile if each.kv_usage is not None]
        time = decode_time(answer)
        if time is None or not running or not usage:
            return
        # The probe is one of the running sequences in any case.
        rows = max(statistics.fmean(running), 1.0)
        own = time.context
        context = max(statistics.fmean(usage) * self._num_kv_tokens, own) if self._num_kv_tokens else own * rows
        seen, times = self.observed, answer.requests[0]
        seen.decodes.append(DecodeTime(rows=rows, context=context, ns=time.ns))
        seen.longest = max(seen.longest, times.num_prompt_tokens)
        seen.beside.append(
            BesideTime(rows=rows - 1, context=max(context - own, 0.0), new=times.num_prompt_tokens, ns=times.ttft_ns)
        )


def described_engine(found: ServerFindings, table: Path, url: str) -> str:
    """Return the table [engines] of a simulation, each number with its source.

    Args:
        table: file of the cost table, beside this file.
        url: address of the server.
    """
    lines = [
        f"# The engine at {url}, as moestro calibrate probed it. moestro sim FILE and --engines FILE read this table.",
        "[engines]",
        f"table = {msgspec.json.encode(table.name).decode()}",
        *(f"{name} = {size.value}  # {size.source}" for name, size in found.sizes.items()),
    ]
    if found.caches_prefixes is not None:
        lines.append(f"enable_prefix_caching = {str(found.caches_prefixes).lower()}  # probed")
    lines += [
        f"api_us = {found.api_us:.1f}  # time of a request outside the engine",
        f"api_token_us = {found.api_token_us:.3f}  # and for each token of its prompt",
    ]
    return "\n".join(lines) + "\n"


def with_findings(found: ServerFindings, conditions: RunRecord, url: str) -> Table:
    """Return the cost table with everything that is known of how it came about."""
    about = {
        **msgspec.to_builtins(conditions),
        "server": url,
        "estimates": msgspec.to_builtins(found.estimates),
        "errors_on_other_sizes": list(found.errors),
        "notes": list(found.notes),
    }
    return msgspec.structs.replace(found.table, about=about)


def write_text(flag: str, path: Path, text: str) -> None:
    """Write a file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class CalibratedServer:
    """Result: what was found, and the files that hold it."""

    found: ServerFindings
    table: Path
    engines: Path


def calibrate_server(settings: ServerProbing, measuring: Measuring, console: Console) -> CalibratedServer:
    """Probe the server, write `--out` and the description beside it, and print what was found.

    Raises:
        ConfigError: no server answers there, or a file cannot be written.
        MoestroError: the server is busy, refuses or fails probes, is too slow, or contradicts itself. No file is
            written.
    """
    assert settings.server is not None, "the verb checks it"
    if measuring.out.suffix == ".toml":
        raise ConfigError(
            f"--out {measuring.out} is the table, and the engine file beside it ends in .toml: give .json"
        )
    endpoint_settings = EndpointSettings(
        base_url=settings.server, model=settings.served_model, api_key=settings.api_key, timeout=settings.seconds
    )
    conditions = run_record("measured")
    with console.status("calibrating the server") as status:

        def on_probe(kind: str, elapsed_s: float) -> None:
            status.update(f"calibrating the server: {elapsed_s:.0f} of {settings.seconds:.0f} s, {kind}")

        found, endpoint = uvloop.run(_probe(endpoint_settings, settings, measuring.seed, on_probe))
    if endpoint.is_paced:
        conditions = msgspec.structs.replace(conditions, kind="paced")
    engines = measuring.out.with_suffix(".toml")
    shown_server = without_user(endpoint_settings.root)
    table = with_findings(found, conditions, shown_server)
    write_text("--out", measuring.out, msgspec.json.format(msgspec.json.encode(table), indent=1).decode() + "\n")
    write_text("--out", engines, described_engine(found, measuring.out, shown_server))
    _print(console, found)
    console.print(f"Written to {measuring.out} and {engines}.", markup=False, highlight=False, soft_wrap=True)
    return CalibratedServer(found, measuring.out, engines)


async def _probe(
    endpoint_settings: EndpointSettings, settings: ServerProbing, seed: int, on_probe: Callable[[str, float], None]
) -> tuple[ServerFindings, Endpoint]:
    limits = ProbeLimits(
        seconds=settings.seconds,
        max_concurrency=settings.max_concurrency,
        max_prompt_tokens=settings.max_prompt_tokens,
        max_added_load=settings.max_added_load,
    )
    async with BenchClient(endpoint_settings) as client:
        endpoint = await client.find_endpoint("--served-model")
        probing = ProbingClient(client, endpoint, limits, vocab_size=settings.vocab_size, seed=seed)
        server = await probing.find_server()
        design = make_design(server, limits, seed)
        await probing.drive(design.run(), on_probe)
    return find(design.observed, server), endpoint


def make_design(server: ProbedServer, limits: ProbeLimits, seed: int) -> IdleDesign | BesideDesign:
    """Choose the experiment: for an idle server, or beside traffic."""
    return IdleDesign(server, limits, seed) if limits.max_added_load is None else BesideDesign(server, limits, seed)


def _print(console: Console, found: ServerFindings) -> None:
    rows = [(each.title, each.words) for each in found.estimates]
    cached = {True: "prefixes are cached", False: "no prefix is cached", None: "not identified"}
    rows.append(("prefix cache", cached[found.caches_prefixes]))
    if found.errors:
        sizes = np.abs(found.errors)
        rows.append(
            (
                "other sizes",
                f"{len(sizes)} probes priced with a mean error of {sizes.mean():.1%}, {sizes.max():.1%} at most",
            )
        )
    for name, text in rows:
        console.print(f"{name:<32} {text}", markup=False, highlight=False, soft_wrap=True)
    for note in found.notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
