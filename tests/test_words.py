"""Sources, tests and docs use the field's words: a message is received, a rank reports, a caller requests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BANNED = {"told", "said", "heard", "asked", "nobody", "somebody", "whoever"}
TREES = ("src", "tests", "docs")
SUFFIXES = {".py", ".md", ".toml", ".json", ".jsonl", ".yaml", ".txt", ".html", ".js", ".css", ".cpp", ".h", ".jinja"}
BUILT = {"__pycache__", "_build", "node_modules", "prebuilt"}
# Words of a list from which prompts are drawn: another word would change the prompts of a seed.
DATA = {"src/moestro/workload/generated/draws.py": {"said"}}
# The parts of `has_heard`, `NOBODY_WAITS` and `NotAsked`.
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def banned_words(text: str) -> list[str]:
    """Banned words of a text, also those inside identifiers."""
    return [part for part in PART.findall(text) if part.lower() in BANNED]


def files() -> Iterator[Path]:
    """The text files under the law; pytest's and builders' files are not part of the tree."""
    yield ROOT / "README.md"
    for tree in TREES:
        for file in sorted((ROOT / tree).rglob("*")):
            is_source = file.suffix in SUFFIXES and BUILT.isdisjoint(file.parts) and file.is_file()
            if is_source and file != Path(__file__) and file.name != "CHANGELOG.md":
                yield file


def test_no_file_and_no_name_of_a_file_has_a_banned_word():
    hits = []
    for file in files():
        name = file.relative_to(ROOT).as_posix()
        allowed = DATA.get(name, set())
        for number, line in enumerate([name, *file.read_text().splitlines()]):
            hits += [f"{name}:{number}: {word}" for word in banned_words(line) if word not in allowed]
    assert not hits, f"{len(hits)} banned words; write reported, received, requested, none or the caller\n" + "\n".join(
        hits
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("if has_heard: pass", ["heard"]),
        ("self._told_ids = NOBODY_WAITS_NS", ["told", "NOBODY"]),
        ("class NotAsked(Asked): ...", ["Asked", "Asked"]),
        ("Whoever asks is told so.", ["Whoever", "told"]),
        ("masked, tasked, unasked, threshold, toldest", []),
    ],
)
def test_banned_words_are_found_as_words_and_inside_identifiers(text, found):
    assert banned_words(text) == found
