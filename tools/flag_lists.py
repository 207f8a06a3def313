"""Lists of the command line's flags, as Cyclopts writes them from the same declarations as `--help`."""

from __future__ import annotations

from cyclopts.docs.markdown import generate_markdown_docs

from moestro.cli.app import app
from moestro.cli.main import register

register()


def flags_of(verb: str) -> str:
    """Every flag of one verb by group, with type, help, choices and default."""
    return generate_markdown_docs(
        app, commands_filter=[verb], no_root_title=True, skip_preamble=True, generate_toc=False
    ).strip()
