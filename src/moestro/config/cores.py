"""Divides the cores of this machine among the engines."""

from __future__ import annotations

from collections.abc import Sequence

from moestro.config.linux_process import usable_cores
from moestro.config.serve_settings import ServeSettings


def cores_of(settings: ServeSettings, rank: int) -> tuple[int, ...]:
    """Return the cores of the process of a rank; () means that it may run on all.

    Processes on other machines, paced devices, which mostly sleep, and workers that are added later may run on all.
    """
    num_processes = settings.num_first_processes
    is_local = settings.launching.launcher == "local" and settings.paced is None
    if not settings.processes.bind_cores or not is_local or num_processes == 1 or rank >= num_processes:
        return ()
    return share_of_cores(usable_cores(), rank, num_processes)


def share_of_cores(cores: Sequence[int], number: int, num_processes: int) -> tuple[int, ...]:
    """Return the cores of one of several processes that compute side by side: neighbours, as in caches and memory.

    Args:
        cores: cores of all of them, ascending.
        number: number of the process, from 0.

    Returns:
        Its part, which differs from others by one core at most; () if there are fewer cores than processes.
    """
    if len(cores) < num_processes:
        return ()
    first, end = (len(cores) * each // num_processes for each in (number, number + 1))
    return tuple(cores[first:end])
