"""Links in two phases: order, bounded memory, channels that break, and processes that die in the middle."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import deque
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from support.link_peer import ByteFrames, address_of, make_links, run_peer
from support.loaded_processes import LOADED
from support.running import wait_until

from moestro.config.launch_spec import GroupSpec
from moestro.core.stages import DISPATCH, HOP_RECORD, REPLY, Hop, HopMessage
from moestro.flow.settings import GroupStepSettings
from moestro.model import channels
from moestro.model.channels import TensorChannels
from moestro.wire.hop_frames import AnnouncedHop, Announcement, Hello, Meet
from moestro.worker import two_phase
from moestro.worker.rank_process import _two_phase as two_phase_of
from moestro.worker.two_phase import MAX_MEETINGS, TwoPhase, TwoPhaseLinks

LIMIT, WIDTH = 10, 4  # bytes: tensors of three rows and more go on a channel


class FakeEnd:
    """One end of a channel whose bytes arrive when the test says so.

    Attributes:
        under_way: bytes that were sent to this end.
        requested: sizes that it waits for.
        other: the other end.
    """

    def __init__(self) -> None:
        self.is_open = self.is_broken = self.is_closed = self.reaches_device = False
        self.under_way: deque[bytes] = deque()
        self.requested: deque[int] = deque()
        self.arrived: deque[memoryview] = deque()
        self.received_keys: list[str] = []

    def on_message(self, key: str, value: bytes) -> None:
        self.received_keys.append(key)

    def send(self, frame: memoryview) -> None:
        assert self.is_open
        self.other.under_way.append(bytes(frame))

    def expect(self, num_bytes: int) -> None:
        assert self.is_open
        self.requested.append(num_bytes)

    def bring(self) -> bool:
        """Bring the next bytes that were both sent and requested."""
        if not (self.under_way and self.requested):
            return False
        frame = self.under_way.popleft()
        assert len(frame) == self.requested.popleft()
        self.arrived.append(memoryview(bytearray(frame)))
        self.wake()
        return True

    def take(self) -> memoryview | None:
        return self.arrived.popleft() if self.arrived else None

    def close(self) -> None:
        self.is_closed = self.is_broken = True

    def join(self, wait_s: float) -> bool:
        return True


class Pair:
    """Two workers whose announcements and channels the test carries by hand."""

    def __init__(self) -> None:
        self.ends: list[list[FakeEnd]] = [[], []]
        self.notices: list[list[Meet]] = [[], []]  # for each worker
        self.links = [self._make(worker) for worker in range(2)]
        for worker in range(2):
            self.links[worker].connect(1 - worker, 5 + 1 - worker)
            self.links[worker].greeted(Hello(1 - worker, 5 + 1 - worker))

    def _make(self, worker: int) -> TwoPhaseLinks:
        def open_channel(rank: int, peer: str, tell, wake) -> FakeEnd:
            assert (rank, peer) == (worker, "cpu")
            end = FakeEnd()
            end.wake = wake
            self.ends[worker].append(end)
            tell(f"address of {worker}", b"here")
            return end

        settings = TwoPhase(given_limit=LIMIT, channels=SimpleNamespace(open=open_channel))
        own = Hello(worker, 5 + worker)
        return TwoPhaseLinks(own, 2, settings, ByteFrames(WIDTH), lambda to, notice: self.notices[to].append(notice))

    def meet(self) -> None:
        """Carry the rendezvous of the last channel, and open it."""
        for _ in range(2):
            for worker in range(2):
                self.links[worker].receive()
                for notice in self.notices[worker]:
                    self.links[worker].on_message(notice)
                self.notices[worker].clear()
        ends = [self.ends[worker][-1] for worker in range(2)]
        for end, other in (ends, ends[::-1]):
            end.other, end.is_open = other, True
            end.wake()

    def open(self) -> None:
        assert self.links[0].announce(message(0, 3), 3 * WIDTH) is None  # the first one goes inline
        self.meet()

    def close(self) -> None:
        for links in self.links:
            links.close()


def message(seq: int, num_rows: int, src: int = 0) -> HopMessage:
    kind = DISPATCH if src == 0 else REPLY
    hop = Hop(kind=kind, src=src, dst=1 - src, epoch=0, seq=seq, layer=0, num_rows=num_rows, dtype="uint8")
    return HopMessage(hop, np.zeros(num_rows, HOP_RECORD), np.full((num_rows, WIDTH), seq % 256, np.uint8))


@pytest.fixture
def pair():
    made = Pair()
    with contextlib.closing(made):
        yield made


def announce(pair: Pair, sent: HopMessage) -> AnnouncedHop:
    """Announce a large message, and send its tensor."""
    links = pair.links[sent.hop.src]
    announcement = links.announce(sent, sent.tensor.nbytes)
    assert announcement is not None
    links.send_tensor(sent.hop.dst, sent.tensor)
    return AnnouncedHop(announcement, sent.records)


@pytest.mark.parametrize("seed", range(20))
def test_messages_keep_their_order_whenever_tensors_and_announcements_arrive(pair, seed, monkeypatch):
    """Random sizes, delays of the channel, and bounds; the oracle is the order of sending."""
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(two_phase, "MAX_REQUESTED_BYTES", int(rng.choice([1, 20, 10_000])))
    pair.open()
    wire: deque[HopMessage | AnnouncedHop] = deque()
    end, links = pair.ends[1][-1], pair.links[1]
    got: list[HopMessage] = []
    num_sent = 0
    while len(got) < 60:
        match int(rng.integers(4)):
            case 0 if num_sent < 60:
                sent = message(num_sent, int(rng.integers(1, 8)))
                is_large = sent.tensor.nbytes > LIMIT
                wire.append(announce(pair, sent) if is_large else sent)
                num_sent += 1
            case 1 if wire:
                match wire.popleft():
                    case AnnouncedHop() as announced:
                        links.announced(announced)
                    case whole:
                        if not links.keep(whole):
                            got.append(whole)
            case 2:
                end.bring()
            case 3:
                got += links.receive()
        assert sum(end.requested) + sum(map(len, end.arrived)) <= max(two_phase.MAX_REQUESTED_BYTES, 7 * WIDTH)
    assert [each.hop.seq for each in got] == list(range(60))
    assert all((each.tensor == each.hop.seq).all() and len(each.tensor) == each.hop.num_rows for each in got)
    assert not links.lost


def test_tensors_go_inline_up_to_the_limit_and_until_the_channel_is_open(pair):
    links = pair.links[0]
    assert links.announce(message(0, 2), LIMIT) is None
    assert pair.ends == [[], []]  # nothing large, so no channel
    assert links.announce(message(0, 3), LIMIT + 1) is None
    assert len(pair.ends[0]) == 1
    pair.meet()
    assert links.announce(message(1, 3), LIMIT + 1) == Announcement(message(1, 3).hop, 0, 0, LIMIT + 1)


def test_both_ends_may_begin_at_once_and_share_one_channel(pair):
    for src in range(2):
        assert pair.links[src].announce(message(0, 3, src), 12) is None
    pair.meet()
    assert [len(ends) for ends in pair.ends] == [1, 1]
    assert pair.ends[0][0].received_keys == ["address of 1"]


def test_an_announcement_that_comes_before_the_own_end_is_open_waits(pair):
    pair.open()
    end, links = pair.ends[1][-1], pair.links[1]
    end.is_open = False
    links.announced(announce(pair, message(0, 3)))
    assert links.receive() == []
    assert not end.requested
    end.is_open = True
    end.wake()
    assert links.receive() == []
    assert list(end.requested) == [12]


@pytest.mark.parametrize("breaks", [0, 1], ids=["sender", "receiver"])
def test_a_channel_that_breaks_loses_tensors_and_nothing_else(pair, breaks):
    pair.open()
    links = pair.links[1]
    for seq in range(3):
        links.announced(announce(pair, message(seq, 3)))
    assert links.keep(message(3, 1))
    pair.ends[1][-1].bring()
    for end in (pair.ends[breaks][-1], pair.ends[1 - breaks][-1]):
        end.is_broken = True
        end.wake()
    assert [each.hop.seq for each in links.receive()] == [0, 3]
    assert pair.links[0].receive() == []
    assert pair.links[0].lost == {1}
    assert links.lost == {0}
    assert all(ends[-1].is_closed for ends in pair.ends)
    assert not links.keep(message(4, 1))
    pair.open()  # another channel
    links.announced(announce(pair, message(5, 3)))
    assert pair.ends[1][-1].bring()
    assert [each.hop.seq for each in links.receive()] == [5]


def test_announcements_for_a_channel_that_was_given_up_are_lost(pair):
    pair.open()
    late = announce(pair, message(0, 3))
    pair.ends[1][-1].is_broken = True
    pair.ends[1][-1].wake()
    pair.links[1].receive()
    pair.links[1].lost.clear()
    pair.links[1].announced(late)
    assert pair.links[1].lost == {0}
    assert not pair.links[1].keep(message(1, 1))


def test_a_missing_announcement_gives_the_channel_up(pair):
    pair.open()
    announce(pair, message(0, 3))
    pair.links[1].announced(announce(pair, message(1, 3)))
    assert pair.links[1].lost == {0}
    assert pair.ends[1][-1].is_closed


def test_a_channel_that_never_opens_or_breaks_again_and_again_is_given_up(pair):
    for _ in range(MAX_MEETINGS):
        pair.open()
        for worker in range(2):
            pair.ends[worker][-1].is_broken = True
            pair.ends[worker][-1].wake()
            pair.links[worker].receive()
    assert pair.links[0].announce(message(0, 3), 12) is None
    assert len(pair.ends[0]) == MAX_MEETINGS
    pair.links[0].connect(1, 7)  # another process
    assert pair.links[0].announce(message(0, 3), 12) is None
    assert len(pair.ends[0]) == MAX_MEETINGS  # nothing is known of its device before its hello
    pair.links[0].greeted(Hello(1, 7))
    assert pair.links[0].announce(message(0, 3), 12) is None
    assert len(pair.ends[0]) == MAX_MEETINGS + 1
    pair.ends[0][-1].is_broken = True
    pair.ends[0][-1].wake()
    pair.links[0].receive()
    assert pair.links[0].announce(message(0, 3), 12) is None
    assert len(pair.ends[0]) == MAX_MEETINGS + 1


def test_an_end_of_the_peer_gives_up_its_tensors_and_keeps_what_came_whole(pair):
    pair.open()
    links = pair.links[1]
    links.announced(announce(pair, message(0, 3)))
    assert links.keep(message(1, 1))
    links.disconnect(0)
    assert [each.hop.seq for each in links.receive()] == [1]
    assert not links.lost  # the coordinator has notified all workers
    assert links.announce(message(0, 3, 1), 12) is None
    assert len(pair.ends[1]) == 1  # a worker that does not run is not met


@pytest.mark.parametrize(
    "notice", [Meet(0, 4, 0, "key", b""), Meet(0, -1, 0, "key", b""), Meet(1, 6, 9, "key", b"")], ids=repr
)
def test_a_rendezvous_of_another_process_is_ignored(pair, notice):
    pair.links[1].on_message(notice)
    assert pair.ends[1] == []


def test_links_without_channels_send_everything_inline():
    group = GroupSpec(
        worker=0,
        num_homes=1,
        num_workers=2,
        num_shares=1,
        first_shares=((), (0,)),
        is_colocated=False,
        stepping=GroupStepSettings(inline_limit=7),
    )
    part = SimpleNamespace(channels=TensorChannels("127.0.0.1"))
    assert two_phase_of(group, part).inline_limit("cpu") == 7
    assert two_phase_of(group, SimpleNamespace(channels=None)) is None


@pytest.mark.parametrize(("reaches_device", "limit"), [(False, 4 << 20), (True, 128 << 10)])
def test_without_a_limit_devices_send_smaller_tensors_by_themselves(reaches_device, limit):
    channels = SimpleNamespace(reaches_device=lambda peer: reaches_device)
    assert TwoPhase(channels=channels).inline_limit("a card") == limit
    assert TwoPhase(channels=channels, given_limit=0).inline_limit("a card") == 0


# --- over real connections ------------------------------------------------------------------------------------------


def links_of(directory, worker: int, width: int):
    return contextlib.closing(make_links(directory, worker, 0, width, LIMIT))


@pytest.mark.parametrize("seed", range(3))
def test_real_links_bring_every_message_whole_and_in_order(tmp_path, seed):
    rng = np.random.default_rng(seed)
    process, before = psutil.Process(), set(threading.enumerate())
    with links_of(tmp_path, 0, 1000) as home, links_of(tmp_path, 1, 1000) as expert:
        home.connect(1, address_of(tmp_path, 1, 0), 0)
        expert.connect(0, address_of(tmp_path, 0, 0), 0)
        got: list[list[HopMessage]] = [[], []]
        sent = 0

        def go_on() -> bool:
            got[0].extend(home.receive(0))
            got[1].extend(expert.receive(0))
            return min(map(len, got)) == sent

        for seq in range(300):
            for src, links in ((0, home), (1, expert)):
                rows = int(rng.integers(1, 9))
                hop = message(seq, rows, src).hop
                records = np.zeros(rows, HOP_RECORD)
                records["row"] = np.arange(rows)
                tensor = np.full((rows, 1000), seq % 256, np.uint8)
                links.send(HopMessage(hop, records, tensor), 0)
            sent += 1
            if rng.random() < 0.3:
                go_on()
        wait_until(go_on)
        for each in got:
            assert [one.hop.seq for one in each] == list(range(300))
            assert all((one.tensor == one.hop.seq % 256).all() for one in each)
        counts = home.sent[1]
        wait_until(lambda: counts.num_two_phase or home.send(message(0, 9), 0))
        assert counts.num_messages >= 300
        assert 0 < counts.two_phase_bytes <= counts.num_bytes
        assert not home.to_resend
        assert not expert.to_resend
        begun = sum(process.cpu_times()[:2])
        threading.Event().wait(1)
        assert sum(process.cpu_times()[:2]) - begun < 0.1  # idle channels hardly use the processor
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("sends_tensors", [False, True], ids=["before the tensor is sent", "while tensors are sent"])
def test_a_process_that_is_killed_during_a_receive_is_a_loss_and_leaves_nothing(tmp_path, monkeypatch, sends_tensors):
    monkeypatch.setattr(channels, "TRANSFER_S", 4.0)
    width = 24 << 20 if sends_tensors else 1000
    before = set(threading.enumerate())
    has_announced = LOADED.Event()
    arguments = (str(tmp_path), 0, width, has_announced)
    peer = LOADED.Process(target=run_peer, args=arguments, kwargs={"sends_tensors": sends_tensors}, daemon=True)
    with contextlib.closing(make_links(tmp_path, 0, 0, width)) as home:
        home.connect(1, address_of(tmp_path, 1, 0), 0)
        peer.start()
        try:
            wait_until(lambda: home.receive(0) is None or has_announced.is_set())
            waiting = home._two_phase._peers[1]

            def stops_in_the_middle() -> bool:
                wait_until(lambda: home.receive(0) is None or waiting.requested)
                os.kill(peer.pid, signal.SIGSTOP)
                settled = time.monotonic() + 0.5
                while time.monotonic() < settled:  # what the connection holds may complete the tensor
                    home.receive(0)
                    time.sleep(0.01)
                if not waiting.requested:
                    os.kill(peer.pid, signal.SIGCONT)
                return bool(waiting.requested)

            wait_until(stops_in_the_middle)
            assert not home.to_resend  # it may come back
            os.kill(peer.pid, signal.SIGKILL)
            if not sends_tensors:  # otherwise gloo may say nothing
                wait_until(lambda: home.receive(0) is None or home.to_resend == {1})
        finally:
            peer.kill()
            peer.join()
        home.disconnect(1)  # as the coordinator says
        home.receive(0)
        assert not home._two_phase._peers[1].waiting
        assert not home._two_phase._peers[1].requested
        wait_until(lambda: home.receive(0) == [] and set(threading.enumerate()) == before)
