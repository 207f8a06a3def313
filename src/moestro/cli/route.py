"""`moestro route`: the router in front of running engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from moestro.cli.app import ORIGINS, app
from moestro.cli.extras import require_extra
from moestro.config.config_sources import config_lines
from moestro.config.serve_settings import CONFIG_GROUP
from moestro.gateway.settings import RouteSettings


@app.command
def route(
    *,
    flags: RouteSettings = RouteSettings(),
    config: Annotated[Path | None, Parameter(group=CONFIG_GROUP)] = None,
    print_config: Annotated[bool, Parameter(group=CONFIG_GROUP, negative=())] = False,
) -> None:
    """Route requests to running engines: vLLM, SGLang, Moestro, or any other with OpenAI's API.

    * moestro route --engine http://127.0.0.1:8001 --engine http://127.0.0.1:8002 needs no further flag.
    * moestro route --engine a=http://gpu1:8000 --engine b=http://gpu2:8000 names the engines a and b.
    * moestro explain REQUEST_ID shows the routing decision of a request.

    Parameters
    ----------
    config
        A YAML or TOML file of settings with the names of flags. Flags beat the environment, and both beat the file.
    print_config
        Show every setting and its source, in a form that --config reads, and exit.
    """
    if print_config:
        print("\n".join(config_lines(flags, ORIGINS)))
        return
    from moestro.gateway.server import route as run

    routing = flags.routing
    if routing.tokenizer is None:
        from moestro.gateway.prompt_blocks import text_prompt_reader

        reading = text_prompt_reader(routing.text_block_bytes)
    else:  # the tokenizer's libraries take seconds to load
        require_extra("tokenizer", "--tokenizer")
        from moestro.gateway.tokenized_blocks import tokenized_prompt_reader

        reading = tokenized_prompt_reader(routing.tokenizer, routing.block_size)
    run(flags, reading)
