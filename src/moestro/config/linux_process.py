"""Functions for processes that only Linux has. On other systems they have no effect, and their results show that.

Source: prctl(2), proc(5).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ARG_START, _ARG_END = 47, 48  # fields of /proc/self/stat, counted from 0


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends.

    The end of a pipe says the same, but a stopped process (SIGSTOP) does not read it. The kernel means the thread that
    started this process: the main thread of the API server. Call `os.getppid()` afterwards if the parent may have ended
    before the call.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> bool:
    """Become the parent of processes whose parent ends, if a process of this one started them.

    Returns:
        Whether this system can do so.
    """
    return hasattr(os, "pidfd_open") and _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def rename_last_arguments(marker: str, text: str) -> None:
    """Show `text` instead of this process's last arguments, in `ps` and `/proc/PID/cmdline`.

    Args:
        marker: first of the arguments that are replaced. Text that does not fit into their place is cut.
    """
    with contextlib.suppress(OSError, ValueError):  # not Linux, or a sandbox without /proc
        stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(stat[_ARG_START - 2]), int(stat[_ARG_END - 2])
        before = Path("/proc/self/cmdline").read_bytes()
        room = end - start
        if len(before) != room:
            return  # it was renamed before
        kept = before[: before.rindex(marker.encode())].replace(b"\0", b" ")
        # Where the last byte is not 0, the kernel shows all up to the first 0.
        title = (kept + text.encode())[: room - 2].ljust(room - 1, b"\0") + b"."
        ctypes.memmove(start, title, room)


def usable_cores() -> tuple[int, ...]:
    """Return the numbers of the cores that this process may use; () if the system does not tell."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def cpu_limit(memberships: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return how many cores' time a container's quota allows (`docker --cpus`, Kubernetes' `limits.cpu`).

    Args:
        memberships: File that names the control groups of this process.
        root: Folder of the control groups.

    Returns:
        The least quota of the process's groups and those around them. None means no limit.
    """
    limits: list[float] = []
    with contextlib.suppress(OSError, ValueError):  # not Linux, or a sandbox without /proc
        for line in memberships.read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            # In a container the first version names the group as its host sees it; the own group is then the root's.
            hierarchy = root / "cpu" if controllers else root
            place = hierarchy / group.lstrip("/")
            limits += [each for folder in (place, *place.parents) if (each := _quota(folder)) is not None]
    return min(limits, default=None)


def _quota(folder: Path) -> float | None:
    """Cores' time of one control group, of the second version or the first. None means no limit, or no such group."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):
            quota_us, period_us = " ".join((folder / name).read_text() for name in names).split()
            return int(quota_us) / int(period_us) if quota_us.isdigit() else None  # "max", or -1
    return None


def bind_to_cores(cores: Sequence[int]) -> bool:
    """Let all threads of this process, and those that they start, run on `cores` alone. Returns whether they do."""
    try:
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores)
    except (AttributeError, OSError):  # not Linux, or the process may not use these cores any more
        return False
    return True


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process (SIGSTOP, SIGTSTP); False if the system does not tell.

    A process that computes, waits for a device or is traced by a debugger is not stopped.
    """
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def has_opened_gpu() -> bool:
    """Whether this process has opened a GPU of NVIDIA, so that processes which it forks could not use it."""
    with contextlib.suppress(OSError):
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                if str(descriptor.readlink()).startswith("/dev/nvidia"):
                    return True
    return False


def has_gpu() -> bool:
    """Whether this machine has a GPU of NVIDIA with a driver."""
    return Path("/proc/driver/nvidia").exists()


def available_memory_bytes() -> int | None:
    """Read how much memory new processes can take, of the machine or of this container. None means unknown."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError, ValueError):  # no limit is "max"
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        found.append(limit - used + _cgroup_cache_bytes(group))
    return min(found, default=None)


def _cgroup_cache_bytes(group: Path) -> int:
    """Memory of a container's page cache, which gives way."""
    lines = (group / "memory.stat").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))


def _prctl(option: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    status: int = ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0)
    return status == 0
