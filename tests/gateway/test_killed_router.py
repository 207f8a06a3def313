"""Three `moestro route` before the same engines: one is killed under load, and the others go on as it did."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from routing.fleet import Kind, Load, measure


@pytest.mark.timeout(600)
def test_a_killed_router_fails_no_request_and_moves_no_session(tmp_path):
    load = Load(num_sessions=20, seconds=8.0)
    found = asyncio.run(measure(Kind(3, is_shared=True), load, tmp_path, num_probes=3))
    assert found["requests"] > 40
    assert found["failed_before_first_byte"] == 0, "clients try the next router"
    assert found["tried_again"] > 0, "a router was killed"
    assert found["kept_engine_after_kill"] >= 0.95
    assert found["bytes_per_request"] <= 1024
    assert found["converged_ms"]["median"] <= 2000, "200 on a machine that is not busy"
    logs = [path.read_text() for path in tmp_path.glob("router-*.log")]
    assert len(logs) == 3
    assert not any("ERROR" in log for log in logs)
