"""What the operator chooses about the network and its KV cache, checked where it enters. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from moestro.core.setting_checks import check_floats
from moestro.errors import ConfigError
from moestro.model.gate_override import check_spec

Dtype = Literal["auto", "float32", "float64", "bfloat16", "float16"]
DeviceKind = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "dummy"]
GenerationConfig = Literal["auto", "vllm"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """One rank's network.

    Attributes:
        model: a local checkpoint directory; a hub id is resolved before it comes here.
        dtype: of weights, activations and KV; `auto` is the checkpoint's own.
        device: `auto` takes an accelerator where there is one.
        load_format: `dummy` draws random weights of the config's shapes, keyed by `seed`.
        generation_config: `auto`: sampling defaults are those of the checkpoint's generation_config.json; `vllm`:
            neutral ones. End tokens are read from it in any case.
        max_model_len: tokens of the longest sequence; None: the config's, lowered to what the KV cache holds.
        gate_override: `uniform`, `exponential:LAMBDA` or `trace:FILE` (see `gate_override`); None: the network's gate.
        seed: of dummy weights and of the gate override.
        block_size: tokens of one KV block.
        kv_cache_memory_bytes: of all layers' K and V.
        num_gpu_blocks_override: blocks to allocate, whatever `kv_cache_memory_bytes` says.
        kv_offloading_size: GiB of host memory for the KV of preempted sequences; 0: it is computed again.

    Raises:
        ConfigError: a value is impossible; the text says what is allowed.
    """

    model: str
    dtype: Dtype = "auto"
    device: DeviceKind = "auto"
    load_format: LoadFormat = "auto"
    generation_config: GenerationConfig = "auto"
    max_model_len: int | None = None
    gate_override: str | None = None
    seed: int = 0
    block_size: int = 16
    kv_cache_memory_bytes: int = 1 << 30
    num_gpu_blocks_override: int | None = None
    kv_offloading_size: float = 0

    def __post_init__(self) -> None:
        check_floats(self)
        if not self.model:
            raise ConfigError("--model is empty: give a checkpoint directory.")
        _check_choice("--dtype", self.dtype, get_args(Dtype))
        _check_choice("--device", self.device, get_args(DeviceKind))
        _check_choice("--load-format", self.load_format, get_args(LoadFormat))
        _check_choice("--generation-config", self.generation_config, get_args(GenerationConfig))
        _check_at_least("--max-model-len", self.max_model_len, 1)
        _check_at_least("--block-size", self.block_size, 1)
        _check_at_least("--kv-cache-memory-bytes", self.kv_cache_memory_bytes, 1)
        _check_at_least("--num-gpu-blocks-override", self.num_gpu_blocks_override, 1)
        if self.kv_offloading_size < 0:
            raise ConfigError(f"--kv-offloading-size {self.kv_offloading_size:g} is no size: give GiB, 0 or more.")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed {self.seed} is out of range: give 0 .. 2**63 - 1.")
        if self.gate_override is not None:
            check_spec(self.gate_override)


def _check_choice(flag: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise ConfigError(f"{flag} {given!r} is unknown: give one of {', '.join(allowed)}.")


def _check_at_least(flag: str, given: int | None, least: int) -> None:
    if given is not None and given < least:
        raise ConfigError(f"{flag} {given} is too small: give at least {least}.")
