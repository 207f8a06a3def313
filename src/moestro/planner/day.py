"""A day of requests: their times, the servers that may answer them, and figures in windows of the day."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import NS_PER_MS, NS_PER_S
from moestro.cost.gpus import gpu_named, kv_blocks, worker_kv_blocks
from moestro.cost.settings import link_within, read_network
from moestro.cost.tables import Table, load_table
from moestro.errors import ConfigError
from moestro.planner.question import checked_positions
from moestro.planner.settings import HardwareSettings, ObjectiveSettings, PlanSettings
from moestro.planner.systems import RunLimits, ServedSystem, ServerLaunch, memory_share, own_servers
from moestro.sim.cluster import AtTimes, Workload
from moestro.sim.groups.group_setup import network_of
from moestro.sim.records import read_record
from moestro.sim.replay import read_engines
from moestro.sim.results import Results
from moestro.sim.settings import SimEngineSettings
from moestro.workload.generated.draws import at_rate, faster, poisson, replay
from moestro.workload.rows import RequestForm, RequestMaker, Rows, equal_rows
from moestro.workload.traces.reading import read_trace
from moestro.workload.traces.request_record import RequestRecord

Int64s = NDArray[np.int64]

_NUM_GENERATED = 2000  # requests, where no file has any


@dataclass(frozen=True, slots=True, eq=False)
class DayLoad:
    """Requests with their times.

    Attributes:
        source: short description.
        arrival_ns: arrivals, int64[n], ascending from 0.
        num_prompt_tokens, num_output_tokens: tokens of each request, int64[n].
        longest: most tokens of a request, prompt and answer; of a record, prompt and requested answer.
        workload: makes the requests in a form.
        block_size: tokens of a block in the file, where engines must have the same. None means any.
        is_generated: whether the arrivals were drawn.
        notes: what of the file has no effect.
    """

    source: str
    arrival_ns: Int64s
    num_prompt_tokens: Int64s
    num_output_tokens: Int64s
    longest: int
    workload: Callable[[RequestForm], Workload]
    block_size: int | None = None
    is_generated: bool = False
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.arrival_ns)

    @property
    def is_at_once(self) -> bool:
        """Whether all requests arrive at one time, so that they have no rate."""
        return not self.arrival_ns[-1]

    @property
    def words(self) -> str:
        """The requests with their rate, in words."""
        number, seconds = f"{_counted(len(self))}, {self.source}", self.arrival_ns[-1] / NS_PER_S
        if self.is_at_once:
            return f"{number}: all at one time, so they have no rate, and no load is higher"
        return (
            f"{number}: {len(self) / seconds:,.3g} a second and {self.num_output_tokens.sum() / seconds:,.4g} tokens of"
            f" answers a second, in the mean of {seconds:,.3g} s"
        )

    def arrivals(self, factor: float) -> AtTimes:
        """Return the arrivals at a multiple of the rate: the same requests in the same order, closer together."""
        return AtTimes(faster(self.arrival_ns, factor))


def read_load(settings: PlanSettings) -> DayLoad:
    """Read or make the requests that the settings name, at `--load-factor` times their rate.

    Raises:
        ConfigError: a file cannot be read, or neither a file nor --request-rate says when requests arrive.
    """
    traffic = settings.traffic
    if traffic.dataset_path is None:
        if traffic.request_rate is None:
            raise ConfigError(f"--find {settings.finds} needs times: give --dataset-path with times, or --request-rate")
        rows = equal_rows(_NUM_GENERATED, traffic.isl, traffic.osl)
        return _of_rows(rows, f"{len(rows):,} requests of {traffic.isl:,} and {traffic.osl:,} tokens", settings)
    record = read_record(traffic.dataset_path)
    if record is not None:
        return _of_record(record, traffic.dataset_path.name, settings)
    rows = read_trace(traffic.dataset_path)
    if rows.texts is not None:
        raise ConfigError(f"--dataset-path {traffic.dataset_path} holds texts, whose tokens are unknown: give lengths")
    answered = np.flatnonzero((rows.num_output_tokens >= 1) & (rows.num_prompt_tokens >= 1))
    if not len(answered):
        raise ConfigError(f"--dataset-path {traffic.dataset_path} has no request with a prompt and an answer")
    if rows.timestamp_ns is None and traffic.request_rate is None:
        raise ConfigError(
            f"--dataset-path {traffic.dataset_path} has no times: give --request-rate for Poisson arrivals"
        )
    return _of_rows(rows.select(answered), traffic.dataset_path.name, settings)


def _of_rows(rows: Rows, source: str, settings: PlanSettings) -> DayLoad:
    rate, notes = settings.traffic.request_rate, [f"--dataset-path: {note}" for note in rows.notes]
    rng = np.random.default_rng([settings.search.seed, len(rows)])
    if rows.timestamp_ns is None:
        assert rate is not None, "checked by the caller"
        times = poisson(len(rows), rate, rng)
        source += f", Poisson arrivals at {rate:g} requests/s"
    else:
        times = replay(rows.timestamp_ns, rng)
        times = times if rate is None else at_rate(times, rate)

    return DayLoad(
        source=source,
        arrival_ns=faster(times, settings.traffic.load_factor),
        num_prompt_tokens=rows.num_prompt_tokens,
        num_output_tokens=rows.num_output_tokens,
        longest=int((rows.num_prompt_tokens + rows.num_output_tokens).max()),
        workload=partial(RequestMaker, rows),
        is_generated=rows.is_generated or rows.timestamp_ns is None,
        notes=tuple(notes),
    )


def _of_record(record: RequestRecord, source: str, settings: PlanSettings) -> DayLoad:
    rate, times = settings.traffic.request_rate, record.arrival_ns
    prompts, outputs, limits = (
        np.array([getattr(each, name) for each in record.requests], np.int64)
        for name in ("num_prompt_tokens", "num_output_tokens", "max_tokens")
    )
    return DayLoad(
        source=f"{source}, recorded",
        arrival_ns=faster(times if rate is None else at_rate(times, rate), settings.traffic.load_factor),
        num_prompt_tokens=prompts,
        num_output_tokens=np.maximum(outputs, 1),
        longest=int((prompts + np.maximum(limits, 1)).max()),
        workload=lambda form: record,
        block_size=record.header.block_size,
        notes=record.notes,
    )


_LEAST = 20  # requests of a window


class WindowFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that arrive in one window.

    Attributes:
        start_s, end_s: seconds after the first arrival.
        num_requests: requests.
        ttft_ms, itl_ms: means.
    """

    start_s: float
    end_s: float
    num_requests: int
    ttft_ms: float
    itl_ms: float

    @property
    def words(self) -> str:
        """When it is, in words."""
        return f"from {_clock(self.start_s)} to {_clock(self.end_s)} ({_counted(self.num_requests)})"


class DayFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One run over the times of the requests.

    Attributes:
        num_requests: requests.
        num_refused: requests that no engine took.
        ttft_ms, ttft_p99_ms: time to first token, mean and 99th percentile.
        itl_ms: mean time between two tokens of an answer.
        tokens_per_s: output tokens a second, from the first arrival to the last token.
        hit_ratio: share of prompt tokens from the prefix cache.
        busiest: window with the highest mean TTFT.
        excess: largest latency as a multiple of its objective; above 1, one is missed. None: requests are refused.
        broken: the objective that the run misses by the largest factor, in a sentence; None: it holds all.
    """

    num_requests: int
    num_refused: int
    ttft_ms: float
    ttft_p99_ms: float
    itl_ms: float
    tokens_per_s: float
    hit_ratio: float
    busiest: WindowFigures
    excess: float | None
    broken: str | None


def figures_of(results: Results, objectives: ObjectiveSettings) -> DayFigures:
    """Judge a run.

    Args:
        results: requests in order of arrival, of which at least one is answered.
        objectives: what has to hold.
    """
    answered = np.flatnonzero(results.is_answered)
    assert len(answered), "a simulation ends when all requests have ended"
    arrival_ns, first_ns, last_ns = (
        column[answered] for column in (results.arrival_ns, results.first_token_ns, results.last_token_ns)
    )
    ttft_ms, num_gaps = (first_ns - arrival_ns) / NS_PER_MS, np.maximum(results.num_tokens[answered] - 1, 0)
    gaps_ms = (last_ns - first_ns) / NS_PER_MS
    windows = [
        WindowFigures(
            start_s=float(arrival_ns[rows][0] / NS_PER_S),
            end_s=float(arrival_ns[rows][-1] / NS_PER_S),
            num_requests=len(ttft_ms[rows]),
            ttft_ms=float(ttft_ms[rows].mean()),
            itl_ms=float(gaps_ms[rows].sum() / max(int(num_gaps[rows].sum()), 1)),
        )
        for rows in windows_of(arrival_ns, round(objectives.window * NS_PER_S))
    ]
    ttft_p99_ms, num_refused = float(np.percentile(ttft_ms, 99)), len(results) - len(answered)
    excess, missed = _excess(windows, ttft_p99_ms, objectives)
    return DayFigures(
        num_requests=len(results),
        num_refused=num_refused,
        ttft_ms=float(ttft_ms.mean()),
        ttft_p99_ms=ttft_p99_ms,
        itl_ms=float(gaps_ms.sum() / max(int(num_gaps.sum()), 1)),
        tokens_per_s=float(results.num_tokens[answered].sum() / max(int(last_ns.max() - arrival_ns[0]), 1) * NS_PER_S),
        hit_ratio=float(results.num_hit_tokens[answered].sum() / results.num_prompt_tokens[answered].sum()),
        busiest=max(windows, key=lambda each: each.ttft_ms),
        excess=None if num_refused else excess,
        broken=f"{num_refused:,} of {len(results):,} requests are refused" if num_refused else missed,
    )


def windows_of(arrival_ns: NDArray[np.int64], window_ns: int) -> list[slice]:
    """Return the rows of each window; one with few requests joins the next, and the last ones join the one before.

    Args:
        arrival_ns: arrivals, int64[n], ascending.
        window_ns: length of a window.
    """
    begins = np.flatnonzero(np.diff((arrival_ns - arrival_ns[0]) // window_ns, prepend=-1)).tolist()
    found, start = [], 0
    for end in [*begins[1:], len(arrival_ns)]:
        if end - start >= _LEAST:
            found.append(slice(start, end))
            start = end
    if start < len(arrival_ns):
        first = found.pop().start if found else 0
        found.append(slice(first, len(arrival_ns)))
    return found


def _excess(
    windows: list[WindowFigures], ttft_p99_ms: float, objectives: ObjectiveSettings
) -> tuple[float, str | None]:
    """Return the largest latency as a multiple of its objective, and, if it is missed, that objective in a sentence."""
    itl, ttft = max(windows, key=lambda each: each.itl_ms), max(windows, key=lambda each: each.ttft_ms)
    found = [
        (itl.itl_ms, objectives.max_itl,
         f"mean ITL is {itl.itl_ms:,.1f} ms for requests that arrive {itl.words}", "itl"),
        (ttft.ttft_ms, objectives.max_ttft,
         f"mean TTFT is {ttft.ttft_ms:,.0f} ms for requests that arrive {ttft.words}", "ttft"),
        (ttft_p99_ms, objectives.max_ttft_p99, f"P99 of TTFT is {ttft_p99_ms:,.0f} ms", "ttft-p99"),
    ]  # fmt: skip
    excess, sentence = max(
        (value / most, f"{text}: --max-{flag} is {most:g}") for value, most, text, flag in found if most is not None
    )
    return excess, sentence if excess > 1 else None


def _counted(number: int) -> str:
    return f"{number:,} request{'s' if number != 1 else ''}"


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"


@dataclass(frozen=True, slots=True, eq=False)
class ServerChoice:
    """A kind of server, of which any number may be started.

    Attributes:
        title: short name.
        num_gpus: GPUs of one server.
        engines: its engines as the simulator has them, `count` of 1.
        launch: its command.
        is_from_sizes: whether it is computed from a network's sizes; otherwise it was measured.
        notes: what limits its figures, in sentences.
    """

    title: str
    num_gpus: int
    engines: SimEngineSettings
    launch: ServerLaunch
    is_from_sizes: bool = True
    notes: tuple[str, ...] = ()

    def commands(self, system: ServedSystem, num_servers: int, settings: PlanSettings) -> list[str]:
        """Return the lines that start `num_servers` servers and a router.

        Raises:
            ConfigError: the server's version lacks a flag.
        """
        launch = replace(self.launch, num_servers=num_servers)
        if system.name == "moestro" and self.is_from_sizes:
            gpu = gpu_named(self.engines.gpu)
            link = link_within(settings.hardware.link_within, gpu).name
            launch = own_servers(launch, settings.model, gpu.name, link)
        elif system.name == "moestro":
            launch = replace(launch, num_servers=1, num_replicas=num_servers)
        return system.commands(launch)


def choices_of(
    settings: PlanSettings, system: ServedSystem, load: DayLoad
) -> tuple[list[ServerChoice], dict[str, str]]:
    """Return the servers that fit, and why others do not, by their titles.

    Raises:
        ConfigError: a name is unknown, a file cannot be read, or the network was made for shorter requests.
    """
    if settings.is_calibrated:
        return [_calibrated(settings, system, load)], {}
    network = read_network(settings.model)
    checked_positions(settings.model, load.longest)
    gpu_named(settings.hardware.gpu)  # an unknown one is no reason why a server does not fit
    num_experts = network.experts.num_experts if network.experts else 0
    most = min(settings.hardware.num_gpus, settings.hardware.gpus_per_machine)
    sizes = [2**power for power in range(most.bit_length())]
    found, misfits = [], {}
    for tensor_parallel in sizes:
        for num_ranks in (size for size in sizes if size * tensor_parallel <= most):
            is_spread = num_ranks > 1
            if is_spread and num_ranks * tensor_parallel > num_experts:
                continue
            if system.why_not("ep" if is_spread else "fused", tensor_parallel) is not None:
                continue
            title = title_of(tensor_parallel, num_ranks)
            if settings.hardware.num_gpus > most and settings.hardware.gpus_per_machine % (num_ranks * tensor_parallel):
                misfits[title] = f"machines of {settings.hardware.gpus_per_machine} GPUs are not whole numbers of it"
                continue
            try:
                found.append(_of_sizes(settings, system, load, (tensor_parallel, num_ranks)))
            except ConfigError as error:
                misfits[title] = str(error).split(". ")[0]  # without the advice, which is for a single server
    return found, misfits


def title_of(tensor_parallel: int, num_ranks: int) -> str:
    """Return the name of a server: `1 GPU`, `4 GPUs, TP 4`, `8 GPUs, EP 8`, `8 GPUs, TP 2, EP 8`."""
    num_gpus = tensor_parallel * num_ranks
    words = [f"{num_gpus} GPU{'s' if num_gpus > 1 else ''}"]
    words += [f"TP {tensor_parallel}"] if tensor_parallel > 1 else []
    return ", ".join([*words, f"EP {num_gpus}"] if num_ranks > 1 else words)


def _of_sizes(settings: PlanSettings, system: ServedSystem, load: DayLoad, sizes: tuple[int, int]) -> ServerChoice:
    """Return a server whose weights and KV cache are computed from a network's sizes.

    Args:
        sizes: GPUs of each rank, and ranks.
    """
    tensor_parallel, num_ranks = sizes
    hardware, search, num_gpus = settings.hardware, settings.search, tensor_parallel * num_ranks
    path = Path(settings.model).expanduser()
    engines = SimEngineSettings(
        ep_ranks=num_ranks,
        gpu=hardware.gpu,
        network=str(path.absolute()) if path.exists() else settings.model,
        tensor_parallel_size=tensor_parallel,
        link_within=hardware.link_within,
        gpu_memory_utilization=hardware.gpu_memory_utilization,
        block_size=load.block_size or search.block_size,
        max_num_seqs=search.max_num_seqs,
        max_num_batched_tokens=max(search.max_num_batched_tokens, search.max_num_seqs),
    )
    num_redundant = settings.serving.redundant_experts if num_ranks > 1 else 0
    engines = replace(engines, num_blocks=_num_blocks(engines, num_redundant), max_model_len=load.longest)
    assert engines.num_blocks is not None, "computed above"
    num_tokens = engines.num_blocks * engines.block_size
    if num_tokens < load.longest:
        raise ConfigError(f"{num_tokens:,} tokens of KV cache, and the longest request needs {load.longest:,}")
    is_own = system.name == "moestro"
    launch = ServerLaunch(
        model=settings.serving.serve_model or settings.model,
        mode="ep" if num_ranks > 1 else "fused",
        gpus_per_server=num_gpus,
        gpus_per_machine=hardware.gpus_per_machine,
        tensor_parallel_size=tensor_parallel,
        limits=RunLimits(max_num_seqs=engines.max_num_seqs, max_num_batched_tokens=engines.max_num_batched_tokens),
        max_model_len=load.longest,
        block_size=engines.block_size if is_own else None,
        kv_cache_bytes=num_tokens * network_of(engines).kv_bytes_per_token if is_own else None,
        memory_share=None if is_own else memory_share(system, gpu_named(hardware.gpu), hardware.gpu_memory_utilization),
        num_redundant_experts=num_redundant,
        further=settings.serving.further,
    )
    return ServerChoice(title_of(tensor_parallel, num_ranks), num_gpus, engines, launch)


def _num_blocks(engines: SimEngineSettings, num_redundant: int) -> int:
    """Return the KV blocks of each rank beside its share of the experts and their copies."""
    network = network_of(engines)
    num_experts = network.experts.num_experts if network.experts else 0
    num_gpus = engines.ep_ranks * engines.tensor_parallel_size
    if num_redundant and (num_experts + num_redundant) % num_gpus:
        raise ConfigError(
            f"{num_experts} experts and --redundant-experts {num_redundant} are not divisible by {num_gpus} GPUs"
        )
    return worker_kv_blocks(
        network,
        gpu_named(engines.gpu),
        engines.block_size,
        num_slots=-(-(num_experts + num_redundant) // engines.ep_ranks),
        gpu_memory_utilization=engines.gpu_memory_utilization,
    )


def _calibrated(settings: PlanSettings, system: ServedSystem, load: DayLoad) -> ServerChoice:
    """Return the engine of an engine file, on the GPU where it was calibrated or on another one."""
    path, hardware = Path(settings.model).expanduser(), settings.hardware
    _check_gpus(hardware, system)
    try:
        engines = msgspec.convert(read_engines(path, "MODEL"), SimEngineSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from None
    table = engines.table
    if table is None or engines.num_blocks is None:
        raise ConfigError(f"{path} names no table of `moestro calibrate --server`: give the .toml file that it writes")
    if load.block_size is not None and load.block_size != engines.block_size:
        raise ConfigError(
            f"--dataset-path is a record with blocks of {load.block_size} tokens, and those of the engine have"
            f" {engines.block_size}"
        )
    num_blocks = engines.num_blocks
    is_other = hardware.is_other_gpu
    engines = _on_other_gpu(engines, num_blocks, hardware) if is_other else engines
    longest = engines.max_model_len or num_blocks * engines.block_size
    if load.longest > longest:
        raise ConfigError(
            f"{path}: the engine takes requests of {longest:,} tokens, and the longest needs {load.longest:,}"
        )
    measured = load_table(Path(table))
    launch = ServerLaunch(
        model=settings.serving.serve_model or measured.model,
        gpus_per_server=hardware.gpus_per_engine,
        gpus_per_machine=hardware.gpus_per_machine,
        tensor_parallel_size=hardware.gpus_per_engine,
        limits=RunLimits(max_num_seqs=engines.max_num_seqs, max_num_batched_tokens=engines.max_num_batched_tokens),
        max_model_len=engines.max_model_len,
        block_size=engines.block_size,
        num_blocks=None if is_other else num_blocks,
        caches_prefixes=engines.enable_prefix_caching,
        further=settings.serving.further,
    )
    title, engines = f"engine of {path.name}", replace(engines, count=1)
    notes = _unknown_limits(measured, engines)
    return ServerChoice(title, hardware.gpus_per_engine, engines, launch, is_from_sizes=False, notes=notes)


def _check_gpus(hardware: HardwareSettings, system: ServedSystem) -> None:
    """Refuse engines that the server cannot run, or that have more GPUs than there are."""
    if why_not := system.why_not("fused", hardware.gpus_per_engine):
        raise ConfigError(f"--gpus-per-engine {hardware.gpus_per_engine}: {why_not}; give --for vllm or sglang")
    if hardware.gpus_per_engine > hardware.num_gpus:
        raise ConfigError(
            f"--gpus-per-engine {hardware.gpus_per_engine} is more than --num-gpus {hardware.num_gpus}: not one engine"
            " can be started"
        )


def _on_other_gpu(engines: SimEngineSettings, num_blocks: int, hardware: HardwareSettings) -> SimEngineSettings:
    """Return a calibrated engine of equally many GPUs of another kind: the KV cache grows with what is left."""
    assert hardware.network is not None, "checked by the settings"
    assert hardware.calibrated_gpu is not None, "checked by the caller"
    engines = replace(
        engines, gpu=hardware.gpu, network=hardware.network, table_gpu=hardware.calibrated_gpu,
        tensor_parallel_size=hardware.gpus_per_engine, link_within=hardware.link_within,
    )  # fmt: skip
    there, here = (
        kv_blocks(
            network_of(engines),
            gpu_named(name),
            engines.block_size,
            gpu_memory_utilization=hardware.gpu_memory_utilization,
        )
        for name in (hardware.gpu, hardware.calibrated_gpu)
    )
    return replace(engines, num_blocks=max(num_blocks * there // here, 1))


class _ProbedLimit(msgspec.Struct):
    """The part of an estimate of `moestro calibrate --server` that says whether it was identified."""

    name: str
    title: str
    value: float | None = None


class _ProbedLimits(msgspec.Struct):
    estimates: list[_ProbedLimit] = []


def _unknown_limits(table: Table, engines: SimEngineSettings) -> tuple[str, ...]:
    """Note the limits for which an engine file has a bound or an assumption, because no probe determined them."""
    used = {
        "max_num_seqs": engines.max_num_seqs,
        "max_num_batched_tokens": engines.max_num_batched_tokens,
        "num_kv_tokens": (engines.num_blocks or 0) * engines.block_size,
        "block_size": engines.block_size,
    }
    try:
        probed = msgspec.convert(table.about, _ProbedLimits).estimates
    except msgspec.ValidationError:
        return ()
    unknown = [f"{each.title} ({used[each.name]:,})" for each in probed if each.name in used and each.value is None]
    if not unknown:
        return ()
    words = f"so the engine file has a bound or an assumption: {', '.join(unknown)}. The commands set these limits"
    return (f"Not identified by moestro calibrate, {words}, and a server with others gives other figures.",)
