"""Moestro: one scheduler for Mixture-of-Experts serving, from the cluster down to the expert.

`from moestro import LLM, SamplingParams` generates from Python; the names are loaded when they are first used.
"""

from importlib import import_module

__version__ = "0.1.0"

# Public name -> (module, name there). An import of Moestro alone loads none of them.
_OFFERED = {
    "LLM": ("moestro.offline.llm", "LLM"),
    "SamplingParams": ("moestro.offline.llm", "OfflineSamplingParams"),
    "RequestOutput": ("moestro.offline.llm", "RequestOutput"),
    "CompletionOutput": ("moestro.offline.llm", "CompletionOutput"),
}


def __getattr__(name: str) -> object:
    """Return a public class, and load its module."""
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _OFFERED[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted({*globals(), *_OFFERED})
