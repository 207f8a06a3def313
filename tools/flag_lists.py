"""Lists of the command line's flags, as Cyclopts writes them from the same declarations as `--help`."""

from __future__ import annotations

import re
from itertools import pairwise

from cyclopts.docs.markdown import generate_markdown_docs

from moestro.cli.app import app
from moestro.cli.main import register
from moestro.cost.links import LINKS

# The choices of a flag, one a paragraph. They have tables of their own, which `_PAGES` names.
_CHOICES = re.compile(r"\n\n    \* [\w.-]+: [^\n]*(?:\n\n    \* [\w.-]+: [^\n]*)*")
_PAGES = {
    "policy": "placement.md#policies",
    "placement-policy": "placement.md#policies",
    "tool-call-parser": "chats.md#formats-of-calls",
    "reasoning-parser": "chats.md#reasoning",
}
_OPTION = re.compile(r"\* `--([\w-]+)")
_LINKS = f"one of {', '.join(LINKS)}"

register()


def flags_of(verb: str) -> str:
    """Every flag of one verb by group, with type, help, choices and default. Policies and parsers are named alone."""
    return "\n".join(_flags(verb))


def flags_beside(verb: str, other: str) -> str:
    """Flags of one verb as `flags_of`; those that `other` has word for word are named alone, at the end."""
    same = set(_flags(other))
    flags = _flags(verb)
    named = [f"`--{option[1]}`" for flag in flags if flag in same and (option := _OPTION.match(flag))]
    shown = [flag for flag in flags if flag not in same]
    shown = [flag for flag, after in pairwise([*shown, "\n**"]) if not (_is_head(flag) and _is_head(after))]
    return "\n".join([*shown, "", f"As in `moestro {other}`: {', '.join(named)}."])


def _is_head(text: str) -> bool:
    return text.lstrip("\n").startswith("**")


def _flags(verb: str) -> list[str]:
    """One text for each flag and each head of a group."""
    text = generate_markdown_docs(
        app, commands_filter=[verb], no_root_title=True, skip_preamble=True, generate_toc=False
    ).strip()
    text = text.replace(_LINKS, "[a link](costs.md#links-between-workers)")
    return [_with_names(flag) for flag in re.split(r"\n(?=\* |\n\*\*)", text)]


def _with_names(flag: str) -> str:
    """Replace the descriptions of a flag's choices by their names and a link to their table."""
    listed = _CHOICES.search(flag)
    if listed is None:
        return flag
    names = re.findall(r"^    \* ([\w.-]+): ", listed[0], re.MULTILINE)
    default = re.search(r" (\*\[default: .*?\]\*)$", listed[0])
    option = _OPTION.match(flag)
    page = _PAGES.get(option[1] if option else "", "policies.md")
    shown = f" One of [{', '.join(names)}]({page})." + (f" {default[1]}" if default else "")
    return flag.replace(listed[0], shown)
