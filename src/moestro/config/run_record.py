"""The conditions of a run: machine, code, versions, command. A stored figure needs them to be reproducible."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import msgspec

from moestro import __version__

_PACKAGE = Path(__file__).parents[1]
_LIBRARIES = ("aiohttp", "msgspec", "numpy", "torch", "transformers", "uvloop")
_HIDDEN = "***"
_USER = re.compile(r"(?<=://)[^/@\s]*@")  # user and password of a URL


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions of one run.

    Attributes:
        kind: kind of evidence: measured, paced, simulated or computed.
        command: the command line, without the program's directory and with hidden keys.
        started_at: UTC time in ISO 8601. None means that it is unknown.
        moestro: version of Moestro.
        commit: last commit that changed the package, with `-dirty` if its files differ from that commit. It is empty
            where the package does not lie in a checkout of its own.
        python: version of Python.
        libraries: versions of the libraries that the process has loaded, by name.
        machine: platform and processor.
        num_cpus: number of processor cores.
        load_average: load average of the last minute at the start. None means that it is unknown.
        note: remarks of the operator.
    """

    kind: str
    command: str
    started_at: str | None
    moestro: str
    commit: str
    python: str
    libraries: dict[str, str]
    machine: str
    num_cpus: int
    load_average: float | None
    note: str = ""

    def has_code_of(self, other: RunRecord) -> bool:
        """Whether both runs are known to have the same code."""
        return self.commit == other.commit != "" and not self.commit.endswith("-dirty")


def run_record(kind: str, note: str = "") -> RunRecord:
    """Collect the conditions of this process. Call it before the run: the checkout and the load change meanwhile."""
    return RunRecord(
        kind=kind,
        command=shown_command(sys.argv),
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        moestro=__version__,
        commit=commit_of(_PACKAGE),
        python=platform.python_version(),
        libraries={name: version(name) for name in _LIBRARIES if sys.modules.get(name) is not None},
        machine=_machine(),
        num_cpus=os.cpu_count() or 0,
        load_average=round(os.getloadavg()[0], 2),
        note=note,
    )


def shown_command(arguments: Sequence[str]) -> str:
    """Format the command line for publication, without the program's directory, API keys and users of URLs."""
    program = Path(arguments[0])
    # A script's path inside the checkout is part of the command; the directory of an installed program is not.
    is_script = program.suffix == ".py" and not program.is_absolute()
    shown = [f"python {shlex.quote(str(program))}" if is_script else shlex.quote(program.name)]
    is_key = False
    for argument in arguments[1:]:
        flag, has_value, _ = argument.partition("=")
        if is_key:
            shown.append(_HIDDEN)
        elif flag == "--api-key" and has_value:
            shown.append(f"{flag}={_HIDDEN}")
        else:
            shown.append(shlex.quote(without_user(argument)))
        is_key = argument == "--api-key"
    return " ".join(shown)


def without_user(text: str) -> str:
    """Hide user and password of URLs in a text that is kept."""
    return _USER.sub(f"{_HIDDEN}@", text)


def commit_of(directory: Path) -> str:
    """Return the last commit that changed the files of `directory`, in the form of `RunRecord.commit`."""
    # The path limits the query to this directory, which may lie in the checkout of another project.
    commit = _git(directory, "log", "-1", "--format=%h", "--abbrev=12", "--", ".")
    if commit and _git(directory, "status", "--porcelain", "--", "."):
        return f"{commit}-dirty"
    return commit


def _git(directory: Path, *words: str) -> str:
    """Run a git command and return its output, or an empty string where git or a checkout is missing."""
    command = ["git", *words]
    try:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)  # noqa: S603
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _machine() -> str:
    return f"{platform.platform()}, {_cpu_model()}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"
