"""Files of tensors that other systems write, as NumPy arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from moestro.errors import ConfigError


def read_tensor_file(path: Path) -> Any:
    """Read a `.pt` file of tensors, numbers, texts, lists and dictionaries; no code of the file runs.

    Returns:
        The object in the file, with a NumPy array in place of each tensor.

    Raises:
        ConfigError: The file cannot be read, or contains other objects.
    """
    try:
        return _as_arrays(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # torch raises errors of its unpickler, its zip reader and its archive, which vary
        first = (str(error).splitlines() or [type(error).__name__])[0]
        if type(error).__name__ == "UnpicklingError":  # torch's own text advises to let the file's code run
            first = "it is damaged, or holds other objects than tensors, numbers, texts, lists and dictionaries"
        raise ConfigError(f"{path} cannot be read as a file of tensors: {first}") from error


def _as_arrays(found: Any) -> Any:
    if isinstance(found, torch.Tensor):
        return found.numpy()
    if isinstance(found, dict):
        return {key: _as_arrays(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [_as_arrays(value) for value in found]
    return found
