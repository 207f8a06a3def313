"""What `moestro calibrate` is told: frozen values, checked when made, with the words of its help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from moestro.errors import ConfigError
from moestro.model.settings import DeviceKind, Dtype, LoadFormat

MODEL_GROUP = Group.create_ordered("Model", help="The model to measure, as for moestro serve.")
_RANGE = Group.create_ordered(
    "Range", help="The measured range. Prices are interpolated between measured points, and extrapolated beyond them."
)
_MEASURING = Group.create_ordered("Measuring", help="The effort of measuring, and the file of the table.")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class MeasuredModel:
    """The network, loaded as a server loads it."""

    dtype: Annotated[Dtype, Parameter(group=MODEL_GROUP)] = "auto"
    "Data type of weights, activations and KV cache; auto: that of the checkpoint."
    device: Annotated[DeviceKind, Parameter(group=MODEL_GROUP)] = "auto"
    "The device to measure; auto: an accelerator if there is one."
    load_format: Annotated[LoadFormat, Parameter(group=MODEL_GROUP)] = "auto"
    "dummy: random weights of the right shapes, to measure without a download."
    block_size: Annotated[int, Parameter(group=MODEL_GROUP)] = 16
    "Tokens of one KV block."
    kv_cache_memory_bytes: Annotated[int, Parameter(group=MODEL_GROUP)] = 1 << 30
    "Bytes of KV cache; steps that it cannot hold are not measured."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Range:
    """Which shapes."""

    max_model_len: Annotated[int | None, Parameter(group=_RANGE)] = None
    "Tokens of the longest sequence. Unset: the limit of the model, if it fits."
    max_num_seqs: Annotated[int, Parameter(group=_RANGE)] = 64
    "Maximum number of decodes in one step."
    max_num_batched_tokens: Annotated[int, Parameter(group=_RANGE)] = 2048
    "Tokens of the largest prefill chunk."

    def __post_init__(self) -> None:
        _check_at_least("--max-num-seqs", self.max_num_seqs, 2)
        _check_at_least("--max-num-batched-tokens", self.max_num_batched_tokens, 32)
        if self.max_model_len is not None:
            _check_at_least("--max-model-len", self.max_model_len, 64)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Measuring:
    """How."""

    rounds: Annotated[int, Parameter(group=_MEASURING)] = 5
    "Number of measurements of each shape. Each round visits all shapes, so drift affects them alike."
    num_checks: Annotated[int, Parameter(group=_MEASURING)] = 16
    "Number of further shapes that check the prices of shapes outside the table."
    seed: Annotated[int, Parameter(group=_MEASURING)] = 0
    "Random seed for the tokens and the checked shapes."
    out: Annotated[Path, Parameter(group=_MEASURING)] = Path("table.json")
    "The file to write."

    def __post_init__(self) -> None:
        _check_at_least("--rounds", self.rounds, 2)
        _check_at_least("--num-checks", self.num_checks, 1)
        if not self.out.absolute().parent.is_dir():  # said before minutes are spent on measuring
            raise ConfigError(f"--out {self.out}: there is no directory {self.out.absolute().parent}")


def _check_at_least(flag: str, given: int, least: int) -> None:
    if given < least:
        raise ConfigError(f"{flag} {given} is too small: give at least {least}.")
