"""Sources of settings, the forms in which values may be written, and the origin of each value.

Besides the command line, settings come from the environment and a file. Values may have vLLM's forms: whole numbers
with a suffix, and values that Moestro translates or refuses.
"""

from __future__ import annotations

import json
import logging
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import yaml
from cyclopts import App, ArgumentCollection, Group, Parameter
from cyclopts.config import Dict

from moestro.config.vllm_flags import flag_named, take_or_refuse, warn_of_taken
from moestro.errors import ConfigError
from moestro.files.text_files import read_text

logger = logging.getLogger(__name__)

# Values that vLLM takes and Moestro does not, for flags that both have: their equivalents, or why they are refused.


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


MAX_FILE_BYTES = 1 << 20

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Entry:
    """One setting.

    Attributes:
        key: name as the file spells it.
        value: value, or values of a flag that takes several. None means that the key has no value.
        place: file and line, for messages.
    """

    key: str
    value: Scalar | list[Scalar]
    place: str


def read_config_file(path: Path) -> list[Entry]:
    """Read the settings in `path`, in the format of its suffix. Entries without a value are left out.

    Raises:
        ConfigError: the file cannot be read, is not in the format of its suffix, has sections, or sets a key twice.
    """
    readers = {".toml": _read_toml, ".yaml": _read_yaml, ".yml": _read_yaml}
    reader = readers.get(path.suffix)
    if reader is None:
        raise ConfigError(f"--config {path}: the name must end in .yaml, .yml or .toml")
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"--config {path} is larger than {MAX_FILE_BYTES} bytes")
        text = read_text(path)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from None
    found: dict[str, Entry] = {}
    for entry in reader(text, path):
        name = entry.key.replace("_", "-")
        if name in found:
            raise ConfigError(f"{entry.place}: {entry.key} was set before, at {found[name].place}")
        found[name] = entry
    return [entry for entry in found.values() if entry.value is not None]


def _read_toml(text: str, path: Path) -> Iterator[Entry]:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    for key, value in data.items():
        # The parser reports no position. A key in an unusual spelling has no line.
        spelt = re.search(rf"^\s*\[*\s*[\"']?{re.escape(key)}[\"']?\s*[=\].]", text, re.MULTILINE)
        place = f"{path}:{text.count(chr(10), 0, spelt.end()) + 1}" if spelt else str(path)
        yield Entry(key, _flat(key, value, place), place)


def _read_yaml(text: str, path: Path) -> Iterator[Entry]:
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path} must hold lines of the form name: value")
        for key_node, value_node in root.value:
            place = f"{path}:{key_node.start_mark.line + 1}"
            key = str(loader.construct_object(key_node, deep=True))
            # Refused before the value is built, because a few nested aliases can stand for billions of values.
            _refuse_nested(key, isinstance(value_node, yaml.MappingNode), place)
            for item in value_node.value if isinstance(value_node, yaml.SequenceNode) else ():
                _refuse_nested(key, not isinstance(item, yaml.ScalarNode), place)
            yield Entry(key, _flat(key, loader.construct_object(value_node, deep=True), place), place)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    finally:
        loader.dispose()


def _flat(key: str, value: object, place: str) -> Scalar | list[Scalar]:
    if isinstance(value, list):
        return [_scalar(key, item, place) for item in value]
    return _scalar(key, value, place)


def _scalar(key: str, value: object, place: str) -> Scalar:
    _refuse_nested(key, isinstance(value, dict | list), place)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _refuse_nested(key: str, is_nested: bool, place: str) -> None:  # noqa: FBT001
    if is_nested:
        raise ConfigError(f"{place}: {key} must be one value or a list of values; there are no sections")


SECRETS = frozenset({"api_key", "router_api_key", "engine_api_key", "admin_api_key", "peer_key"})
_NOT_IN_FILES = frozenset({"config", "print-config"})


@Parameter(name="*", group=Group("Configuration", help="Settings from a file.", sort_key=6))
@dataclass(frozen=True, kw_only=True)
class ConfigFlags:
    """Flags of every verb that reads a file of settings."""

    config: Path | None = None
    "A YAML or TOML file of settings with the names of flags. Flags beat the environment, and both beat the file."
    print_config: Annotated[bool, Parameter(negative=())] = False
    "Show every setting and its source, in a form that --config reads, and exit."


class ConfigFile:
    """Reads the file that the verb's `--config` names, for cyclopts. Flags and environment variables win over it."""

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Add the file's settings to `arguments`; an error names the key or value and its line."""
        option = next((argument for argument in arguments if "--config" in argument.names), None)
        if option is None or not option.tokens:
            return
        taken: list[str] = []
        for entry in read_config_file(Path(option.tokens[-1].value).expanduser()):
            if entry.key.replace("_", "-") in _NOT_IN_FILES:
                raise ConfigError(f"{entry.place}: {entry.key} is for the command line only")
            flag = f"--{entry.key}".replace("_", "-")
            if flag_named(flag) is None or any(flag in argument.names for argument in arguments):
                Dict({entry.key: entry.value}, source=entry.place)(app, (), arguments)
                continue
            try:
                take_or_refuse(flag, str(entry.value))
            except ConfigError as error:
                raise ConfigError(f"{entry.place}: {error}") from None
            taken.append(flag)
        warn_of_taken(taken)


class Origins:
    """Remembers the origin of each value, for cyclopts. It adds no settings and must be the last source."""

    def __init__(self) -> None:
        self._of: dict[str, str] = {}

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Remember the sources of `arguments`."""
        self._of.clear()
        for argument in arguments:
            if argument.tokens:
                token = argument.tokens[0]
                named = {"cli": "command line", "env": f"environment variable {token.keyword}"}
                self._of[argument.field_info.name] = named.get(token.source, token.source)

    def of(self, name: str) -> str:
        """The origin of the setting `name`, in words."""
        return self._of.get(name, "default")


def config_lines(settings: object, origins: Origins) -> Iterator[str]:
    """Yield the dataclass `settings` as lines of YAML that `--config` reads; each line names the origin of its value.

    Secrets are not shown.
    """
    for name, value in settings_in(settings):
        if name in SECRETS and value:
            yield f"# {name}: not shown  # {origins.of(name)}"
        else:
            yield f"{name}: {json.dumps(value, default=str)}  # {origins.of(name)}"


def settings_in(settings: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of every setting in a dataclass and in the groups that it is composed of."""
    for each in fields(settings):
        value = getattr(settings, each.name)
        if is_dataclass(value):
            yield from settings_in(value)
        else:
            yield each.name, value
