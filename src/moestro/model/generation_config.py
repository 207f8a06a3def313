"""The checkpoint authors' sampling defaults: `generation_config.json`, read as plain JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moestro.core.request import SAMPLING_RANGES, SamplingDefaults
from moestro.errors import UnsupportedModelError, shown_literal
from moestro.files.checkpoint import read_json_object


def read_generation_config(directory: Path) -> dict[str, Any]:
    """Read the file's fields; a missing file has none.

    Raises:
        UnsupportedModelError: the file is not a JSON object.
    """
    path = directory / "generation_config.json"
    return read_json_object(path) if path.exists() else {}


def eos_token_ids(fields: dict[str, Any], config: Any) -> tuple[int, ...]:
    """Ids that end a sequence: those of the file and of transformers' config, ascending.

    Raises:
        UnsupportedModelError: an id is no token id of the network.
    """
    ids: list[int] = []
    for given in (fields.get("eos_token_id"), config.eos_token_id, config.get_text_config().eos_token_id):
        ids += given if isinstance(given, list | tuple) else [] if given is None else [given]
    if wrong := [each for each in ids if type(each) is not int]:
        raise UnsupportedModelError(
            f"eos_token_id must be an integer or a list of them, got {shown_literal(wrong[0])}."
        )
    vocab_size = config.get_text_config().vocab_size
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise UnsupportedModelError(
            f"eos_token_id must be from 0 to {vocab_size - 1}, the vocabulary's last token, got"
            f" {shown_literal(next(each for each in ids if not 0 <= each < vocab_size))}."
        )
    return tuple(sorted(set(ids)))


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
