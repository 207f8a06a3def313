"""`moestro explain`: why a request went where it went."""

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
    """Tell which engine a request was routed to, with which scores, why, and how it came out.

    Parameters
    ----------
    request_id
        As the answer's x-request-id header has it.
    admin_url
        The admin plane of the running router.
    admin_api_key
        Its key, if it has one; better set as MOESTRO_ADMIN_API_KEY than shown in the process list.
    record
        Look in this file of moestro route --record instead.
    """
    from rich.console import Console

    from moestro.gateway.explain import explain as tell

    tell(request_id, admin_url=admin_url, admin_api_key=admin_api_key, record=record, console=Console())
