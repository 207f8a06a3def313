"""An engine whose constants a test knows: a plain scheduler with linear prices, on virtual time or behind a socket.

As a script it serves on a free port, and prints its address: `known_engine.py '{"max_rows": 8}'`.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
import os
import random
import sys
from collections import OrderedDict
from dataclasses import dataclass, field, fields

import numpy as np
from aiohttp import web

from moestro.calibrate.probing.probes import ProbeAnswer, RequestTimes, ServerFigures, prompt_tokens


@dataclass(kw_only=True)
class KnownConstants:
    """Prices in ns, and sizes; `faults` name what the server does wrong."""

    step_ns: float = 6e6
    row_ns: float = 150e3
    context_ns: float = 300.0
    prompt_ns: float = 20e3
    api_ns: float = 3e6
    api_token_ns: float = 0.0
    budget: int = 512
    max_rows: int = 24
    block_size: int = 16
    num_blocks: int = 1200
    max_requests: int = 10_000
    caches: bool = True
    prefills_first: bool = False  # as SGLang: chunks of prompts have steps of their own, before all decodes
    noise: float = 0.0
    faults: list[str] = field(default_factory=list)
    phase_s: float = 0.0  # on virtual time: every second phase has other work, and its steps take three times as long

    def price_ns(self, rows: list[tuple[int, int]]) -> float:
        """Of a step of (start, tokens) for each sequence."""
        ns = self.step_ns
        for start, num_tokens in rows:
            if num_tokens == 1:
                ns += self.row_ns + self.context_ns * (start + 1)
            else:
                ns += self.prompt_ns * num_tokens + self.context_ns * start
        return ns


class KnownSequence:
    def __init__(self, name: object, tokens: list[int], max_tokens: int) -> None:
        self.name, self.tokens, self.max_tokens = name, tokens, max_tokens
        self.num_computed = self.num_generated = self.num_cached = 0
        self.blocks: list[object] = []

    @property
    def gap(self) -> int:
        return len(self.tokens) + self.num_generated - self.num_computed


class KnownEngine:
    """First come, first served, with chunked prefill and a prefix cache that drops what was used longest ago."""

    def __init__(self, constants: KnownConstants) -> None:
        self.constants = constants
        self.waiting: list[KnownSequence] = []
        self.running: list[KnownSequence] = []
        self.free: OrderedDict[object, None] = OrderedDict((("blank", i), None) for i in range(constants.num_blocks))
        self.num_prompt_tokens = self.num_generated_tokens = self.num_hit_tokens = 0
        self.draw = random.Random(0)
        self._num_blank = constants.num_blocks

    def add(self, sequence: KnownSequence) -> None:
        self.waiting.append(sequence)

    def plan(self) -> tuple[float, list[tuple[KnownSequence, int]]]:
        """Price and units of the next step; no units: the engine is idle."""
        constants, left = self.constants, self.constants.budget
        units = []
        for sequence in self.running:
            units.append((sequence, min(sequence.gap, left)))
            left -= units[-1][1]
        while self.waiting and left and len(self.running) < constants.max_rows and self._admit(self.waiting[0]):
            sequence = self.waiting.pop(0)
            self.running.append(sequence)
            units.append((sequence, min(sequence.gap, left)))
            left -= units[-1][1]
        units = [unit for unit in units if unit[1]]
        if constants.prefills_first and any(num > 1 for _, num in units):
            units = [unit for unit in units if unit[1] > 1]
        price = constants.price_ns([(sequence.num_computed, num) for sequence, num in units])
        return price * (1 + constants.noise * self.draw.gauss(0, 1)), units

    def finish(self, units: list[tuple[KnownSequence, int]]) -> list[tuple[KnownSequence, bool]]:
        """End a step: sequences with a new token, and whether it is the last."""
        found = []
        for sequence, num in units:
            sequence.num_computed += num
            if sequence.gap:
                continue
            sequence.num_generated += 1
            self.num_generated_tokens += 1
            if sequence.num_generated == 1:
                self.num_prompt_tokens += len(sequence.tokens)
            is_last = sequence.num_generated == sequence.max_tokens
            found.append((sequence, is_last))
            if is_last:
                self.drop(sequence)
        return found

    def drop(self, sequence: KnownSequence) -> None:
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
            size = self.constants.block_size
            full = min(sequence.num_computed, len(sequence.tokens)) // size
            for number, block in reversed(list(enumerate(sequence.blocks))):
                name = self._name(sequence, number) if number < full and self.constants.caches else block
                if name in self.free or (number >= full or not self.constants.caches):
                    self._num_blank += 1
                    self.free[("blank", self._num_blank)] = None
                    self.free.move_to_end(("blank", self._num_blank), last=False)
                else:
                    self.free[name] = None
            sequence.blocks = []

    def _name(self, sequence: KnownSequence, number: int) -> object:
        return hash(tuple(sequence.tokens[: (number + 1) * self.constants.block_size]))

    def _admit(self, sequence: KnownSequence) -> bool:
        size = self.constants.block_size
        needed = -(-(len(sequence.tokens) + sequence.max_tokens) // size)
        hits: list[object] = []
        if self.constants.caches:
            while len(hits) < (len(sequence.tokens) - 1) // size and self._name(sequence, len(hits)) in self.free:
                hits.append(self._name(sequence, len(hits)))
        if needed > len(self.free):
            return False
        for name in hits:
            del self.free[name]
        sequence.blocks = hits + [self.free.popitem(last=False)[0] for _ in range(needed - len(hits))]
        sequence.num_computed = sequence.num_cached = len(hits) * size
        self.num_hit_tokens += sequence.num_cached
        return True


@dataclass
class VirtualServer:
    """Answers probes on virtual time, as `SendProbe`."""

    engine: KnownEngine
    now_ns: float = 1e9
    shows_figures: bool = True

    def __call__(self, probe):  # noqa: C901 (an event loop)
        constants, engine = self.engine.constants, self.engine
        before = self.figures()
        arrivals: list[tuple[float, int]] = []
        sent = [0.0] * len(probe.requests)
        times: list[list[float]] = [[] for _ in probe.requests]
        sequences: dict[int, KnownSequence] = {}

        def send(number: int, at_ns: float) -> None:
            sent[number] = at_ns
            tokens = probe.requests[number].num_tokens
            heapq.heappush(arrivals, (at_ns + constants.api_ns + constants.api_token_ns * tokens, number))

        refused = set(range(constants.max_requests, len(probe.requests)))
        for number, request in enumerate(probe.requests):
            if not request.after and number not in refused:
                send(number, self.now_ns)
        while arrivals or engine.running or engine.waiting:
            while arrivals and arrivals[0][0] <= self.now_ns:
                number = heapq.heappop(arrivals)[1]
                request = probe.requests[number]
                sequence = KnownSequence(number, prompt_tokens(request, 4096), request.max_tokens)
                sequences[number] = sequence
                engine.add(sequence)
            price, units = engine.plan()
            if not units:
                self.now_ns = max(self.now_ns, arrivals[0][0])
                continue
            if constants.phase_s and int(self.now_ns / 1e9 / constants.phase_s) % 2:
                price *= 3
            self.now_ns += price
            for sequence, _ in engine.finish(units):
                times[sequence.name].append(self.now_ns)
                if sequence.name == 0:
                    for number, request in enumerate(probe.requests):
                        if request.after and request.after == len(times[0]) and number not in refused:
                            send(number, self.now_ns)
        self.now_ns += 1e6
        answers = tuple(
            RequestTimes(sent_ns=0, deliveries=np.zeros(0, np.int64), failure="http_503")
            if number in refused
            else RequestTimes(
                sent_ns=round(sent[number]),
                deliveries=np.array(times[number]).round().astype(np.int64),
                num_prompt_tokens=request.num_tokens,
                num_output_tokens=request.max_tokens,
                num_cached_tokens=0 if "no usage details" in constants.faults else sequences[number].num_cached,
            )
            for number, request in enumerate(probe.requests)
        )
        after = self.figures()
        return ProbeAnswer(requests=answers, elapsed_s=self.now_ns / 1e9 - 1, before=before, after=after)

    def figures(self) -> ServerFigures | None:
        engine = self.engine
        if not self.shows_figures:
            return None
        return ServerFigures(
            num_running=len(engine.running),
            num_waiting=len(engine.waiting),
            num_tokens=engine.num_prompt_tokens + engine.num_generated_tokens,
            num_hit_tokens=engine.num_hit_tokens,
        )


def run_design(design, send):
    """Run an experiment to its end."""
    steps = design.run()
    probe = next(steps)
    while True:
        try:
            probe = steps.send(send(probe))
        except StopIteration:
            return design.observed


# --- behind a socket ----------------------------------------------------------------------------------------------


class SocketServer:
    """The engine as an OpenAI-compatible server, whose steps begin when the one before should have ended."""

    def __init__(self, constants: KnownConstants) -> None:
        self.constants, self.engine = constants, KnownEngine(constants)
        self.queues: dict[object, asyncio.Queue] = {}
        self.wake = asyncio.Event()
        self.num_posts = 0

    async def work(self) -> None:
        loop = asyncio.get_running_loop()
        ready = 0.0
        while True:
            price, units = self.engine.plan()
            if not units:
                self.wake.clear()
                await self.wake.wait()
                ready = loop.time()
                continue
            ready = max(ready + price / 1e9, loop.time() - 0.02)
            await asyncio.sleep(max(ready - loop.time(), 0))
            for sequence, is_last in self.engine.finish(units):
                self.queues[sequence.name].put_nowait(is_last)

    async def complete(self, http):
        constants, faults = self.constants, self.constants.faults
        arrived = asyncio.get_running_loop().time()
        body = json.loads(await http.read())
        self.num_posts += 1
        if "rate limit" in faults and self.num_posts > 12:
            return web.json_response({"error": {"message": "12 requests a minute"}}, status=429)
        if len(self.queues) >= constants.max_requests:
            return web.json_response({"error": {"message": "the queue is full"}}, status=503)
        wanted = body["max_tokens"] if "ends early" not in faults else max(body["max_tokens"] // 2, 1)
        sequence = KnownSequence(object(), body["prompt"], wanted)
        queue = self.queues[sequence.name] = asyncio.Queue()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            due = arrived + (constants.api_ns + constants.api_token_ns * len(sequence.tokens)) / 1e9
            await asyncio.sleep(max(due - asyncio.get_running_loop().time(), 0))
            self.engine.add(sequence)
            self.wake.set()
            await response.prepare(http)
            held = b""
            is_last = False
            while not is_last:
                is_last = await queue.get()
                choice = {"index": 0, "text": "x", "finish_reason": "length" if is_last else None}
                event = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
                if "holds back" in faults:
                    held += event
                else:
                    await response.write(event)
            if "holds back" in faults:  # one event for the whole answer
                await response.write(held[held.rindex(b"data") :])
            usage = {"prompt_tokens": len(sequence.tokens), "completion_tokens": wanted}
            if "no usage details" not in faults:
                usage["prompt_tokens_details"] = {"cached_tokens": sequence.num_cached}
            await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
            return response
        finally:
            self.engine.drop(sequence)
            del self.queues[sequence.name]

    async def models(self, http):
        return web.json_response({"data": [{"id": "known", "max_model_len": 4096}]})

    async def metrics(self, http):
        engine, faults = self.engine, self.constants.faults
        if "no metrics" in faults:
            return web.Response(status=404)
        scale = 0.3 if "counts too little" in faults else 1.0
        blocks = self.constants.num_blocks // (10 if "smaller cache" in faults else 1)
        size = self.constants.block_size
        lines = {
            'vllm:num_requests_running{engine="0"}': len(engine.running) + ("busy" in faults) * 3,
            'vllm:num_requests_waiting{engine="0"}': len(engine.waiting),
            'vllm:prompt_tokens_total{engine="0"}': engine.num_prompt_tokens * scale,
            'vllm:generation_tokens_total{engine="0"}': engine.num_generated_tokens * scale,
            'vllm:prefix_cache_hits_total{engine="0"}': engine.num_hit_tokens,
            'vllm:prefix_cache_queries_total{engine="0"}': engine.num_prompt_tokens,
            f'vllm:cache_config_info{{block_size="{size}",num_gpu_blocks="{blocks}",engine="0"}}': 1,
            'vllm:kv_cache_usage_perc{engine="0"}': sum(len(each.blocks) for each in engine.running)
            / self.constants.num_blocks,
        }
        return web.Response(text="".join(f"{name} {value}\n" for name, value in lines.items()))


async def serve(constants: KnownConstants) -> None:
    server = SocketServer(constants)
    app = web.Application(client_max_size=1 << 28)
    app.add_routes([web.get("/v1/models", server.models), web.get("/metrics", server.metrics)])
    app.add_routes([web.post("/v1/completions", server.complete)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"curl http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await server.work()


def go_first(pid: int) -> None:
    """Schedule a process before others, where its user may: its sleeps are what a test measures. 0 is this one."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(pid, os.SCHED_RR, os.sched_param(1))


if __name__ == "__main__":
    go_first(0)
    given = json.loads(sys.argv[1])
    assert given.keys() <= {each.name for each in fields(KnownConstants)}
    asyncio.run(serve(KnownConstants(**given)))
