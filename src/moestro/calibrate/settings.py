"""What `moestro calibrate` is told: frozen values, checked when made, with the words of its help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from moestro.core.setting_checks import CheckedSettings, at_least
from moestro.errors import ConfigError
from moestro.model.settings import DeviceKind, Dtype, LoadFormat

MODEL_GROUP = Group.create_ordered("Model", help="What is measured; as for moestro serve.")
_RANGE = Group.create_ordered(
    "Range", help="How far. Between measured points prices are interpolated, beyond them they go on in a straight line."
)
_MEASURING = Group.create_ordered("Measuring", help="How carefully, and where the table goes.")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class MeasuredModel(CheckedSettings):
    """The network, loaded as a server loads it."""

    dtype: Annotated[Dtype, Parameter(group=MODEL_GROUP)] = "auto"
    "Of weights, activations and KV cache; auto: what the checkpoint was saved in."
    device: Annotated[DeviceKind, Parameter(group=MODEL_GROUP)] = "auto"
    "Where it runs; auto: an accelerator if there is one."
    load_format: Annotated[LoadFormat, Parameter(group=MODEL_GROUP)] = "auto"
    "dummy: random weights of the right shapes, to measure without a download."
    block_size: Annotated[int, at_least(1), Parameter(group=MODEL_GROUP)] = 16
    "Tokens of one KV block."
    kv_cache_memory_bytes: Annotated[int, at_least(1), Parameter(group=MODEL_GROUP)] = 1 << 30
    "Bytes of KV cache: what it cannot hold is not measured."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Range(CheckedSettings):
    """Which shapes."""

    max_model_len: Annotated[int | None, at_least(64), Parameter(group=_RANGE)] = None
    "Tokens of the longest sequence; unset: what the model was made for, if it fits."
    max_num_seqs: Annotated[int, at_least(2), Parameter(group=_RANGE)] = 64
    "Most decodes in one step."
    max_num_batched_tokens: Annotated[int, at_least(32), Parameter(group=_RANGE)] = 2048
    "Tokens of the largest prefill chunk."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Measuring(CheckedSettings):
    """How."""

    rounds: Annotated[int, at_least(2), Parameter(group=_MEASURING)] = 5
    "Times that every shape is visited: a machine that drifts drifts under all of them alike."
    num_checks: Annotated[int, at_least(1), Parameter(group=_MEASURING)] = 16
    "Other shapes, measured to see how well the table prices what it does not hold."
    seed: Annotated[int, Parameter(group=_MEASURING)] = 0
    "Of the tokens, and of the shapes that are checked."
    out: Annotated[Path, Parameter(group=_MEASURING)] = Path("table.json")
    "The file to write."

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.out.absolute().parent.is_dir():  # said before minutes are spent on measuring
            raise ConfigError(f"--out {self.out}: there is no directory {self.out.absolute().parent}")
