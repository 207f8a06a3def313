"""The flags that every `moestro repro` verb has."""

# Annotations here are objects, not strings: cyclopts reads those of a subclass in the subclass's module.
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ReproSettings:
    """Settings of the frame. A paper with flags of its own extends them."""

    quick: Annotated[bool, Parameter(negative=())] = False
    "Run a small plan that takes less than a minute and shows what the experiment does."
    loads: tuple[str, ...] | None = None
    "Run only these loads. Unset: all of them."
    out: Path | None = None
    """Write NAME.json here and, where matplotlib is installed, pictures. The findings of each load are kept here as
    NAME.LOAD.json as soon as they are made, and the same version does not make them again: a stopped run goes on, and
    loads that several processes made come together in one that asks for all of them."""
