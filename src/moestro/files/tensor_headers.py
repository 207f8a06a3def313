"""The tensors of safetensors files, read from the files' headers alone: names, types and shapes. No torch.

Format: https://github.com/huggingface/safetensors#format. A header is checked against its file before it is believed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from moestro.errors import UnsupportedModelError, shown

MAX_HEADER_BYTES = 32 << 20  # 100,000 tensors take 10 MiB
_LENGTH_BYTES = 8
_MAX_DIMENSIONS = 8  # published weights have 4
_METADATA = "__metadata__"
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


class _Stored(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class TensorHeader(msgspec.Struct, frozen=True):
    """One tensor of a checkpoint.

    Attributes:
        file: path of its file.
        dtype: name of its type in safetensors, for instance BF16.
        shape: numbers of elements, by dimension.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)


def read_headers(files: Sequence[Path]) -> dict[str, TensorHeader]:
    """Read the tensors of a checkpoint's files, by name.

    Raises:
        UnsupportedModelError: a file is torn or its header wrong, or two files have one tensor.
    """
    found: dict[str, TensorHeader] = {}
    for file in files:
        for name, entry in _read_file(file).items():
            if name in found:
                raise UnsupportedModelError(
                    f"{shown(name)} is in {found[name].file} and in {file}: remove one of them."
                )
            found[name] = TensorHeader(file, entry.dtype, tuple(entry.shape))
    return found


def _read_file(file: Path) -> dict[str, _Stored]:
    try:
        with file.open("rb") as opened:
            num_bytes = os.fstat(opened.fileno()).st_size
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            if not 2 <= length <= num_bytes - _LENGTH_BYTES:
                raise _torn(file, f"its header claims {length} bytes, and the file has {num_bytes}")
            if length > MAX_HEADER_BYTES:
                raise _torn(file, f"its header has {length} bytes, and at most {MAX_HEADER_BYTES} are read")
            raw = opened.read(length)
    except OSError as error:
        raise _torn(file, str(error.strerror)) from error
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        fields.pop(_METADATA, None)
        entries = {name: msgspec.json.decode(entry, type=_Stored) for name, entry in fields.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _torn(file, f"its header is malformed ({shown(error)})") from error
    _check_layout(file, entries, num_bytes - _LENGTH_BYTES - length)
    return entries


def _check_layout(file: Path, entries: dict[str, _Stored], num_bytes: int) -> None:
    """Refuse tensors that do not fill their file's data, of `num_bytes` bytes, one after the other."""
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if entry.dtype not in _BITS:
            raise _torn(file, f"tensor {shown(name)} is of the unknown dtype {shown(entry.dtype)}")
        if len(entry.shape) > _MAX_DIMENSIONS or min(entry.shape, default=0) < 0:
            raise _torn(file, f"tensor {shown(name)} has the shape {shown(entry.shape)}")
        wanted = math.prod(entry.shape) * _BITS[entry.dtype] // 8
        if end - begin != wanted:
            raise _torn(file, f"tensor {shown(name)} needs {wanted} bytes and has {end - begin}")
        if begin != at or end > num_bytes:
            raise _torn(file, f"tensor {shown(name)} is at {begin} to {end}, where {at} to {num_bytes} are left")
        at = end
    if at != num_bytes:
        raise _torn(file, f"its tensors take {at} bytes, and it holds {num_bytes}")


def _torn(file: Path, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"The weights in {file} cannot be loaded: {why}. Fetch the file again.")
