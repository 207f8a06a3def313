"""Finds the directories of the model and of the tokenizer that an operator names; it may download them.

Only the verbs that need a name on the Hugging Face hub load this file, because its client is an extra.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.utils import validate_repo_id

from moestro.errors import ConfigError, shown
from moestro.files.checkpoint import READ_PATTERNS, WEIGHTS_PATTERN
from moestro.model.settings import DEMO_MODEL


def locate_model(model: str) -> Path:
    """Return the checkpoint directory of a path, a Hugging Face id, or the demo model that comes with Moestro.

    Raises:
        ConfigError: No such checkpoint exists, or it cannot be fetched; the text says what to do.
    """
    path = _directory(model, "checkpoint", READ_PATTERNS)
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} holds no config.json: give a checkpoint directory in Hugging Face's layout")
    return path.resolve()


def locate_tokenizer(tokenizer: str) -> Path:
    """Return the directory of a tokenizer by a path, a Hugging Face id, or the name of the demo model.

    Raises:
        ConfigError: There is no such tokenizer, or it cannot be fetched; the text names `--tokenizer` and what to do.
    """
    if not tokenizer:
        raise ConfigError("--tokenizer is empty: give a directory or a name on the Hugging Face hub, or leave it out")
    try:
        path = _directory(tokenizer, "tokenizer", [each for each in READ_PATTERNS if each != WEIGHTS_PATTERN])
    except ConfigError as error:
        raise ConfigError(f"--tokenizer: {error}") from None
    if not (path / "tokenizer.json").is_file():
        raise ConfigError(
            f"--tokenizer {tokenizer}: {path} holds no tokenizer.json, and only fast tokenizers are supported: give a"
            " directory or a repository that has one"
        )
    return path.resolve()


def _directory(name: str, what: str, patterns: Sequence[str]) -> Path:
    """Return the directory of that path; otherwise that of the demo model or of a repository on the hub."""
    path = _demo() if name == DEMO_MODEL else Path(name).expanduser()
    return path if path.is_dir() else _download(name, what, patterns)


def _demo() -> Path:
    # Wheels are installed unpacked, so the path outlives the context.
    with as_file(files("moestro") / "assets" / "demo") as path:
        if path.is_dir():
            return path
    raise ConfigError("this installation lacks the demo model: name a checkpoint, for instance moestro serve DIR")


def _download(name: str, what: str, patterns: Sequence[str]) -> Path:
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"there is no directory {name}")
    try:
        validate_repo_id(name)
        return Path(snapshot_download(name, allow_patterns=list(patterns)))  # The patterns exclude code.
    except Exception as error:  # The hub's client raises its own errors, its transport's and the file system's.
        raise ConfigError(
            f"{name} is not a local directory, and its download from the Hugging Face hub failed"
            f" ({type(error).__name__}: {shown(error)}). Give a {what} directory, or check the name, the network, and"
            " HF_TOKEN for a gated repository."
        ) from error
