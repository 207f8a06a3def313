"""The settings of `moestro calibrate`. A docstring under a field is its text in `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from moestro.core.setting_checks import CheckedSettings, at_least
from moestro.errors import ConfigError
from moestro.model.settings import DeviceKind, Dtype, LoadFormat

MODEL_GROUP = Group.create_ordered("Model", help="The measured model, loaded as by moestro serve.")
_RANGE = Group.create_ordered(
    "Range",
    help="The measured shapes. Prices are interpolated between them, and extrapolated linearly beyond.",
)
_MEASURING = Group.create_ordered("Measuring", help="The measurement, and the file of the table.")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class MeasuredModel(CheckedSettings):
    """The network, loaded as a server loads it."""

    dtype: Annotated[Dtype, Parameter(group=MODEL_GROUP)] = "auto"
    "Data type of weights, activations and KV cache; auto: what the checkpoint was saved in."
    device: Annotated[DeviceKind, Parameter(group=MODEL_GROUP)] = "auto"
    "Device of the network; auto: an accelerator if there is one."
    load_format: Annotated[LoadFormat, Parameter(group=MODEL_GROUP)] = "auto"
    "dummy: random weights of the right shapes, to measure without a download."
    block_size: Annotated[int, at_least(1), Parameter(group=MODEL_GROUP)] = 16
    "Tokens of one KV block."
    kv_cache_memory_bytes: Annotated[int, at_least(1), Parameter(group=MODEL_GROUP)] = 1 << 30
    "Bytes of KV cache. Shapes that do not fit are not measured."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Range(CheckedSettings):
    """The shapes that are measured."""

    max_model_len: Annotated[int | None, at_least(64), Parameter(group=_RANGE)] = None
    "Tokens of the longest sequence. Unset: the limit of the model, if it fits."
    max_num_seqs: Annotated[int, at_least(2), Parameter(group=_RANGE)] = 64
    "Maximum number of decodes in one step."
    max_num_batched_tokens: Annotated[int, at_least(32), Parameter(group=_RANGE)] = 2048
    "Tokens of the largest prefill chunk."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Measuring(CheckedSettings):
    """The measurement."""

    rounds: Annotated[int, at_least(2), Parameter(group=_MEASURING)] = 5
    "Visits to every shape, so that a drift of the machine affects all shapes alike."
    num_checks: Annotated[int, at_least(1), Parameter(group=_MEASURING)] = 16
    "Other shapes that are measured to check how well the table prices them."
    seed: Annotated[int, Parameter(group=_MEASURING)] = 0
    "Random seed of the tokens, and of the shapes that are checked."
    out: Annotated[Path, Parameter(group=_MEASURING)] = Path("table.json")
    "File of the table."

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.out.absolute().parent.is_dir():  # checked before the measurement, which takes minutes
            raise ConfigError(f"--out {self.out}: there is no directory {self.out.absolute().parent}")
