"""`moestro run-batch`: answers a file of requests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from moestro.cli.app import app


@app.command(name="run-batch")
def run_batch(
    *serve_flags: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    input_file: Annotated[Path, Parameter(name=("--input-file", "-i"))],
    output_file: Annotated[Path, Parameter(name=("--output-file", "-o"))],
    url: Annotated[str | None, Parameter(name=("--url", "--base-url"))] = None,
    api_key: Annotated[str | None, Parameter(show_default=False)] = None,
) -> None:
    """Answer the requests of a file in OpenAI's batch format; each line gets one line of answer or error.

    The exit status is 1 if a line has an error.

    Further flags are those of moestro serve, and start a model for the batch: --model, --dtype, --engines and others.

    * moestro run-batch -i in.jsonl -o out.jsonl --model moestro-demo
    * moestro run-batch -i in.jsonl -o out.jsonl --url http://127.0.0.1:8000 uses a server that runs.

    Parameters
    ----------
    input_file
        A request in each line: custom_id, method (POST), url and body. The url is /v1/chat/completions,
        /v1/completions, /v1/responses or /v1/messages.
    output_file
        File for the answers, in the order in which they are complete. It loses what it had.
    url
        Address of a running server, with or without /v1. Unset: a model is started.
    api_key
        Key of the running server. MOESTRO_API_KEY keeps it out of the process list.
    """
    from moestro.offline.batch_file import open_output, read_batch, run_lines, summary
    from moestro.offline.server import BackgroundLoop, any_server
    from moestro.workload.progress import progress

    lines = read_batch(input_file)
    target = open_output(input_file, output_file)
    loop = BackgroundLoop()
    try:
        with target, any_server(url, api_key, serve_flags) as server, progress("requests", len(lines)) as advance:
            counts = loop.run(run_lines(server, lines, target, advance))
            print(f"{summary(counts)}: {output_file}", file=sys.stderr)
            if counts.failed:
                server.raise_if_ended()
                sys.exit(1)
    finally:
        loop.close()
