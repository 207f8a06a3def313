"""Compiles a library for one instruction set. Standard library only: the wheel's build runs this file alone."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_COMPILERS = ("c++", "g++", "clang++")
# Contraction would let the compiler round a product and a sum in one place and not in another, by the number of rows.
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno")
_SEAL_BYTES = 32
_CAUSE_LENGTH = 300  # characters of a compiler's words in a note of a line or a few
_TIMEOUT_S = 300.0  # a loaded machine takes a minute; a hanging compiler must not hold the cache's lock for ever
# Shell script that runs a compiler and its child processes in one process group. The standard input ends with the
# process that wants the library; the script then removes the compiler's files and kills the group.
_WATCHED = """
exec 3<&0
{ read -r _ <&3; rm -rf "$TMPDIR"; kill -9 0; } 2>/dev/null & watcher=$!
"$@" </dev/null 3<&-
status=$?
kill $watcher 2>/dev/null
exit $status
"""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """Instruction set of a compilation.

    Attributes:
        name: its name in notes and file names.
        flags: the compiler's flags.
    """

    name: str
    flags: tuple[str, ...]


PLAIN = InstructionSet("plain", ())
AVX2 = InstructionSet("avx2", ("-mavx2", "-mfma"))
AVX512 = InstructionSet("avx512", (*AVX2.flags, *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl"))))
AVX512_BF16 = InstructionSet("avx512_bf16", (*AVX512.flags, "-mavx512bf16"))
AMX_BF16 = InstructionSet("amx_bf16", (*AVX512_BF16.flags, "-mamx-tile", "-mamx-bf16"))


@dataclass(frozen=True, slots=True)
class LibrarySource:
    """Sources of a compiled library.

    Attributes:
        name: Its name in file names.
        title: Its name for operators.
        folder: Folder of its `source/`, and of `prebuilt/`, which the wheel's build fills.
        x86_64_sets: Instruction sets for which a wheel has it on x86-64, the least first, each with the instructions of
            those before; elsewhere it has `PLAIN` alone.
        has_threads: Whether it uses OpenMP where the compiler has it.
    """

    name: str
    title: str
    folder: Path
    x86_64_sets: tuple[InstructionSet, ...]
    has_threads: bool

    @property
    def prebuilt(self) -> Path:
        """Folder of the wheel's compiled files."""
        return self.folder / "prebuilt"

    def built_sets(self) -> tuple[InstructionSet, ...]:
        """Return the instruction sets for which a wheel has the library on this kind of machine, the least first."""
        return self.x86_64_sets if platform.machine().lower() in {"x86_64", "amd64"} else (PLAIN,)

    def files(self) -> list[Path]:
        """Return the source files."""
        return sorted(path for path in (self.folder / "source").iterdir() if path.suffix in {".cpp", ".h"})


CPU_KERNELS = LibrarySource(
    "kernels",
    "CPU kernels",
    _PACKAGE / "model" / "kernels",
    (PLAIN, AVX2, AVX512, AVX512_BF16, AMX_BF16),
    has_threads=True,
)
PLACEMENT_KERNEL = LibrarySource(
    "placement", "placement kernel", _PACKAGE / "placement" / "kernel", (PLAIN,), has_threads=False
)
ROUTE_KERNEL = LibrarySource("routing", "routing kernel", _PACKAGE / "routing" / "kernel", (PLAIN,), has_threads=False)
GATE_KERNEL = LibrarySource("gate", "gate kernel", _PACKAGE / "cost" / "gate_kernel", (PLAIN,), has_threads=False)
LIBRARIES = (CPU_KERNELS, PLACEMENT_KERNEL, ROUTE_KERNEL, GATE_KERNEL)


class CompilerError(Exception):
    """A library cannot be compiled here; the text says why."""


