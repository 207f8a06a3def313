"""The banner of `moestro route`: engines, route policy and an example request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moestro import __version__
from moestro.gateway.engines.engine_admin import EngineView
from moestro.web.banner import Banner, curl_line

_MAX_SHOWN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSummary:
    """Facts about a router for its banner.

    Attributes:
        policy: name of the route policy.
        prompts: method of comparing prompts, in words.
        seconds: time since the start of the process, seconds.
        picker_url: address of the endpoint picker; empty without one.
        peers: addresses of other routers.
        num_workers: processes that share the port.
        followed: access log that a shadow follows; empty if this router is none.
    """

    engines: Sequence[EngineView]
    policy: str
    prompts: str
    url: str
    admin_url: str
    needs_key: bool
    seconds: float
    picker_url: str = ""
    peers: Sequence[str] = ()
    num_workers: int = 1
    followed: str = ""


def route_banner(summary: RouteSummary) -> Banner:
    """Return the banner of a router that accepts requests. Its example works once an engine is up."""
    models = [model for engine in summary.engines for model in engine.models]
    body = {"model": models[0] if models else "MODEL", "prompt": "Hello", "max_tokens": 16}
    rows = [
        *_engine_rows(summary.engines),
        ("policy", summary.policy),
        ("prompts", summary.prompts),
        ("ready in", f"{summary.seconds:.1f} s"),
        ("admin", f"{summary.admin_url}/admin/engines, /admin/explain/REQUEST_ID, /metrics"),
        ("serving", f"{summary.url} (OpenAI's API under /v1)"),
        ("page", f"{summary.url}/ (a chat, engines), {summary.admin_url}/ (decisions, drains)"),
    ]
    if summary.picker_url:
        rows.insert(-2, ("picker", f"{summary.picker_url} (Envoy's ext_proc)"))
    if summary.num_workers > 1:
        rows.insert(-2, ("workers", str(summary.num_workers)))
    if summary.peers:
        rows.insert(-2, ("peers", ", ".join(summary.peers[:_MAX_SHOWN])))
    if summary.followed:
        rows.insert(0, ("shadow", f"sends engines no request, and follows {summary.followed}"))
    return Banner(
        title=f"Moestro {__version__} route",
        rows=rows,
        example=curl_line(summary.url, body, needs_key=summary.needs_key, options="-i "),
    )


def _engine_rows(engines: Sequence[EngineView]) -> list[tuple[str, str]]:
    num_up = sum(engine.condition == "up" for engine in engines)
    rows = [("engines", f"{num_up} of {len(engines)} up")]
    for engine in engines[:_MAX_SHOWN]:
        what = ", ".join(engine.models) if engine.condition == "up" else f"{engine.condition}: {engine.cause}"
        rows.append(("", f"{engine.name}  {engine.url}  {what}"))
    if len(engines) > _MAX_SHOWN:
        rows.append(("", f"and {len(engines) - _MAX_SHOWN} more"))
    return rows
