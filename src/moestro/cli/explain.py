"""`moestro explain`: shows what all levels of scheduling did with a request."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from moestro.cli.app import app


@app.command
def explain(
    request_id: str,
    *,
    admin_url: str = "http://127.0.0.1:8081",
    admin_api_key: Annotated[str | None, Parameter(show_default=False)] = None,
    record: Path | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
    perfetto: Path | None = None,
) -> None:
    """Show the engine of a request and why it was chosen, its place in the queue, who preempted it, and the outcome.

    Of moestro serve, the devices that computed its experts and the experts that moved meanwhile are shown too.

    Parameters
    ----------
    request_id
        Of moestro route: the answer's x-request-id header. Of moestro serve: the answer's id, for further choices
        with -1, -2, and so on behind it.
    admin_url
        Address of the operators' port of the running router, or of the server with --admin-port.
    admin_api_key
        Key of the admin plane. MOESTRO_ADMIN_API_KEY keeps it out of the process list.
    record
        Read this file of --record instead, of moestro route or of moestro serve.
    json
        Print the trace as JSON.
    perfetto
        Write the trace to this file too, with a track for each level: open it at https://ui.perfetto.dev.
    """
    from rich.console import Console

    from moestro.cli.recorded.explain import find_trace, tell, write_perfetto

    trace = find_trace(request_id, admin_url=admin_url, admin_api_key=admin_api_key, record=record)
    tell(trace, Console(), as_json=json)
    if perfetto is not None:
        write_perfetto(trace, perfetto)
