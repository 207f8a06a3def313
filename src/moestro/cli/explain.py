"""`moestro explain`: shows the routing decision of a request."""

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
) -> None:
    """Show the engine of a request, the scores and the reason of the choice, and the outcome.

    Parameters
    ----------
    request_id
        Id of the request, from the answer's x-request-id header.
    admin_url
        Address of the running router's admin plane.
    admin_api_key
        Key of the admin plane. MOESTRO_ADMIN_API_KEY keeps it out of the process list.
    record
        Read this file of moestro route --record instead.
    """
    from rich.console import Console

    from moestro.cli.recorded.explain import explain as tell

    tell(request_id, admin_url=admin_url, admin_api_key=admin_api_key, record=record, console=Console())
