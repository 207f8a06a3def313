"""The settings of one rank's network and its KV cache, its place on the machine, and its sampling defaults. No torch.

A docstring under a field is its text in `--help`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec

from moestro.core.request import SAMPLING_RANGES, SamplingDefaults
from moestro.core.setting_checks import CheckedSettings, above, at_least, between, flag_group
from moestro.errors import ConfigError, UnsupportedModelError, shown_literal
from moestro.files.checkpoint import MAX_TOKENIZER_BYTES, read_bytes, read_json_object
from moestro.model.experts.gate_override import check_spec

Dtype = Literal["auto", "float32", "float64", "bfloat16", "float16"]
DeviceKind = Literal["auto", "cpu", "cuda"]
KernelKind = Literal["auto", "own", "eager"]
LoadFormat = Literal["auto", "dummy"]

DEMO_MODEL = "moestro-demo"  # the small model that comes with Moestro

_DEFAULT_KV_CACHE_BYTES = 1 << 30
_MEMORY = ("Memory", "The length and the number of sequences.", 2)


@dataclass(frozen=True, kw_only=True)
class NetworkSettings(CheckedSettings):
    """Which network one rank loads, and how."""

    model: str = field(default=DEMO_MODEL, kw_only=False)
    "A checkpoint directory, or a name on the Hugging Face hub; moestro-demo is the small one that comes with Moestro."
    tokenizer: str | None = None
    "A directory with tokenizer.json and the chat template, or a name on the hub, if they are not the model's own."
    dtype: Dtype = "auto"
    "Data type of weights, activations and KV cache; auto: what the checkpoint was saved in."
    device: str = "auto"
    "cpu, cuda, auto (an accelerator if there is one), or paced:h20 (modelled durations of MODEL on that GPU)."
    kernels: KernelKind = "auto"
    "auto: Moestro's own kernels where they can be had (a CPU serves meanwhile); own: nothing else; eager: torch's."
    enforce_eager: bool = False
    "On a GPU, launch every kernel of a step by itself, instead of replaying steps recorded as CUDA graphs."
    threads: Annotated[int | None, between(1, 1024)] = None
    "CPU threads with which each engine computes. Unset: OMP_NUM_THREADS, or the machine's cores over the engines."
    load_format: LoadFormat = "auto"
    "dummy: random weights of the right shapes, to measure speed without a download."
    gate_override: str | None = None
    (
        "Replace the gate's choice of experts to study load: uniform, exponential:LAMBDA or trace:FILE, with recorded"
        " choices [tokens, layers, chosen] (.npy), or `experts` and `token_ids`, whose rows go to equal tokens (.npz)."
    )
    generation_config: Literal["auto", "vllm"] = "auto"
    "Sampling defaults where a request names none; auto: the checkpoint's generation_config.json; vllm: neutral ones."
    seed: Annotated[int, between(0, 2**63 - 1)] = 0
    "Random seed of dummy weights and of the gate override. Requests bring their own seeds."

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise ConfigError("--model is empty: give a checkpoint directory, or a name on the Hugging Face hub")
        if self.device not in get_args(DeviceKind) and not self.device.startswith("paced:"):
            known = ", ".join(get_args(DeviceKind))
            raise ConfigError(f"--device {self.device!r} is unknown: give one of {known}, or paced:GPU")
        if self.gate_override is not None:
            check_spec(self.gate_override)

    @property
    def tokenizer_directory(self) -> Path:
        """The directory of the tokenizer, once all names are directories."""
        return Path(self.tokenizer or self.model)


@dataclass(frozen=True, kw_only=True)
class CacheSettings(CheckedSettings):
    """The KV cache of one rank, real or simulated."""

    max_model_len: Annotated[int | None, at_least(1), flag_group(*_MEMORY)] = None
    "Tokens of the longest sequence, prompt and answer. Unset or auto: the limit of the model, if it fits."
    block_size: Annotated[int, at_least(1), flag_group(*_MEMORY)] = 16
    "Tokens of one KV block, the unit of memory and of prefix caching."
    kv_offloading_size: Annotated[float, at_least(0), flag_group(*_MEMORY)] = 0.0
    "GiB of host memory of each engine, for KV of preempted requests and evicted prefixes. 0: it is computed again."


@dataclass(frozen=True, kw_only=True)
class ModelSettings(CacheSettings, NetworkSettings):
    """One rank's network, its KV cache, and the memory that this may take."""

    gpu_memory_utilization: Annotated[float, above(0, at_most=1), flag_group(*_MEMORY)] = 0.9
    "Share of a GPU's memory for weights, steps and KV cache together; engines on one GPU divide it."
    kv_cache_memory_bytes: Annotated[int | None, at_least(1), flag_group(*_MEMORY)] = None
    "Bytes of KV cache of each engine, exactly. Unset: what --gpu-memory-utilization leaves of a GPU; 1 GiB on a CPU."
    num_gpu_blocks_override: Annotated[int | None, at_least(1), flag_group(*_MEMORY)] = None
    "KV blocks of each engine, in place of the two above; for experiments with scarce memory."
    max_parked_bytes: Annotated[int | None, at_least(1), flag_group(*_MEMORY)] = None
    "In preemptive mode, bytes of the KV cache's memory for what is inside the network; unset: two full steps."

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of all layers' K and V where no memory of a card is left to choose by."""
        return self.kv_cache_memory_bytes or _DEFAULT_KV_CACHE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRank:
    """A process's place among those of its machine, and the largest step that it computes.

    Attributes:
        rank: number of the process, by which it takes an accelerator.
        num_ranks: processes that take accelerators in turn.
        max_tokens, max_seqs: tokens and sequences of the largest step.
        records_steps: whether a GPU's steps are recorded as CUDA graphs.
        free_host_bytes: host memory that new processes can take. None means unknown.
    """

    rank: int = 0
    num_ranks: int = 1
    max_tokens: int = 2048
    max_seqs: int = 64
    records_steps: bool = False
    free_host_bytes: int | None = None

    def num_sharing(self, num_accelerators: int) -> int:
        """Count the processes, this one included, that use its accelerator."""
        return max(-(-(self.num_ranks - self.rank % num_accelerators) // num_accelerators), 1)


ALONE = LocalRank()  # the only process of its machine, with the default bounds of steps


# The checkpoint authors' sampling defaults: `generation_config.json`, read as plain JSON.


def read_generation_config(directory: Path) -> dict[str, Any]:
    """Read the file's fields; a missing file has none.

    Raises:
        UnsupportedModelError: the file is not a JSON object.
    """
    path = directory / "generation_config.json"
    return read_json_object(path) if path.exists() else {}


def eos_token_ids(recommended: dict[str, Any], fields: dict[str, Any], config: Any) -> tuple[int, ...]:
    """Ids that end a sequence: those that the two files name, ascending; the family's own where neither names any.

    Args:
        recommended: fields of `generation_config.json`.
        fields: fields of `config.json`.
        config: transformers' config, which has the family's value where the file has none.

    Raises:
        UnsupportedModelError: an id is no token id of the network.
    """
    text, own = config.get_text_config(), fields.get("text_config") or {}
    ids = _listed("generation_config.json", recommended.get("eos_token_id"))
    ids += _listed("config.json", fields.get("eos_token_id")) + _listed("config.json", own.get("eos_token_id"))
    ids = ids or _listed("config.json", config.eos_token_id) + _listed("config.json", text.eos_token_id)
    for file, each in ids:
        if type(each) is not int or not 0 <= each < text.vocab_size:
            raise UnsupportedModelError(
                f"{file}: eos_token_id must be an integer from 0 to {text.vocab_size - 1}, the vocabulary's last token,"
                f" or a list of them, got {shown_literal(each)}."
            )
    return tuple(sorted({each for _, each in ids}))


def _listed(file: str, given: Any) -> list[tuple[str, Any]]:
    """List the ends that a field of `file` gives, each with the file's name."""
    return [(file, each) for each in (given if isinstance(given, list | tuple) else [given]) if each is not None]


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _AddedTokens(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def tokenizer_end(directory: Path, vocab_size: int) -> int | None:
    """Id of the `eos_token` of a tokenizer's files, with which vLLM ends answers, too; None where they name none.

    Fine-tuned checkpoints often name the end of their chat's turns there alone.

    Args:
        directory: directory of `tokenizer_config.json` and `tokenizer.json`.
        vocab_size: tokens of the network, which may lack tokens of its tokenizer.

    Raises:
        UnsupportedModelError: a file is too large, or `tokenizer_config.json` is no JSON object.
    """
    config, tokenizer = directory / "tokenizer_config.json", directory / "tokenizer.json"
    fields = read_json_object(config) if config.exists() else {}
    text = _content_of(fields.get("eos_token"))
    if not isinstance(text, str):
        return None
    added = fields.get("added_tokens_decoder")
    ids = [name for name, token in added.items() if _content_of(token) == text] if isinstance(added, dict) else []
    if not ids and tokenizer.exists():
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):  # The tokenizer itself refuses such a file.
            found = msgspec.json.decode(read_bytes(tokenizer, MAX_TOKENIZER_BYTES), type=_AddedTokens)
            ids = [str(token.id) for token in found.added_tokens if token.content == text]
    end = next((int(name) for name in ids if name.isdecimal()), None)
    return end if end is not None and end < vocab_size else None


def _content_of(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def sampling_defaults(fields: dict[str, Any]) -> SamplingDefaults:
    """Sampling defaults of the file; neutral where it names none.

    Raises:
        UnsupportedModelError: a value lies outside of the API's bounds.
    """
    given = {name: fields[name] for name in SamplingDefaults.__struct_fields__ if fields.get(name) is not None}
    for name, value in given.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or value not in SAMPLING_RANGES[name] or (name == "top_k" and value != int(value)):
            raise UnsupportedModelError(
                f"generation_config.json: {name} must be {SAMPLING_RANGES[name]}, got {shown_literal(value)}:"
                " correct it, or give --generation-config vllm to ignore the file's sampling values."
            )
    if "top_k" in given:
        given["top_k"] = max(0, int(given["top_k"]))
    return SamplingDefaults(**given)
