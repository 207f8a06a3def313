"""Decides which kernels a network on a CPU gets: the search begins before the weights are read and ends after them."""

from __future__ import annotations

import torch

from moestro.errors import ConfigError
from moestro.model.kernels.exchange import KernelExchange
from moestro.model.kernels.kernel_build import KernelBuild
from moestro.model.network import Network
from moestro.model.settings import ModelSettings

# A compilation begins before the weights are read, and takes about 6 s of a core. A start waits for the rest of it so
# long at most: the demo model, which loads in 5 s, is ready within 10 s.
_PATIENCE_S = 3.0
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
    if network.device.type != "cpu" or network.dtype is not torch.bfloat16:
        if settings.kernels != "own":
            return ()
        return ("--kernels own: the own kernels are for bfloat16 on a CPU, so torch computes all.",)
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
