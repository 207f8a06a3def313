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
    url: str | None = None,
    api_key: Annotated[str | None, Parameter(show_default=False)] = None,
) -> None:
    """Answer the requests of a file in OpenAI's batch format; each line gets one line of answer or error.

    Further flags are those of moestro serve, and start a model for the batch: --model, --dtype, --engines and others.

    * moestro run-batch -i in.jsonl -o out.jsonl --model moestro-demo
    * moestro run-batch -i in.jsonl -o out.jsonl --url http://127.0.0.1:8000 uses a server that runs.

    Parameters
    ----------
    input_file
        A request in each line: custom_id, method (POST), url (/v1/chat/completions or /v1/completions) and body.
    output_file
        File for the answers, in the order in which they are complete. It loses what it had.
    url
        Address of a running server, with or without /v1. Unset: a model is started.
    api_key
        Key of the running server. MOESTRO_API_KEY keeps it out of the process list.
    """
    from moestro.offline.any_server import any_server
    from moestro.offline.background_loop import BackgroundLoop
    from moestro.offline.batch_file import count_requests, open_files, run_lines
    from moestro.workload.progress import progress

    source, target = open_files(input_file, output_file)
    loop = BackgroundLoop()
    try:
        total = count_requests(source)
        with source, target, any_server(url, api_key, serve_flags) as server, progress("requests", total) as advance:
            counts = loop.run(run_lines(server, source, target, advance))
            print(f"{counts.num_good} answered of {total}, {counts.num_failed} errors: {output_file}", file=sys.stderr)
            if counts.num_failed:
                server.raise_if_ended()
    finally:
        loop.close()
