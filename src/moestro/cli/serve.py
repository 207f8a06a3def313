"""`moestro serve`: the engines and the API server."""

from __future__ import annotations

from collections.abc import Callable

from moestro.cli.app import ORIGINS, app, loading, require_extra
from moestro.config.config_sources import ConfigFlags, config_lines
from moestro.config.serve_settings import ServeSettings, with_derived


@app.command
def serve(
    settings: ServeSettings = ServeSettings(),
    *,
    source: ConfigFlags = ConfigFlags(),
) -> None:
    """Serve a model behind OpenAI's API."""
    if source.print_config:
        print("\n".join(config_lines(settings, ORIGINS)))
        return
    run_serve(settings)


def run_serve(settings: ServeSettings, on_ready: Callable[[str], None] | None = None) -> None:
    """Serve until a signal.

    Args:
        on_ready: Function that receives the server's URL once it takes requests, in place of the banner.

    Raises:
        ConfigError: The settings cannot be honoured, or a library is missing; the text says what to do.
        EngineDiedError: No engine is left; the text is the cause.
    """
    # A paced device without arithmetic computes nothing, so a tokenizer is enough.
    require_extra("tokenizer" if settings.pacing.paced_arithmetic == "none" else "serve", "moestro serve")
    if settings.launching.launcher == "ray":
        require_extra("ray", "--launcher ray")
    if settings.tracing.otlp_traces_endpoint is not None:
        require_extra("otel", "--otlp-traces-endpoint")
    with loading("the server"):
        from moestro.config.checkpoint_directory import locate_model, locate_tokenizer
        from moestro.server.server import serve as run

    derived = with_derived(settings, locate_model, locate_tokenizer)
    if on_ready is None:
        run(derived)
    else:
        run(derived, on_ready=on_ready)
