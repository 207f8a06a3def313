"""`moestro serve`: the engines and the API server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from moestro.cli.app import ORIGINS, app
from moestro.cli.extras import require_extra
from moestro.config.config_sources import config_lines
from moestro.config.serve_settings import CONFIG_GROUP, ServeSettings, with_derived


@app.command
def serve(
    settings: ServeSettings = ServeSettings(),
    *,
    config: Annotated[Path | None, Parameter(group=CONFIG_GROUP)] = None,
    print_config: Annotated[bool, Parameter(group=CONFIG_GROUP, negative=())] = False,
) -> None:
    """Serve a model behind OpenAI's API.

    Parameters
    ----------
    config
        A YAML or TOML file of settings with the names of flags. Flags beat the environment, and both beat the file.
    print_config
        Show every setting and its source, in a form that --config reads, and exit.
    """
    if print_config:
        print("\n".join(config_lines(settings, ORIGINS)))
        return
    # A paced device without arithmetic computes nothing, so a tokenizer is enough.
    require_extra("tokenizer" if settings.pacing.paced_arithmetic == "none" else "serve", "moestro serve")
    from moestro.server.checkpoint import locate_model
    from moestro.server.server import serve as run

    run(with_derived(settings, locate_model))
