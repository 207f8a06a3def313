"""A compiled library comes from the wheel, from the cache or from a compiler; without any there is a reason."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support.running import wait_until

from moestro.native import compiler
from moestro.native.compiler import (
    LIBRARIES,
    PLAIN,
    CompilerError,
    InstructionSet,
    LibrarySource,
    accepts,
    find_compiler,
    instruction_set_of,
    is_whole,
    library_name,
)
from moestro.native.library_search import LibrarySearch, OptionalKernel, cache_folder

ROOT = Path(__file__).parents[2]
NO_FOLDER = Path("/nonexistent")
FUNCTION = 'extern "C" __attribute__((visibility("default"))) int moestro_answer() { return 42; }\n'


class Answer:
    """A loaded library of one function."""

    def __init__(self, path: Path) -> None:
        self.path, self.library = path, ctypes.CDLL(str(path))

    def __call__(self) -> int:
        return self.library.moestro_answer()


@pytest.fixture
def source(tmp_path) -> LibrarySource:
    """A library of one function."""
    folder = tmp_path / "library" / "source"
    folder.mkdir(parents=True)
    (folder / "answer.cpp").write_text(FUNCTION)
    return LibrarySource("answer", "answer's library", folder.parent, (PLAIN,), has_threads=True)


@pytest.fixture
def compiled(source, tmp_path) -> Path:
    """A folder with the compiled library."""
    try:
        find_compiler()
    except CompilerError as error:
        pytest.skip(str(error))
    return compiler.compile_library(source, PLAIN, tmp_path / "compiled").parent


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)


@pytest.fixture
def counted(compiled, monkeypatch):
    """Compilations, which copy the library that is there."""
    made = []
    content = next(compiled.glob("*.so")).read_bytes()

    def compile_library(source, chosen, folder):
        made.append(chosen)
        target = folder / library_name(source, chosen)
        Path(f"{target}.new").write_bytes(content)
        Path(f"{target}.new").replace(target)
        return target

    monkeypatch.setattr("moestro.native.library_search.compile_library", compile_library)
    return made


def search(source: LibrarySource, prebuilt: Path = NO_FOLDER, cache: Path = NO_FOLDER) -> LibrarySearch[Answer]:
    made = LibrarySearch(source, PLAIN, Answer, prebuilt, cache)
    made.wait(300)
    assert made.is_over
    return made


def test_the_wheel_s_library_comes_first(source, compiled, no_compiler):
    found = search(source, prebuilt=compiled)
    assert found.library() == 42
    assert found.library.path.parent == compiled


def test_without_a_compiler_there_is_none_and_the_reason_is_given(source, no_compiler, tmp_path, caplog):
    with caplog.at_level("INFO", "moestro.native.library_search"):
        found = search(source, cache=tmp_path / "cache")
    assert found.library is None
    assert found.look() is None
    assert found.failure == "no C++ compiler was found; install g++ or clang++, or name one in CXX"
    assert [each.message for each in caplog.records] == [f"answer's library: not available: {found.failure}"]
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("given", ["/nonexistent/g++", "nonsense -O2", "'", " "])
def test_a_compiler_of_cxx_that_is_absent_is_named(given, source, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", given)
    assert search(source, cache=tmp_path / "cache").failure == f"CXX={given} names no program that is here"


def test_the_compiler_of_cxx_may_have_arguments(source, compiled, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", f"env NAME=value {find_compiler()[0]} -DANSWER=1")
    assert search(source, cache=tmp_path / "cache").library() == 42


@pytest.fixture
def optional(source, compiled, no_compiler, monkeypatch) -> OptionalKernel[Answer]:
    """A library with a plain twin, in the user's cache."""
    compiled.rename(compiled.parent / "kernels")
    monkeypatch.setattr("moestro.native.library_search.cache_folder", lambda: compiled.parent / "kernels")
    return OptionalKernel(source, Answer, is_wanted=False)


def test_an_optional_kernel_is_searched_for_once_it_is_wanted(optional):
    assert optional.look() is None
    assert optional.wait() is None
    optional.want()
    assert optional.look()() == 42
    assert optional.search() is optional.search()
    assert optional.wait()() == 42


def test_an_optional_kernel_is_left_out_in_its_block_and_thread_alone(optional):
    optional.want()
    with ThreadPoolExecutor(1) as pool, optional.left_out():
        assert optional.look() is None
        assert pool.submit(optional.look).result()() == 42
    assert optional.look()() == 42


