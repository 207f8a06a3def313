"""Papers' experiments on virtual time, in one frame.

A folder here is a paper. Its `experiment.py` defines `make_experiment(settings)`, which returns an `Experiment`.
The docstring of the folder is the help of the verb `moestro repro FOLDER`. A folder that needs flags of its own extends
`ReproSettings`, and names the dataclass `SETTINGS`. In `experiment.py`, `Experiment` fits any paper; `GridExperiment`
does most of the work for one that serves loads at rates by several systems under several seeds.
"""

# Annotations here are objects, not strings: cyclopts reads those of a subclass in the subclass's module.
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from moestro.core.setting_checks import CheckedSettings, at_least


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ReproSettings(CheckedSettings):
    """Flags of every verb of `moestro repro`; a paper's verb with further flags extends them."""

    quick: Annotated[bool, Parameter(negative=())] = False
    """Run a small plan that takes less than a minute and shows what the experiment does. It judges no claim: the
    verdicts of the stored run stand beside its figures."""
    loads: tuple[str, ...] | None = None
    "Run only these loads. Unset: all of them."
    jobs: Annotated[int | None, at_least(1)] = None
    "Processes among which the loads are spread. Unset: one for each core."
    out: Path | None = None
    """Write NAME.json here and, where matplotlib is installed, pictures. The findings of each load are kept here as
    NAME.LOAD.json as soon as they are made. The same version reuses them: a stopped run continues, and a run of all
    loads combines those that several processes made."""
