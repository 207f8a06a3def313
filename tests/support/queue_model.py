"""Engines as small as they can be while queues, batches and prefix caches still matter: for tests of routing alone.

Time goes in ticks. In one tick an engine computes so many prompt tokens, first come first served, and each of its
decoding requests gets on by a step's share; steps get longer with the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from moestro.core.hashing import split_hashes
from moestro.core.request import Request
from moestro.routing.router import Router

TICK_NS = 10_000_000
STEP_NS, STEP_NS_PER_REQUEST = 10_000_000, 500_000
PREFILL_TOKENS_PER_TICK = 100


@dataclass
class _Job:
    request: Request
    num_left: float
    num_output_tokens: int
    num_decoded: float = 0.0


@dataclass
class _Engine:
    cached: set[bytes] = field(default_factory=set)
    prefilling: list[_Job] = field(default_factory=list)
    decoding: list[_Job] = field(default_factory=list)


class QueueModel:
    """A router and its engines.

    Attributes:
        num_hit, num_prompt: prompt tokens found in a cache, and in all.
        load: float64[n], requests in flight, summed over ticks.
    """

    def __init__(self, router: Router, block_size: int, speeds: list[float] | None = None) -> None:
        self.router, self.block_size = router, block_size
        self.engines = [_Engine() for _ in range(router.num_engines)]
        self.speeds = speeds or [1.0] * router.num_engines
        self.now_ns = self.num_hit = self.num_prompt = 0
        self.load = np.zeros(router.num_engines)
        self.ttft_ns: list[int] = []

    def submit(self, request: Request, num_output_tokens: int) -> int:
        engine = self.router.submit(request, self.now_ns).engine
        blocks = split_hashes(request.block_hashes)
        held = [each in self.engines[engine].cached for each in blocks]
        num_hit = min([*held, False].index(False) * self.block_size, request.num_prompt_tokens - 1)
        self.num_hit, self.num_prompt = self.num_hit + num_hit, self.num_prompt + request.num_prompt_tokens
        job = _Job(request, request.num_prompt_tokens - num_hit, num_output_tokens)
        self.engines[engine].prefilling.append(job)
        return engine

    def tick(self) -> None:
        self.now_ns += TICK_NS
        for number, engine in enumerate(self.engines):
            self._prefill(number, engine)
            steps = self.speeds[number] * TICK_NS / (STEP_NS + STEP_NS_PER_REQUEST * len(engine.decoding))
            for job in list(engine.decoding):
                job.num_decoded += steps
                if job.num_decoded >= job.num_output_tokens:
                    engine.decoding.remove(job)
                    self.router.ended(job.request.request_id, self.now_ns, job.num_output_tokens)
        self.load += self.router.table.num_in_flight

    def _prefill(self, number: int, engine: _Engine) -> None:
        budget = PREFILL_TOKENS_PER_TICK * self.speeds[number]
        while engine.prefilling and budget > 0:
            job = engine.prefilling[0]
            done = min(budget, job.num_left)
            budget, job.num_left = budget - done, job.num_left - done
            if job.num_left <= 0:
                engine.prefilling.pop(0)
                engine.decoding.append(job)
                self.ttft_ns.append(self.now_ns - job.request.arrival_ns)
                engine.cached.update(split_hashes(job.request.block_hashes))
                self.router.kv_stored(number, job.request.block_hashes, self.now_ns)
                self.router.first_token(job.request.request_id, self.now_ns)
