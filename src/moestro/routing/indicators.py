"""Indicators: figures of each engine by which policies score.

Each indicator returns a value for every row. A figure that an engine has not reported within `fresh_ns` is replaced by
the router's own count. A figure older than the last decision is corrected by the requests sent since.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from moestro.core.views import Figure
from moestro.routing.policy_contract import RouteView
from moestro.routing.scoring import Counts, Mask, Scores


def fresh(view: RouteView, figure: Figure) -> Mask:
    """Return bool[n]: whether the figure is no older than the view's `fresh_ns`."""
    return figure.known(view.now_ns, view.fresh_ns)


def all_fresh(view: RouteView, *figures: Figure) -> bool:
    """Return whether every routable engine has reported each of these figures lately, so that they are comparable."""
    unroutable = ~view.engines.routable
    return all(bool((fresh(view, figure) | unroutable).all()) for figure in figures)


def new_tokens(view: RouteView) -> Counts:
    """Tokens of the prompt and of a resumed answer that each engine would have to compute."""
    return view.request.num_known_tokens - view.hit_tokens


def hit_ratio(view: RouteView) -> Scores:
    """Fraction of the prompt in each engine's cache, 0 .. 1."""
    return view.hit_tokens / view.request.num_prompt_tokens


def own_prefill_tokens(view: RouteView) -> Scores:
    """Prompt tokens that this router sent to each engine and that are not yet computed.

    The router's own count includes whole prompts until their first token. The engine's report counts partly computed
    prompts, but may include other routers' requests. Both are upper bounds at any age, so the minimum holds.
    """
    return np.minimum(view.engines.prefill_tokens, view.engines.reported_prefill_tokens)


def foreign_prefill_tokens(view: RouteView) -> Scores:
    """Prompt tokens that other routers sent to each engine and that were not computed at its last report."""
    engines = view.engines
    known = fresh(view, engines.queued_prefill_tokens) & (engines.num_foreign > 0)
    return np.where(known, np.maximum(engines.reported_prefill_tokens - engines.prefill_tokens, 0.0), 0.0)


def queued_prefill_tokens(view: RouteView) -> Scores:
    """Prompt tokens that all routers sent to each engine and that are not yet computed."""
    own = own_prefill_tokens(view)
    return own + foreign_prefill_tokens(view) if np.count_nonzero(view.engines.num_foreign) else own


def p_tokens(view: RouteView) -> Scores:
    """LMetric's P-token: tokens that each engine would compute before this request's first token."""
    return queued_prefill_tokens(view) + new_tokens(view)


def batch_size(view: RouteView) -> Counts:
    """Requests on each engine, waiting or running: exact for this router, as last reported for others."""
    engines = view.engines
    if not np.count_nonzero(engines.num_foreign):
        return engines.num_in_flight
    return engines.num_in_flight + np.where(fresh(view, engines.num_waiting), engines.num_foreign, 0)


def num_waiting(view: RouteView) -> Scores:
    """Requests without KV blocks; without a fresh report, those without a first token."""
    engines = view.engines
    reported = engines.num_waiting.values + engines.num_unseen
    return np.where(fresh(view, engines.num_waiting), reported, engines.num_prefilling)


def num_running(view: RouteView) -> Scores:
    """Requests with KV blocks; without a fresh report, those with a first token."""
    engines = view.engines
    own = engines.num_in_flight - engines.num_prefilling
    return np.where(fresh(view, engines.num_running), engines.num_running.values, own)


def num_tokens(view: RouteView) -> Scores:
    """Context tokens of the requests on each engine; without a fresh report, tokens of their prompts."""
    engines = view.engines
    return np.where(fresh(view, engines.num_tokens), engines.num_tokens.values, engines.context_tokens)


def kv_usage(view: RouteView) -> Scores:
    """Fraction of KV blocks held; without a fresh report, the share that prompts in flight would hold, or 0."""
    engines = view.engines
    own = np.minimum(engines.context_tokens / engines.num_kv_tokens, 1.0)
    return np.where(fresh(view, engines.kv_usage), engines.kv_usage.values, own)


def expert_pressure(view: RouteView) -> Scores:
    """Load of the workers of each engine's experts over the mean worker's, at least 1; without a fresh report, 1."""
    figure = view.engines.expert_pressure
    return np.where(fresh(view, figure), np.maximum(figure.values, 1.0), 1.0)


def expert_local_share(view: RouteView) -> Scores:
    """Fraction of each engine's visits to experts that stay on its device, 0 .. 1; without a fresh report, 0."""
    figure = view.engines.expert_local_share
    return np.where(fresh(view, figure), figure.values, 0.0)


def host_tokens(view: RouteView) -> Counts:
    """Tokens of the prompt that each engine's cache holds in host memory alone, and copies back."""
    return np.zeros(len(view.engines), np.int64) if view.host_tokens is None else view.host_tokens


def copy_price(view: RouteView) -> Scores:
    """Time to copy a prompt token from host memory over the time to compute it, on each engine."""
    return view.engines.copy_price


def speed(view: RouteView) -> Scores:
    """Prompt tokens a second of each engine relative to the others."""
    return view.engines.speed


def decode_speed(view: RouteView) -> Scores:
    """Tokens of answers a second of each engine relative to the others."""
    return view.engines.decode_speed


def prompt_tokens(view: RouteView) -> Counts:
    """Length of the prompt in tokens, the same for all engines."""
    return np.full(len(view.engines), view.request.num_prompt_tokens, np.int64)


# Indicators by their names in `--route-score`.
INDICATORS: Mapping[str, Callable[[RouteView], Scores | Counts]] = {
    each.__name__: each
    for each in (
        p_tokens, new_tokens, queued_prefill_tokens, hit_ratio, prompt_tokens, batch_size,
        num_waiting, num_running, num_tokens, kv_usage, expert_pressure, expert_local_share, speed, decode_speed,
        host_tokens, copy_price,
    )
}  # fmt: skip

# Inputs of each indicator, from which the needs of a score expression follow.
HIT_INDICATORS = frozenset({"p_tokens", "new_tokens", "hit_ratio", "host_tokens"})
TRAIT_INDICATORS = frozenset({"speed", "decode_speed", "copy_price"})
FIGURES_OF: Mapping[str, tuple[str, ...]] = {
    "p_tokens": ("queued_prefill_tokens",),
    "queued_prefill_tokens": ("queued_prefill_tokens",),
    "num_waiting": ("num_waiting",),
    "num_running": ("num_running",),
    "num_tokens": ("num_tokens",),
    "kv_usage": ("kv_usage",),
    "expert_pressure": ("expert_pressure",),
    "expert_local_share": ("expert_local_share",),
}
# Figures that no count of the router replaces.
REQUIRED_FIGURES = frozenset({"kv_usage", "expert_pressure", "expert_local_share"})
