"""Optional dependencies: which extra of the package brings which libraries."""

from __future__ import annotations

from importlib.util import find_spec

from moestro.errors import ConfigError

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
    "envoy": ("grpc", "grpc_health", "google.protobuf"),
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
