"""Compiles a library for one instruction set. Standard library only: the wheel's build runs this file alone."""

from __future__ import annotations

import atexit
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_COMPILERS = ("c++", "g++", "clang++")
# Contraction would let the compiler round a product and a sum in one place and not in another, by the number of rows.
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno")
_SEAL_BYTES = 32
_TIMEOUT_S = 300.0  # a loaded machine takes a minute; a hanging compiler must not hold the cache's lock for ever


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
LIBRARIES = (CPU_KERNELS, PLACEMENT_KERNEL)


class CompilerError(Exception):
    """A library cannot be compiled here; the text says why."""


def find_compiler() -> str | None:
    """Return the path of a C++ compiler, that of the variable CXX first. None means that there is none."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else _COMPILERS
    return next((found for name in names if (found := shutil.which(name))), None)


def library_name(source: LibrarySource, chosen: InstructionSet) -> str:
    """Return the file name of a compiled library. It changes with the sources, the flags and the kind of machine."""
    digest = hashlib.sha256(" ".join((platform.machine(), sys.platform, *_FLAGS, *chosen.flags)).encode())
    for path in source.files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{source.name}-{chosen.name}-{digest.hexdigest()[:16]}.so"


def compile_library(source: LibrarySource, chosen: InstructionSet, folder: Path) -> Path:
    """Compile a library into `folder`, which is made if it is absent. The file appears whole or not at all.

    Raises:
        CompilerError: there is no compiler, or it fails.
        OSError: the folder cannot be written.
    """
    compiler = find_compiler()
    if compiler is None:
        raise CompilerError("no C++ compiler was found")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / library_name(source, chosen)
    for left in folder.glob(f".{target.name}.*"):  # of a process that was killed: the caller holds the cache's lock
        left.unlink(missing_ok=True)
    handle, made = tempfile.mkstemp(prefix=f".{target.name}.", dir=folder)
    os.close(handle)
    try:
        sources = [str(path) for path in source.files() if path.suffix == ".cpp"]
        failures = []
        # clang without its OpenMP library still gives kernels of one thread.
        for threads in (("-fopenmp",), ()) if source.has_threads else ((),):
            command = [compiler, *_FLAGS, *chosen.flags, *threads, *sources, "-o", made]
            failure = _run(command)
            if failure is None:
                _seal(Path(made))
                Path(made).replace(target)
                return target
            failures.append(failure)
        raise CompilerError(f"{compiler} failed: {failures[0]}")
    finally:
        Path(made).unlink(missing_ok=True)


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


def _run(command: list[str]) -> str | None:
    """Run a compiler, which ends with this process. Returns its last words, or None if it succeeded."""
    # The lock lets no process end between the start of a compiler and the note of it.
    lock, started, is_ending = threading.Lock(), list[subprocess.Popen[str]](), threading.Event()

    def end() -> None:
        with lock:
            is_ending.set()
            for process in started:
                process.kill()

    atexit.register(end)
    try:
        with lock:
            if is_ending.is_set():
                return "the process ends"
            process = subprocess.Popen(  # noqa: S603
                command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
            )
            started.append(process)
        _, words = process.communicate(timeout=_TIMEOUT_S)
    except OSError as error:
        return str(error)
    except subprocess.TimeoutExpired as error:
        process.kill()
        process.communicate()
        return str(error)
    finally:
        atexit.unregister(end)
    return None if process.returncode == 0 else (words.strip() or f"exit status {process.returncode}")[-500:]
