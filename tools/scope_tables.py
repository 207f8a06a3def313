"""Tables of docs/scope.md: vLLM's flags and other servers' fields that Moestro refuses, made from what refuses them."""

from __future__ import annotations

import json

from moestro.config.vllm_flags import VLLM_FLAGS
from moestro.server.api.request_fields import IN_CHAT, IN_COMPLETIONS, IN_MESSAGES, IN_RESPONSES, Neutral


def vllm_flags() -> str:
    """Flags of vLLM in two tables: those that end the start, and those that are taken. A row has one remedy."""
    refused: dict[str, list[str]] = {}
    taken: dict[str, list[str]] = {}
    for name, flag in VLLM_FLAGS.items():
        shown = f"`{name}`" + (f" ({', '.join(f'`{each}`' for each in sorted(flag.neutral))})" if flag.neutral else "")
        (taken if flag.is_taken else refused).setdefault(flag.text, []).append(shown)
    tables = {
        "ends the start (but for these values)": refused,
        "taken without effect": taken,
    }
    return "\n\n".join(
        "\n".join(
            [
                f"| {head} | what to do, or why |",
                "|---|---|",
                *(f"| {', '.join(flags)} | {text} |" for text, flags in sorted(rows.items())),
            ]
        )
        for head, rows in tables.items()
    )


def refused_fields() -> str:
    """Fields that are refused, by the paths that refuse them, with their neutral values."""
    both = {name: values for name, values in IN_COMPLETIONS.items() if IN_CHAT.get(name) == values}
    by_path: dict[str, Neutral] = {
        "`/v1/completions` and `/v1/chat/completions`": both,
        "`/v1/completions` alone": _without(IN_COMPLETIONS, both),
        "`/v1/chat/completions` alone": _without(IN_CHAT, both),
        "`/v1/messages`": IN_MESSAGES,
        "`/v1/responses`": IN_RESPONSES,
    }
    rows = [f"| {path} | {', '.join(_field(*each) for each in neutral.items())} |" for path, neutral in by_path.items()]
    return "\n".join(["| path | fields (accepted values) |", "|---|---|", *rows])


def _without(fields: Neutral, others: Neutral) -> Neutral:
    return {name: values for name, values in fields.items() if name not in others}


def _field(name: str, values: tuple[object, ...]) -> str:
    accepted = f" ({', '.join(f'`{json.dumps(value)}`' for value in values)})" if values else ""
    return f"`{name}`{accepted}"
