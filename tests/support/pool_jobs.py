"""Jobs of process pools, in a module that spawned processes can import."""

from __future__ import annotations

import os


def with_process(job: int) -> tuple[int, int]:
    return job * job, os.getpid()


def failing(job: int) -> int:
    return 1 // (job - 1)
