"""Refuses unsupported checkpoints before reading their weights, with the reason, so that no answer is silently wrong.

`core.checkpoint` has checked the files and the sizes. Two checks follow: the config, and the network's skeleton without
weights. A network that passes them and is not a tested family must also pass `check` after loading.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from moestro.errors import UnsupportedModelError, shown
from moestro.files.config_fields import TensorHeader, layer_of_name

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
_ELEMENTS = {"U8": 2}  # numbers in one element of a packed dtype: mxfp4 has two in a byte


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


def refuse_dtypes(tensors: Mapping[str, TensorHeader], quantization: Any, ignored: Sequence[str]) -> None:
    """Refuse weights unless they are floating-point numbers, or quantized as the config says.

    Args:
        tensors: tensors of the checkpoint, by name.
        quantization: the config's quantization, which `refuse_config_file` has accepted.
        ignored: name patterns of tensors that the network does not read.

    Raises:
        UnsupportedModelError: a tensor is refused.
    """
    method = None if quantization is None else quantization["quant_method"]
    allowed = _FLOATS if method is None else _FLOATS + _DEQUANTIZED[method]
    for name, tensor in tensors.items():
        if tensor.dtype not in allowed and not any(re.search(pattern, name) for pattern in ignored):
            packed = "" if method is None else f" with quantization {method!r}"
            raise UnsupportedModelError(
                f"{tensor.file}: tensor {shown(name)} is of dtype {tensor.dtype}; {', '.join(allowed)} are read{packed}"
                ". Give an unquantized checkpoint, or one whose config.json names its quantization."
            )


def refuse_shapes(network: nn.Module, tensors: Mapping[str, TensorHeader]) -> None:
    """Refuse a network whose parameters the checkpoint's tensors do not fill. Neither is in memory.

    transformers merges, renames and transposes tensors while it loads them. So shapes are compared where the names are
    equal, in any order of dimensions, and numbers of elements in each layer as a whole.

    Args:
        network: network without memory for its weights.
        tensors: tensors of the checkpoint, by name.

    Raises:
        UnsupportedModelError: a shape differs, or a layer has too few elements; the text names it.
    """
    wanted: Counter[int | None] = Counter()
    for name, parameter in network.named_parameters():
        wanted[layer_of_name(name)] += parameter.numel()
        tensor = tensors.get(name)
        if tensor is not None and tensor.dtype in _FLOATS and sorted(tensor.shape) != sorted(parameter.shape):
            raise UnsupportedModelError(
                f"{tensor.file}: tensor {shown(name)} has the shape {list(tensor.shape)}, and config.json makes it"
                f" {list(parameter.shape)}: the two are of different checkpoints."
            )
    found: Counter[int | None] = Counter()
    for name, tensor in tensors.items():
        found[layer_of_name(name)] += tensor.num_elements * _ELEMENTS.get(tensor.dtype, 1)
    for layer, num_elements in wanted.items():
        if num_elements > found[layer]:
            place = "outside of the layers" if layer is None else f"in layer {layer}"
            raise UnsupportedModelError(
                f"config.json makes a network with {num_elements} parameters {place}, and the weights have"
                f" {found[layer]} there{_absent(network, tensors, layer)}: the two are of different checkpoints."
            )


def _absent(network: nn.Module, tensors: Mapping[str, TensorHeader], layer: int | None) -> str:
    """Name a tensor that a layer lacks. Those of experts may have other names in the checkpoint."""
    names = (name for name, _ in network.named_parameters() if layer_of_name(name) == layer and name not in tensors)
    first = next((name for name in names if ".experts." not in name), None)
    return "" if first is None else f" (they lack {first})"


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