def find_compiler() -> list[str]:
    """Return the command of a C++ compiler: that of the variable CXX, which may have arguments, or one on the PATH.

    Raises:
        CompilerError: There is none; the text says what to do.
    """
    given = os.environ.get("CXX")
    try:
        commands = [shlex.split(given)] if given else [[name] for name in _COMPILERS]
    except ValueError:  # quotes that do not end
        commands = []
    for name, *arguments in filter(None, commands):
        if found := shutil.which(name):
            return [found, *arguments]
    if given:
        raise CompilerError(f"CXX={given} names no program that is here")
    raise CompilerError("no C++ compiler was found; install g++ or clang++, or name one in CXX")


def library_name(source: LibrarySource, chosen: InstructionSet) -> str:
    """Return the file name of a compiled library. It changes with the sources, the flags and the kind of machine."""
    digest = hashlib.sha256(" ".join((platform.machine(), sys.platform, *_FLAGS, *chosen.flags)).encode())
    for path in source.files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{source.name}-{chosen.name}-{digest.hexdigest()[:16]}.so"


def instruction_set_of(path: Path) -> str:
    """Return the name of a compiled library's instruction set, which is in its file name."""
    return path.name.split("-")[1]


def accepts(chosen: InstructionSet) -> bool:
    """Whether the compiler knows an instruction set; some distributions' compilers are older than the processors.

    Raises:
        CompilerError: There is no compiler, or it does not end.
    """
    with tempfile.TemporaryDirectory(prefix="moestro-") as work:
        return _run([*find_compiler(), *chosen.flags, "-fsyntax-only", "-x", "c++", os.devnull], Path(work)) is None


def compile_library(source: LibrarySource, chosen: InstructionSet, folder: Path) -> Path:
    """Compile a library into `folder`, which is made if it is absent. The file appears whole or not at all.

    Raises:
        CompilerError: there is no compiler, or it fails.
        OSError: the folder cannot be written.
    """
    compiler = find_compiler()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / library_name(source, chosen)
    for left in folder.glob(f".{target.name}.*"):  # of a process that was killed: the caller holds the cache's lock
        shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=folder))
    try:
        made = work / target.name
        sources = [str(path) for path in source.files() if path.suffix == ".cpp"]
        failures = []
        # clang without its OpenMP library still gives kernels of one thread.
        for threads in (("-fopenmp",), ()) if source.has_threads else ((),):
            command = [*compiler, *_FLAGS, *chosen.flags, *threads, *sources, "-o", str(made)]
            failure = _run(command, work)
            if failure is None:
                _seal(made)
                made.replace(target)
                return target
            failures.append(failure)
        raise CompilerError(f"{compiler[0]} failed: {failures[0]}")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def is_whole(path: Path) -> bool:
    """Whether a compiled file is there as it was written. A library that is cut short would end the process."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    body, seal = content[:-_SEAL_BYTES], content[-_SEAL_BYTES:]
    return hashlib.sha256(body).digest() == seal


def _seal(path: Path) -> None:
    """Append a digest to a compiled file, which loaders ignore."""
    with path.open("ab") as file:
        file.write(hashlib.sha256(path.read_bytes()).digest())
    path.chmod(0o755)


def _run(command: list[str], work: Path) -> str | None:
    """Run a compiler, which ends with this process. Returns the cause of a failure in one line, or None.

    Args:
        command: The compiler and its arguments.
        work: Folder for its temporary files, which goes when this process ends.

    Raises:
        CompilerError: It does not end, so that another try is useless.
    """
    watched, held = os.pipe()  # closed by the end of this process, however it comes
    try:
        process = subprocess.Popen(  # noqa: S603 - the operator's compiler and Moestro's own sources
            ["/bin/sh", "-c", _WATCHED, "moestro", *command],
            stdin=watched,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=os.environ | {"TMPDIR": str(work)},
            process_group=0,
        )
        try:
            _, words = process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise CompilerError(f"{command[0]} did not end within {_TIMEOUT_S:g} s") from error
    finally:
        os.close(watched)
        os.close(held)
    return None if process.returncode == 0 else _cause(words) or f"exit status {process.returncode}"


def _cause(words: str) -> str:
    """The first error in a compiler's words and what follows, in one line."""
    first = max(words.find("error"), 0)
    return " ".join(words[words.rfind("\n", 0, first) + 1 :].split())[:_CAUSE_LENGTH]
