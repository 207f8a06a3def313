"""Sends the probes of a design to a server, and times the tokens of its answers."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

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
from moestro.loadgen.client import BenchClient, Endpoint
from moestro.routing.scrape import scrape
from moestro.workload.run_records import Outcome

_LOOK_S = 0.2  # between reads of /metrics while a probe runs beside traffic
_LOOKS = 5  # after a probe, until no request is left: some servers show the end of one a moment later
_LOOK_AGAIN_S = 0.1
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

    async def find_server(self) -> ProbedServer:
        """Read what the server shows of itself."""
        self._figures = await self._read_figures()
        return ProbedServer(
            model=self._endpoint.model, max_model_len=self._endpoint.max_model_len, figures=self._figures
        )

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
        events = {request.after: asyncio.Event() for request in probe.requests}

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
        looking = asyncio.create_task(self._look()) if self._limits.max_added_load is not None else None
        began_s = time.monotonic()
        times = await asyncio.gather(*sending)
        meanwhile = await _stopped(looking)
        before, self._figures = self._figures, await self._figures_after()
        elapsed_s = self._elapsed_s()
        if self._limits.max_added_load is not None:
            await asyncio.sleep((time.monotonic() - began_s) * (1 / self._limits.max_added_load - 1))
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
        if self._figures is None:
            return None
        for _ in range(1 if self._limits.max_added_load is not None else _LOOKS):
            found = await self._read_figures()
            if found is None or not (found.num_running or found.num_waiting):
                break
            await asyncio.sleep(_LOOK_AGAIN_S)
        return found

    async def _look(self) -> list[ServerFigures]:
        found: list[ServerFigures] = []
        try:
            while True:
                await asyncio.sleep(_LOOK_S)
                if (figures := await self._read_figures()) is not None:
                    found.append(figures)
        except asyncio.CancelledError:
            return found

    async def _read_figures(self) -> ServerFigures | None:
        text = await self._client.read("/metrics")
        return None if text is None else figures_of(text)


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
