"""Machines of the processes of a server, by name and by number."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

MachineOf = Callable[[int], str]  # name of the machine of a rank's process


def machine_numbers(names: Sequence[str]) -> NDArray[np.int32]:
    """Return int32[names], a number from 0 for each machine: the same for the same name."""
    _, numbers = np.unique(np.array(names), return_inverse=True)
    return numbers.astype(np.int32)
