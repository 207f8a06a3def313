"""How much host memory for KV pays for a log: its requests on replicas of one GPU, with larger and larger tiers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np

from moestro.core.setting_checks import fields_of
from moestro.cost.gpus import GIB
from moestro.cost.roofline import VLLM_HOST, Roofline, RooflineSettings
from moestro.engine.settings import SchedulerLimits, SchedulerSettings
from moestro.errors import ConfigError
from moestro.planner.divisions import GpuDivision
from moestro.planner.memory import memory_of
from moestro.planner.question import PlanQuestion
from moestro.sim.figures.results import Results
from moestro.sim.load.arrivals import AtTimes
from moestro.sim.prices import OneRank
from moestro.sim.scenario import Scenario, run
from moestro.sim.settings import PolicySettings, SimEngineSettings
from moestro.workload.generated.draws import at_rate, poisson
from moestro.workload.requests import RequestForm, RequestMaker
from moestro.workload.rows import Int64s, Rows
from moestro.workload.traces.reading import read_trace

_MOST_REQUESTS = 1000  # of the log, its first ones
_LEAD_IN = 0.25  # share of them, in no figure: they find empty caches
_RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # host memory over KV memory
_BLOCK_SIZE = 64  # tokens of a simulated block, if that of the log is a multiple
_WORTH = 0.05  # of the mean TTFT: more memory that gains less does not pay


class HostMemorySize(msgspec.Struct, frozen=True, kw_only=True):
    """One size of host memory.

    Attributes:
        gib: host memory of each engine, GiB.
        kv_ratio: the same over its KV memory.
        ttft_ms, ttft_p99_ms: time from a request to its first token, mean and 99th percentile.
        device_hits, host_hits: shares of the prompt tokens that come from the GPU's cache and from host memory.
    """

    gib: float
    kv_ratio: float
    ttft_ms: float
    ttft_p99_ms: float
    device_hits: float
    host_hits: float


class HostMemoryAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How much host memory pays.

    Attributes:
        num_engines: replicas of one GPU that serve the log.
        num_requests: requests of the log that were simulated.
        kv_gib: KV memory of each engine, GiB.
        sizes: from none upwards. They end at the limit, where more memory changes no hit, or where the time is over.
        best: the least size whose mean TTFT no larger one shortens by more than a twentieth.
        is_cut: whether the time was over before the limit.
    """

    num_engines: int
    num_requests: int
    kv_gib: float
    sizes: list[HostMemorySize]
    best: HostMemorySize
    is_cut: bool

    def sentences(self) -> list[str]:
        """Return the answer in sentences."""
        none, best = self.sizes[0], self.best
        where = (
            f"{self.num_requests:,} requests on {self.num_engines} replicas of one GPU with {self.kv_gib:.3g} GiB of KV"
        )
        tried = f"up to {self.sizes[-1].gib:.3g} GiB were tried"
        if best.gib:
            found = (
                f"Host memory of {best.gib:.3g} GiB for each engine pays (--kv-offloading-size {best.gib:.3g}): it"
                f" takes {1 - best.ttft_ms / none.ttft_ms:.0%} off the mean TTFT, from {none.ttft_ms:,.0f} to"
                f" {best.ttft_ms:,.0f} ms, P99 from {none.ttft_p99_ms:,.0f} to {best.ttft_p99_ms:,.0f} ms; hits are"
                f" {best.device_hits:.0%} on the GPU and {best.host_hits:.0%} in host memory ({where}; {tried})"
            )
        else:
            found = (
                f"No host memory pays: none takes a twentieth off the mean TTFT of {none.ttft_ms:,.0f} ms, at"
                f" {none.device_hits:.0%} hits on the GPU ({where}; {tried})"
            )
        return [found, "The time did not suffice for more host memory: raise --time"] if self.is_cut else [found]