def test_a_forked_process_searches_anew(optional):
    before = optional.search()
    if (child := os.fork()) == 0:
        is_new = optional.search() is not before and optional.look()() == 42
        os._exit(0 if is_new else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert optional.search() is before


def old_compiler(folder: Path) -> Path:
    """A compiler that does not know `NEW`."""
    path = folder / "old-c++"
    refusal = 'case "$*" in *-mnovel*) echo "unknown option" >&2; exit 1;; esac'
    path.write_text(f'#!/bin/sh\n{refusal}\nexec {find_compiler()[0]} "$@"\n')
    path.chmod(0o755)
    return path


NEW, NEWER = InstructionSet("new", ("-mnovel",)), InstructionSet("newer", ("-mnovel", "-mnoveler"))


def test_a_compiler_that_does_not_know_the_best_set_compiles_the_best_that_it_knows(source, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(old_compiler(tmp_path)))
    cache = tmp_path / "cache"
    assert [accepts(each) for each in (PLAIN, NEW, NEWER)] == [True, False, False]
    for _ in range(2):  # the second finds what the first has compiled
        found = LibrarySearch(source, NEWER, Answer, NO_FOLDER, cache, [NEW, PLAIN])
        assert found.wait()() == 42
        assert found.instruction_set == "plain"
        assert instruction_set_of(found.library.path) == "plain"
    assert [each.name for each in cache.glob("*.so")] == [library_name(source, PLAIN)]


def test_a_wheel_that_lacks_the_best_set_serves_where_no_compiler_is(source, compiled, no_compiler, tmp_path):
    found = LibrarySearch(source, NEW, Answer, compiled, tmp_path / "cache", [PLAIN])
    assert found.wait()() == 42
    assert found.instruction_set == "plain"


def test_a_lesser_library_of_the_cache_does_not_keep_the_best_from_being_compiled(source, tmp_path):
    """Machines with unlike processors may share a home folder."""
    cache, better = tmp_path / "cache", InstructionSet("better", ("-DBETTER=1",))
    assert LibrarySearch(source, PLAIN, Answer, NO_FOLDER, cache).wait()() == 42
    found = LibrarySearch(source, better, Answer, NO_FOLDER, cache, [PLAIN])
    found.wait()
    assert found.instruction_set == "better"


def test_a_library_that_is_whole_and_cannot_be_loaded_is_named(source, compiled, no_compiler, tmp_path, caplog):
    path = compiled / library_name(source, PLAIN)
    path.write_bytes(b"built for another system")
    compiler._seal(path)
    assert search(source, prebuilt=compiled, cache=tmp_path / "cache").library is None
    [warning] = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert warning.startswith(f"answer's library: {path} cannot be loaded: ")


def test_without_a_home_there_is_no_cache(source, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    made = LibrarySearch(source, PLAIN, Answer, NO_FOLDER)
    made.wait(300)
    assert made.failure == "the user has no home folder for a cache; XDG_CACHE_HOME may name another folder"


def test_a_cache_serves_without_a_compiler(source, compiled, no_compiler):
    assert search(source, cache=compiled).library() == 42


def test_a_look_finds_what_is_compiled_and_waits_for_no_compiler(source, compiled, tmp_path, monkeypatch):
    assert LibrarySearch(source, PLAIN, Answer, NO_FOLDER, compiled).look()() == 42
    slow = tmp_path / "c++"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("CXX", str(slow))
    begun = LibrarySearch(source, PLAIN, Answer, NO_FOLDER, tmp_path / "cache")
    assert begun.look() is None
    assert not begun.is_over


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_cache_entry_is_compiled_again(damage, source, compiled, counted):
    path = compiled / library_name(source, PLAIN)
    content = path.read_bytes()
    damaged = {"cut": content[:5000], "empty": b"", "changed": content[:3000] + b"\1" * 64 + content[3064:]}[damage]
    path.write_bytes(damaged)
    assert not is_whole(path)
    assert search(source, cache=compiled).library is not None
    assert len(counted) == 1
    assert is_whole(path)


def test_searches_that_begin_together_compile_once(source, tmp_path, counted):
    begun = [LibrarySearch(source, PLAIN, Answer, NO_FOLDER, tmp_path / "cache") for _ in range(4)]
    assert all(each.wait(300) is not None for each in begun)
    assert len(counted) == 1


def test_a_folder_that_cannot_be_written_leaves_none(source, tmp_path, counted):
    (tmp_path / "file").write_text("in the way")
    found = search(source, cache=tmp_path / "file" / "kernels")
    assert found.library is None
    folder = tmp_path / "file" / "kernels"
    assert found.failure == f"{folder} cannot be written: Not a directory; XDG_CACHE_HOME may name another folder"


def test_a_compiler_that_fails_is_quoted_and_leaves_no_file(source, tmp_path, monkeypatch):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\nprintf 'In file x:\nx.cpp:1: error: 42 \\303\nnote: see\n' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    cache = tmp_path / "cache"
    found = search(source, cache=cache)
    assert found.failure == f"{broken} failed: x.cpp:1: error: 42 \N{REPLACEMENT CHARACTER} note: see"
    assert [path.name for path in cache.iterdir()] == ["answer.lock"]


@pytest.fixture
def hanging(tmp_path, monkeypatch) -> Path:
    """File in which a compiler that hangs writes the ids of its two processes."""
    slow, pids = tmp_path / "c++", tmp_path / "pids"
    slow.write_text(
        f"#!/bin/sh\nsleep 600 &\ntouch $TMPDIR/part\necho $$ $! > {pids}.new\nmv {pids}.new {pids}\nwait\n"
    )
    slow.chmod(0o755)
    monkeypatch.setenv("CXX", str(slow))
    return pids


def test_a_compiler_that_hangs_is_ended_with_its_processes_and_not_tried_again(source, hanging, tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "_TIMEOUT_S", 1.0)
    cache = tmp_path / "cache"
    assert search(source, cache=cache).failure == f"{tmp_path / 'c++'} did not end within 1 s"
    await_ends(hanging)
    assert [path.name for path in cache.iterdir()] == ["answer.lock"]


@pytest.mark.parametrize("end", ["", "os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_a_process_that_ends_while_a_compiler_runs_ends_it_too(end, source, hanging, tmp_path):
    cache = tmp_path / "cache"
    code = f"""
import os, time
from pathlib import Path
from moestro.native.compiler import PLAIN, LibrarySource
from moestro.native.library_search import LibrarySearch
source = LibrarySource("answer", "answer", Path({str(source.folder)!r}), (PLAIN,), has_threads=False)
LibrarySearch(source, PLAIN, str, Path("/nonexistent"), Path({str(cache)!r})).look()
while not Path({str(hanging)!r}).exists():
    time.sleep(0.01)
{end}
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=300, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (-9 if "kill" in end else 0, b"")
    await_ends(hanging)
    assert [path.name for path in cache.iterdir()] == ["answer.lock"]


def await_ends(pids: Path) -> None:
    wait_until(lambda: not any(is_running(int(pid)) for pid in pids.read_text().split()))


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended may wait to be collected."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_the_name_of_an_entry_changes_with_sources_and_flags(source, tmp_path):
    before = library_name(source, PLAIN)
    assert library_name(source, PLAIN) == before
    for each in LIBRARIES:
        assert len({library_name(each, chosen) for chosen in each.built_sets()}) == len(each.built_sets())
    shutil.copytree(source.folder, tmp_path / "copy")
    copy = replace(source, folder=tmp_path / "copy")
    assert library_name(copy, PLAIN) == before
    with (copy.folder / "source" / "answer.cpp").open("a") as file:
        file.write("\n")
    assert library_name(copy, PLAIN) != before


def test_the_cache_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "moestro" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path(os.path.expanduser("~/.cache/moestro/kernels"))  # noqa: PTH111


def test_the_wheel_s_build_runs_the_compiler_s_file_without_the_package(tmp_path):
    copy = tmp_path / "src" / "moestro" / "native" / "compiler.py"
    copy.parent.mkdir(parents=True)
    shutil.copy(compiler.__file__, copy)
    code = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("library_compiler", {str(copy)!r})
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
print(*(source.prebuilt.relative_to({str(tmp_path)!r}) for source in module.LIBRARIES))
"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    named = done.stdout.split()
    assert named == [
        "src/moestro/model/kernels/prebuilt",
        "src/moestro/placement/kernel/prebuilt",
        "src/moestro/routing/kernel/prebuilt",
        "src/moestro/cost/gate_kernel/prebuilt",
    ]
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    for source, prebuilt in zip(LIBRARIES, named, strict=True):
        assert f"{prebuilt}/" in ignored
        assert any(path.suffix == ".cpp" for path in source.files())


@pytest.mark.skipif(shutil.which("clang++") is None, reason="no clang++")
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_clang_takes_each_library(library, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "clang++")
    assert is_whole(compiler.compile_library(library, PLAIN, tmp_path))
