"""Deployments of a network on a number of GPUs, the memory of each GPU, and the host memory for KV that pays.

A deployment is groups of one mode, alike, that use every GPU. Weights and the longest request must fit on it.
Host memory is judged by a log, whose requests run on replicas of one GPU with larger and larger tiers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from moestro.core.setting_checks import fields_of
from moestro.cost.gpus import GIB, WORKSPACE_BYTES
from moestro.cost.networks import NetworkShape, network_share
from moestro.cost.roofline import VLLM_HOST, Roofline, RooflineSettings
from moestro.engine.settings import SchedulerLimits, SchedulerSettings
from moestro.errors import ConfigError
from moestro.planner.question import PlanQuestion
from moestro.planner.settings import HardwareSettings
from moestro.sim.cluster import AtTimes
from moestro.sim.groups.group import OneRank
from moestro.sim.results import Results
from moestro.sim.scenario import Scenario, run
from moestro.sim.settings import PolicySettings, SimEngineSettings, SimMode
from moestro.workload.generated.draws import at_rate, poisson
from moestro.workload.rows import Int64s, RequestForm, RequestMaker, Rows
from moestro.workload.traces.reading import read_trace

_MOST_RATIOS = 8  # of attention to expert workers that are tried in a group; more differ by little
_NAMES = {"ep": "ep", "ep-overlap": "ep-overlap", "afd": "ping-pong", "async": "async"}


@dataclass(frozen=True, slots=True)
class GpuDivision:
    """One deployment.

    Attributes:
        mode: `fused` is replicas that share nothing, with tensor parallelism inside a group of several GPUs. The other
            modes are those of `moestro sim`.
        num_groups: groups, all alike; requests are spread over them evenly.
        gpus_per_group: GPUs of a group.
        num_expert_workers: GPUs of a group with experts alone. The others have attention, and, if this is 0, experts.
    """

    mode: SimMode
    num_groups: int
    gpus_per_group: int
    num_expert_workers: int = 0

    @property
    def num_attention_workers(self) -> int:
        """GPUs of a group with attention and KV."""
        return self.gpus_per_group - self.num_expert_workers

    @property
    def num_engines(self) -> int:
        """Schedulers of a group: one for each attention worker, and one for a replica of any size."""
        return 1 if self.mode == "fused" else self.num_attention_workers

    @property
    def num_holders(self) -> int:
        """GPUs of a group that hold experts."""
        return self.num_expert_workers or self.gpus_per_group

    @property
    def tensor_parallel_size(self) -> int:
        """GPUs of an engine."""
        return self.gpus_per_group if self.mode == "fused" else 1

    @property
    def title(self) -> str:
        """Short name: `2 x async 2+2`, `8 replicas`, `2 replicas of 4 GPUs`."""
        if self.mode == "fused":
            replicas = f"{self.num_groups} replica{'s' if self.num_groups > 1 else ''}"
            return replicas if self.gpus_per_group == 1 else f"{replicas} of {self.gpus_per_group} GPUs"
        form = str(self.gpus_per_group)
        if self.num_expert_workers:
            form = f"{self.num_attention_workers}+{self.num_expert_workers}"
        times = f"{self.num_groups} x " if self.num_groups > 1 else ""
        return f"{times}{_NAMES[self.mode]} {form}"


def divisions_of(question: PlanQuestion) -> list[GpuDivision]:
    """List all deployments to try, whether their weights fit or not."""
    hardware, search = question.settings.hardware, question.settings.search
    found = [
        division
        for size in range(1, hardware.num_gpus + 1)
        if hardware.num_gpus % size == 0 and _fits_machines(hardware, size)
        for division in _of_groups(question, size)
    ]
    return [division for division in found if why_not_served(question, division) is None or not search.served_only]


def _fits_machines(hardware: HardwareSettings, size: int) -> bool:
    """Whether groups of `size` GPUs have room on the machines, each with equally many GPUs on as few as it needs."""
    per_machine, num_groups = hardware.gpus_per_machine, hardware.num_gpus // size
    num_machines, each = math.ceil(hardware.num_gpus / per_machine), math.ceil(size / per_machine)
    if each > 1:
        return size % each == 0 and num_groups * each <= num_machines
    return num_machines == 1 or math.ceil(num_groups / (per_machine // size)) <= num_machines


def why_not_served(question: PlanQuestion, division: GpuDivision) -> str | None:
    """Return why the chosen server does not run a deployment. None means that it does."""
    return question.system.why_not(division.mode, division.tensor_parallel_size)


def _of_groups(question: PlanQuestion, size: int) -> Iterator[GpuDivision]:
    """Yield the deployments in groups of `size` GPUs."""
    hardware, experts = question.settings.hardware, question.network.experts
    number = hardware.num_gpus // size
    if size <= hardware.gpus_per_machine and size & (size - 1) == 0:  # all-reduces stay inside a machine
        yield GpuDivision("fused", number, size)
    if experts is None or size == 1:
        return
    if size <= experts.num_experts:
        modes: tuple[SimMode, ...] = ("ep", "ep-overlap", "async")
        for mode in modes:
            yield GpuDivision(mode, number, size)
    for num_expert_workers in _ratios(size):
        if num_expert_workers <= experts.num_experts:
            yield GpuDivision("afd", number, size, num_expert_workers)
            yield GpuDivision("async", number, size, num_expert_workers)


def _ratios(size: int) -> list[int]:
    """Numbers of expert workers in a group of `size` GPUs."""
    if size <= _MOST_RATIOS:
        return list(range(1, size))
    return sorted({size * part // _MOST_RATIOS for part in range(1, _MOST_RATIOS)})


_GB = 1e9
_MOST_GPUS = 4096  # up to which `fewest_gpus` looks


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the GPUs of one deployment.

    Attributes:
        usable_gb: memory of a GPU that may be used.
        weights_gb: weights on a GPU with attention.
        expert_weights_gb: weights on a GPU with experts alone. None means that there is none.
        kv_gb: memory left for KV on a GPU with attention, beside the workspace; negative if something is missing.
        num_blocks: KV blocks of each engine.
        kv_tokens: tokens in them.
        why_not: reason why the deployment does not fit. None means that it fits.
    """

    usable_gb: float
    weights_gb: float
    expert_weights_gb: float | None
    kv_gb: float
    num_blocks: int
    kv_tokens: int
    why_not: str | None = None


