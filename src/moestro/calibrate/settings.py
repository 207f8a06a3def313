"""The settings of `moestro calibrate`. A docstring under a field is its text in `--help`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from moestro.core.setting_checks import CheckedSettings, above, at_least, flag_of
from moestro.errors import ConfigError
from moestro.model.settings import DeviceKind, Dtype, LoadFormat

MODEL_GROUP = Group.create_ordered("Model", help="The measured model, loaded as by moestro serve.")
_RANGE = Group.create_ordered(
    "Range",
    help="The measured shapes. Prices are interpolated between them, and extrapolated linearly beyond.",
)
_SERVER = Group.create_ordered(
    "Server",
    help=(
        "A running OpenAI-compatible server that is probed over HTTP, such as vLLM, SGLang or moestro serve. Of the"
        " groups above and below, --seed and --out apply to it."
    ),
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
class ServerProbing(CheckedSettings):
    """A running server that is probed from outside, in place of a model that is loaded here."""

    server: Annotated[str | None, Parameter(name=("--server", "--url", "--base-url"), group=_SERVER)] = None
    "Address of the server, with or without /v1. Unset: MODEL is measured in this process."
    served_model: Annotated[str | None, Parameter(group=_SERVER)] = None
    "Name of the model on the server; unset: the first that /v1/models lists."
    api_key: Annotated[str | None, Parameter(group=_SERVER, show_default=False)] = field(default=None, repr=False)
    "Bearer token of all requests. MOESTRO_API_KEY keeps it out of the process list."
    seconds: Annotated[float, at_least(5), Parameter(group=_SERVER)] = 300.0
    "Duration of the probes. With less time fewer of them repeat, and intervals are wider."
    max_concurrency: Annotated[int, at_least(1), Parameter(group=_SERVER)] = 64
    "Most requests at once. A larger maximum batch is not identified."
    max_prompt_tokens: Annotated[int, at_least(16), Parameter(group=_SERVER)] = 8192
    "Tokens of the longest prompt. A larger token budget of a step is not identified."
    max_added_load: Annotated[float | None, above(0, at_most=1), Parameter(group=_SERVER)] = None
    (
        "Share of the time in which probes may be under way beside other traffic, one request at a time, 0.1 for a"
        " tenth. Only costs are estimated then. Unset: the server has to be idle, and probes fill it."
    )
    vocab_size: Annotated[int, at_least(1), Parameter(group=_SERVER)] = 4096
    "Token ids of prompts are drawn from 0 to this number, exclusive. Set it to the model's, so that the gate sees all."

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.server is None:
            # A key may come from the environment, where it is for other commands.
            names = (each for each in fields(self) if each.name != "api_key")
            given = [each for each in names if getattr(self, each.name) != each.default]
            if given:
                raise ConfigError(f"{flag_of(given[0].name)} is for a running server: give --server URL too")
        elif not self.server.startswith(("http://", "https://")):
            raise ConfigError(f"--server must begin with http:// or https://, got {self.server}")


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
        # Checked before the measurement, which takes minutes.
        if not self.out.absolute().parent.is_dir():
            raise ConfigError(f"--out {self.out}: there is no directory {self.out.absolute().parent}")
        if self.out.is_dir():
            raise ConfigError(f"--out {self.out} is a directory: name a file in it")
