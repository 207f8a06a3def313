"""A small checkpoint and lies about it. As a program: tells all lies under a limit of memory, and reports what failed.

A lie ends in a `ConfigError` of one line, or the checkpoint is read. Anything else is a fault: another error, a wait,
or more memory than the limit. No torch.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from moestro.cost import settings
from moestro.cost.settings import read_network
from moestro.errors import ConfigError
from moestro.files import checkpoint
from moestro.files.checkpoint import read_checkpoint
from moestro.model.settings import read_generation_config, sampling_defaults

Lie = tuple[str, Callable[[Path], object]]

MEMORY_BYTES = 1 << 30  # address space of the program; it holds 0.3 GB without any lie
_PATIENCE_S = 20  # for one lie, which takes milliseconds
_SEED = 7
_LONGEST = 900  # characters of a refusal, most of them a path

CONFIG: dict[str, object] = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 32, "hidden_size": 8,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 16,
    "moe_intermediate_size": 4, "num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "tie_word_embeddings": True, "eos_token_id": 2, "sliding_window": None, "hidden_act": "silu",
}  # fmt: skip
_ABSENT = (
    "text_config", "quantization_config", "layer_types", "rope_parameters", "rope_scaling", "num_labels",
    "kv_lora_rank", "q_lora_rank", "n_shared_experts", "first_k_dense_replace", "shared_expert_intermediate_size",
    "num_local_experts", "n_routed_experts", "id2label", "torch_dtype", "vision_config", "is_encoder_decoder",
    "auto_map",
)  # fmt: skip
NASTY: tuple[object, ...] = (
    None, True, False, 0, -1, 1, 3, 7, 10**6, 10**12, 10**30, -(10**30), 1.5, -0.5, 1e308, float("nan"), float("inf"),
    "", "x", "8", "\ud800", "\x00", [], [1], [None] * 3, ["x"], [10**12], {}, {"a": 1}, {"num_hidden_layers": 10**12},
    {"bits": "x"}, {"bits": -1}, {"quant_method": 3},
)  # fmt: skip
_GENERATION = ("eos_token_id", "temperature", "top_k", "top_p", "repetition_penalty", "min_p")
_FILES = (
    "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "model.safetensors.index.json", "merges.txt",
)  # fmt: skip


def make_checkpoint(directory: Path) -> Path:
    """Write the small checkpoint, which is read without a refusal."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "generation_config.json").write_text('{"temperature": 0.7}')
    write_tensors(directory / "model.safetensors", *_tensors())
    return directory


def write_tensors(path: Path, header: dict[str, object], num_bytes: int) -> None:
    """Write a safetensors file with `header` before `num_bytes` zeros."""
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(num_bytes))


def _tensors() -> tuple[dict[str, object], int]:
    shapes = {"model.embed_tokens.weight": [32, 8], "model.norm.weight": [8]}
    for layer in range(2):
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = [8]
        shapes |= {f"model.layers.{layer}.mlp.experts.{n}.up_proj.weight": [4, 8] for n in range(4)}
    header: dict[str, object] = {}
    at = 0
    for name, shape in shapes.items():
        end = at + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    return header, at


def all_lies() -> Iterator[Lie]:
    """Each field of a config by each value, each file by each kind, and headers of weights."""
    yield from _fields("config.json", (*CONFIG, *_ABSENT))
    yield from _fields("generation_config.json", _GENERATION)
    for name in _FILES:
        yield from ((f"{name} as {kind}", _in_place_of(name, make)) for kind, make in KINDS.items())
    yield from _headers()


def _fields(file: str, names: tuple[str, ...]) -> Iterator[Lie]:
    for name in names:
        for value in NASTY:

            def tell(directory: Path, name: str = name, value: object = value) -> None:
                path = directory / file
                path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))

            yield f"{file}: {name} = {value!r}"[:120], tell


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a name of a socket has 107 bytes at most
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10 << 30)


