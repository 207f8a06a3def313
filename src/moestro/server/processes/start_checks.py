"""Refuses, before any process starts, what this machine, this checkpoint or this network cannot do.

Workers check the rest.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from moestro.config.linux_process import available_memory_bytes, has_gpu
from moestro.config.serve_settings import ServeSettings
from moestro.cost.hf_config import network_from_config
from moestro.errors import ConfigError
from moestro.files.checkpoint import Checkpoint, check_files, read_checkpoint
from moestro.files.config_fields import num_experts_of
from moestro.web.ports.lifecycle import process_age_s
from moestro.wire.messages import Phase


class StartClock:
    """Records consecutive phases since the process started.

    Attributes:
        phases: Phases so far; their sum is the time from the start of the process to the last mark.
    """

    def __init__(self) -> None:
        self._since = time.monotonic() - process_age_s()
        self.phases: list[Phase] = []

    def mark(self, name: str) -> None:
        """End the phase that began at the last mark, and call it `name`."""
        now = time.monotonic()
        self.phases.append(Phase(name, now - self._since))
        self._since = now

    def mark_engines(self, phases: Sequence[Sequence[Phase]]) -> None:
        """Add the phases of the slowest engine. The next phase includes the time that messages took to arrive."""
        slowest = max(phases, key=lambda own: sum(phase.seconds for phase in own))
        self.phases.extend(slowest)
        self._since += sum(phase.seconds for phase in slowest)


_GIB = 1 << 30


def check_start(settings: ServeSettings) -> None:
    """Check the checkpoint's files, and the number of workers against its experts and the machine's memory.

    Raises:
        ConfigError: A file is refused, or there are too many workers; the text says what to do.
    """
    if settings.model.tokenizer is not None:
        check_files(settings.model.tokenizer_directory)
    if settings.paced is not None:
        return  # A paced device has the memory and the network of another machine.
    has_weights = settings.model.load_format != "dummy"
    checkpoint = read_checkpoint(Path(settings.model.model), has_weights=has_weights)
    _check_experts(settings, num_experts_of(checkpoint.config))
    if settings.model.device == "cpu" or (settings.model.device == "auto" and not has_gpu()):
        _check_memory(settings, checkpoint, available_memory_bytes())


def _check_experts(settings: ServeSettings, num_experts: int | None) -> None:
    """Compare the number of workers with the experts. None means that workers find the number when they load."""
    mode = settings.stepping.mode
    num_shares = {"async": settings.group.num_shares, "ep": settings.processes.engines}.get(mode, 1)
    if num_experts is None or num_shares <= num_experts:
        return
    if mode == "ep":
        raise ConfigError(
            f"--mode ep needs an expert for each engine: the model has {num_experts} experts a layer, so give"
            f" --engines {num_experts} or less"
        )
    flag = "--experts" if settings.group.num_expert_workers else "--attention"
    raise ConfigError(
        f"--mode {mode} spreads experts over {num_shares} workers, and the network has {num_experts} experts a layer:"
        f" lower {flag}, or take another --mode"
    )


def _check_memory(settings: ServeSettings, checkpoint: Checkpoint, available: int | None) -> None:
    """Compare the memory of all engines, which each load the whole network, with what is left."""
    model, num_engines = settings.model, settings.num_engines
    weights = _weight_bytes(checkpoint)
    cache = 0 if model.num_gpu_blocks_override is not None else model.kv_cache_bytes
    if available is None or num_engines * (weights + cache) <= available:
        return
    flag = "--attention" if settings.stepping.mode == "async" else "--engines"
    raise ConfigError(
        f"{num_engines} engines need {num_engines * (weights + cache) / _GIB:.1f} GiB of memory, each"
        f" {weights / _GIB:.1f} for weights and {cache / _GIB:.1f} for KV, and {available / _GIB:.1f} are free: lower"
        f" {flag}{' or --kv-cache-memory-bytes' if cache else ''}"
    )


def _weight_bytes(checkpoint: Checkpoint) -> int:
    """Return the bytes of the weight files; of dummy weights those that the config's sizes make, or 0 if unknown."""
    if checkpoint.tensors:
        return sum(path.stat().st_size for path in {tensor.file for tensor in checkpoint.tensors.values()})
    try:
        return int(network_from_config("config.json", checkpoint.config).weight_bytes())
    except ConfigError:
        return 0  # The family's own values of missing sizes are known to a worker.
