"""Links between workers over real sockets: order, losses, workers that do not run, garbage."""

from __future__ import annotations

import contextlib
import socket
import threading

import numpy as np
import pytest
import zmq
from support.hosts import LOOPBACK
from support.running import wait_until

import moestro.worker.peer_links
from moestro.core.processes import CurveKeys, in_address
from moestro.core.stages import DISPATCH, HOP_RECORD, REPLY, Hop, HopMessage
from moestro.wire.hop_frames import Hello, HopLimits, NoTensors
from moestro.wire.sockets import ListenAddress, new_curve_keys
from moestro.worker.peer_links import PeerLinks


def message(src: int, dst: int, seq: int, kind: int = DISPATCH, epoch: int = 0) -> HopMessage:
    hop = Hop(kind=kind, src=src, dst=dst, epoch=epoch, seq=seq, layer=0, num_rows=1)
    return HopMessage(hop, np.zeros(1, HOP_RECORD))


@pytest.fixture
def pair(tmp_path):
    """A home, number 0, and a worker with experts, number 1; connected."""
    made = []
    for worker in range(2):
        limits = HopLimits(
            worker=worker, num_workers=3, num_layers=1, num_chosen=1, num_slots=1, num_places=9, num_remote_places=9
        )
        made.append(PeerLinks(Hello(worker, 5 + worker), listen_address(tmp_path, worker), NoTensors(), limits))
    home, expert = made
    home.connect(1, address_of(tmp_path, 1), 6)
    expert.connect(0, address_of(tmp_path, 0), 5)
    wait_until(
        lambda: [home.receive(0), expert.receive(0)] == [[], []] and (home.launches[1], expert.launches[0]) == (6, 5)
    )
    with contextlib.closing(home), contextlib.closing(expert):
        yield home, expert


def address_of(directory, worker: int) -> str:
    return f"ipc://{directory}/{worker}"


def listen_address(directory, worker: int) -> ListenAddress:
    return ListenAddress(address_of(directory, worker))


def received(links: PeerLinks, num: int) -> list[int]:
    seqs: list[int] = []

    def has_all() -> bool:
        seqs.extend(each.hop.seq for each in links.receive(0))
        return len(seqs) >= num

    wait_until(has_all)
    return seqs


def test_messages_of_a_channel_arrive_in_order_and_are_counted(pair):
    home, expert = pair
    for seq in range(500):
        home.send(message(0, 1, seq), 0)
    assert received(expert, 500) == list(range(500))
    assert home.sent[1].num_messages == home.num_sent == 500
    assert home.sent[1].num_bytes > 500 * HOP_RECORD.itemsize
    assert not home.has_messages()
    assert not expert.to_resend


def test_has_messages_says_whether_something_has_arrived(pair):
    home, expert = pair
    assert not expert.has_messages()
    home.send(message(0, 1, 0), 0)
    wait_until(expert.has_messages)
    assert received(expert, 1) == [0]


def test_what_goes_to_a_worker_that_does_not_run_is_dropped_and_counted(pair):
    home, expert = pair
    home.disconnect(1)
    home.send(message(0, 1, 0), 0)
    home.send(message(0, 2, 0), 0)
    assert home.num_undelivered == 2
    assert not home.to_resend  # the homes send everything again when it is back
    assert expert.receive(0) == []


def test_a_missing_reply_makes_the_home_send_again(pair):
    home, expert = pair
    for seq in (0, 1, 3):
        expert.send(message(1, 0, seq, REPLY), 0)
    assert received(home, 3) == [0, 1, 3]
    assert home.to_resend == {1}


def test_a_missing_dispatch_makes_the_receiver_ask_the_home_to_send_again(pair):
    home, expert = pair
    home.send(message(0, 1, 1), 0)
    assert received(expert, 1) == [1]
    assert not expert.to_resend
    wait_until(lambda: home.receive(0) == [] and home.to_resend == {1})


def test_a_new_epoch_begins_with_a_new_count_and_late_messages_of_the_old_one_are_no_gap(pair):
    home, expert = pair
    for epoch, seq in ((0, 0), (0, 1), (1, 0), (0, 9), (1, 1)):
        home.send(message(0, 1, seq, epoch=epoch), 0)
    assert received(expert, 5) == [0, 1, 0, 9, 1]
    wait_until(lambda: not expert.has_messages())
    assert home.receive(0) == []
    assert not home.to_resend


