"""The `moestro` command, and the sources of settings that its verbs share."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from importlib.util import find_spec

from cyclopts import App, Parameter
from cyclopts.config import Env
from rich.console import Console

from moestro import __version__
from moestro.config.config_sources import ConfigFile, Origins, SuffixedNumbers, VllmValues
from moestro.errors import ConfigError

ORIGINS = Origins()

app = App(
    name="moestro",
    help=(
        "One scheduler for Mixture-of-Experts serving, from the cluster down to the expert.\n\n"
        "Every flag can also be set by an environment variable: --max-num-seqs by MOESTRO_MAX_NUM_SEQS. "
        "Whole numbers may have a suffix, as in vLLM: 8k is 8,000, and 8K is 8,192."
    ),
    version=__version__,
    config=(
        Env("MOESTRO_", command=False),  # keeps API keys out of the process list
        ConfigFile(),
        SuffixedNumbers(),
        VllmValues(),
        ORIGINS,
    ),
    # A flag that is given twice takes the last value, as in other programs; a flag of several values takes them all.
    default_parameter=Parameter(show_env_var=False, negative_iterable=(), allow_repeating=True),
)


# Optional dependencies: which extra of the package brings which libraries.

# Extra of pyproject.toml -> modules that its packages install.
EXTRAS = {
    "serve": (
        "torch",
        "transformers",
        "tokenizers",
        "safetensors",
        "accelerate",
        "huggingface_hub",
        "jinja2",
        "llguidance",
    ),
    "tokenizer": ("transformers", "tokenizers", "huggingface_hub", "jinja2", "llguidance"),
    "plots": ("matplotlib",),
    "ray": ("ray",),
    "exact": ("scipy",),
    "envoy": ("hpack", "google.protobuf"),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
}


def is_installed(extra: str) -> bool:
    """Whether all libraries of `extra` can be imported; none of them is loaded."""
    return all(map(_exists, EXTRAS[extra]))


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # A package that the module would be in.
        return False


def require_extra(extra: str, purpose: str) -> None:
    """Check that the libraries of `extra` are installed before `purpose`, a verb or a flag, imports its room.

    Raises:
        ConfigError: a library is missing; the text names the command that installs the extra.
    """
    if not is_installed(extra):
        raise ConfigError(f"{purpose} needs libraries that are not installed: {install_command(extra)}")


def install_command(extra: str) -> str:
    """The command that installs `extra`, for messages."""
    return f"pip install 'moestro[{extra}]'"


# Imports of a verb: the sign on a terminal that its libraries load, which takes up to some seconds.


@contextlib.contextmanager
def loading(what: str) -> Iterator[None]:
    """Show "Loading …" with a spinner on stderr for the duration of the block, on a terminal only.

    Args:
        what: noun phrase of what is loaded.
    """
    console = Console(stderr=True)
    with console.status(f"Loading {what} …") if console.is_terminal else contextlib.nullcontext(), uncollected():
        yield


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Look for no garbage during the block: what an import makes stays, and the search takes a sixth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
