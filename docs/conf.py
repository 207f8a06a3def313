"""Settings of the documentation site: `make docs` builds it with Sphinx from the Markdown pages of this directory."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

from moestro import __version__

project = "Moestro"
author = "The Moestro developers"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "Moestro"

# Links name headings as on GitHub: (page.md#a-heading).
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"


_HERE = Path(__file__).parent
sys.path.insert(0, str(_HERE.parent / "tools"))

from reference_tables import for_site, with_tables  # noqa: E402  a script of tools/, whose folder the line above names

_OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#]+)(#[^)]*)?\)")


def _name_files_outside(_app: Sphinx, _page: str, source: list[str]) -> None:
    """Turn links to files beside docs/ into their paths: the site has no page for them. Broken ones stay, and fail."""

    def name(link: re.Match[str]) -> str:
        text, path = link.group(1), link.group(2)
        if not (_HERE / path).exists():
            return link.group(0)
        shown = path.removeprefix("../").rstrip("/")
        return f"{text} (`{shown}`)" if shown not in text else text

    source[0] = _OUTSIDE.sub(name, source[0])


def _fill_tables(_app: Sphinx, _page: str, source: list[str]) -> None:
    """Put the tables that are made from declarations in their marked places: the repository has few of them."""
    source[0] = with_tables(source[0], for_site)


def setup(app: Sphinx) -> None:
    """Register the hooks of this site. Tables come first: their links to files beside docs/ are turned as well."""
    app.connect("source-read", _fill_tables)
    app.connect("source-read", _name_files_outside)
