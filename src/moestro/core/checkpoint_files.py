"""Safe reading of a checkpoint directory: only its own files, and JSON of bounded size and depth. No torch here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moestro.errors import UnsupportedModelError

# Files that Moestro and transformers read. Weights are safetensors only, because the other formats are pickles.
READ_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
_TEMPLATES = "additional_chat_templates"
MAX_CONFIG_BYTES = 4 << 20  # published files have some KiB
MAX_INDEX_BYTES = 64 << 20  # the index of a checkpoint with 100,000 tensors has 10 MiB
_MAX_DEPTH = 32  # published configs have 6; transformers reads a config recursively


def read_json_object(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Read the fields of a JSON file.

    Raises:
        UnsupportedModelError: the path is no regular file, or the file is too large, too deep or no JSON object.
    """
    if not path.is_file():
        raise UnsupportedModelError(f"{path} is not a regular file.")
    if (size := path.stat().st_size) > max_bytes:
        raise UnsupportedModelError(f"{path} has {size} bytes: at most {max_bytes} are read.")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedModelError(f"{path} is malformed: {error}.") from error
    except RecursionError:
        raise UnsupportedModelError(_too_deep(path)) from None
    if not isinstance(fields, dict):
        raise UnsupportedModelError(f"{path} is malformed: it must hold one JSON object.")
    if _is_deeper(fields, _MAX_DEPTH):
        raise UnsupportedModelError(_too_deep(path))
    return fields


def refuse_links_out(directory: Path) -> None:
    """Refuse a checkpoint directory with links to files outside of it.

    In the Hugging Face hub's cache a checkpoint's files are links to `blobs` of the same repository, which are allowed.

    Raises:
        UnsupportedModelError: a file that would be read lies elsewhere.
    """
    roots = [directory.resolve()]
    if roots[0].parent.name == "snapshots":
        roots.append(roots[0].parents[1] / "blobs")
    files = [path for pattern in READ_PATTERNS for path in directory.glob(pattern)]
    for path in (*files, *(directory / _TEMPLATES).glob("*")):
        target = path.resolve()
        if not any(target.is_relative_to(root) for root in roots):
            raise UnsupportedModelError(
                f"{path} is a link to {target}, outside of the checkpoint's directory: put a copy in its place."
            )


def _too_deep(path: Path) -> str:
    return f"{path} is nested more than {_MAX_DEPTH} levels deep."


def _is_deeper(value: object, depth: int) -> bool:
    """Whether `value` has more than `depth` levels of objects and arrays."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth < 0 or any(_is_deeper(each, depth - 1) for each in inner)
