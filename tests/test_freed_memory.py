"""Test processes give back what they have freed."""

from __future__ import annotations

import sys

import psutil
import pytest
from support.freed_memory import GROWTH_BYTES, FreedMemory

BLOCK_BYTES = 64 << 10  # so small that glibc takes it from the heap


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's function")
def test_a_block_in_use_does_not_keep_the_memory_below_it():
    freed, process = FreedMemory(), psutil.Process()
    freed.give_back()
    before = process.memory_info().rss
    blocks = [bytes([1]) * BLOCK_BYTES for _ in range(3 * GROWTH_BYTES // BLOCK_BYTES // 2)]
    blocks = blocks[-1:]
    freed.give_back()
    assert process.memory_info().rss - before < GROWTH_BYTES // 4
    assert len(blocks[0]) == BLOCK_BYTES
