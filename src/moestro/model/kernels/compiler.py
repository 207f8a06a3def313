"""Compiles the kernels for one instruction set. Standard library only: the wheel's build runs this file alone."""

from __future__ import annotations

import atexit
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "source"
PREBUILT = Path(__file__).parent / "prebuilt"  # filled by the wheel's build

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
_X86_64 = (PLAIN, AVX2, AVX512, AVX512_BF16, AMX_BF16)  # each has the instructions of those before


class CompilerError(Exception):
    """The kernels cannot be compiled here; the text says why."""


def built_sets() -> tuple[InstructionSet, ...]:
    """Return the instruction sets for which a wheel has kernels on this kind of machine, the least first."""
    return _X86_64 if platform.machine().lower() in {"x86_64", "amd64"} else (PLAIN,)


def find_compiler() -> str | None:
    """Return the path of a C++ compiler, that of the variable CXX first. None means that there is none."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else _COMPILERS
    return next((found for name in names if (found := shutil.which(name))), None)


def library_name(chosen: InstructionSet) -> str:
    """Return the file name of the compiled kernels. It changes with the sources, the flags and the kind of machine."""
    digest = hashlib.sha256(" ".join((platform.machine(), sys.platform, *_FLAGS, *chosen.flags)).encode())
    for path in _source_files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"kernels-{chosen.name}-{digest.hexdigest()[:16]}.so"


def compile_kernels(chosen: InstructionSet, folder: Path) -> Path:
    """Compile the kernels into `folder`, which is made if it is absent. The file appears whole or not at all.

    Raises:
        CompilerError: there is no compiler, or it fails.
        OSError: the folder cannot be written.
    """
    compiler = find_compiler()
    if compiler is None:
        raise CompilerError("no C++ compiler was found")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / library_name(chosen)
    for left in folder.glob(f".{target.name}.*"):  # of a process that was killed: the caller holds the cache's lock
        left.unlink(missing_ok=True)
    handle, made = tempfile.mkstemp(prefix=f".{target.name}.", dir=folder)
    os.close(handle)
    try:
        sources = [str(path) for path in _source_files() if path.suffix == ".cpp"]
        failures = []
        for threads in (("-fopenmp",), ()):  # clang without its OpenMP library still gives kernels of one thread
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
    try:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)  # noqa: S603
    except OSError as error:
        return str(error)
    atexit.register(process.kill)
    try:
        _, words = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        process.kill()
        process.communicate()
        return str(error)
    finally:
        atexit.unregister(process.kill)
    return None if process.returncode == 0 else (words.strip() or f"exit status {process.returncode}")[-500:]


def _source_files() -> list[Path]:
    return sorted(path for path in SOURCES.iterdir() if path.suffix in {".cpp", ".h"})
