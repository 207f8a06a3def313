"""The demo model without most of its layers, for tests that compare servers of the same network."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

KEPT = (0, 6)  # The first layer and the last one.
NUM_LAYERS = len(KEPT)


def write_short_demo(directory: Path, demo_dir: Path) -> Path:
    """Write the checkpoint `demo_dir` with the layers `KEPT` alone; its text makes less sense.

    Returns `directory`.
    """
    shutil.copytree(demo_dir, directory, dirs_exist_ok=True)
    config = json.loads((demo_dir / "config.json").read_text()) | {"num_hidden_layers": NUM_LAYERS}
    (directory / "config.json").write_text(json.dumps(config))
    _cut(demo_dir / "model.safetensors", directory / "model.safetensors")
    return directory


def _cut(source: Path, target: Path) -> None:
    """Write the tensors of the kept layers and those that belong to none, without torch: numpy has no bfloat16."""
    content = source.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header, data = {}, bytearray()
    for name, tensor in json.loads(content[8:begin]).items():
        new = re.sub(r"(?<=\.layers\.)\d+", _new_number, name)
        if name == "__metadata__" or "dropped" in new:
            continue
        first, end = (begin + offset for offset in tensor["data_offsets"])
        header[new] = tensor | {"data_offsets": [len(data), len(data) + end - first]}
        data += content[first:end]
    text = json.dumps(header).encode()
    target.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _new_number(match: re.Match[str]) -> str:
    layer = int(match[0])
    return str(KEPT.index(layer)) if layer in KEPT else "dropped"
