"""One log line per kind and interval."""

from __future__ import annotations

import logging

from moestro.web.ports.faults import LogLimit


def test_a_flood_is_one_line_per_interval_and_kind_and_the_next_says_how_many_were_left_out(caplog):
    now_s = 0.0
    limit = LogLimit(logging.getLogger("a"), interval_s=10.0, clock=lambda: now_s)
    for _ in range(3):
        limit.warning("bad", "bad bytes, 100%s")
        limit.warning("odd", "an odd frame")
    assert caplog.messages == ["bad bytes, 100%s", "an odd frame"]
    now_s = 9.9
    limit.warning("bad", "bad bytes")
    now_s = 10.0
    limit.warning("bad", "worse bytes")
    limit.warning("bad", "worse bytes")
    assert caplog.messages[2:] == ["worse bytes (and 3 more since the last such line)"]
    now_s = 20.0
    limit.warning("bad", "bad bytes")
    assert caplog.messages[3:] == ["bad bytes (and 1 more since the last such line)"]
    now_s = 30.0
    limit.warning("bad", "bad bytes")
    assert caplog.messages[4:] == ["bad bytes"]