def test_garbage_is_dropped_and_counted(pair, tmp_path, caplog):
    home, expert = pair
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.connect(address_of(tmp_path, 1))
        for frames in ([b"\xff"], [b"", b""], [b"a", b"b", b"c", b"d"], [b"\x93", b"123", b""], [b"\x80", b"", b""]):
            stranger.send_multipart(frames)
        home.send(message(0, 1, 0), 0)
        wait_until(lambda: expert.receive(0) is not None and expert.num_garbage == 5)
    home.send(message(0, 1, 1), 0)
    assert received(expert, 1) == [1]
    assert len([text for text in caplog.messages if "was dropped" in text]) == 3  # the first, second and fourth


def test_a_worker_that_does_not_read_loses_messages_and_the_home_sends_them_again(monkeypatch, tmp_path):
    monkeypatch.setattr(moestro.worker.peer_links, "_MAX_QUEUED", 10)
    limits = HopLimits(
        worker=0, num_workers=2, num_layers=1, num_chosen=1, num_slots=1, num_places=9, num_remote_places=9
    )
    with contextlib.closing(PeerLinks(Hello(0, 0), listen_address(tmp_path, 0), NoTensors(), limits)) as home:
        home.connect(1, address_of(tmp_path, 1), 6)  # where no worker listens
        for seq in range(50):
            home.send(message(0, 1, seq), 0)
        assert home.num_undelivered >= 40
        assert home.to_resend == {1}


class Relay:
    """Forwards connections to another port of this machine, and can cut them, as a network does that fails."""

    def __init__(self, address: str) -> None:
        self._port = int(address.rpartition(":")[2])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._ends += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)

    def cut(self) -> None:
        ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()


def test_a_stranger_without_keys_cannot_make_a_worker_hold_a_frame_without_bound():
    with contextlib.closing(distant_links(0, "tcp://127.0.0.1:*", new_curve_keys())) as links:
        port = int(links.address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=300) as stranger:
            stranger.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32))
            stranger.sendall(b"\x06" + (3 << 30).to_bytes(8, "big"))
            with pytest.raises(ConnectionError):
                stranger.sendall(bytes(100 << 20))


def distant_links(worker: int, address: str, keys: CurveKeys) -> PeerLinks:
    """The links of one of two workers, on tcp."""
    limits = HopLimits(
        worker=worker, num_workers=2, num_layers=1, num_chosen=1, num_slots=1, num_places=9, num_remote_places=9
    )
    return PeerLinks(Hello(worker, 5), ListenAddress(address, keys), NoTensors(), limits)


@pytest.fixture
def distant():
    """A home and a worker with experts on tcp, each behind a relay: (home, expert, relay to expert, relay to home)."""
    keys = new_curve_keys()
    with contextlib.ExitStack() as stack:
        made, relays = [], []
        for worker in range(2):
            links = distant_links(worker, "tcp://127.0.0.1:*", keys)
            made.append(stack.enter_context(contextlib.closing(links)))
            relays.append(stack.enter_context(contextlib.closing(Relay(links.address))))
        home, expert = made
        home.connect(1, relays[1].address, 5)
        expert.connect(0, relays[0].address, 5)
        wait_until(lambda: home.receive(0) == expert.receive(0) == [] and home.launches[1] == expert.launches[0] == 5)
        yield home, expert, relays[1], relays[0]


@LOOPBACK
def test_workers_on_two_machines_meet(host):
    keys = new_curve_keys()
    with contextlib.ExitStack() as stack:
        home, expert = (
            stack.enter_context(contextlib.closing(distant_links(worker, f"tcp://{in_address(host)}:*", keys)))
            for worker in range(2)
        )
        home.connect(1, expert.address, 5)
        expert.connect(0, home.address, 5)
        wait_until(lambda: home.receive(0) == expert.receive(0) == [] and home.launches[1] == expert.launches[0] == 5)
        home.send(message(0, 1, 0), 0)
        assert received(expert, 1) == [0]


def test_a_home_sends_again_when_its_connection_to_a_worker_breaks(distant):
    home, expert, relay, _ = distant
    home.send(message(0, 1, 0), 0)
    assert received(expert, 1) == [0]
    home.find_breaks()
    assert not home.to_resend
    relay.cut()
    wait_until(lambda: home.find_breaks() or home.to_resend == {1})
    home.send(message(0, 1, 1), 0)
    assert received(expert, 1) == [1]


def test_a_worker_has_the_home_send_again_when_its_connection_to_it_breaks(distant):
    home, expert, _, relay = distant
    relay.cut()
    wait_until(lambda: expert.find_breaks() or home.receive(0) or home.to_resend == {1})
    assert home.num_refused == expert.num_refused == 0
