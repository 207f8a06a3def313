"""Reads an expert profile from any file that shows its experts' load; the contents say of which form a file is.

Forms: our own file, dumps of SGLang's recorder, gate choices per token (`.npy` [tokens, layers, top_k], also `.zst`),
responses of a vLLM server with `routed_experts`, and plain counts ([layers, experts]).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from moestro.errors import ConfigError
from moestro.files.text_files import encoding_of, text_of
from moestro.workload.experts.expert_profile import HEADER_MEMBER, ExpertProfile, read_profile_file, read_routing
from moestro.workload.experts.sglang_dumps import (
    SglangDump,
    deal_to_steps,
    has_steps,
    is_sglang_dump,
    load_of_tokens,
    profile_of_dumps,
)

_NPY, _ZIP, _ZSTD = b"\x93NUMPY", b"PK\x03\x04", b"\x28\xb5\x2f\xfd"
_KNOWN = (
    "a profile of Moestro, a dump of SGLang's recorder (.pt), choices of experts (.npy, .npy.zst), counts, or"
    " JSON lines of vLLM's responses with routed_experts"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileReading:
    """How to read a profile.

    Attributes:
        num_experts: Logical experts of a layer; None takes the largest one seen.
        top_k: Experts of a token, where a file has counts alone.
        tokens_per_step: Tokens of a step, where a file has no steps.
        needs_steps: Whether an operator chose `tokens_per_step`. A profile that recorded its steps is then refused.
        experts_of: Returns the experts of the network that a recording names, given its number of layers; None means
            that it is unknown.
        index: Index of a routing trace, JSON lines; None means that there is none.
        datasets: Data sets of the index to use; empty means all.
        read_tensors: Reads a `.pt` file; None means that torch is not installed.
    """

    num_experts: int | None = None
    top_k: int = 8
    tokens_per_step: int = 256
    needs_steps: bool = False
    experts_of: Callable[[str, int], int | None] = lambda _name, _num_layers: None
    index: Path | None = None
    datasets: tuple[str, ...] = ()
    read_tensors: Callable[[Path], Any] | None = None


def read_profile(paths: Sequence[Path], reading: ProfileReading) -> ExpertProfile:
    """Read one profile from one or several files of one form.

    Raises:
        ConfigError: A file cannot be read, is damaged or foreign, or the files do not fit together.
    """
    _refuse_repeated(paths)
    forms = {_form_of(path) for path in paths}
    if len(forms) != 1:
        raise ConfigError(f"the profile's files have different forms: {', '.join(sorted(forms)) or 'there is none'}")
    (form,) = forms
    if reading.index is not None and form != "array":
        raise ConfigError(f"--routing-index goes with choices of experts (.npy, .npy.zst), and {paths[0]} has none")
    if reading.datasets and reading.index is None:
        raise ConfigError("--dataset chooses among the answers of --routing-index: give that file, too")
    if form == "profile":
        if len(paths) > 1:
            raise ConfigError("give one profile of Moestro at a time")
        _refuse_steps(paths[0], reading)
        profile = read_profile_file(paths[0])
    elif form == "tensors":
        profile = _of_dumps([_dump(path, reading) for path in paths], reading)
    elif form == "array":
        profile = _of_arrays(paths, reading)
    else:
        profile = _of_json(paths, reading)
    if not profile.load.tokens.any():
        raise ConfigError(f"{paths[0]} has no token for any expert")
    if reading.num_experts not in (None, profile.num_experts):
        raise ConfigError(
            f"{paths[0]} has {profile.num_experts} experts a layer, and {reading.num_experts} were expected"
            " (--num-experts, --model)"
        )
    return profile


def _refuse_repeated(paths: Sequence[Path]) -> None:
    """Refuse files that are given twice, under one name or under two.

    Raises:
        ConfigError: Two of them are the same file, or have the same contents.
    """
    by_size: dict[int, list[Path]] = {}
    for path in paths:
        try:
            by_size.setdefault(path.stat().st_size, []).append(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
    for alike in by_size.values():
        seen: dict[bytes, Path] = {}
        for path in alike if len(alike) > 1 else ():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "blake2b").digest()
            if digest in seen:
                raise ConfigError(f"{path} has the same contents as {seen[digest]}: give each file of a recording once")
            seen[digest] = path


def _of_dumps(dumps: Sequence[SglangDump], reading: ProfileReading) -> ExpertProfile:
    if any(has_steps(dump) for dump in dumps):
        _refuse_steps(dumps[0].path, reading)
    return profile_of_dumps(dumps, float(reading.tokens_per_step * reading.top_k))


def _refuse_steps(path: Path, reading: ProfileReading) -> None:
    """Refuse a chosen number of tokens for a profile with steps.

    Raises:
        ConfigError: An operator chose one.
    """
    if reading.needs_steps:
        raise ConfigError(f"{path} has steps of its own: leave out --tokens-per-step")


def _form_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            start = file.read(4096)
            if start.startswith(_ZSTD):
                file.seek(0)
                start = zstandard.ZstdDecompressor().stream_reader(file).read(4096)
        if start.startswith(_ZIP):
            with zipfile.ZipFile(path) as members:
                return "profile" if HEADER_MEMBER in members.namelist() else "tensors"
    except zipfile.BadZipFile as error:
        raise ConfigError(f"{path} is damaged or cut off: {error}") from error
    except (OSError, zstandard.ZstdError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not start:
        raise ConfigError(f"{path} is empty or cut off")
    if start.startswith(_NPY):
        return "array"
    if start.decode(encoding_of(start), "ignore").lstrip().startswith(("{", "[")):
        return "json"
    raise ConfigError(f"{path} is of no form that Moestro reads: expected {_KNOWN}")


def _contents(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        if data.startswith(_ZSTD):
            with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)) as unpacked:
                return unpacked.read()
    except (OSError, zstandard.ZstdError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return data


def _dump(path: Path, reading: ProfileReading) -> SglangDump:
    if reading.read_tensors is None:
        raise ConfigError(f"{path} is a file of tensors, which torch reads: pip install 'moestro[serve]'")
    found = reading.read_tensors(path)
    if not is_sglang_dump(found):
        raise ConfigError(f"{path} is no dump of SGLang's recorder: it lacks logical_count and records")
    return SglangDump(path, found)


def _of_arrays(paths: Sequence[Path], reading: ProfileReading) -> ExpertProfile:
    if reading.index is not None:
        return _of_trace(paths, reading.index, reading)
    arrays = [_array(path, _contents(path), str(path)) for path in paths]
    if arrays[0].ndim == 2:
        dumps = [SglangDump(path, {"logical_count": array}) for path, array in zip(paths, arrays, strict=True)]
        return _of_dumps(dumps, reading)
    return _of_choices(arrays, reading, f"gate choices of {', '.join(path.name for path in paths)}")


def _of_trace(paths: Sequence[Path], index: Path, reading: ProfileReading) -> ExpertProfile:
    if len(paths) > 1:
        raise ConfigError("--routing-index goes with one file of choices")
    trace = read_routing(paths[0], index)
    known = sorted({each.dataset for each in trace.generations})
    unknown = sorted(set(reading.datasets) - set(known))
    if unknown:
        raise ConfigError(f"{index} has no data set {unknown[0]!r}; it has {', '.join(known)}")
    used = [each for each in trace.generations if not reading.datasets or each.dataset in reading.datasets]
    chosen = np.concatenate([trace.tokens_of(each) for each in used])
    what = ", ".join(reading.datasets) or "all data sets"
    return _of_choices([chosen], reading, f"gate choices of {paths[0].name}, {what}, {len(used)} answers")


def _array(path: Path, data: bytes, name: str) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError, MemoryError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from error
    if array.ndim not in (2, 3) or array.dtype.kind not in ("uif" if array.ndim == 2 else "ui") or not array.size:
        raise ConfigError(
            f"{name} holds {array.dtype}{list(array.shape)}: expected whole numbers [tokens, layers, top_k], or counts"
            " [layers, experts]"
        )
    return array


def _of_choices(arrays: Sequence[NDArray[Any]], reading: ProfileReading, origin: str, model: str = "") -> ExpertProfile:
    """Make a profile of int[tokens, layers, top_k], each array a source."""
    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) > 1:
        raise ConfigError(f"the recordings have different layers or top_k: {', '.join(map(str, sorted(shapes)))}")
    largest, smallest = max(int(array.max()) for array in arrays), min(int(array.min()) for array in arrays)
    notes: list[str] = []
    num_experts = reading.num_experts or reading.experts_of(model, arrays[0].shape[1])
    if num_experts is None:
        num_experts = largest + 1
        notes.append(f"{num_experts} experts, by the largest one seen; --num-experts states another number")
    if smallest < -1 or largest >= num_experts:
        raise ConfigError(f"expert {largest if largest >= num_experts else smallest} is not one of {num_experts}")
    num_layers, top_k = arrays[0].shape[1:]
    # Servers record zeros for a dense layer; in a layer with experts, no token chooses one of them twice.
    dense = [layer for layer in range(num_layers) if all(_is_dense(array[:, layer]) for array in arrays)]
    kept = [layer for layer in range(num_layers) if layer not in dense]
    if not kept:
        raise ConfigError("no layer has choices of experts")
    if dense:
        arrays = [array[:, kept] for array in arrays]
        notes.append(f"layers without choices, which are taken to be dense: {len(dense)}")
    dealt = deal_to_steps(arrays, reading.tokens_per_step)
    num_tokens = sum(map(len, arrays))
    notes.append(f"the {num_tokens:,} tokens are dealt to steps of {reading.tokens_per_step} (--tokens-per-step)")
    return ExpertProfile(
        load=load_of_tokens(dealt, num_experts),
        layers=tuple(kept),
        num_model_layers=num_layers,
        model=model,
        origin=f"{origin}, top-{top_k}",
        notes=tuple(notes),
    )


def _is_dense(choices: NDArray[Any]) -> bool:
    return choices.shape[1] > 1 and bool((choices == choices[:1, :1]).all())


def _of_json(paths: Sequence[Path], reading: ProfileReading) -> ExpertProfile:
    objects = [_objects(path) for path in paths]
    if all(len(found) == 1 and "logical_count" in found[0] for found in objects):
        dumps = [
            SglangDump(path, {"logical_count": _counts(path, found[0]["logical_count"])})
            for path, found in zip(paths, objects, strict=True)
        ]
        return _of_dumps(dumps, reading)
    recordings, models, num_empty = [], set(), 0
    for path, found in zip(paths, objects, strict=True):
        routed = [list(_routed(path, number, response)) for number, response in enumerate(found, 1)]
        num_empty += routed.count([])
        arrays = [array for each in routed for array in each]
        if not arrays:
            raise ConfigError(
                f"{path} has no routed_experts: start vLLM with --enable-return-routed-experts. Expected {_KNOWN}"
            )
        if len({array.shape[1:] for array in arrays}) > 1:
            raise ConfigError(f"{path}: its responses have different layers or top_k")
        recordings.append(np.concatenate(arrays))
        models |= {str(response["model"]) for response in found if response.get("model")}
    model = models.pop() if len(models) == 1 else ""
    num_responses = sum(map(len, objects)) - num_empty
    profile = _of_choices(recordings, reading, f"routed_experts of vLLM's responses ({num_responses})", model)
    if not num_empty:
        return profile
    return replace(
        profile, notes=(*profile.notes, f"responses without routed_experts, which are left out: {num_empty}")
    )


def _objects(path: Path) -> list[dict[str, Any]]:
    """Read one JSON object, an array of them, or one a line."""
    try:
        data = text_of(_contents(path))
    except UnicodeError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    try:
        found = msgspec.json.decode(data)
    except msgspec.DecodeError:
        try:
            found = msgspec.json.Decoder().decode_lines(data)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path} is neither JSON nor JSON lines: {error}") from None
    found = found if isinstance(found, list) else [found]
    if not all(isinstance(each, dict) for each in found):
        raise ConfigError(f"{path}: expected JSON objects")
    return found


def _counts(path: Path, found: object) -> NDArray[Any]:
    try:
        return np.array(found, np.float64)
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"{path}: logical_count is no array of numbers: {error}") from None


def _routed(path: Path, number: int, response: dict[str, Any]) -> Iterator[NDArray[Any]]:
    """Yield the arrays of one response: of its prompt, where it has one apart, and of each choice."""
    choices = response.get("choices")
    places = [response, *(choices if isinstance(choices, list) else [])]
    for place in places:
        for name in ("prompt_routed_experts", "routed_experts"):
            found = place.get(name) if isinstance(place, dict) else None
            if found is not None:
                yield _decoded(path, f"{path}, response {number}: {name}", found)


def _decoded(path: Path, name: str, found: object) -> NDArray[Any]:
    if isinstance(found, str):
        try:
            data = base64.b64decode(found, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ConfigError(f"{name} is not base64: {error}") from None
        array = _array(path, data, name)
    else:
        try:
            array = np.array(found, np.int64)
        except (ValueError, TypeError, OverflowError) as error:
            raise ConfigError(f"{name} is no array of whole numbers: {error}") from None
    if array.ndim != 3:
        raise ConfigError(f"{name} holds {list(array.shape)}: expected [tokens, layers, top_k]")
    return array
