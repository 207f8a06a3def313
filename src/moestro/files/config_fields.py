"""The sizes that a `config.json` promises: kinds and bounds of its fields, and the tensors that must back them.

No torch here: these checks run before a network is built, because building a lie takes gigabytes.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from moestro.errors import UnsupportedModelError, shown, shown_literal

# The tensors of safetensors files, read from the files' headers alone: names, types and shapes. No torch.
#
# Format: https://github.com/huggingface/safetensors#format. A header is checked against its file before it is believed.

MAX_HEADER_BYTES = 32 << 20  # 100,000 tensors take 10 MiB
_LENGTH_BYTES = 8
_MAX_DIMENSIONS = 8  # published weights have 4
_METADATA = "__metadata__"
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


_MOST_POSITIONS = 1 << 30


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


Fields = Mapping[str, Any]

# Names of the same size in the configs of the families that transformers has.
EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
TOP_K_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_HEAD_KEYS = ("num_attention_heads", "n_head", "n_heads")
_WIDTH_KEYS = ("hidden_size", "n_embd", "d_model")

# Bounds leave room for more than any published network has. A skeleton takes 0.6 MB of host memory a layer, and
# configs make a list as long as their layers or labels, so that these two bound what a lie can take.
MAX_LAYERS = 1024  # published: 200
_MAX_WIDTH = 1 << 20  # published: 65,536
_MAX_COUNT = 1 << 16  # of heads, experts, groups, labels; published: 512
_COUNTS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(_LAYER_KEYS, (1, MAX_LAYERS)),
    **dict.fromkeys((*_HEAD_KEYS, "num_key_value_heads"), (1, _MAX_COUNT)),
    **dict.fromkeys(_WIDTH_KEYS, (1, _MAX_WIDTH)),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), (0, _MAX_WIDTH)),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), (1, _MAX_WIDTH)),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), (0, _MAX_WIDTH)),
    **dict.fromkeys((*EXPERT_KEYS, *TOP_K_KEYS, "n_shared_experts", "n_group", "topk_group"), (0, _MAX_COUNT)),
    **dict.fromkeys(("first_k_dense_replace", "num_labels"), (0, _MAX_COUNT)),
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers", "max_window_layers"), (0, MAX_LAYERS)),
    "decoder_sparse_step": (1, _MAX_COUNT),
    "vocab_size": (1, 1 << 24),  # published: 262,400
    **dict.fromkeys(("max_position_embeddings", "n_positions"), (1, _MOST_POSITIONS)),  # published: 10,485,760
}
# Least value of numbers, and whether it is itself refused.
_NUMBERS: dict[str, tuple[float, bool]] = {
    "rope_theta": (0.0, True),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"), (0.0, False)),
}
_EMBEDDINGS = re.compile(r"(^|\.)(embed_tokens|wte|embed_in|word_embeddings|tok_embeddings)\.weight$")
_ONE_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_ALL_EXPERTS = re.compile(r"\.experts\.[a-z_]+(\.weight)?$")


def refuse_sizes(fields: Fields, file: Path) -> None:
    """Refuse sizes of a wrong kind, out of bounds, or that contradict each other.

    Args:
        fields: fields of a config, with those of its text part within it or instead of it.
        file: file that has them, for the message.

    Raises:
        UnsupportedModelError: a field is refused; the text names it, its value, and what is allowed.
    """
    _refuse_objects(file, fields)
    text = fields.get("text_config")
    for part in (fields, text) if isinstance(text, dict) else (fields,):
        for name, (least, most) in _COUNTS.items():
            _refuse_count(file, name, part.get(name), least, most)
        for name, (least_number, is_above) in _NUMBERS.items():
            _refuse_number(file, name, part.get(name), least_number, is_above=is_above)
        _refuse_lists(file, part)
        _refuse_token_ids(file, part)
        _refuse_heads(file, part)
        _refuse_top_k(file, part)


def refuse_unbacked(fields: Fields, file: Path, tensors: Mapping[str, TensorHeader]) -> None:
    """Refuse a config that promises layers, experts or a vocabulary that the tensors do not have.

    Args:
        fields: fields that `refuse_sizes` has accepted.
        file: file that has them, for the message.
        tensors: tensors of the checkpoint, by name.

    Raises:
        UnsupportedModelError: a promise is not kept; the text names the field and what the tensors have.
    """
    text = fields.get("text_config")
    part = {**fields, **text} if isinstance(text, dict) else fields
    num_layers = _first(part, _LAYER_KEYS)
    layers = {layer for name in tensors if (layer := layer_of_name(name)) is not None}
    if (
        num_layers is not None
        and (missing := next((n for n in range(num_layers) if n not in layers), None)) is not None
    ):
        raise UnsupportedModelError(
            f"{file}: {_key(part, _LAYER_KEYS)} is {num_layers}, and the weights have no tensor of layer {missing}:"
            " the two are of different checkpoints."
        )
    _refuse_vocabulary(file, part.get("vocab_size"), tensors)
    _refuse_experts(file, part, tensors)


def num_experts_of(fields: Fields) -> int | None:
    """Return the routed experts of a layer; None means that the config does not say it in a known way."""
    text = fields.get("text_config")
    part = {**fields, **text} if isinstance(text, dict) else fields
    found = [part[key] for key in EXPERT_KEYS if isinstance(part.get(key), int)]
    return max(found) if found else None


def layer_of_name(name: str) -> int | None:
    """Layer of a module or tensor: the first number in its name. None means that it belongs to no layer."""
    return next((int(part) for part in name.split(".") if part.isdecimal() and part.isascii()), None)


def _refuse_count(file: Path, name: str, value: object, least: int, most: int) -> None:
    if value is not None and (type(value) is not int or not least <= value <= most):
        raise UnsupportedModelError(
            f"{file}: {name} must be a whole number from {least} to {most}, got {shown_literal(value)}."
        )


def _refuse_number(file: Path, name: str, value: object, least: float, *, is_above: bool) -> None:
    if value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or value < least or (is_above and value == least):  # type: ignore[operator]
        bound = f"above {least:g}" if is_above else f"at least {least:g}"
        raise UnsupportedModelError(f"{file}: {name} must be a number {bound}, got {shown_literal(value)}.")


def _refuse_objects(file: Path, fields: Fields) -> None:
    for name in ("text_config", "quantization_config"):
        value = fields.get(name)
        if value is not None and not isinstance(value, dict):
            raise UnsupportedModelError(f"{file}: {name} must be an object, got {shown_literal(value)}.")
    bits = (fields.get("quantization_config") or {}).get("bits")
    if bits is not None and (type(bits) is not int or not 1 <= bits <= 16):
        raise UnsupportedModelError(f"{file}: bits must be a whole number from 1 to 16, got {shown_literal(bits)}.")


def _refuse_lists(file: Path, part: Fields) -> None:
    for name, kind, noun in (("layer_types", str, "names"), ("mlp_only_layers", int, "numbers of layers")):
        value = part.get(name)
        if value is not None and not (isinstance(value, list) and all(type(each) is kind for each in value)):
            raise UnsupportedModelError(f"{file}: {name} must be a list of {noun}, got {shown_literal(value)}.")
    kinds, num_layers = part.get("layer_types"), _first(part, _LAYER_KEYS)
    if kinds is not None and num_layers is not None and len(kinds) < num_layers:
        raise UnsupportedModelError(
            f"{file}: layer_types must name the kind of each of the {num_layers} layers, got {len(kinds)} kinds."
        )


def _refuse_token_ids(file: Path, part: Fields) -> None:
    """Refuse ids of the end that are no whole numbers, which transformers reports as a TypeError of its own."""
    value = part.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if wrong := [each for each in ids if type(each) is not int]:
        raise UnsupportedModelError(
            f"{file}: eos_token_id must be a whole number or a list of them, got {shown_literal(wrong[0])}."
        )


def _refuse_heads(file: Path, part: Fields) -> None:
    heads, width, shared = _first(part, _HEAD_KEYS), _first(part, _WIDTH_KEYS), part.get("num_key_value_heads")
    if heads is None:
        return
    if isinstance(shared, int) and heads % shared:
        raise UnsupportedModelError(
            f"{file}: num_key_value_heads must divide the {heads} attention heads, got {shared}."
        )
    if width is not None and part.get("head_dim") is None and not part.get("kv_lora_rank") and width % heads:
        raise UnsupportedModelError(
            f"{file}: {_key(part, _WIDTH_KEYS)} must be a multiple of the {heads} attention heads where head_dim is"
            f" not given, got {width}."
        )


def _refuse_top_k(file: Path, part: Fields) -> None:
    num_experts, top_k = num_experts_of(part), _first(part, TOP_K_KEYS)
    if num_experts and top_k is not None and not 1 <= top_k <= num_experts:
        raise UnsupportedModelError(
            f"{file}: {_key(part, TOP_K_KEYS)} must be from 1 to the {num_experts} experts of a layer, got {top_k}."
        )


def _refuse_vocabulary(file: Path, vocab_size: int | None, tensors: Mapping[str, TensorHeader]) -> None:
    for name, tensor in tensors.items():
        if vocab_size is not None and _EMBEDDINGS.search(name) and tensor.shape[:1] != (vocab_size,):
            raise UnsupportedModelError(
                f"{file}: vocab_size is {vocab_size}, and {shown(name)} in {tensor.file.name} has the shape"
                f" {list(tensor.shape)}: the two are of different checkpoints."
            )


def _refuse_experts(file: Path, part: Fields, tensors: Mapping[str, TensorHeader]) -> None:
    """Compare the number of experts with tensors of single experts, or with those that have all experts of a layer."""
    num_experts = num_experts_of(part)
    if not num_experts:
        return
    single = {int(found[1]) for name in tensors if (found := _ONE_EXPERT.search(name))}
    whole = {tensor.shape[0] for name, tensor in tensors.items() if tensor.shape and _ALL_EXPERTS.search(name)}
    most = max(single) + 1 if single else max(whole, default=0)
    if most and (most < num_experts or (single and most > num_experts)):
        raise UnsupportedModelError(
            f"{file}: {_key(part, EXPERT_KEYS)} is {num_experts}, and the weights have {most} experts a layer: the two"
            " are of different checkpoints."
        )


def _first(part: Fields, keys: tuple[str, ...]) -> int | None:
    return next((part[key] for key in keys if isinstance(part.get(key), int)), None)


def _key(part: Fields, keys: tuple[str, ...]) -> str:
    return next((key for key in keys if isinstance(part.get(key), int)), keys[0])


# The longest sequence.


def longest_context(max_positions: int | None, rope: Any) -> int | None:
    """Return the positions that a network was made for, with those that YaRN adds; None if its config names none.

    Args:
        max_positions: the config's `max_position_embeddings`.
        rope: its `rope_parameters` or `rope_scaling`; None means no scaling.
    """
    found = rope if isinstance(rope, Mapping) else {}
    factor, kind = found.get("factor"), found.get("rope_type", found.get("type"))
    if max_positions is None or kind != "yarn" or not isinstance(factor, int | float):
        return max_positions
    original = found.get("original_max_position_embeddings") or max_positions
    return max(max_positions, round(min(original * factor, _MOST_POSITIONS)))
