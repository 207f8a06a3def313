"""Machines of the processes of a server, by name."""

from __future__ import annotations

from collections.abc import Callable

MachineOf = Callable[[int], str]  # name of the machine of a rank's process
