"""README.md and docs/: each file that they name exists, and each link leads somewhere; README.md is short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# docs/log.md is history: its entries name the files as they were.
PAGES = [
    ROOT / "README.md",
    ROOT / "tests" / "mutants.md",
    *sorted(set((ROOT / "docs").glob("*.md")) - {ROOT / "docs" / "log.md"}),
]
# Blocks of commands (```bash, ```console, ...) are not read: their files are the reader's.
# A path is written from the root of the repository, of the package, or of the tests of one room.
BASES = [ROOT, ROOT / "src" / "moestro"]
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"(?<![\w./:-])(?:[\w.-]+/)+[\w.*-]+\.(?:py|md|json|toml|png|jinja|txt)\b")
FOLDER = re.compile(
    r"(?<![\w./:-])(?:src|tests|bench|docs|tools|examples|core|wire|routing|engine|flow|model|cost)/[\w./]*/?$"
)
BARE = re.compile(r"(?<![\w./*-])[a-z_]+\.py\b")
TEST = re.compile(r"\btest_\w+\b(?!\.py)")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_file_that_a_page_names_exists(page):
    text = page.read_text()
    plain = re.sub(r"^```\w+\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    fences = re.findall(r"^```\n(.*?)^```$", plain, re.MULTILINE | re.DOTALL)  # diagrams; shells' and outputs are apart
    spans = CODE.findall(re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    named = {path for span in [*spans, *fences] for path in PATH.findall(span)}
    named |= {folder for span in spans for folder in FOLDER.findall(span)}
    named -= {path for path in named if path.startswith("vllm/")}  # sources of policies, in vLLM's tree
    missing = {path for path in named if not any(list(base.glob(path)) for base in BASES)}
    modules = {file.name for folder in ("src", "tests", "bench", "tools") for file in (ROOT / folder).rglob("*.py")}
    missing |= {name for span in spans for name in BARE.findall(span) if not name.startswith("my")} - modules
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_test_that_a_page_names_exists(page):
    tests = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    named = {name for span in CODE.findall(page.read_text()) for name in TEST.findall(span)}
    assert not {name for name in named if f"def {name}(" not in tests}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_link_of_a_page_leads_somewhere(page):
    for target in LINK.findall(page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_the_menu_of_the_site_has_every_page():
    menus = re.findall(r"^```{toctree}\n(.*?)^```$", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE | re.DOTALL)
    listed = [line for menu in menus for line in menu.splitlines() if line and not line.startswith(":")]
    assert sorted(listed) == sorted(page.stem for page in (ROOT / "docs").glob("*.md") if page.stem != "index")


def test_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    bullets = [line for line in lines if line.startswith("* ")]
    assert [line for line in bullets if len(line.split()) > 40] == []
