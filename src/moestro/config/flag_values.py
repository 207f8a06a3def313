"""Values of flags as vLLM takes them: whole numbers with a suffix, and values that Moestro translates or refuses."""

from __future__ import annotations

import logging
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal

from cyclopts import App, ArgumentCollection

from moestro.errors import ConfigError

# Values that vLLM takes and Moestro does not, for flags that both have: their equivalents, or why they are refused.

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ForeignValues:
    """Values that vLLM has for a flag, and Moestro has not.

    Attributes:
        same: Moestro's values with the same meaning, by vLLM's.
        taken: Moestro's values, by vLLM's, where the difference changes nothing here; one warning names each.
        why_taken: Why it changes nothing; part of a sentence.
        refused: What to do in place of a value that needs what is missing; part of a sentence.
    """

    same: Mapping[str, str] = field(default_factory=dict)
    taken: Mapping[str, str] = field(default_factory=dict)
    why_taken: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)


_LOADERS = ("safetensors", "hf", "fastsafetensors", "instanttensor", "runai_streamer", "runai_streamer_sharded")
_PICKLES = "weights are read from safetensors files alone: convert the checkpoint to them"
_OTHER_FILES = "give a checkpoint in Hugging Face's layout, with safetensors files"

VLLM_VALUES: Mapping[str, ForeignValues] = {
    "dtype": ForeignValues(same={"half": "float16", "float": "float32"}),
    "load_format": ForeignValues(
        taken=dict.fromkeys(_LOADERS, "auto"),
        why_taken="weights are always read from safetensors files, by one loader",
        refused={
            **dict.fromkeys(("pt", "npcache"), _PICKLES),
            **dict.fromkeys(("gguf", "mistral", "modelexpress", "sharded_state", "tensorizer"), _OTHER_FILES),
            "bitsandbytes": "give a checkpoint in FP8, MXFP4 or without quantization",
        },
    ),
    "tool_call_parser": ForeignValues(same={"glm47": "glm45", "qwen3_xml": "qwen3_coder"}),
    "reasoning_parser": ForeignValues(same={"deepseek_v3": "qwen3"}),
}


class VllmValues:
    """Replaces values of vLLM by Moestro's own, for cyclopts, in flags, environment variables and files alike.

    It adds no settings and must come after the sources that do.
    """

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Replace the tokens of `arguments`; an error names the flag and what to do."""
        for argument in arguments:
            if argument.tokens and (values := VLLM_VALUES.get(argument.field_info.name)) is not None:
                argument.tokens[:] = [
                    token.evolve(value=_own(argument.name, token.value, values)) for token in argument.tokens
                ]


def _own(flag: str, given: str, values: ForeignValues) -> str:
    if given in values.refused:
        raise ConfigError(f"{flag} {given} is a value of vLLM and not supported: {values.refused[given]}")
    if given in values.taken:
        logger.warning("%s %s is a value of vLLM that changes nothing here: %s", flag, given, values.why_taken)
        return values.taken[given]
    return values.same.get(given, given)


# Whole numbers with a suffix, as vLLM's flags take them: 8k, 25.6k, 2G.

_FORM = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
# vLLM's words for a limit that the model decides, which is what the setting means unset.
_UNSET = {"--max-model-len": frozenset({"auto", "-1"})}


class SuffixedNumbers:
    """Writes out suffixed numbers wherever a setting is a whole number, for cyclopts.

    A small letter stands for powers of 1,000 and a capital for powers of 1,024, in flags, environment variables and
    files alike. It adds no settings and must come after the sources that do.
    """

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Replace the tokens of `arguments`; an error names the flag and the value."""
        for argument in arguments:
            if argument.tokens and int in (argument.hint, *typing.get_args(argument.hint)):
                if argument.tokens[-1].value in _UNSET.get(argument.name, ()):
                    argument.tokens.clear()
                argument.tokens[:] = [
                    token.evolve(value=_written_out(argument.name, token.value)) for token in argument.tokens
                ]


def _written_out(name: str, value: str) -> str:
    match = _FORM.fullmatch(value.strip())
    if match is None:
        return value
    number, suffix = Decimal(match[1]), match[2]
    if suffix.isupper() and "." in match[1]:
        raise ConfigError(
            f"{name} {value}: {suffix} counts in powers of 1,024 and takes whole numbers; "
            f"{match[1]}{suffix.lower()} counts in powers of 1,000"
        )
    written = number * (1024 if suffix.isupper() else 1000) ** _POWERS[suffix.lower()]
    if written % 1:
        raise ConfigError(f"{name} {value}: must be a whole number, got {written:f}")
    return str(int(written))
