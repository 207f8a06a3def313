"""FP8 checkpoints: how transformers reads them, with weights that stay in float8 or are dequantised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import FineGrainedFP8Config

from moestro.files.config_fields import TensorHeader, layer_of_name
from moestro.model.experts.routed import PackedExperts, is_experts, weight_names
from moestro.model.float8 import BLOCK, FLOAT8, SCALES, Float8Linear, Float8Weight, ScaleBlock, empty_parameter

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
