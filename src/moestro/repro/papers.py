"""The papers whose experiments can be run: one for each folder beside this file."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

import moestro.repro
from moestro.repro import ReproSettings
from moestro.repro.results import StoredClaim


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """One paper, as its folder declares it.

    Attributes:
        name: the folder and the verb.
        about: the verb's help.
        settings: the dataclass of the verb's flags.
        claims_path: file with the claims of the stored run, which `tools/judge_claims.py` writes. A paper without a
            stored run has none.
    """

    name: str
    about: str
    settings: type[ReproSettings]
    claims_path: Path

    def experiment(self, settings: ReproSettings) -> Any:
        """Import the paper's code and return its `Experiment` under these settings."""
        return importlib.import_module(f"{moestro.repro.__name__}.{self.name}.experiment").make_experiment(settings)

    def stored_claims(self) -> list[StoredClaim]:
        """The claims of the stored run. They are empty where there is none."""
        if not self.claims_path.exists():
            return []
        return msgspec.json.decode(self.claims_path.read_bytes(), type=list[StoredClaim])


def papers() -> list[Paper]:
    """All papers by name. Their folders are imported, their experiments are not."""
    names = sorted(module.name for module in pkgutil.iter_modules(moestro.repro.__path__) if module.ispkg)
    return [_declared(name, importlib.import_module(f"{moestro.repro.__name__}.{name}")) for name in names]


def _declared(name: str, folder: ModuleType) -> Paper:
    return Paper(
        name=name,
        about=inspect.getdoc(folder) or "",
        settings=getattr(folder, "SETTINGS", ReproSettings),
        claims_path=Path(folder.__path__[0]) / "stored_claims.json",
    )
