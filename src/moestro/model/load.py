"""Loads a network from a checkpoint directory: config, refusals, weights, in that order.

Weights of an FP8 checkpoint stay in float8 or are dequantised.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils import logging as hf_logging
from transformers.utils.quantization_config import FineGrainedFP8Config

from moestro.errors import ConfigError, MoestroError, UnsupportedModelError, shown
from moestro.files.checkpoint import read_checkpoint
from moestro.files.config_fields import TensorHeader, layer_of_name, longest_context, refuse_sizes, refuse_unbacked
from moestro.model.attention import PAGED, compress_attention, register_attention
from moestro.model.check import (
    refuse_config,
    refuse_config_file,
    refuse_dtypes,
    refuse_shapes,
    refuse_skeleton,
)
from moestro.model.experts.routed import EXPERTS, PackedExperts, is_experts, register_experts, weight_names
from moestro.model.kernels.kernel_choice import why_no_float8_kernels
from moestro.model.network import Network
from moestro.model.pools import choose_max_model_len
from moestro.model.settings import ModelSettings
from moestro.model.tensors import (
    BLOCK,
    FLOAT8,
    SCALES,
    Float8Linear,
    Float8Weight,
    ScaleBlock,
    empty_parameter,
    open_device_of,
)

METHOD = "moestro_fp8"  # the quantizer's name in transformers' registry
_THEIRS = "fp8"
_FLOAT8_HEADER = "F8_E4M3"  # in safetensors files
_Counts = Counter[tuple[int | None, bool]]  # numbers by layer, and whether they are scales


def read_as(quantization: Mapping[str, Any], *, keeps_float8: bool) -> dict[str, Any]:
    """A config's quantization for `from_pretrained`, which reads FP8 weights by this module and dequantises others."""
    if quantization["quant_method"] not in (_THEIRS, METHOD):
        return {**quantization, "dequantize": True}
    return {**quantization, "quant_method": METHOD, "dequantize": not keeps_float8}


def keeps_float8(config: Any) -> bool:
    """Whether `read_as` has let the weights of a config's checkpoint stay in float8."""
    quantization = getattr(config, "quantization_config", None)
    if not isinstance(quantization, dict):  # transformers has replaced it
        quantization = {} if quantization is None else vars(quantization)
    return quantization.get("quant_method") == METHOD and not quantization["dequantize"]


def why_not_float8(
    quantization: Mapping[str, Any], skeleton: Any, num_layers: int, tensors: Mapping[str, TensorHeader]
) -> str | None:
    """Why the weights of an FP8 checkpoint cannot stay as they are; None if they can.

    Args:
        quantization: the config's quantization.
        skeleton: network without memory, whose modules are changed to those in float8.
        num_layers: layers that run.
        tensors: tensors of the checkpoint, by name.
    """
    size = quantization.get("weight_block_size", (128, 128))
    if not isinstance(size, list | tuple) or quantization.get("activation_scheme", "dynamic") != "dynamic":
        return "their scales are not those of blocks"
    _Float8Quantizer(_Float8Config(**quantization)).exchange(skeleton)
    wanted: _Counts = Counter()
    for name, parameter in skeleton.named_parameters():
        if name.endswith(SCALES) or parameter.dtype is FLOAT8:
            wanted[layer_of_name(name), name.endswith(SCALES)] += parameter.numel()
    found: _Counts = Counter()
    for name, tensor in tensors.items():
        layer = layer_of_name(name)
        # Layers that do not run may follow: heads for multi-token prediction.
        if (layer is None or layer < num_layers) and (name.endswith(SCALES) or tensor.dtype.startswith("F8")):
            found[layer, name.endswith(SCALES) or tensor.dtype != _FLOAT8_HEADER] += tensor.num_elements
    return None if wanted == found else "some modules are stored in another form than config.json says"


@register_quantization_config(METHOD)
class _Float8Config(FineGrainedFP8Config):  # type: ignore[misc]
    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.quant_method = METHOD


