"""Memory of bodies is kept for the next ones: what is returned to the system costs a page fault for each 4 KiB."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# Blocks of some hundred kB, several at once, are freed and needed again.
PROGRAM = """
import resource
from moestro.web.ports.lifecycle import keep_freed_memory
keep_freed_memory()
def body():
    b"".join([b"%d" % at * 300_000 for at in range(8)])
body()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    body()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these thresholds")
def test_memory_of_bodies_is_kept_for_the_next_one():
    counts = []
    for program in (PROGRAM, PROGRAM.replace("\nkeep_freed_memory()", "")):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        counts.append(int(done.stdout))
    kept, returned = counts
    assert 10 * kept < returned
