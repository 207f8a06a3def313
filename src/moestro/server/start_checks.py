"""Refuses, before any process starts, what this machine or this network cannot do. Workers check the rest."""

from __future__ import annotations

from pathlib import Path

from moestro.config.linux_process import available_memory_bytes, has_gpu
from moestro.config.serve_settings import ServeSettings
from moestro.core.checkpoint_files import read_json_object
from moestro.errors import ConfigError, UnsupportedModelError

_GIB = 1 << 30
# Names of the number of routed experts in the configs of the families that transformers has. Workers find the number of
# any other family when they have loaded it.
_EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")


def check_start(settings: ServeSettings) -> None:
    """Check the number of workers against the network's experts and the machine's memory.

    Raises:
        ConfigError: There are too many; the text says what to do.
    """
    if settings.paced is not None:
        return  # A paced device has the memory and the network of another machine.
    directory = Path(settings.model.model)
    _check_experts(settings, directory)
    if settings.model.device == "cpu" or (settings.model.device == "auto" and not has_gpu()):
        _check_memory(settings, directory, available_memory_bytes())


def _check_experts(settings: ServeSettings, directory: Path) -> None:
    mode = settings.stepping.mode
    num_shares = {"async": settings.group.num_shares, "ep": settings.processes.engines}.get(mode, 1)
    num_experts = _num_experts(directory)
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


def _num_experts(directory: Path) -> int | None:
    """Return the routed experts of a layer; None means that the config does not say it in a known way."""
    try:
        config = read_json_object(directory / "config.json")
    except UnsupportedModelError:
        return None  # A worker says what is wrong.
    text = config.get("text_config")
    fields = config | text if isinstance(text, dict) else config
    found = [fields[key] for key in _EXPERT_KEYS if isinstance(fields.get(key), int)]
    return max(found) if found else None


def _check_memory(settings: ServeSettings, directory: Path, available: int | None) -> None:
    """Compare the memory of all engines, which each load the whole network, with what is left."""
    model, num_engines = settings.model, settings.num_engines
    weights = 0
    if model.load_format != "dummy":
        weights = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    cache = 0 if model.num_gpu_blocks_override is not None else model.kv_cache_bytes
    if available is None or num_engines * (weights + cache) <= available:
        return
    flag = "--attention" if settings.stepping.mode == "async" else "--engines"
    raise ConfigError(
        f"{num_engines} engines need {num_engines * (weights + cache) / _GIB:.1f} GiB of memory, each"
        f" {weights / _GIB:.1f} for weights and {cache / _GIB:.1f} for KV, and {available / _GIB:.1f} are free: lower"
        f" {flag}{' or --kv-cache-memory-bytes' if cache else ''}"
    )