def host_memory_that_pays(question: PlanQuestion, seconds_left: Callable[[], float]) -> HostMemoryAnswer | None:
    """Simulate the log with growing host memory. None means that --max-kv-offloading-size does not ask for it.

    Raises:
        ConfigError: the log says neither what its prompts share nor when they come, or one GPU cannot serve it.
    """
    most_gib = question.settings.hardware.max_kv_offloading_size
    if most_gib is None:
        return None
    scenario = _scenario(question)
    bounds = scenario.bounds
    kv_gib = bounds.num_blocks * bounds.block_bytes / GIB
    sizes: list[HostMemorySize] = []
    is_cut = False
    for gib in (0.0, *(ratio * kv_gib for ratio in _RATIOS if ratio * kv_gib < most_gib), most_gib):
        is_cut = bool(sizes) and seconds_left() <= 0
        if is_cut:
            break
        num_blocks = int(gib * GIB) // bounds.block_bytes
        found = run(replace(scenario, bounds=replace(bounds, num_host_blocks=num_blocks)), PolicySettings())
        sizes.append(_figures(found, gib, kv_gib))
        if len(sizes) > 1 and 0 < sizes[-1].host_hits == sizes[-2].host_hits:
            break  # the smaller tier was not full
    least = min(each.ttft_ms for each in sizes)
    return HostMemoryAnswer(
        num_engines=scenario.engines.count,
        num_requests=len(scenario.workload),
        kv_gib=kv_gib,
        sizes=sizes,
        best=next(each for each in sizes if each.ttft_ms * (1 - _WORTH) <= least),
        is_cut=is_cut,
    )


def _figures(results: Results, gib: float, kv_gib: float) -> HostMemorySize:
    rows = np.argsort(results.arrival_ns, kind="stable")[int(_LEAD_IN * len(results)) :]
    rows = rows[results.is_answered[rows]]
    ttft_ms = (results.first_token_ns - results.arrival_ns)[rows] / 1e6
    num_prompt, num_host = (int(each[rows].sum()) for each in (results.num_prompt_tokens, results.num_host_tokens))
    return HostMemorySize(
        gib=gib,
        kv_ratio=gib / kv_gib,
        ttft_ms=float(ttft_ms.mean()),
        ttft_p99_ms=float(np.percentile(ttft_ms, 99)),
        device_hits=(int(results.num_hit_tokens[rows].sum()) - num_host) / num_prompt,
        host_hits=num_host / num_prompt,
    )


def _scenario(question: PlanQuestion) -> Scenario:
    """Return the log on as many replicas as there are GPUs, without host memory."""
    hardware, search = question.settings.hardware, question.settings.search
    use = memory_of(question, GpuDivision("fused", hardware.num_gpus, 1))
    if use.why_not is not None:
        raise ConfigError(
            f"--max-kv-offloading-size asks for replicas of one GPU, and {question.network.name} does not fit one"
            f" {question.gpu.name}: {use.why_not}. Drop it, or give a GPU with more memory"
        )
    rows, times = _log(question)
    # Larger blocks than a server's change few hits, and are simulated several times as fast.
    block_size = max(search.block_size, math.gcd(rows.block_size or _BLOCK_SIZE, _BLOCK_SIZE))
    num_blocks = use.kv_tokens // block_size
    engines = SimEngineSettings(
        count=hardware.num_gpus,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_batched_tokens=search.max_num_batched_tokens,
    )
    bounds = SchedulerSettings(
        num_blocks=num_blocks,
        block_bytes=question.network.kv_bytes_per_token * block_size,
        block_size=block_size,
        max_model_len=num_blocks * block_size,
        **fields_of(engines, SchedulerLimits),
    )
    cost = Roofline(RooflineSettings(network=question.network, gpu=question.gpu, host=VLLM_HOST))
    return Scenario(
        workload=RequestMaker(rows, RequestForm(block_size=block_size)),
        arrivals=AtTimes(times),
        engines=engines,
        bounds=bounds,
        prices=OneRank(cost),
        source="the log",
        is_generated=False,
        seed=search.seed,
    )


def _log(question: PlanQuestion) -> tuple[Rows, Int64s]:
    """Return the first requests of --dataset-path, and when they arrive."""
    traffic = question.settings.traffic
    if traffic.dataset_path is None:
        raise ConfigError("--max-kv-offloading-size is answered for a log: give --dataset-path")
    rows = read_trace(traffic.dataset_path, _MOST_REQUESTS)
    if rows.hash_ids is None and rows.stream is None:
        raise ConfigError(
            f"--dataset-path {traffic.dataset_path} does not say what prompts share, so that nothing is ever found in"
            " host memory: give a log with hash_ids or conversations, or drop --max-kv-offloading-size"
        )
    answered = np.flatnonzero((rows.num_output_tokens >= 1) & (rows.num_prompt_tokens >= 1))
    rows = rows.select(answered)
    if rows.timestamp_ns is not None:
        times = rows.timestamp_ns - rows.timestamp_ns[0]
        return rows, times if traffic.request_rate is None else at_rate(times, traffic.request_rate)
    if traffic.request_rate is None:
        raise ConfigError(
            f"--dataset-path {traffic.dataset_path} has no times: give --request-rate, or drop --max-kv-offloading-size"
        )
    return rows, poisson(len(rows), traffic.request_rate, np.random.default_rng(question.settings.search.seed))
