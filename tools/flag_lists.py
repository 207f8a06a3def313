"""Lists of the command line's flags, as Cyclopts writes them from the same declarations as `--help`."""

from __future__ import annotations

import re

from cyclopts.docs.markdown import generate_markdown_docs

import moestro.cli.main  # noqa: F401 registers the verbs
from moestro.cli.app import app

# The choices of a flag, one a paragraph. They have tables of their own, which `_PAGES` names.
_CHOICES = re.compile(r"\n\n    \* [\w.-]+: [^\n]*(?:\n\n    \* [\w.-]+: [^\n]*)*")
_PAGES = {
    "policy": "placement.md#policies",
    "placement-policy": "placement.md#policies",
    "tool-call-parser": "chats.md#formats-of-calls",
    "reasoning-parser": "chats.md#reasoning",
}


def flags_of(verb: str) -> str:
    """Every flag of one verb by group, with type, help, choices and default. Policies and parsers are named alone."""
    text = generate_markdown_docs(
        app, commands_filter=[verb], no_root_title=True, skip_preamble=True, generate_toc=False
    ).strip()
    return "\n".join(_with_names(flag) for flag in re.split(r"\n(?=\* )", text))


def _with_names(flag: str) -> str:
    """Replace the descriptions of a flag's choices by their names and a link to their table."""
    listed = _CHOICES.search(flag)
    if listed is None:
        return flag
    names = re.findall(r"^    \* ([\w.-]+): ", listed[0], re.MULTILINE)
    default = re.search(r" (\*\[default: .*?\]\*)$", listed[0])
    option = re.match(r"\* `--([\w-]+)", flag)
    page = _PAGES.get(option[1] if option else "", "policies.md")
    shown = f" One of [{', '.join(names)}]({page})." + (f" {default[1]}" if default else "")
    return flag.replace(listed[0], shown)