@register_quantizer(METHOD)
class _Float8Quantizer(FineGrainedFP8HfQuantizer):  # type: ignore[misc]
    """Gives a network the modules of this room in place of transformers', whose kernels are fetched at run time."""

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `load` decides whether weights stay in float8."""

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        if self.quantization_config.dequantize:
            super()._process_model_before_weight_loading(model, **kwargs)
        else:
            self.exchange(model)

    def exchange(self, model: Any) -> None:
        """Replace modules that the config does not except, none of which has memory yet."""
        self._normalize_modules_to_not_convert(model)
        excepted = self.get_modules_to_not_convert(
            model, self.quantization_config.modules_to_not_convert, model._keep_in_fp32_modules
        )
        block = ScaleBlock(*self.quantization_config.weight_block_size)
        for name, module in list(model.named_modules()):
            if not should_convert_module(name, excepted):
                continue
            if type(module) is nn.Linear:
                model.set_submodule(name, Float8Linear(module, block))
            elif is_experts(module) and not module.is_transposed:
                _exchange_experts(module, block)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for name, parameter in model.named_parameters():  # a checkpoint may have them in bfloat16
            if name.endswith(SCALES):
                parameter.data = parameter.data.to(torch.float32)
        return model

    def get_weight_conversions(self) -> list[Any]:
        return _with_partial_blocks(super().get_weight_conversions())

    def update_weight_conversions(self, weight_conversions: list[Any], *model: Any) -> list[Any]:
        return _with_partial_blocks(super().update_weight_conversions(weight_conversions, *model))


def _exchange_experts(module: nn.Module, block: ScaleBlock) -> None:
    """Let an experts module hold its weights in float8, with their scales beside them."""
    experts = cast(PackedExperts, module)
    for name in weight_names(experts):
        weight: Tensor = getattr(experts, name)
        number, num_out, num_in = weight.shape
        halves = 2 if experts.has_gate and name != "down_proj" else 1
        height, width = block.grid(num_out // halves, num_in)
        setattr(module, name, empty_parameter(*weight.shape, dtype=FLOAT8, device=weight.device))
        scales = empty_parameter(number, halves * height, width, dtype=torch.float32, device=weight.device)
        setattr(module, f"{name}{SCALES}", scales)
    setattr(module, BLOCK, block)


class _Dequantize(Fp8Dequantize):  # type: ignore[misc]
    """Dequantises weights whose last blocks are smaller too, as those of DeepSeek-V3 for latents."""

    def _dequantize_one(self, quantized: Tensor, scales: Tensor, output_dtype: torch.dtype | None = None) -> Tensor:
        size = self.hf_quantizer.quantization_config.weight_block_size
        if size is None or quantized.dim() != 2 or tuple(scales.shape) != ScaleBlock(*size).grid(*quantized.shape):
            return cast(Tensor, super()._dequantize_one(quantized, scales, output_dtype))
        weight = Float8Weight(quantized, scales.to(torch.float32), ScaleBlock(*size))
        return weight.dequantised(output_dtype or (scales.dtype if scales.element_size() > 1 else torch.bfloat16))


def _with_partial_blocks(conversions: list[Any]) -> list[Any]:
    for conversion in conversions:
        operations = getattr(conversion, "operations", None) or []
        for at, operation in enumerate(operations):
            if type(operation) is Fp8Dequantize:
                operations[at] = _Dequantize(operation.hf_quantizer)
    return conversions


def read_config(settings: ModelSettings) -> Any:
    """Read transformers' config of the checkpoint, after every refusal that needs no weights.

    Raises:
        UnsupportedModelError: this checkpoint cannot run here; the text says why.
        ConfigError: `--max-model-len` exceeds the length that the network was made for.
    """
    directory = Path(settings.model)
    has_weights = settings.load_format != "dummy"
    checkpoint = read_checkpoint(directory, has_weights=has_weights)
    refuse_config_file(checkpoint.config)
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        text = config.get_text_config()
        refuse_config(config, choose_max_model_len(settings, positions_in(text)))
        sizes, file = text.to_dict(), directory / "config.json"  # with the family's values of missing fields
    except MoestroError:
        raise
    except Exception as error:  # transformers' validators raise errors of their own, and other code any kind
        raise UnsupportedModelError(f"transformers does not accept config.json: {_one_line(error)}") from error
    refuse_sizes(sizes, file)
    if has_weights:
        refuse_unbacked(sizes, file, checkpoint.tensors)
    skeleton = build_skeleton(config)
    if has_weights:
        ignored = skeleton._keys_to_ignore_on_load_unexpected or ()
        refuse_dtypes(checkpoint.tensors, checkpoint.config.get("quantization_config"), ignored)
        refuse_shapes(skeleton, checkpoint.tensors)
    return config


def positions_in(text: Any) -> int | None:
    """Return the tokens of the longest sequence by transformers' config of the text part; None if it names none."""
    return longest_context(getattr(text, "max_position_embeddings", None), getattr(text, "rope_parameters", None))


