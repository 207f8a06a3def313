"""The exchange between processes: what arrives, and what happens when one of them ends or stands still."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from support.exchange_peer import join, run_peer
from support.loaded_processes import LOADED
from support.running import PATIENCE_S
from torch import distributed

from moestro.errors import GroupLostError
from moestro.model.experts.exchange import GroupPlace
from moestro.wire import sockets
from moestro.wire.sockets import SocketExchange

_COUNTS = torch.zeros(2, 1, dtype=torch.int64)
NOTHING = memoryview(bytearray(0))
_LARGE = 3_000_000  # bytes, far above what a socket takes at once


def place(worker: int, timeout_s: float) -> GroupPlace:
    return GroupPlace(worker=worker, num_workers=2, timeout_s=timeout_s)


@pytest.mark.parametrize("ends", [True, False])
def test_a_lost_worker_is_an_error_and_not_a_hang(ends, tmp_path):
    """An ended process is noticed at once, one that stands still after the time that was given."""
    is_ready = LOADED.Event()
    path = str(tmp_path / "store")
    arguments = (place(1, 30.0), path, is_ready)
    peer = LOADED.Process(target=run_peer, args=arguments, kwargs={"ends": ends}, daemon=True)
    peer.start()
    assert is_ready.wait(300)
    group, host = join(place(0, 3600.0 if ends else 5.0), path)
    try:
        group.exchange_counts(_COUNTS)
        with pytest.raises(GroupLostError, match="engine 1 ended" if ends else "engine 1 did not answer within 5 s"):
            group.exchange_counts(_COUNTS)
    finally:
        peer.kill()
        host.close()


def together(num_workers: int, work, timeout_s: float = PATIENCE_S) -> list:
    """Run `work(worker, exchange)` in a thread for each worker, and return what each returns."""
    store, all_have_run = distributed.HashStore(), threading.Barrier(num_workers)

    def run(worker: int):
        with contextlib.closing(SocketExchange(worker, num_workers, timeout_s, store)) as host:
            has_run = work(worker, host)
            all_have_run.wait(PATIENCE_S)
        return has_run

    with ThreadPoolExecutor(num_workers) as pool:
        return list(pool.map(run, range(num_workers)))


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_each_worker_gets_what_the_others_sent_it(num_workers):
    """Random sizes, none and large ones among them, in several rounds."""
    sizes = np.random.default_rng(num_workers).choice([0, 1, 300, 70_000, _LARGE], (4, num_workers, num_workers))

    def part(number: int, sender: int, receiver: int) -> np.ndarray:
        rng = np.random.default_rng((number, sender, receiver))
        return rng.integers(0, 256, sizes[number, sender, receiver], np.uint8)

    def work(worker: int, host: SocketExchange) -> bool:
        is_equal = True
        for number in range(len(sizes)):
            received = [np.full(size, 7, np.uint8) for size in sizes[number, :, worker]]
            sent = [part(number, worker, other).data for other in range(num_workers)]
            host.swap(sent, [each.data for each in received])
            is_equal &= all(np.array_equal(got, part(number, other, worker)) for other, got in enumerate(received))
        return is_equal

    assert together(num_workers, work) == [True] * num_workers


def test_numbers_are_gathered_in_the_order_of_the_workers():
    found = together(3, lambda worker, host: host.gather(np.array([worker, 10 * worker, -1])[:2]).tolist())
    assert found == [[[0, 0], [1, 10], [2, 20]]] * 3


def test_a_worker_that_ends_in_the_middle_of_a_message_is_noticed():
    def work(worker: int, host: SocketExchange) -> str:
        if worker == 0:
            host._sockets[1].send(bytes(10))  # less than a head
            host.close()
            return ""
        with pytest.raises(GroupLostError) as caught:
            host.swap([NOTHING] * 2, [memoryview(bytearray(8)), NOTHING])
        return str(caught.value)

    assert "engine 0 ended" in together(2, work)[1]


def test_all_notice_a_worker_that_ends():
    """Also those that expect nothing of it."""

    def work(worker: int, host: SocketExchange) -> str:
        if worker == 1:
            host.close()
            return ""
        with pytest.raises(GroupLostError) as caught:
            host.swap([NOTHING] * 3, [NOTHING] * 3)
        return str(caught.value)

    assert [text[-6:] for text in together(3, work)] == [" ended", "", " ended"]


@pytest.mark.parametrize(("number", "length"), [(1, 0), (0, 3)])
def test_workers_that_have_lost_step_are_noticed(number, length):
    """By the numbers of their exchanges, or by the lengths of their parts."""

    def work(worker: int, host: SocketExchange) -> str:
        host._num_swaps += number * worker
        parts = [[memoryview(bytearray(8 + length * worker)) for _ in range(2)] for _ in range(2)]
        with pytest.raises(GroupLostError) as caught:
            host.swap(*parts)
        return str(caught.value)

    assert any("is at another exchange" in text for text in together(2, work))


def test_a_worker_with_the_address_of_another_one_is_refused():
    """Addresses lie in a store without a password."""
    store = distributed.HashStore()
    store.set("socket-0", name := f"moestro-test-{os.getpid()}")

    def answer() -> None:
        with listener.accept()[0] as connection:
            connection.sendall(sockets._NUMBER.pack(2))
            connection.recv(1, socket.MSG_PEEK)

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind(f"\0{name}")
        listener.listen()
        answered = pool.submit(answer)
        with pytest.raises(GroupLostError, match="engine 0 did not connect"):
            SocketExchange(1, 2, PATIENCE_S, store)
        answered.result(PATIENCE_S)


def test_a_worker_that_does_not_come_is_named():
    store = distributed.HashStore()
    with pytest.raises(GroupLostError, match="engine 1, 2 did not connect"):
        SocketExchange(0, 3, 0.1, store)


def test_a_process_of_another_user_is_refused(monkeypatch):
    """Its connection is closed, and does not count as a worker's."""
    users = iter([os.getuid() + 1, os.getuid(), os.getuid()])
    monkeypatch.setattr(sockets, "_user_of", lambda connection: next(users))
    store = distributed.HashStore()
    found = []
    host = threading.Thread(target=lambda: found.append(SocketExchange(0, 2, PATIENCE_S, store)))
    host.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(PATIENCE_S)
        stranger.connect(f"\0{store.get('socket-0').decode()}")
        assert stranger.recv(1) == b""  # closed
    other = SocketExchange(1, 2, PATIENCE_S, store)
    host.join(PATIENCE_S)
    assert len(found) == 1
    for each in (other, *found):
        each.close()
