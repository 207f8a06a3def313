"""The servers that a plan over times may start: every division of a machine's GPUs, or the engine of an engine file."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from moestro.cost.capacity import kv_blocks, worker_kv_blocks
from moestro.cost.gpus import gpu_named
from moestro.cost.named_parts import link_within, read_network
from moestro.cost.tables import load_table
from moestro.errors import ConfigError
from moestro.planner.over_time.load import DayLoad
from moestro.planner.settings import PlanSettings
from moestro.planner.systems import RunLimits, ServedSystem, ServerLaunch, memory_share, own_servers
from moestro.sim.engine_prices import network_of
from moestro.sim.load.recorded_engines import read_engines
from moestro.sim.settings import SimEngineSettings


@dataclass(frozen=True, slots=True, eq=False)
class ServerChoice:
    """A kind of server, of which any number may be started.

    Attributes:
        title: short name.
        num_gpus: GPUs of one server.
        engines: its engines as the simulator has them, `count` of 1.
        launch: its command.
        is_from_sizes: whether it is computed from a network's sizes; otherwise it was measured.
    """

    title: str
    num_gpus: int
    engines: SimEngineSettings
    launch: ServerLaunch
    is_from_sizes: bool = True

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
        ConfigError: a name is unknown, or the engine file cannot be read.
    """
    if settings.is_calibrated:
        return [_calibrated(settings, load)], {}
    network = read_network(settings.model)
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
        further=tuple(shlex.split(settings.serving.server_flags)),
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


def _calibrated(settings: PlanSettings, load: DayLoad) -> ServerChoice:
    """Return the engine of an engine file, on the GPU where it was calibrated or on another one."""
    path, hardware = Path(settings.model).expanduser(), settings.hardware
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
    is_other = hardware.calibrated_gpu is not None and hardware.calibrated_gpu != hardware.gpu
    if is_other:
        assert hardware.network is not None, "checked by the settings"
        assert hardware.calibrated_gpu is not None, "checked above"
        network = read_network(hardware.network)
        there, here = (
            kv_blocks(
                network, gpu_named(name), engines.block_size, gpu_memory_utilization=hardware.gpu_memory_utilization
            )
            for name in (hardware.gpu, hardware.calibrated_gpu)
        )
        engines = replace(
            engines, gpu=hardware.gpu, network=hardware.network, table_gpu=hardware.calibrated_gpu,
            num_blocks=max(num_blocks * there // here, 1),
        )  # fmt: skip
    longest = engines.max_model_len or num_blocks * engines.block_size
    if load.longest > longest:
        raise ConfigError(
            f"{path}: the engine takes requests of {longest:,} tokens, and the longest needs {load.longest:,}"
        )
    launch = ServerLaunch(
        model=settings.serving.serve_model or load_table(Path(table)).model,
        gpus_per_server=hardware.gpus_per_engine,
        gpus_per_machine=hardware.gpus_per_machine,
        tensor_parallel_size=hardware.gpus_per_engine,
        limits=RunLimits(max_num_seqs=engines.max_num_seqs, max_num_batched_tokens=engines.max_num_batched_tokens),
        max_model_len=engines.max_model_len,
        block_size=engines.block_size,
        num_blocks=None if is_other else num_blocks,
        caches_prefixes=engines.enable_prefix_caching,
        further=tuple(shlex.split(settings.serving.server_flags)),
    )
    title, engines = f"engine of {path.name}", replace(engines, count=1)
    return ServerChoice(title, hardware.gpus_per_engine, engines, launch, is_from_sizes=False)