def load_ahead() -> None:
    """Load what transformers prepares when a process reads its first network, so that forks of this one need not.

    Its rules of renamed weights are a thousand regular expressions, for the families of all networks. They and the
    modules that networks share are a quarter of the time in which a fork opens a small network.
    """
    with contextlib.suppress(ImportError, AttributeError):  # another version prepares it elsewhere
        for name in ("generation.utils", "modeling_layers", "processing_utils"):
            import_module(f"transformers.{name}")
        import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("")


def load_network(settings: ModelSettings, config: Any, rank: int = 0) -> tuple[Network, tuple[str, ...]]:
    """Load the network to its device, with notes for the operator.

    Args:
        config: config from `read_config`.
        rank: as in `choose_device`.

    Raises:
        UnsupportedModelError: weights are missing, torn, or differ from the config's shapes.
        ConfigError: the device is absent, or its memory does not hold the weights.
    """
    register_attention()
    register_experts()
    hf_logging.disable_progress_bar()
    device = open_device_of(settings, rank)
    why_dequantised = choose_float8(settings, config, device)
    for part in (config, config.get_text_config()):
        part.output_router_logits = False  # a training loss, which every step would compute
    try:
        if settings.load_format == "dummy":
            model, note = draw_weights(settings, config, device), "Weights are random (--load-format dummy)."
        else:
            model, note = _read_weights(settings, config, device)
        network = Network(model.to(device).eval())
        why_expanded = compress_attention(network.model)
        notes = (note, why_dequantised, describe_float8(network.model), why_expanded)
        return network, tuple(each for each in notes if each)
    except torch.OutOfMemoryError as error:
        free, total = (size / (1 << 30) for size in torch.cuda.mem_get_info(device))
        raise ConfigError(
            f"The weights do not fit {device}, which has {total:.1f} GiB of memory and {free:.1f} GiB left: end other"
            " programs there, take a smaller --dtype, or spread the experts over more cards (--mode ep or async)."
        ) from error


def build_skeleton(config: Any) -> Any:
    """Build the network without memory for weights, unless its modules are refused."""
    try:
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # an inconsistent config can make a constructor raise anything
        raise UnsupportedModelError(f"transformers cannot build this config's network: {_one_line(error)}") from error
    refuse_skeleton(skeleton)
    return skeleton


def choose_float8(settings: ModelSettings, config: Any, device: torch.device) -> str:
    """Decide whether the weights of a checkpoint stay in float8, and note it in its config.

    They do where the own kernels read them; elsewhere they are dequantised at load. All processes decide alike.

    Args:
        settings: those of the network.
        config: config from `read_config`.
        device: the network's device.

    Returns:
        A sentence for the operator, if FP8 weights are dequantised; else nothing.
    """
    quantization = getattr(config, "quantization_config", None)
    if settings.load_format == "dummy" or quantization is None or quantization["quant_method"] != "fp8":
        return ""
    dtype = choose_dtype(settings, config) or torch.bfloat16
    why_not = why_no_float8_kernels(settings, device, dtype)
    if why_not is None:
        tensors = read_checkpoint(Path(settings.model), has_weights=True).tensors
        num_layers = config.get_text_config().num_hidden_layers
        why_not = why_not_float8(quantization, build_skeleton(config), num_layers, tensors)
    config.quantization_config = read_as(quantization, keeps_float8=why_not is None)
    return "" if why_not is None else f"FP8 weights are dequantised to {_name(dtype)}: {why_not}."


