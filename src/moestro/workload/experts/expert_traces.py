"""Recorded gate choices: the experts of real tokens, from which placement is planned and skew is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from moestro.errors import ConfigError
from moestro.workload.files import open_lines, read_jsonl

UInt8s = NDArray[np.uint8]
Int64s = NDArray[np.int64]

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
