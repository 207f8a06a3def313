"""The banner of `moestro serve`: model, engines, capacity, URL, and an example request."""

from __future__ import annotations

from collections.abc import Sequence

from moestro import __version__
from moestro.core.model_info import CardMemory, ModelInfo
from moestro.server.api.fields.request_builder import ServedModel
from moestro.web.banner import Banner, curl_line
from moestro.wire.messages import Phase

_GIB = 1 << 30
_LEAST_SHOWN = _GIB // 20  # smaller parts would be shown as 0.0


def serve_banner(
    model: ServedModel, infos: Sequence[ModelInfo], phases: Sequence[Phase], url: str, *, needs_key: bool
) -> Banner:
    """Return the banner of a server that accepts requests.

    Args:
        infos: Model information, one per engine.
        phases: Consecutive phases from the start of the process until now.
    """
    info, count = infos[0], len(infos)
    tokens = sum(each.num_blocks * each.block_size for each in infos)
    gate = f", {info.num_experts} experts a layer, top-{info.num_experts_per_token}" if info.num_experts else ", dense"
    durations = ", ".join(f"{phase.name} {phase.seconds:.1f}" for phase in phases)
    rows = [
        ("model", ", ".join(model.names)),
        ("network", f"{info.model_type}, {_human(info.num_parameters)} parameters, {info.num_layers} layers{gate}"),
        ("engines", f"{count} x {info.device}, {info.dtype}"),
        ("context", f"{info.max_model_len:,} tokens"),
        ("KV cache", f"{tokens:,} tokens: {tokens / info.max_model_len:.1f} sequences of the full context at once"),
        *(() if info.card is None else (("GPU memory", _card_text(info.card, count)),)),
        *zip(("tool calls", "reasoning"), map(": ".join, model.chat.choices), strict=False),
        ("ready in", f"{sum(phase.seconds for phase in phases):.1f} s ({durations})"),
        ("serving", f"{url} (OpenAI's API under /v1)"),
        ("page", f"{url}/ (a chat, engines, experts)"),
    ]
    body = {"model": model.names[0], "prompt": "def fibonacci(n):", "max_tokens": 48}
    return Banner(
        title=f"Moestro {__version__}",
        rows=rows,
        notes=info.notes,
        example=curl_line(url, body, needs_key=needs_key),
    )


def _card_text(card: CardMemory, num_engines: int) -> str:
    """List the uses of a card's memory, in GiB of each engine."""
    parts = [("weights", card.weight_bytes), ("peak of a step", card.step_bytes), ("graphs", card.graph_bytes)]
    parts += [("KV cache", card.kv_bytes), ("other", card.other_bytes)]
    listed = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in parts if size >= _LEAST_SHOWN)
    shared = "" if card.num_sharing == 1 else f", shared by {card.num_sharing} processes"
    each = "" if num_engines == 1 else "each "
    return f"{card.total_bytes / _GIB:.1f} GiB{shared}: {each}{listed}"


def _human(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)
