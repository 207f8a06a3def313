"""The API server's clock, as a rank on another machine reads it."""

from __future__ import annotations

import random
import time

import pytest

from moestro.errors import EngineDiedError
from moestro.wire.messages import ClockReading, ReadClock
from moestro.worker.rank_process import server_clock

MS = 1_000_000


class SlowChannel:
    """A channel on which questions and answers wait for random times; the server's clock is `ahead_ns` ahead."""

    def __init__(self, ahead_ns: int, seed: int) -> None:
        self._ahead_ns, self._random = ahead_ns, random.Random(seed)
        self._requested_ns = 0
        self.num_requests_seen = 0

    def send(self, message: ReadClock) -> None:
        self._requested_ns = message.requested_ns
        self.num_requests_seen += 1

    def receive(self, wait_s: float) -> list[ClockReading]:
        time.sleep(self._random.uniform(0, 0.005))
        server_ns = time.monotonic_ns() + self._ahead_ns
        time.sleep(self._random.uniform(0, 0.005))
        return [ClockReading(self._requested_ns, server_ns)]


@pytest.mark.parametrize("ahead_ns", [0, 10**15, -(10**15)])
@pytest.mark.parametrize("seed", range(3))
def test_the_clock_is_read_within_half_of_a_round_trip(ahead_ns, seed):
    channel = SlowChannel(ahead_ns, seed)
    clock = server_clock(channel)
    assert channel.num_requests_seen > 4
    assert abs(clock() - (time.monotonic_ns() + ahead_ns)) < 20 * MS


def test_an_api_server_that_does_not_answer_is_an_error():
    channel = SlowChannel(0, 0)
    channel.receive = lambda wait_s: []
    with pytest.raises(EngineDiedError, match="did not tell its time"):
        server_clock(channel)
