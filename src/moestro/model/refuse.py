"""Refuses unsupported checkpoints before reading their weights, with the reason, so that no answer is silently wrong.

Three checks follow one another: the files, the config, the network's skeleton without weights. A network that passes
them and is not a tested family must also pass `check` after loading.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from moestro.core.checkpoint_files import MAX_INDEX_BYTES, read_json_object, refuse_links_out
from moestro.errors import UnsupportedModelError

# Families whose logits the parity tests compare with transformers' own.
TESTED_FAMILIES = frozenset(
    {
        "deepseek_v2",
        "deepseek_v3",
        "ernie4_5_moe",
        "glm4_moe",
        "gpt_oss",
        "granitemoe",
        "llama",
        "minimax_m2",
        "mixtral",
        "olmoe",
        "phimoe",
        "qwen2",
        "qwen2_moe",
        "qwen3_moe",
    }
)
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
# Names of dtypes in safetensors files.
_FLOATS = ("F64", "F32", "F16", "BF16")
# Quantizations that loading undoes, and the dtypes of their weights and scales.
_DEQUANTIZED = {"fp8": ("F8_E4M3", "F8_E5M2", "F8_E8M0"), "mxfp4": ("U8",)}


def read_config_file(directory: Path) -> dict[str, Any]:
    """Read `config.json` unchanged.

    Raises:
        UnsupportedModelError: the directory holds no checkpoint, a file links out of it, or its config is no object.
    """
    if not directory.is_dir():
        raise UnsupportedModelError(f"{directory} is no directory: give a checkpoint directory with a config.json.")
    names = sorted(path.name for path in directory.iterdir())
    if "config.json" not in names:
        raise UnsupportedModelError(f"{directory} holds no config.json{_what_it_is(names)}")
    refuse_links_out(directory)
    return read_json_object(directory / "config.json")


def refuse_config_file(raw: dict[str, Any]) -> None:
    """Refuse a `config.json` unless it describes a decoder that transformers can build, with readable weights.

    Raises:
        UnsupportedModelError: the config is refused; the text says why.
    """
    family = raw.get("model_type")
    if not isinstance(family, str):
        raise UnsupportedModelError("config.json names no model_type.")
    if family not in CONFIG_MAPPING:
        remote = " needs code from its own repository (auto_map, trust_remote_code), and" if raw.get("auto_map") else ""
        raise UnsupportedModelError(
            f"model_type {family!r}{remote} is unknown to the installed transformers: Moestro runs only its networks."
        )
    if raw.get("is_encoder_decoder"):
        raise UnsupportedModelError(f"model_type {family!r} is an encoder-decoder: only decoders are served.")
    if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedModelError(f"model_type {family!r} has no causal language model: it cannot generate text.")
    if raw.get("transformers_weights") is not None:
        raise UnsupportedModelError(
            f"config.json names its weights by transformers_weights ({raw['transformers_weights']!r}): not read. Give"
            " the weights as model.safetensors, or in shards with an index."
        )
    _refuse_heads(raw)
    _refuse_quantization(raw.get("quantization_config"))


def find_weights(directory: Path) -> list[Path]:
    """Find the files that transformers reads weights from; all are safetensors files of the directory.

    Raises:
        UnsupportedModelError: a file is missing or has another format.
    """
    names = sorted(path.name for path in directory.iterdir())
    if "adapter_config.json" in names:  # transformers would load the adapter too, even from a pickle
        raise UnsupportedModelError(f"{directory} holds a LoRA adapter: merge it into the model, or remove it.")
    index = directory / "model.safetensors.index.json"
    found = [name for name in names if name == "model.safetensors"]  # transformers prefers this file
    if index.exists():
        found += _indexed(index)
    found = found or [name for name in names if name.endswith(".safetensors")]
    if missing := sorted(set(found) - set(names)):
        raise UnsupportedModelError(f"{directory} lacks {len(missing)} weight files, first {missing[0]}.")
    if not found:
        raise UnsupportedModelError(f"{directory} holds no .safetensors weights{_what_it_is(names)}")
    return [directory / name for name in found]


def _indexed(index: Path) -> list[str]:
    """Names of the weight files in an index."""
    weight_map = read_json_object(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise UnsupportedModelError(f"{index} is malformed: weight_map must name a file for each tensor.")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UnsupportedModelError(
                f"{index} names the weight file {name!r}: only .safetensors files beside it are read. Convert the"
                " weights to safetensors."
            )
    return names


def refuse_dtypes(files: Sequence[Path], quantization: Any, ignored: Sequence[str]) -> None:
    """Refuse weights unless they are floating-point numbers, or quantized as the config says.

    Args:
        files: files from `find_weights`.
        quantization: the config's quantization, which `refuse_config_file` has accepted.
        ignored: name patterns of tensors that the network does not read.

    Raises:
        UnsupportedModelError: a tensor is refused, or a file cannot be read.
    """
    method = None if quantization is None else quantization["quant_method"]
    allowed = _FLOATS if method is None else _FLOATS + _DEQUANTIZED[method]
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                dtypes = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
        except Exception as error:  # torn files: the reader and the operating system raise errors of their own
            raise UnsupportedModelError(f"The weights in {file} cannot be loaded: {error}") from error
        for name, dtype in dtypes.items():
            if dtype not in allowed and not any(re.search(pattern, name) for pattern in ignored):
                packed = "" if method is None else f" with quantization {method!r}"
                raise UnsupportedModelError(
                    f"{file}: tensor {name} is of dtype {dtype}; {', '.join(allowed)} are read{packed}. Give an"
                    " unquantized checkpoint, or one whose config.json names its quantization."
                )


def refuse_config(config: Any, max_model_len: int) -> None:
    """Refuse a config unless a paged step can compute the attention of every layer.

    Args:
        config: transformers' config of the whole model.
        max_model_len: tokens of the longest sequence.

    Raises:
        UnsupportedModelError: hybrids, softcapped scores, frequencies that depend on the batch.
    """
    if getattr(config, "vision_config", None) is not None or getattr(config, "audio_config", None) is not None:
        raise UnsupportedModelError(f"model_type {config.model_type!r} takes more than text: only text is served.")
    text = config.get_text_config()
    strange = sorted(set(getattr(text, "layer_types", None) or ()) - _ATTENTION_LAYERS)
    if strange:
        raise UnsupportedModelError(
            f"model_type {config.model_type!r} has layers of type {', '.join(strange)}: only full and sliding attention"
            " keep their state in KV blocks."
        )
    if getattr(text, "attn_logit_softcapping", None) is not None:
        raise UnsupportedModelError(f"model_type {config.model_type!r} softcaps its attention scores: not supported.")
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):  # one for all layers, or one for each kind of layer
        if isinstance(parameters, dict):
            _refuse_rope(text, parameters, max_model_len)


def refuse_skeleton(network: nn.Module) -> None:
    """Refuse a network unless it attends through transformers' interface and has no other state. It needs no weights.

    Raises:
        UnsupportedModelError: the network is refused; the text says why.
    """
    if not getattr(network, "_supports_attention_backend", False):
        raise UnsupportedModelError(f"{type(network).__name__} does not use transformers' attention interface.")
    for name, module in network.named_modules():
        if getattr(module, "is_causal", True) is False:
            raise UnsupportedModelError(
                f"{type(network).__name__} attends to later tokens too ({name}): not a decoder."
            )
        if isinstance(module, nn.Conv1d):
            raise UnsupportedModelError(
                f"{type(network).__name__} mixes tokens by a convolution ({name}), whose state no KV block keeps:"
                " hybrids (Mamba, linear attention) are not supported."
            )


def _what_it_is(names: list[str]) -> str:
    """Complete a sentence about a directory without the wanted file."""
    endings = {
        ".gguf": "GGUF files are not supported: give the checkpoint that they were made from.",
        "adapter_config.json": "it is a LoRA adapter, not a model: merge it into its base model first.",
        ".bin": "pickled .bin weights run code when they are read: convert them to safetensors.",
        ".pt": "pickled .pt weights run code when they are read: convert them to safetensors.",
        ".pth": "pickled .pth weights run code when they are read: convert them to safetensors.",
    }
    for ending, reason in endings.items():
        if any(name.endswith(ending) for name in names):
            return f"; {reason}"
    return ": it is empty." if not names else ": give a checkpoint directory as transformers saves it."


def _refuse_heads(raw: dict[str, Any]) -> None:
    heads: set[str] = set()
    for entry in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        heads.update([entry] if isinstance(entry, str) else entry)
    given = raw.get("architectures") or []
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise UnsupportedModelError(f"config.json: architectures must be a list of names, got {given!r}.")
    if given and not heads.intersection(given):
        raise UnsupportedModelError(f"architectures {given} holds no causal language model: it cannot generate text.")


def _refuse_quantization(quantization: Any) -> None:
    if quantization is None:
        return
    is_object = isinstance(quantization, dict)
    method = quantization.get("quant_method") if is_object else quantization
    if not is_object or not isinstance(method, str) or method not in _DEQUANTIZED:
        raise UnsupportedModelError(
            f"Weights quantized by {method!r} are not supported: only {' and '.join(_DEQUANTIZED)} are, dequantized."
            " Give an unquantized checkpoint."
        )
    if method == "fp8" and find_spec("accelerate") is None:
        raise UnsupportedModelError("transformers reads fp8 weights only where accelerate is installed: install it.")


def _refuse_rope(text: Any, parameters: dict[str, Any], max_model_len: int) -> None:
    kind = parameters.get("rope_type") or "default"
    if "dynamic" in kind:
        raise UnsupportedModelError(
            f"rope_type {kind!r} changes every sequence's frequencies with the longest one of the batch: not supported."
        )
    if kind != "longrope":
        return
    original = parameters.get("original_max_position_embeddings") or text.max_position_embeddings
    if max_model_len <= original:
        return  # always the short factors
    if text.model_type == "phimoe" and parameters.get("short_mscale") == parameters.get("long_mscale"):
        return  # in this family the frequencies are constant; only the factor of cos and sin switches
    raise UnsupportedModelError(
        f"rope_type 'longrope' changes every sequence's frequencies once any of the batch passes {original} tokens:"
        f" set --max-model-len {original} or less (it is {max_model_len})."
    )
