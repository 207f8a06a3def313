"""A checkpoint as its files describe it, after every check that needs no torch: of kinds, sizes, names and shapes."""

from __future__ import annotations

import codecs
import json
import math
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moestro.errors import UnsupportedModelError, shown
from moestro.files.config_fields import TensorHeader, read_headers, refuse_sizes, refuse_unbacked
from moestro.files.text_files import UTF16_MARKS, encoding_of, text_of

# Safe reading of a checkpoint directory: only its own regular files, and JSON of bounded size and depth. No torch.

# Files that Moestro and transformers read. Weights are safetensors only, because the other formats are pickles.
WEIGHTS_PATTERN = "*.safetensors"
READ_PATTERNS = (WEIGHTS_PATTERN, "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
_TEMPLATES = "additional_chat_templates"
MAX_CONFIG_BYTES = 4 << 20  # published files have some KiB
MAX_INDEX_BYTES = 64 << 20  # the index of a checkpoint with 100,000 tensors has 10 MiB
MAX_TOKENIZER_BYTES = 64 << 20  # the largest published one has 33 MiB; in memory each byte takes up to 18
INDEX = "model.safetensors.index.json"
# Files that a library reads whole, and their limits. Nothing reads other JSON files, which may have any size.
_MOST_BYTES = {
    "config.json": MAX_CONFIG_BYTES,
    "generation_config.json": MAX_CONFIG_BYTES,
    "tokenizer_config.json": MAX_CONFIG_BYTES,
    "special_tokens_map.json": MAX_CONFIG_BYTES,
    "added_tokens.json": MAX_CONFIG_BYTES,
    "tokenizer.json": MAX_TOKENIZER_BYTES,
    INDEX: MAX_INDEX_BYTES,
}
_MAX_DEPTH = 32  # published configs have 6; transformers reads a config recursively
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Read a regular file. A FIFO or a device is refused without waiting for its writer.

    Raises:
        UnsupportedModelError: the path is no regular file, cannot be read, or has more than `max_bytes` bytes.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UnsupportedModelError(_unreadable(path, error)) from error
    try:
        found = os.fstat(file)
        _refuse_kind(path, found)
        if found.st_size > max_bytes:
            raise UnsupportedModelError(_too_large(path, found.st_size, max_bytes))
        with os.fdopen(file, "rb", closefd=False) as opened:
            raw = opened.read(max_bytes + 1)  # a file of /proc has any number of bytes, and size 0
    finally:
        os.close(file)
    if len(raw) > max_bytes:
        raise UnsupportedModelError(_too_large(path, len(raw), max_bytes))
    return raw


def read_json_object(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Read the fields of a JSON file.

    Raises:
        UnsupportedModelError: the path is no regular file, or the file is too large, too deep or no JSON object.
    """
    raw = read_bytes(path, max_bytes)
    try:
        fields = json.loads(text_of(raw))
    except ValueError as error:
        raise UnsupportedModelError(f"{path} is malformed: {shown(error)}.") from error
    except RecursionError:
        raise UnsupportedModelError(_too_deep(path)) from None
    if not isinstance(fields, dict):
        raise UnsupportedModelError(f"{path} is malformed: it must hold one JSON object.")
    if _is_deeper(fields, _MAX_DEPTH):
        raise UnsupportedModelError(_too_deep(path))
    if (name := _non_finite(fields)) is not None:
        raise UnsupportedModelError(f"{path}: {shown(name)} is NaN or infinite: give a finite number.")
    return fields


def check_files(directory: Path) -> None:
    """Refuse a directory with a file that is no regular file, too large, unreadable, or a link out of it.

    In the Hugging Face hub's cache a checkpoint's files are links to `blobs` of the same repository, which are allowed.

    Raises:
        UnsupportedModelError: a file is refused; the text names it.
    """
    roots = [directory.resolve()]
    if roots[0].parent.name == "snapshots":
        roots.append(roots[0].parents[1] / "blobs")
    files = [path for pattern in READ_PATTERNS for path in directory.glob(pattern)]
    for path in sorted((*files, *(directory / _TEMPLATES).glob("*"))):
        try:
            target = path.resolve(strict=True)
        except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError
            raise UnsupportedModelError(_unreadable(path, error)) from error
        if not any(target.is_relative_to(root) for root in roots):
            raise UnsupportedModelError(
                f"{path} is a link to {target}, outside of the checkpoint's directory: put a copy in its place."
            )
        _check_file(path)


def find_weights(directory: Path) -> list[Path]:
    """Find the files that transformers reads weights from; all are safetensors files of the directory.

    Raises:
        UnsupportedModelError: a file is missing or has another format.
    """
    names = sorted(path.name for path in directory.iterdir())
    if "adapter_config.json" in names:  # transformers would load the adapter too, even from a pickle
        raise UnsupportedModelError(f"{directory} holds a LoRA adapter: merge it into the model, or remove it.")
    found = [name for name in names if name == "model.safetensors"]  # transformers prefers this file
    if INDEX in names:
        found += sorted(set(read_index(directory / INDEX).values()))
    found = found or [name for name in names if name.endswith(".safetensors")]
    if missing := sorted(set(found) - set(names)):
        raise UnsupportedModelError(f"{directory} lacks {len(missing)} weight files, first {missing[0]}.")
    if not found:
        raise UnsupportedModelError(f"{directory} holds no .safetensors weights{what_it_is(names)}")
    return [directory / name for name in dict.fromkeys(found)]


def read_index(index: Path) -> dict[str, str]:
    """Read the weight file of each tensor from an index.

    Raises:
        UnsupportedModelError: the index is malformed, or names a file that is not read.
    """
    weight_map = read_json_object(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise UnsupportedModelError(f"{index} is malformed: weight_map must name a file for each tensor.")
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UnsupportedModelError(
                f"{index} names the weight file {shown(name)!r}: only .safetensors files beside it are read. Convert"
                " the weights to safetensors."
            )
    return weight_map


def what_it_is(names: Sequence[str]) -> str:
    """Complete a sentence about a directory, whose files are `names`, without the wanted file."""
    endings = {
        ".gguf": "GGUF files are not supported: give the checkpoint that they were made from.",
        "adapter_config.json": "it is a LoRA adapter, not a model: merge it into its base model first.",
        ".bin": "pickled .bin weights run code when they are read: convert them to safetensors.",
        ".pt": "pickled .pt weights run code when they are read: convert them to safetensors.",
        ".pth": "pickled .pth weights run code when they are read: convert them to safetensors.",
    }
    for ending, reason in endings.items():
        if any(name.endswith(ending) for name in names):
            return f"; {reason}"
    return ": it is empty." if not names else ": give a checkpoint directory as transformers saves it."


def _check_file(path: Path) -> None:
    found = path.stat()
    _refuse_kind(path, found)
    if not os.access(path, os.R_OK):
        raise UnsupportedModelError(f"{path} cannot be read: this user lacks the permission.")
    if path.name in _MOST_BYTES and (encoding := _mark_of(path)) is not None:
        raise UnsupportedModelError(
            f"{path} begins with a byte order mark, and transformers does not read {encoding}: save it as UTF-8 without"
            " the mark."
        )
    most = MAX_CONFIG_BYTES if path.suffix == ".jinja" else _MOST_BYTES.get(path.name)
    if most is not None and found.st_size > most:
        raise UnsupportedModelError(_too_large(path, found.st_size, most))


def _mark_of(path: Path) -> str | None:
    """Return the encoding that a file's byte order mark names. None means that it has no mark."""
    with path.open("rb") as file:
        start = file.read(len(codecs.BOM_UTF8))
    return encoding_of(start) if start.startswith((codecs.BOM_UTF8, *UTF16_MARKS)) else None


def _refuse_kind(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = next((text for is_kind, text in _KINDS if is_kind(found.st_mode)), "of an unknown kind")
        raise UnsupportedModelError(f"{path} is {kind}, not a regular file: put a copy of the right file in its place.")


def _unreadable(path: Path, error: Exception) -> str:
    if path.is_symlink():
        return f"{path} is a link to {path.readlink()}, which leads to no file: put a copy in its place."
    return f"{path} cannot be read: {getattr(error, 'strerror', None) or error}."


def _too_large(path: Path, num_bytes: int, most: int) -> str:
    return f"{path} has {num_bytes} bytes: at most {most} are read."


def _too_deep(path: Path) -> str:
    return f"{path} is nested more than {_MAX_DEPTH} levels deep."


def _is_deeper(value: object, depth: int) -> bool:
    """Whether `value` has more than `depth` levels of objects and arrays."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth < 0 or any(_is_deeper(each, depth - 1) for each in inner)


def _non_finite(value: object, name: str = "") -> str | None:
    """Name of a number that is NaN or infinite, which JSON does not have; None means that there is none."""
    if isinstance(value, float) and not math.isfinite(value):
        return name
    if isinstance(value, dict):
        inner = ((each, f"{name}.{key}" if name else key) for key, each in value.items())
    elif isinstance(value, list):
        inner = ((each, name) for each in value)
    else:
        return None
    return next((found for each in inner if (found := _non_finite(*each)) is not None), None)


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
