"""Tables of docs/scope.md: vLLM's flags and other servers' fields that Moestro refuses, made from what refuses them."""

from __future__ import annotations

import json

from moestro.config.vllm_flags import VLLM_FLAGS
from moestro.server.unsupported import IN_CHAT, IN_COMPLETIONS, IN_MESSAGES, IN_RESPONSES, Neutral


def vllm_flags() -> str:
    """Flags of vLLM, those with one remedy in one row."""
    flags_of: dict[str, list[str]] = {}
    for flag, remedy in VLLM_FLAGS.items():
        flags_of.setdefault(remedy, []).append(f"`{flag}`")
    rows = [f"| {', '.join(flags)} | {remedy} |" for remedy, flags in flags_of.items()]
    return "\n".join(["| flag of vLLM | in its place |", "|---|---|", *rows])


def refused_fields() -> str:
    """Fields that are refused, by the paths that refuse them, with their neutral values."""
    by_path: dict[str, Neutral] = {
        "`/v1/completions`": IN_COMPLETIONS,
        "`/v1/chat/completions`": IN_CHAT,
        "`/v1/messages`": IN_MESSAGES,
        "`/v1/responses`": IN_RESPONSES,
    }
    rows = [f"| {path} | {', '.join(_field(*each) for each in neutral.items())} |" for path, neutral in by_path.items()]
    return "\n".join(["| path | fields (accepted values) |", "|---|---|", *rows])


def _field(name: str, values: tuple[object, ...]) -> str:
    accepted = f" ({', '.join(f'`{json.dumps(value)}`' for value in values)})" if values else ""
    return f"`{name}`{accepted}"
