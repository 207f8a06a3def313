"""Modules of transformers that load without the start of their packages, and packages that start where they have to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

IMPORT = "from moestro.text.transformers_part import import_part; "


@pytest.fixture
def package(tmp_path) -> Path:
    """A package of the same name, which says when it starts."""
    directory = tmp_path / "transformers"
    (directory / "inner").mkdir(parents=True)
    (directory / "__init__.py").write_text("print('outer'); NAME, __version__ = 1, '0'")
    (directory / "inner" / "__init__.py").write_text("print('inner'); from . import free")
    (directory / "inner" / "free.py").write_text("from .. import __version__; from . import other; print('free')")
    (directory / "inner" / "other.py").write_text("")
    (directory / "bound.py").write_text("from .inner import other; from . import NAME; print('bound')")
    return tmp_path


def output_of(package: Path, code: str) -> list[str]:
    """What the code prints in a process that finds `package` first."""
    code = f"import sys; sys.path.insert(0, {str(package)!r}); {IMPORT}{code}"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()


BOTH = "('transformers', 'transformers.inner')"
STAYS = f"import_part('transformers.inner.other', {BOTH}); print('transformers.inner' in sys.modules)"


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("import_part('transformers.inner.free')", ["inner", "free"]),
        (f"import_part('transformers.inner.free', {BOTH})", ["free"]),
        (f"import_part('transformers.inner.free', {BOTH}); import transformers.inner", ["free", "outer", "inner"]),
        ("import_part('transformers.inner.free'); from transformers import NAME", ["inner", "free", "outer"]),
        ("import transformers; import_part('transformers.inner.free')", ["outer", "inner", "free"]),
        (f"import_part('transformers.inner.free'); {STAYS}", ["inner", "free", "True"]),
        (f"import_part('transformers.bound', {BOTH})", ["outer", "inner", "free", "bound"]),
    ],
)
def test_a_package_starts_where_a_module_needs_it_or_imports_it(package, code, printed):
    assert output_of(package, code) == printed


def test_what_was_loaded_before_stays_the_same_when_the_package_has_to_start(package):
    first = f"a = import_part('transformers.inner.free', {BOTH}); import_part('transformers.bound')"
    last = "from transformers.inner import free; print(a is free)"
    assert output_of(package, f"{first}; {last}") == ["free", "inner", "outer", "inner", "bound", "True"]


def test_a_module_that_does_not_exist_is_an_import_error():
    code = f"""
{IMPORT}
try:
    import_part("transformers.no_such_module")
except ImportError as error:
    print("no_such_module" in str(error), "transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", "import sys" + code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "True"]


def test_with_the_newest_transformers_the_package_does_not_start_for_tokenizer_and_templates(demo_dir):
    code = f"""
import sys
from pathlib import Path
import moestro.text.chats.template_worker
print("transformers" in sys.modules, "transformers.utils" in sys.modules)
from moestro.text.tokenizer import PreTrainedTokenizerFast, Tokenizer
assert Tokenizer(Path({str(demo_dir)!r})).encode("hi", add_special_tokens=True)
print("transformers" in sys.modules)
import transformers
print(transformers.PreTrainedTokenizerFast is PreTrainedTokenizerFast)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False", "False", "True"]
