"""A checkpoint as its files describe it, after every check that needs no torch: of kinds, sizes, names and shapes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moestro.errors import UnsupportedModelError, shown
from moestro.files.checkpoint_files import INDEX, check_files, find_weights, read_index, read_json_object, what_it_is
from moestro.files.config_fields import refuse_sizes, refuse_unbacked
from moestro.files.tensor_headers import TensorHeader, read_headers

_WHOLE = "model.safetensors"


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A checked checkpoint.

    Attributes:
        directory: its directory.
        config: fields of `config.json`.
        tensors: tensors of its weight files, by name; empty where the weights are not read.
    """

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, TensorHeader]


def read_checkpoint(directory: Path, *, has_weights: bool = True) -> Checkpoint:
    """Read and check the files of a checkpoint. Weights themselves are not read.

    Args:
        has_weights: whether its weights will be read; dummy weights need `config.json` alone.

    Raises:
        UnsupportedModelError: the directory holds no checkpoint, or a file or a promise of its config is refused.
    """
    if not directory.is_dir():
        raise UnsupportedModelError(f"{directory} is no directory: give a checkpoint directory with a config.json.")
    names = sorted(path.name for path in directory.iterdir())
    if "config.json" not in names:
        raise UnsupportedModelError(f"{directory} holds no config.json{what_it_is(names)}")
    check_files(directory)
    file = directory / "config.json"
    config = read_json_object(file)
    refuse_sizes(config, file)
    if not has_weights:
        return Checkpoint(directory, config, {})
    files = find_weights(directory)
    is_whole = files[0].name == _WHOLE  # which transformers reads instead of those of the index
    tensors = read_headers(files[:1] if is_whole else files)
    if not is_whole and INDEX in names:
        _check_index(directory / INDEX, tensors)
    refuse_unbacked(config, file, tensors)
    return Checkpoint(directory, config, tensors)


def _check_index(index: Path, tensors: dict[str, TensorHeader]) -> None:
    for name, file in read_index(index).items():
        tensor = tensors.get(name)
        if tensor is None or tensor.file.name != file:
            raise UnsupportedModelError(f"{index} says that tensor {shown(name)} is in {file}, and it is not.")
