"""Decides which kernels a network on a CPU gets: the search begins before the weights are read and ends after them."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from moestro.errors import ConfigError
from moestro.model.kernels.exchange import KernelExchange
from moestro.model.kernels.library import KernelBuild
from moestro.model.network import Network
from moestro.model.settings import ModelSettings

# A compilation begins before the weights are read, and takes about 6 s of a core. A start waits for the rest of it so
# long at most: the demo model, which loads in 5 s, is ready within 10 s.
_PATIENCE_S = 3.0
_LEAST_CAPABILITY = (8, 0)  # of a GPU: matrix units for bfloat16
_FIRST_FLOAT8 = (8, 9)  # capability whose instructions convert float8
_AWAITED = (
    "CPU kernels: torch's for now. Moestro's own are being compiled, and replace them between two steps. Answers of"
    " that moment may differ from later ones (--kernels own waits)."
)


def begin_search(settings: ModelSettings) -> KernelBuild | None:
    """Begin to search for the kernels, unless the settings rule out that a network uses them."""
    if settings.kernels == "eager" or settings.dtype not in {"auto", "bfloat16"}:
        return None
    if settings.device == "cuda" or (settings.device != "cpu" and torch.cuda.is_available()):
        return None
    return KernelBuild()


def choose_kernels(network: Network, build: KernelBuild | None, settings: ModelSettings) -> tuple[str, ...]:
    """Give a loaded network the kernels, or let it await them.

    Args:
        network: The network, before it is packed.
        build: The search from `begin_search`.
        settings: Those of the network.

    Returns:
        Sentences for the operator.

    Raises:
        ConfigError: The operator demands the own kernels, and they cannot be had.
    """
    if network.device.type == "cuda":
        return _choose_for_gpu(network, settings)
    return _choose_for_cpu(network, build, settings)


def _choose_for_cpu(network: Network, build: KernelBuild | None, settings: ModelSettings) -> tuple[str, ...]:
    if network.dtype is not torch.bfloat16:
        if settings.kernels != "own":
            return ()
        return ("--kernels own: the own kernels of a CPU are for bfloat16, so torch computes all.",)
    if build is None:
        return ("CPU kernels: torch's (--kernels eager).",)
    library = build.wait(None if settings.kernels == "own" else _PATIENCE_S)
    if library is not None:
        network.use_kernels(KernelExchange(library))
        return ()
    if not build.is_over:
        network.await_kernels(build)
        return (_AWAITED,)
    if settings.kernels == "own":
        raise ConfigError(f"--kernels own: {build.failure}. --kernels auto serves with torch's kernels instead.")
    return (f"CPU kernels: torch's, which are slower than Moestro's own: {build.failure}.",)


def _choose_for_gpu(network: Network, settings: ModelSettings) -> tuple[str, ...]:
    """Do `choose_kernels` on a GPU, where Triton compiles the kernels that a step needs."""
    if settings.kernels == "eager":
        return ("GPU kernels: torch's (--kernels eager).",)
    why_not = _why_no_gpu_kernels(network.device, network.dtype)
    if why_not is None:
        # Triton is imported with them, and comes with a torch for CUDA.
        from moestro.model.cuda.exchange import CudaExchange  # noqa: PLC0415
        from moestro.model.cuda.functions import CudaKernels  # noqa: PLC0415

        network.use_kernels(CudaExchange(CudaKernels(network.device, network.dtype)))
        return ()
    if settings.kernels == "own":
        raise ConfigError(f"--kernels own: {why_not}. --kernels auto serves with torch's kernels instead.")
    return (f"GPU kernels: torch's, which are slower than Moestro's own: {why_not}.",)


def why_no_float8_kernels(settings: ModelSettings, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why no kernels can read weights in float8; None if they can.

    Args:
        settings: Those of the network.
        device: The network's device.
        dtype: Dtype of the activations.
    """
    if device.type != "cuda":
        return "the kernels of a CPU do not read FP8"
    if settings.kernels == "eager":
        return "torch's kernels do not read them (--kernels eager)"
    capability = torch.cuda.get_device_capability(device)
    if capability < _FIRST_FLOAT8:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, and FP8 needs 8.9 or more"
    return _why_no_gpu_kernels(device, dtype)


def _why_no_gpu_kernels(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the own kernels cannot run a network of some dtype; None if they can."""
    if dtype not in (torch.bfloat16, torch.float32):
        return f"there are own kernels for bfloat16 and float32, and the network is in {dtype}"
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return "they need a GPU of compute capability 8.0 or more"
    if find_spec("triton") is None:
        return "Triton is not installed, which comes with a torch for CUDA"
    return None