def share_of(question: PlanQuestion, division: GpuDivision) -> NetworkShape:
    """Return the network as one GPU of the deployment computes it.

    Raises:
        ConfigError: tensor parallelism does not divide a size.
    """
    network = question.network
    if division.mode != "fused" or division.gpus_per_group == 1:
        return network
    return network_share(network, division.gpus_per_group)


def memory_of(question: PlanQuestion, division: GpuDivision) -> MemoryUse:
    """Compute the memory that a deployment uses."""
    usable = question.gpu.memory_bytes * question.settings.hardware.gpu_memory_utilization
    try:
        network = share_of(question, division)
    except ConfigError as error:
        return MemoryUse(
            usable_gb=usable / _GB, weights_gb=0.0, expert_weights_gb=None, kv_gb=0.0, num_blocks=0, kv_tokens=0,
            why_not=str(error),
        )  # fmt: skip
    num_experts = network.experts.num_experts if network.experts else 0
    num_slots = -(-num_experts // (1 if division.mode == "fused" else division.num_holders))
    slots = network.slot_weight_bytes(num_slots)
    weights = network.attention_weight_bytes + (0 if division.num_expert_workers else slots)
    kv = usable - weights - WORKSPACE_BYTES
    block_size = question.settings.search.block_size
    num_blocks = max(int(kv // (network.kv_bytes_per_token * block_size)), 0)
    use = MemoryUse(
        usable_gb=usable / _GB,
        weights_gb=weights / _GB,
        expert_weights_gb=slots / _GB if division.num_expert_workers else None,
        kv_gb=kv / _GB,
        num_blocks=num_blocks,
        kv_tokens=num_blocks * block_size,
    )
    return msgspec.structs.replace(use, why_not=_why_not(question, use))


def _why_not(question: PlanQuestion, use: MemoryUse) -> str | None:
    workspace = f"{WORKSPACE_BYTES / _GB:.0f} GB of workspace"
    limit = f"more than the {use.usable_gb:.1f} GB that may be used of a {question.gpu.name}"
    if use.expert_weights_gb is not None and use.expert_weights_gb + WORKSPACE_BYTES / _GB > use.usable_gb:
        return f"experts of {use.expert_weights_gb:.1f} GB on a GPU and {workspace} are {limit}"
    if use.kv_gb <= 0:
        return f"weights of {use.weights_gb:.1f} GB on a GPU and {workspace} are {limit}"
    # A simulated request in progress asks for as many tokens as the longest answer has, so both lengths must fit.
    longest = question.lengths.longest_requested
    if use.kv_tokens < longest:
        return (
            f"{use.kv_gb:.1f} GB are left for KV, {use.kv_tokens:,} tokens, and the longest request needs {longest:,}"
        )
    return None


def fewest_gpus(question: PlanQuestion) -> tuple[int, GpuDivision] | None:
    """Find the least number of GPUs on which one group fits, by any division. None means that no number helps."""
    network, size = question.network, 1
    num_experts = network.experts.num_experts if network.experts else 0
    while size <= _MOST_GPUS:
        tried = [GpuDivision("fused", 1, size)] if size & (size - 1) == 0 else []
        if 1 < size <= num_experts:
            tried += [GpuDivision("ep", 1, size)]
        if num_experts:
            tried += [GpuDivision("async", 1, size, experts) for experts in (size - 1, size // 2) if 0 < experts < size]
        for division in tried:
            is_allowed = why_not_served(question, division) is None or not question.settings.search.served_only
            if is_allowed and memory_of(question, division).why_not is None:
                return size, division
        size += 1
    return None


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
