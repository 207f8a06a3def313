"""`moestro route`: the router in front of running engines."""

from __future__ import annotations

from moestro.cli.app import ORIGINS, app, loading, require_extra
from moestro.config.config_sources import ConfigFlags, config_lines
from moestro.gateway.settings import RouteSettings


@app.command
def route(
    *,
    flags: RouteSettings = RouteSettings(),
    source: ConfigFlags = ConfigFlags(),
) -> None:
    """Route requests to running engines: vLLM, SGLang, Moestro, or any other with OpenAI's API.

    * moestro route --engine http://127.0.0.1:8001 --engine http://127.0.0.1:8002 needs no further flag.
    * moestro route --engine a=http://gpu1:8000 --engine b=http://gpu2:8000 names the engines a and b.
    * moestro route --engine http://10.0.0.1:8000 --workers 4 uses four cores.
    * moestro route --engine http://10.0.0.1:8000 --ext-proc 9002 also picks engines for Envoy and its gateways.
    * moestro explain REQUEST_ID shows the routing decision of a request.
    """
    if source.print_config:
        print("\n".join(config_lines(flags, ORIGINS)))
        return
    with loading("the router"):
        from moestro.gateway.server import route as run

    routing = flags.routing
    if routing.tokenizer is None:
        from moestro.gateway.clients.request_body import text_prompt_reader

        reading = text_prompt_reader(routing.text_block_bytes)
    else:  # the tokenizer's libraries take seconds to load
        require_extra("tokenizer", "--tokenizer")
        with loading("the tokenizer"):
            from moestro.config.checkpoint_directory import locate_tokenizer
            from moestro.gateway.clients.tokenized_blocks import tokenized_prompt_reader

        reading = tokenized_prompt_reader(locate_tokenizer(routing.tokenizer), routing.block_size)
    if flags.tracing.otlp_traces_endpoint is not None:
        require_extra("otel", "--otlp-traces-endpoint")
    if flags.front.workers > 1:
        from moestro.gateway.workers import route_with_workers

        route_with_workers(flags, reading)
        return
    if flags.picker.ext_proc is None:
        run(flags, reading)
        return
    require_extra("envoy", "--ext-proc")
    with loading("the endpoint picker"):
        from moestro.gateway.picker.port import picker_port

    run(flags, reading, picker_port)