KINDS: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a directory": Path.mkdir,
    "a socket": _socket,
    "a dangling link": lambda path: path.symlink_to("gone"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to a secret": lambda path: path.symlink_to("/etc/hostname"),
    "nothing": lambda path: None,
    "an empty file": Path.touch,
    "10 GiB": _sparse,
    "a list": lambda path: path.write_text("[1]"),
    "a text": lambda path: path.write_text('"x"'),
    "zeros": lambda path: path.write_bytes(bytes(1 << 16)),
    "bytes": lambda path: path.write_bytes(bytes(range(256)) * 64),
    "a deep object": lambda path: path.write_text('{"a": ' * 100_000),
    "a list of links out": lambda path: path.write_text('{"weight_map": {"a": "../../etc/passwd"}}'),
    "a list of absent files": lambda path: path.write_text('{"weight_map": {"a": "b.safetensors"}}'),
}


def _in_place_of(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def tell(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        make(directory / name)

    return tell


def _headers() -> Iterator[Lie]:
    rng = random.Random(_SEED)
    values = (
        None,
        -1,
        10**18,
        1 << 62,
        1 << 70,
        1.5,
        "x",
        [],
        [-1],
        [1 << 62, 4],
        [8] * 100_000,
        [0, 1 << 60],
        {},
        True,
    )
    names = [name for name in _tensors()[0] if "experts.3" in name or "norm" in name]
    for name in names:
        for field in ("dtype", "shape", "data_offsets"):
            for value in values:

                def tell(directory: Path, name: str = name, field: str = field, value: object = value) -> None:
                    header, num_bytes = _tensors()
                    header[name] = {**header[name], field: value}  # type: ignore[dict-item]
                    write_tensors(directory / "model.safetensors", header, num_bytes)

                yield f"header: {field} of {name} = {str(value)[:40]}", tell
    for length in (0, 1, 1 << 31, 1 << 60, (1 << 64) - 1):
        yield f"header of {length} bytes", lambda d, length=length: _patch(d, 0, length.to_bytes(8, "little"))
    for number in range(150):
        at, byte = rng.randrange(900), rng.randrange(256)
        yield f"header byte {at} is {byte} ({number})", lambda d, at=at, byte=byte: _patch(d, at, bytes([byte]))


def _patch(directory: Path, at: int, new: bytes) -> None:
    with (directory / "model.safetensors").open("r+b") as file:
        file.seek(at)
        file.write(new)


def fault_of(directory: Path) -> str | None:
    """Return what is wrong with the reading of a lie; None means a refusal in one line, or success."""
    for read in (read_checkpoint, _read_generation, lambda directory: read_network(str(directory))):
        try:
            read(directory)
        except ConfigError as error:
            text = str(error)
            if not text or "\n" in text or len(text) > _LONGEST or "Traceback" in text:
                return f"refused by {text[:200]!r}"
        except BaseException as error:
            return f"{type(error).__name__}: {error}"[:200]
    return None


def _read_generation(directory: Path) -> object:
    return sampling_defaults(read_generation_config(directory))


class _Late(BaseException):
    """A lie took too long."""


def _on_alarm(*_: object) -> None:
    raise _Late


def main() -> None:
    """Tell all lies, and print the number of them, the faults by lie, and the peak of memory in bytes."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGALRM, _on_alarm)
    lies = all_lies()
    if "--without-sizes" in sys.argv:  # a fault of ours, which lies about fields must find
        from replaced import replace_names  # noqa: PLC0415 - tests import this file as a module of `support`

        for module in (checkpoint, settings):
            replace_names(module, refuse_sizes=lambda fields, file: None)
        lies = _fields("config.json", tuple(CONFIG))
    place, faults, num_lies = Path(sys.argv[1]), {}, 0
    for name, tell in lies:
        num_lies += 1
        directory = make_checkpoint(place / "checkpoint")
        tell(directory)
        signal.alarm(_PATIENCE_S)
        if (fault := fault_of(directory)) is not None:
            faults[name] = fault
        signal.alarm(0)
        shutil.rmtree(directory)
    print(json.dumps({"num_lies": num_lies, "faults": faults, "peak_bytes": _peak_bytes()}))


def _peak_bytes() -> int:
    """Return the largest memory that this program held; `ru_maxrss` would be that of the process that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


if __name__ == "__main__":
    main()
