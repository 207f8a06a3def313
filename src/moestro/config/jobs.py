"""Runs independent jobs in several processes, on all cores of this machine."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from moestro.config.linux_process import cpu_limit, usable_cores
from moestro.config.user_files import accept_user_code

Job = TypeVar("Job")
Answer = TypeVar("Answer")


def num_cores() -> int:
    """Return the number of cores that this process may use, by its cores and by a container's quota of their time."""
    cores, limit = len(usable_cores()) or os.cpu_count() or 1, cpu_limit()
    return cores if limit is None else max(1, min(cores, int(limit)))


def run_jobs(function: Callable[[Job], Answer], jobs: Sequence[Job], num_processes: int) -> Iterator[Answer]:
    """Yield the answer to each job, in their order; with one process, they run in this one.

    Args:
        function: a function of a module. It, its jobs and their answers travel between processes.

    Raises:
        Exception: what `function` raised; no further job begins then.
    """
    num_processes = min(num_processes, len(jobs))
    if num_processes < 2:
        yield from map(function, jobs)
        return
    # A forked child would inherit threads' locks, for instance those of a progress bar.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, context, accept_user_code) as pool:
        try:
            yield from pool.map(function, jobs)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
