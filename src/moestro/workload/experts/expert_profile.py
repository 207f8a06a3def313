"""A recorded load of experts with what is known of its origin, and the experts that a gate chose for real tokens."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np
import zstandard
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from moestro import __version__
from moestro.core.experts.expert_load import ExpertLoad, LayerPairs
from moestro.errors import ConfigError
from moestro.files.text_files import open_lines, read_jsonl

CREATED_BY = f"moestro {__version__}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertProfile:
    """The load of a network's experts, as a file or a server's recording has it.

    Attributes:
        load: Load of the layers with experts.
        layers: Number of each of these layers in the network, from 0; dense layers count too.
        num_model_layers: Layers of the network, as far as the recording shows.
        model: Name of the network; empty means that the recording does not say it.
        origin: What was recorded, in words.
        notes: What the reader had to assume, a sentence each.
        created_by: Program that made the profile.
        ranks: Ranks whose files were read, where each rank writes one; empty means that there is one for all.
    """

    load: ExpertLoad
    layers: tuple[int, ...]
    num_model_layers: int
    model: str = ""
    origin: str = ""
    notes: tuple[str, ...] = ()
    created_by: str = CREATED_BY
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.layers) != self.num_layers:
            raise ValueError(f"{len(self.layers)} layer numbers for {self.num_layers} layers")
        ordered = all(first < second for first, second in zip(self.layers, self.layers[1:], strict=False))
        if self.layers and not (ordered and self.layers[0] >= 0 and self.layers[-1] < self.num_model_layers):
            raise ValueError(f"layer numbers must grow, and be below {self.num_model_layers}")

    @property
    def num_sources(self) -> int:
        """Number of sources whose tokens are counted apart."""
        return int(self.load.tokens.shape[0])

    @property
    def num_layers(self) -> int:
        """Number of layers with experts."""
        return int(self.load.tokens.shape[1])

    @property
    def num_experts(self) -> int:
        """Number of logical experts of a layer."""
        return int(self.load.tokens.shape[2])


def without_dense_layers(profile: ExpertProfile) -> ExpertProfile:
    """Leave out layers in which no expert got a token: servers record a row of zeros for a dense layer."""
    return with_layers(profile, profile.load.total.sum(axis=1) > 0)


def with_layers(profile: ExpertProfile, kept: NDArray[np.bool_]) -> ExpertProfile:
    """Leave out all layers but those marked.

    Args:
        profile: A profile.
        kept: bool[layers].
    """
    if kept.all():
        return profile
    load, layers = profile.load, np.array(profile.layers, np.int64)
    return replace(
        profile,
        load=ExpertLoad(
            load.tokens[:, kept], load.variance[kept], load.activated[kept], load.num_steps, _pairs(load.pairs, kept)
        ),
        layers=tuple(layers[kept].tolist()),
    )


def _pairs(pairs: LayerPairs | None, kept: NDArray[np.bool_]) -> LayerPairs | None:
    """Keep pairs whose two layers stay neighbours."""
    if pairs is None:
        return None
    stays = kept[pairs.layer] & kept[np.minimum(pairs.layer + 1, len(kept) - 1)]
    number = np.cumsum(kept) - 1
    return LayerPairs(
        number[pairs.layer[stays]].astype(np.int32), pairs.expert[stays], pairs.next_expert[stays], pairs.count[stays]
    )


# Our file of an expert profile: a zip of NumPy arrays, compressed, with checksums, and a JSON header. No pickle.
#
# The header (`header.npy`, UTF-8 text as bytes) has the form, its version, the network, the layers and the window. The
# other members are the arrays of `ExpertLoad` under their names, and those of `LayerPairs` with `pairs_` before them.

FORM, VERSION = "moestro-expert-load", 1
HEADER_MEMBER = "header.npy"
_PAIR_COLUMNS = ("layer", "expert", "next_expert", "count")


class _Header(msgspec.Struct, kw_only=True):
    form: str
    version: int
    model: str
    num_experts: int
    num_sources: int
    layers: list[int]
    num_model_layers: int
    num_steps: float
    origin: str
    notes: list[str]
    created_by: str


def write_profile(path: Path, profile: ExpertProfile) -> None:
    """Write a profile.

    Raises:
        ConfigError: The file cannot be written.
    """
    load = profile.load
    header = _Header(
        form=FORM,
        version=VERSION,
        model=profile.model,
        num_experts=profile.num_experts,
        num_sources=profile.num_sources,
        layers=list(profile.layers),
        num_model_layers=profile.num_model_layers,
        num_steps=load.num_steps,
        origin=profile.origin,
        notes=list(profile.notes),
        created_by=profile.created_by,
    )
    arrays: dict[str, NDArray[Any]] = {
        "header": np.frombuffer(msgspec.json.encode(header), np.uint8),
        "tokens": load.tokens,
        "variance": load.variance,
        "activated": load.activated,
    }
    if load.pairs is not None:
        arrays |= {f"pairs_{name}": getattr(load.pairs, name) for name in _PAIR_COLUMNS}
    try:
        with path.open("wb") as file:  # an open file, because NumPy appends .npz to a name without it
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


def read_profile_file(path: Path) -> ExpertProfile:
    """Read a profile that `write_profile` wrote.

    Raises:
        ConfigError: The file is damaged, or its version or contents are not ours; the text names what is wrong.
    """
    try:
        with path.open("rb") as file:  # NumPy leaves a damaged file open that it opened by name
            members = np.load(file, allow_pickle=False)
            if not isinstance(members, NpzFile):
                raise ValueError("it is no zip of arrays")
            header = _header(path, members["header"].tobytes())
            arrays = {name: members[name] for name in members.files if name != "header"}
    except (OSError, ValueError, KeyError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"{path} is damaged or cut off: {error}") from error
    missing = {"tokens", "variance", "activated"} - arrays.keys()
    if missing:
        raise ConfigError(f"{path} is damaged: it lacks {', '.join(sorted(missing))}")
    try:
        return _profile(header, arrays)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from error


def _header(path: Path, text: bytes) -> _Header:
    try:
        header = msgspec.json.decode(text, type=_Header)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} has a damaged header: {error}") from None
    if header.form != FORM:
        raise ConfigError(f"{path} has the form {header.form!r}, not {FORM!r}")
    if header.version != VERSION:
        raise ConfigError(f"{path} has version {header.version}; this Moestro reads version {VERSION}")
    return header


def _profile(header: _Header, arrays: dict[str, NDArray[Any]]) -> ExpertProfile:
    shape = (header.num_sources, len(header.layers), header.num_experts)
    if arrays["tokens"].shape != shape:
        raise ValueError(f"tokens has the shape {arrays['tokens'].shape}, and the header {shape}")
    floats = {name: np.asarray(arrays[name], np.float64) for name in ("tokens", "variance", "activated")}
    pairs = _stored_pairs(arrays, shape) if "pairs_layer" in arrays else None
    return ExpertProfile(
        load=ExpertLoad(**floats, num_steps=header.num_steps, pairs=pairs),
        layers=tuple(header.layers),
        num_model_layers=header.num_model_layers,
        model=header.model,
        origin=header.origin,
        notes=tuple(header.notes),
        created_by=header.created_by,
    )


def _stored_pairs(arrays: dict[str, NDArray[Any]], shape: tuple[int, int, int]) -> LayerPairs:
    columns = {name: arrays[f"pairs_{name}"] for name in _PAIR_COLUMNS}
    if len({column.shape for column in columns.values()}) != 1 or columns["layer"].ndim != 1:
        raise ValueError("the columns of its pairs have different lengths")
    bounds = {"layer": shape[1] - 1, "expert": shape[2], "next_expert": shape[2]}
    for name, bound in bounds.items():
        column = columns[name]
        if column.dtype.kind != "i" or (len(column) and not 0 <= column.min() <= column.max() < bound):
            raise ValueError(f"pairs_{name} must have whole numbers below {bound}")
    count = np.asarray(columns["count"], np.float64)
    if not (np.isfinite(count) & (count >= 0)).all():
        raise ValueError("pairs_count has a figure that is negative or not finite")
    layer, expert, after = (columns[name].astype(np.int32) for name in bounds)
    return LayerPairs(layer, expert, after, count)


UInt8s = NDArray[np.uint8]
Int64s = NDArray[np.int64]

# Recorded choices of a gate, from which placement is planned and skew is measured.

_PIECE_BYTES = 1 << 20


class TracedAnswer(msgspec.Struct, frozen=True):
    """One answer: the tokens in rows offset .. offset + num_tokens.

    Attributes:
        dataset, category: benchmark and subject of the question.
        prompt_tokens: length of the question, whose routing was not recorded.
    """

    dataset: str
    category: str
    num_tokens: Annotated[int, msgspec.Meta(ge=1)]
    offset: Annotated[int, msgspec.Meta(ge=0)]
    prompt_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class RoutingTrace:
    """The experts of every generated token.

    Attributes:
        experts: uint8[tokens, layers, top_k], one byte a choice; 88,539 tokens of GPT-OSS-20B take 8.5 MB.
        generations: consecutive answers, in order.
    """

    experts: UInt8s
    generations: tuple[TracedAnswer, ...]

    def tokens_of(self, generation: TracedAnswer) -> UInt8s:
        """uint8[num_tokens, layers, top_k], a view."""
        return self.experts[generation.offset : generation.offset + generation.num_tokens]

    def counts(self, num_experts: int, tokens: slice = slice(None)) -> Int64s:
        """int64[layers, num_experts], how many of `tokens` chose each expert.

        The count runs layer by layer and allocates no array of the trace's size.
        """
        part = self.experts[tokens]
        return np.stack([np.bincount(part[:, i].reshape(-1), minlength=num_experts) for i in range(part.shape[1])])


def read_routing(experts: Path, index: Path) -> RoutingTrace:
    """Read a routing trace.

    Args:
        experts: NumPy file of uint8 (.npy, .zst allowed).
        index: its generations as JSON lines.

    Raises:
        ConfigError: a file cannot be read, has another form, or the two do not match.
    """
    generations = []
    with open_lines(index) as lines:
        for number, fields in read_jsonl(index, lines):
            try:
                generations.append(msgspec.convert(fields, TracedAnswer))
            except msgspec.ValidationError as error:
                needed = ", ".join(TracedAnswer.__struct_fields__)
                raise ConfigError(f"{index}, line {number}: {error}; expected {needed}") from None
    array = _read_npy(experts)
    ends = [each.offset + each.num_tokens for each in generations]
    if [0, *ends[:-1]] != [each.offset for each in generations] or ends[-1:] != [len(array)]:
        raise ConfigError(f"{index} must list the {len(array)} tokens of {experts} in order, without gaps")
    return RoutingTrace(array, tuple(generations))


class _Counts(msgspec.Struct):
    expert_counts: dict[str, list[list[int]]]
    crosslayer: dict[str, list[list[list[int]]]] = {}


@dataclass(frozen=True, slots=True, eq=False)
class ExpertCounts:
    """How often the experts of one checkpoint were chosen, by domain of text.

    Attributes:
        by_domain: domain to int64[recorded layers, experts].
        next_layer: domain to int64[recorded layers - 1, experts, experts]: pairs of choices in one recorded layer and
            the next recorded one; empty where pairs were not recorded.
    """

    by_domain: dict[str, Int64s]
    next_layer: dict[str, Int64s]


def read_expert_counts(path: Path) -> dict[str, ExpertCounts]:
    """Read counts by checkpoint in the form of OLMoE's authors: layers 0, 7 and 15 of OLMoE and Mixtral.

    Raises:
        ConfigError: the file cannot be read or has another form.
    """
    with open_lines(path) as lines:
        try:
            found = msgspec.json.decode(lines.read(), type=dict[str, _Counts])
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}: expected expert_counts by checkpoint and domain: {error}") from None
    return {
        name: ExpertCounts(
            {domain: np.array(counts, np.int64) for domain, counts in each.expert_counts.items()},
            {domain: np.array(counts, np.int64) for domain, counts in each.crosslayer.items()},
        )
        for name, each in found.items()
    }


def _read_npy(path: Path) -> UInt8s:
    try:
        with path.open("rb") as packed:
            if path.suffix != ".zst":
                return _fill(path, packed)
            with zstandard.ZstdDecompressor().stream_reader(packed) as unpacked:
                return _fill(path, unpacked)
    except (OSError, ValueError, zstandard.ZstdError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _fill(path: Path, source: BinaryIO) -> UInt8s:
    """Read piece by piece into the array, so that memory never holds the file twice, compressed or not."""
    version = np.lib.format.read_magic(source)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(source)
    if dtype != np.uint8 or len(shape) != 3 or is_fortran:
        raise ConfigError(f"{path} holds {dtype}{list(shape)}: expected uint8[tokens, layers, top_k] in C order")
    array = np.empty(shape, np.uint8)
    flat, num_read = array.reshape(-1), 0
    while num_read < array.size:
        piece = source.read(_PIECE_BYTES)
        if not piece:
            raise ConfigError(f"{path} ends {array.size - num_read} bytes too early")
        flat[num_read : num_read + len(piece)] = np.frombuffer(piece, np.uint8)
        num_read += len(piece)
    return array
