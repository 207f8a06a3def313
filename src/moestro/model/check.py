"""Checks of a checkpoint: refusals before its weights are read, and a comparison with transformers afterwards.

`files.checkpoint` has checked the files and the sizes. The config and the skeleton without weights are checked here, so
that no answer is silently wrong, and each refusal has its reason. After loading, the paged steps of an untested family
must equal transformers' own forward pass.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from moestro.core.rng import uniform
from moestro.core.views import LS
from moestro.core.work import LOGITS_LAST, LOGITS_PROMPT, SAMPLING_ROW, Int32s, Units
from moestro.errors import MoestroError, UnsupportedModelError, shown
from moestro.files.config_fields import TensorHeader, layer_of_name
from moestro.model.experts.routed import EXPERTS
from moestro.model.network import Network
from moestro.model.pools import KVPools
from moestro.model.step import PagedStep
from moestro.model.tensors import SCALES

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
_SCALED = ("F8_E4M3", "F8_E5M2")  # dtypes of weights that transformers would read unscaled if their scales are missing
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
    """Refuse weights unless they are floating-point numbers, or quantized as the config says, with their scales.

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
        is_unscaled = tensor.dtype in _SCALED and f"{name}{SCALES}" not in tensors
        is_read = tensor.dtype in allowed and not is_unscaled
        if is_read or any(re.search(pattern, name) for pattern in ignored):
            continue
        text = f"{tensor.file}: tensor {shown(name)} is of dtype {tensor.dtype}"
        if tensor.dtype in allowed:
            raise UnsupportedModelError(
                f"{text} and lacks its scales, {shown(name + SCALES)}: other names of scales are not read. Give a"
                " checkpoint in the form of DeepSeek-V3 and Qwen3-FP8, or an unquantized one."
            )
        packed = "" if method is None else f" with quantization {method!r}"
        raise UnsupportedModelError(
            f"{text}; {', '.join(allowed)} are read{packed}. Give an unquantized checkpoint, or one whose config.json"
            " names its quantization."
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
    """Name a tensor that a layer lacks, unless the checkpoint seems to have other names for tensors of its kind."""
    kinds = {_kind_of(name) for name in tensors}
    modules = {name.rpartition(".")[0] for name in tensors}
    for name, _ in network.named_parameters():
        if layer_of_name(name) != layer or name in tensors or ".experts." in name:
            continue
        if layer is None or _kind_of(name) in kinds or name.rpartition(".")[0] in modules:
            return f" (they lack {name})"
    return ""


def _kind_of(name: str) -> str:
    """Name of a layer's tensor without the number of the layer."""
    return re.sub(r"\.\d+\.", ".", name, count=1)


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
    kinds = set(getattr(text, "layer_types", None) or ())
    if strange := sorted(kinds - _ATTENTION_LAYERS):
        raise UnsupportedModelError(
            f"model_type {config.model_type!r} has layers of type {', '.join(strange)}: only full and sliding attention"
            " keep their state in KV blocks."
        )
    if "sliding_attention" in kinds and getattr(text, "sliding_window", None) is None:
        raise UnsupportedModelError(
            "config.json: sliding_window must be at least 1 where layer_types has sliding_attention, got null."
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
    name = "original_max_position_embeddings"
    # One beside the parameters wins. transformers reads it late, and has put the longest length in its place by now.
    original = getattr(text, name, None) or parameters.get(name) or text.max_position_embeddings
    if max_model_len <= original:
        return  # always the short factors
    if text.model_type == "phimoe" and parameters.get("short_mscale") == parameters.get("long_mscale"):
        return  # in this family the frequencies are constant; only the factor of cos and sin switches
    raise UnsupportedModelError(
        f"rope_type 'longrope' changes every sequence's frequencies once any of the batch passes {original} tokens:"
        f" set --max-model-len {original} or less (it is {max_model_len})."
    )


_BLOCK_SIZE = 4
# Tokens of the first step, whose logits must be finite: positions and attention matter from the second on, and several
# visit more experts.
_FIRST_TOKENS = 8
_SHORTEST, _LONGEST, _PAST_WINDOW = 24, 1024, 8
# Largest error of a row of logits, relative to their spread. In half precision a gate near a tie may choose another
# expert in some rows, so the median row decides there; the faults that this check finds appear in nearly every row.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.15}


def check_network(network: Network, max_model_len: int, block_size: int) -> tuple[KVPools, int]:
    """Run a network for the first time.

    Returns:
        The result of `Network.probe`.

    Raises:
        UnsupportedModelError: the network fails, a layer keeps no K and V, logits are not finite, or answers differ
            from transformers' own.
    """
    try:
        found = network.probe(block_size, min(_FIRST_TOKENS, block_size, max_model_len))
        check_against_reference(network, max_model_len)
    except (MoestroError, AssertionError):
        raise
    except Exception as error:  # a network may raise anything on inputs that it was not written for
        raise UnsupportedModelError(f"{type(network.model).__name__} cannot run a paged step: {error!r}") from error
    return found


def check_against_reference(network: Network, max_model_len: int) -> None:
    """Compare a prompt in two chunks, beside another sequence, with the logits of transformers' single pass.

    Raises:
        UnsupportedModelError: the logits differ, or a window cannot be checked.
    """
    if network.model.config.model_type in TESTED_FAMILIES:
        return
    name = type(network.model).__name__
    length = min(_prompt_length(network.config), max_model_len)
    tokens = (uniform(np.ones(1, np.uint64), np.arange(length, dtype=np.uint64)) * network.config.vocab_size).astype(
        np.int32
    )
    ours, windows = _run_in_chunks(network, tokens)
    _refuse_unseen_window(network.config, windows, max_model_len)
    theirs = reference_logits(network, tokens)[len(tokens) - len(ours) :]
    spread = theirs.std(-1).clamp(min=torch.finfo(torch.float32).tiny)
    errors = (ours - theirs).abs().amax(-1) / spread
    error = float(errors.median() if network.dtype in (torch.float16, torch.bfloat16) else errors.max())
    if not error <= _TOLERANCE[network.dtype]:
        raise UnsupportedModelError(
            f"{name} is not a tested family, and its paged steps differ from transformers' own pass: relative error"
            f" {error:.2g}, allowed {_TOLERANCE[network.dtype]:.2g}. Its answers would be wrong."
        )


@torch.inference_mode()
def reference_logits(network: Network, tokens: Int32s) -> Tensor:
    """[tokens, vocabulary], logits of transformers' own attention and experts in one pass over the same weights."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None].to(network.device)
    with use_own_functions(network.model):
        logits: Tensor = network.model(input_ids=ids, use_cache=False).logits[0]
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@contextmanager
def use_own_functions(model: Any, experts: str = "eager") -> Iterator[None]:
    """Let a network that is not packed run on transformers' functions. `experts`: name in its experts interface."""
    attention = model.config._attn_implementation
    # `eager` takes the softmax in float32 even in float64; where sdpa exists it is the more precise reference.
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    model.set_experts_implementation(experts)
    try:
        yield
    finally:
        model.set_attn_implementation(attention)
        model.set_experts_implementation(EXPERTS)


def _prompt_length(config: Any) -> int:
    """Length of a prompt that exceeds the window, where that is affordable."""
    window = _window_of(config) or 0
    return max(_SHORTEST, window + _PAST_WINDOW) if window + _PAST_WINDOW <= _LONGEST else _SHORTEST


def _window_of(config: Any) -> int | None:
    if not getattr(config, "use_sliding_window", True):
        return None
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window


def _refuse_unseen_window(config: Any, windows: set[int | None], max_model_len: int) -> None:
    """Refuse a window that the config names but that never reaches the attention function, unless it cannot matter."""
    window = _window_of(config)
    if window is not None and window < max_model_len and window not in windows:
        raise UnsupportedModelError(
            f"The config names a sliding window of {window}, but the network does not pass it to its attention:"
            f" set --max-model-len {window} or less."
        )


def _run_in_chunks(network: Network, tokens: Int32s) -> tuple[Tensor, set[int | None]]:
    """Logits of the second chunk, and the windows that the network requested."""
    first, num_blocks = len(tokens) // 2, -(-len(tokens) // _BLOCK_SIZE)
    pools = KVPools(2 * num_blocks, _BLOCK_SIZE)
    # Blocks from the highest down. The other sequence has the rest: the same tokens, reversed.
    tables = np.arange(2 * num_blocks, dtype=np.int32)[::-1].reshape(2, num_blocks)
    network.logits(PagedStep(paged_units([(0, tokens[:first])], tables[:1]), pools, network.device))
    both = paged_units([(0, tokens[::-1][: first + 1]), (first, tokens[first:])], tables[::-1])
    step = PagedStep(both, pools, network.device)
    return network.logits(step)[first + 1 :], step.windows


def paged_units(parts: list[tuple[int, Int32s]], tables: Int32s) -> Units:
    """Build units that request all logits, from pairs (first position, tokens)."""
    start = np.array([first for first, _ in parts], np.int32)
    return Units(
        slot=np.arange(len(parts), dtype=np.int32),
        serial=np.arange(len(parts)),
        service_class=np.full(len(parts), LS, np.uint8),
        start=start,
        num_tokens=np.array([len(tokens) for _, tokens in parts], np.int32),
        write_start=start,
        logits=np.full(len(parts), LOGITS_LAST | LOGITS_PROMPT, np.uint8),
        block_tables=tables,
        sampling=np.zeros(len(parts), SAMPLING_ROW),
        token_ids=np.concatenate([tokens for _, tokens in parts]),
    )