def describe_float8(model: Any) -> str:
    """A sentence for the operator on the weights that stay in float8; nothing if there are none."""
    sizes = {True: 0, False: 0}
    for name, parameter in model.named_parameters():
        is_float8 = parameter.dtype is FLOAT8 or name.endswith(SCALES)
        sizes[is_float8] += parameter.numel() * parameter.element_size()
    if not sizes[True]:
        return ""
    stored, rest = (f"{size / (1 << 30):.2f} GiB" for size in (sizes[True], sizes[False]))
    return f"FP8 weights stay FP8: {stored} with their scales, beside {rest} of weights in {_name(model.dtype)}."


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _read_weights(settings: ModelSettings, config: Any, device: torch.device) -> tuple[Any, str]:
    """Read the weights, tensor by tensor, to the device. Returns the model and a sentence for the operator, or ""."""
    is_quantized = getattr(config, "quantization_config", None) is not None
    dtype = choose_dtype(settings, config)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            settings.model,
            config=config,
            trust_remote_code=False,
            output_loading_info=True,
            # On a CPU, tensors stay in the mapped files until they are packed.
            device_map=None if device.type == "cpu" else {"": device},
            **pretrained_arguments(config, dtype),
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # torn files, other shapes: each library below raises its own errors
        raise UnsupportedModelError(f"The weights in {settings.model} cannot be loaded: {_one_line(error)}") from error
    if missing := sorted(report["missing_keys"]):
        # transformers would continue with random numbers in place of missing tensors.
        raise UnsupportedModelError(
            f"{settings.model} lacks {len(missing)} of the config's tensors, first {missing[0]}."
        )
    if is_quantized and dtype is not None and not keeps_float8(config):
        finish_dequantizing(model, dtype)
    unused = sorted(report["unexpected_keys"])
    return model, f"{len(unused)} tensors of the checkpoint are not used, first {unused[0]}." if unused else ""


def _one_line(error: Exception) -> str:
    kind = "unknown name or missing field " if type(error) is KeyError else ""  # whose text is the name alone
    return shown(kind + " ".join(str(error).split()))


def choose_dtype(settings: ModelSettings, config: Any) -> torch.dtype | None:
    """Dtype of the weights; None means the checkpoint's, as transformers finds it."""
    if settings.dtype != "auto":
        chosen: torch.dtype = getattr(torch, settings.dtype)
        return chosen
    if getattr(config, "quantization_config", None) is None:
        return None
    return config.get_text_config().dtype or torch.bfloat16


def pretrained_arguments(config: Any, dtype: torch.dtype | None) -> dict[str, Any]:
    """Arguments of `from_pretrained` for Moestro's functions, after the config says how quantized weights are read.

    Args:
        config: config of the checkpoint, which may be changed.
        dtype: dtype of the weights. None means the checkpoint's.
    """
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        config.quantization_config = read_as(quantization, keeps_float8=keeps_float8(config))
    return {
        "dtype": dtype or "auto",
        "attn_implementation": PAGED,
        "experts_implementation": EXPERTS,
        "use_safetensors": True,
        "local_files_only": True,
    }


def finish_dequantizing(model: Any, dtype: torch.dtype) -> None:
    """Convert tensors that dequantizing left in the dtype of its scales, or in bfloat16, to the model's dtype.

    Tensors that the family keeps in float32 on purpose stay, and so do buffers: rotary frequencies must not be rounded.
    """
    kept = (*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ()))
    for name, parameter in model.named_parameters():
        if parameter.dtype != dtype and not any(part in name for part in kept):
            parameter.data = parameter.data.to(dtype)


def draw_weights(settings: ModelSettings, config: Any, device: torch.device) -> Any:
    """Draw random weights of the config's shapes, keyed by the seed, of a size that keeps activations near 1.

    They are drawn on `device`: a core takes minutes for 30 billion numbers, and an accelerator seconds. A seed gives
    other numbers on another kind of device. transformers' own deviation of 0.02 does not serve: in a small network its
    logits hardly depend on the input.
    """
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    given = config.get_text_config().dtype or torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=given if settings.dtype == "auto" else getattr(torch, settings.dtype),
            attn_implementation=PAGED,
            experts_implementation=EXPERTS,
            trust_remote_code=False,
        )
    generator = torch.Generator(device).manual_seed(settings.seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    return model
