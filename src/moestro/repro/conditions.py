"""Under which a result was made: without it a figure cannot be made again, nor told from one of older code."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np

from moestro import __version__

_PACKAGE = Path(__file__).parents[1]


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run.

    Attributes:
        kind: of evidence.
        version: Moestro's.
        commit: the last one that changed the package, with `-dirty` if its files differ from it; empty: the package
            does not lie in a checkout of its own.
        command: as it was typed, without the path of the program.
        machine: it changes no simulated figure, as far as is known; draws are NumPy's.
        note: what else is to be known of them.
    """

    kind: str = "simulated"
    version: str
    commit: str
    command: str
    machine: str
    note: str = ""

    def has_code_of(self, other: Conditions) -> bool:
        """It is known that both ran the same code."""
        return self.commit == other.commit != "" and not self.commit.endswith("-dirty")


def this_run() -> Conditions:
    """The conditions of the process that asks."""
    return Conditions(
        version=__version__,
        commit=commit_of(_PACKAGE),
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        machine=f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()},"
        f" NumPy {np.__version__}",
    )


def commit_of(directory: Path) -> str:
    """The last commit that changed what lies in `directory`; see `Conditions.commit`."""
    # Asked of the directory, not of the checkout: an environment may lie in the checkout of something else.
    commit = _git(directory, "log", "-1", "--format=%h", "--abbrev=12", "--", ".")
    if commit and _git(directory, "status", "--porcelain", "--", "."):
        return f"{commit}-dirty"
    return commit


def _git(directory: Path, *words: str) -> str:
    """What it says; nothing where there is no git, or no checkout."""
    try:
        asked = ["git", *words]
        said = subprocess.run(asked, cwd=directory, capture_output=True, text=True, check=False)  # noqa: S603
    except OSError:
        return ""
    return said.stdout.strip() if said.returncode == 0 else ""
