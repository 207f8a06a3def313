"""Channels for tensors between two processes, over real connections: order, failures, and what they leave behind."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
from support.running import PATIENCE_S, wait_until

from moestro.model import channels
from moestro.model.channels import TensorChannel, TensorChannels


class Ends:
    """Both ends of a channel in one process, each with its own thread of gloo."""

    def __init__(self, makers: tuple[TensorChannels, TensorChannels]) -> None:
        self.news = threading.Event()
        have_begun = threading.Event()

        def tell(other: int):
            def to_other(key: str, value: bytes) -> None:
                assert have_begun.wait(PATIENCE_S)
                self.ends[other].on_message(key, value)

            return to_other

        self.ends: list[TensorChannel] = [makers[i].open(i, "cpu", tell(1 - i), self.news.set) for i in range(2)]
        have_begun.set()
        wait_until(lambda: all(end.is_open for end in self.ends))

    def is_broken(self) -> bool:
        return all(end.is_broken for end in self.ends)

    def close(self) -> None:
        for end in self.ends:
            end.close()
        assert all(end.join(PATIENCE_S) for end in self.ends)


@pytest.fixture
def makers() -> tuple[TensorChannels, TensorChannels]:
    return TensorChannels("127.0.0.1"), TensorChannels("127.0.0.1")


@pytest.fixture
def ends(makers) -> Iterator[Ends]:
    with contextlib.closing(Ends(makers)) as both:
        yield both


def drawn(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.integers(0, 256, size, np.uint8)


def taken(end: TensorChannel, num: int) -> list[bytes]:
    found: list[bytes] = []

    def has_all() -> bool:
        while (frame := end.take()) is not None:
            assert not frame.readonly
            found.append(bytes(frame))
        return len(found) >= num

    wait_until(has_all)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_bytes_arrive_whole_and_in_order_both_ways_whichever_end_is_late(ends, seed):
    rng = np.random.default_rng(seed)
    tensors = [[drawn(rng, int(rng.choice([1, 100, 5000, 300_000]))) for _ in range(30)] for _ in range(2)]
    sends = [list(each) for each in tensors]
    expects = [[len(tensor) for tensor in each] for each in tensors]
    while any(sends) or any(expects):
        end = int(rng.integers(2))
        if rng.random() < 0.5 and sends[end]:
            ends.ends[end].send(sends[end].pop(0).data)
        elif expects[end]:
            ends.ends[1 - end].expect(expects[end].pop(0))
    for end in range(2):
        assert taken(ends.ends[1 - end], 30) == [tensor.tobytes() for tensor in tensors[end]]
    assert not any(end.is_broken for end in ends.ends)


def test_a_receiver_is_woken_and_uses_no_time_before(ends):
    ends.ends[1].expect(3)
    ends.news.clear()
    ends.ends[0].send(np.arange(3, dtype=np.uint8).data)
    assert ends.news.wait(PATIENCE_S)
    assert taken(ends.ends[1], 1) == [b"\0\1\2"]


@pytest.mark.parametrize("is_sending", [False, True])
def test_a_close_ends_all_waits_at_both_ends_and_leaves_no_thread(makers, is_sending):
    process = psutil.Process()
    Ends(makers).close()  # from here on the threads of gloo's devices run
    before = process.num_threads(), process.num_fds()
    for _ in range(3):
        both = Ends(makers)
        for end in both.ends:
            if is_sending:  # what the other end does not request
                end.send(np.zeros(1 << 20, np.uint8).data)
            else:  # what the other end does not send
                end.expect(5)
        both.ends[0].close()
        wait_until(both.is_broken)
        both.close()
    wait_until(lambda: (process.num_threads(), process.num_fds()) <= before)


def test_what_arrived_before_a_break_can_be_taken(ends):
    ends.ends[1].expect(4)
    ends.ends[0].send(np.ones(4, np.uint8).data)
    wait_until(lambda: ends.ends[1]._arrived)
    ends.ends[0].close()
    wait_until(lambda: ends.ends[1].is_broken or ends.ends[1].expect(1))
    assert taken(ends.ends[1], 1) == [b"\1\1\1\1"]
    assert ends.ends[1].take() is None


def test_an_end_whose_other_end_does_not_come_breaks(makers, monkeypatch):
    monkeypatch.setattr(channels, "MEET_S", 0.1)
    alone = makers[0].open(0, "cpu", lambda *_: None, lambda: None)
    wait_until(lambda: alone.is_broken)
    assert not alone.is_open
    alone.close()
    assert alone.join(PATIENCE_S)


def test_an_end_that_is_closed_while_it_waits_for_the_other_one_ends_at_once(makers):
    keys: list[str] = []
    alone = makers[0].open(0, "cpu", lambda key, _: keys.append(key), lambda: None)
    wait_until(lambda: keys)
    alone.close()
    assert alone.join(channels.MEET_S / 2)


def test_a_host_that_is_not_this_machine_breaks_the_channel_alone():
    elsewhere = TensorChannels("192.0.2.1").open(0, "cpu", lambda *_: None, lambda: None)
    wait_until(lambda: elsewhere.is_broken)
    elsewhere.close()
    assert elsewhere.join(PATIENCE_S)
