"""The cores of this machine: jobs in processes on all of them, and their parts for each engine and its threads."""

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

# Rounds for which a thread of libgomp waits awake before it sleeps: 0.6 ms where a round takes 140 cycles, longer than
# the pauses of a step. With a tenth, answers of two threads on a quiet machine take a tenth longer. By libgomp's own
# choice of 300,000 they hold cores for milliseconds that other programs need (`bench/serving/busy_cores.py`).
_SPIN_ROUNDS = 10_000


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


def thread_environment(num_processes: int) -> dict[str, str]:
    """Return variables for OpenMP in each of several processes that share this machine.

    Args:
        num_processes: Number of the processes.

    Returns:
        Number of threads, and how long they wait awake; without what the environment of this process says already.
    """
    chosen = {"OMP_NUM_THREADS": str(max(1, num_cores() // num_processes))}
    if "OMP_WAIT_POLICY" not in os.environ:
        chosen["GOMP_SPINCOUNT"] = str(_SPIN_ROUNDS)
    return {name: value for name, value in chosen.items() if not os.environ.get(name)}
