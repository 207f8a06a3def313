"""Resolves the model that the operator names to a checkpoint directory on disk."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.utils import validate_repo_id

from moestro.core.checkpoint_files import READ_PATTERNS
from moestro.errors import ConfigError, shown
from moestro.model.settings import DEMO_MODEL


def locate_model(model: str) -> Path:
    """Return the checkpoint directory of a path, a Hugging Face id, or the demo model that comes with Moestro.

    Raises:
        ConfigError: No such checkpoint exists, or it cannot be fetched; the text says what to do.
    """
    path = _demo() if model == DEMO_MODEL else Path(model).expanduser()
    if not path.is_dir():
        path = _download(model)
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} holds no config.json: give a checkpoint directory in Hugging Face's layout")
    return path.resolve()


def _demo() -> Path:
    # Wheels are installed unpacked, so the path outlives the context.
    with as_file(files("moestro") / "assets" / "demo") as path:
        if path.is_dir():
            return path
    raise ConfigError("this installation lacks the demo model: name a checkpoint, for instance moestro serve DIR")


def _download(model: str) -> Path:
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ConfigError(f"there is no directory {model}")
    try:
        validate_repo_id(model)
        return Path(snapshot_download(model, allow_patterns=list(READ_PATTERNS)))  # The patterns exclude code.
    except Exception as error:  # The hub's client raises its own errors, its transport's and the file system's.
        raise ConfigError(
            f"{model} is not a local directory, and its download from the Hugging Face hub failed"
            f" ({type(error).__name__}: {shown(error)}). Give a checkpoint directory, or check the name, the network,"
            " and HF_TOKEN for a gated model."
        ) from error
