"""`moestro serve`: the engines and the API server."""

from __future__ import annotations

from moestro.cli.app import ORIGINS, app
from moestro.cli.extras import require_extra
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
    # A paced device without arithmetic computes nothing, so a tokenizer is enough.
    require_extra("tokenizer" if settings.pacing.paced_arithmetic == "none" else "serve", "moestro serve")
    if settings.launching.launcher == "ray":
        require_extra("ray", "--launcher ray")
    from moestro.server.checkpoint import locate_model
    from moestro.server.server import serve as run

    run(with_derived(settings, locate_model))
