"""Links in two phases: a message is announced over ZeroMQ, and its tensor follows once the receiver has requested it.

Channels for tensors are opened when a worker first sends another one a large tensor. Until a channel is open, and when
it cannot be opened, tensors go with their messages. Messages keep their order: what comes after an announcement waits
until the tensor has arrived. A channel that breaks loses its tensors, and the homes send them again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from moestro.core.stages import HopMessage
from moestro.flow.settings import INLINE_LIMIT
from moestro.wire.hop_frames import AnnouncedHop, Announcement, Hello, Meet, TensorFrames
from moestro.worker.channel import WakePipe

logger = logging.getLogger(__name__)

# Two GPUs exchange less than this as fast through the host, an estimate.
DEVICE_INLINE_LIMIT = 128 << 10
MAX_REQUESTED_BYTES = 32 << 20  # that a channel may bring before they are taken; one larger tensor may come alone
_CLOSE_S = 2.0  # for which a close waits for threads
MAX_MEETINGS = 8  # of two processes; then a channel that breaks again and again is given up


class ChannelEnd(Protocol):
    """One end of a channel for tensors; `model.tensor_channel.TensorChannel` implements it.

    Attributes:
        reaches_device: whether frames are the device's memory (`TensorFrames.flatten`), and not the host's (`pack`).
        is_open, is_broken: whether both ends have met; and whether the channel has failed or was closed.
    """

    reaches_device: bool
    is_open: bool
    is_broken: bool

    def on_message(self, key: str, value: bytes) -> None:
        """Take in a value that the other end sent."""
        ...

    def send(self, frame: Any) -> None:
        """Send a frame, of writable memory on the host; the call does not wait."""
        ...

    def expect(self, num_bytes: int) -> None:
        """Ask the other end for its next bytes."""
        ...

    def take(self) -> Any:
        """Return the oldest frame that has arrived; None if there is none."""
        ...

    def close(self) -> None:
        """Give up what is under way."""
        ...

    def join(self, wait_s: float) -> bool:
        """Wait for the threads of a closed channel, up to `wait_s`. Returns whether they have ended."""
        ...


class Channels(Protocol):
    """Opens channels to other workers; `model.tensor_channel.TensorChannels` implements it.

    Attributes:
        device_name: name of this worker's device.
    """

    device_name: str

    def reaches_device(self, peer: str) -> bool:
        """Whether a channel to a worker sends the memory of both devices. `peer`: name of the other one's device."""
        ...

    def describe(self, peers: Sequence[str]) -> str:
        """Describe for the operator how tensors go to other workers. `peers`: names of their devices."""
        ...

    def open(self, rank: int, peer: str, tell: Callable[[str, bytes], None], wake: Callable[[], None], /) -> ChannelEnd:
        """Begin to open a channel.

        Args:
            rank: 0 at one end, and 1 at the other.
            peer: name of the other one's device.
            tell: called with what the other end must hear.
            wake: called after news.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoPhase:
    """Choice of the messages whose tensors go on channels.

    Attributes:
        channels: opens channels.
        given_limit: size of a tensor up to which it goes with its message, bytes. None means `INLINE_LIMIT` of the host
            memory of both ends, and `DEVICE_INLINE_LIMIT` of their devices' memory.
    """

    channels: Channels
    given_limit: int | None = None

    def inline_limit(self, peer: str) -> int:
        """Size of a tensor up to which it goes with its message. `peer`: name of the receiver's device."""
        if self.given_limit is not None:
            return self.given_limit
        return DEVICE_INLINE_LIMIT if self.channels.reaches_device(peer) else INLINE_LIMIT


@dataclass(slots=True)
class _Peer:
    """Channel to one worker's process, and what waits for it.

    Attributes:
        launch: number of the process; -1 means that the worker does not run.
        device: name of its device; None before its hello.
        meeting: number of the channel; -1 means that there was none with this process.
        may_meet: whether this end may open another channel.
        num_sent, num_announced: tensors sent, and announced by the other end, on this channel.
        waiting: messages in the order in which they came, the first of which lacks its tensor.
        unrequested: sizes of announced tensors that this end has not requested, bytes.
        requested: sizes of those that it has requested, bytes.
    """

    launch: int = -1
    device: str | None = None
    channel: ChannelEnd | None = None
    meeting: int = -1
    may_meet: bool = True
    num_sent: int = 0
    num_announced: int = 0
    waiting: deque[HopMessage | AnnouncedHop] = field(default_factory=deque)
    unrequested: deque[int] = field(default_factory=deque)
    requested: deque[int] = field(default_factory=deque)
    requested_bytes: int = 0


class TwoPhaseLinks:
    """Channels of one worker to all others.

    Args:
        own: this process.
        num_workers: workers of the group.
        settings: which tensors go on channels.
        tensors: turns frames into the device's tensors.
        tell: called with a worker and a notice for it.

    Attributes:
        has_news: whether something has happened on a channel since the last `receive`.
        lost: workers on whose channel tensors may have been lost; the caller takes them out.
    """

    def __init__(
        self, own: Hello, num_workers: int, settings: TwoPhase, tensors: TensorFrames, tell: Callable[[int, Meet], None]
    ) -> None:
        self._own, self._settings, self._tensors, self._tell = own, settings, tensors, tell
        self._peers = [_Peer() for _ in range(num_workers)]
        self._hellos: dict[int, Hello] = {}
        self._notices: deque[tuple[int, Meet]] = deque()  # from the threads of channels
        self._closed: list[ChannelEnd] = []  # channels whose threads may still run
        self._arrival = WakePipe()
        self.has_news = False
        self.lost: set[int] = set()

    @property
    def fd(self) -> int:
        """Readable after something has happened on a channel."""
        return self._arrival.fd

    def connect(self, worker: int, launch: int) -> None:
        """Take in that a worker's process runs now. What its earlier process sent whole is still delivered."""
        self._close(worker)
        hello = self._hellos.get(worker)
        device = hello.device if hello is not None and hello.launch == launch else None
        self._peers[worker] = _Peer(launch, device, waiting=self._peers[worker].waiting)

    def greeted(self, hello: Hello) -> None:
        """Take in the first message of a worker's process, which may come before this worker connects to it."""
        self._hellos[hello.src] = hello
        if self._peers[hello.src].launch == hello.launch:
            self._peers[hello.src].device = hello.device

    def disconnect(self, worker: int) -> None:
        """Close the channel to a worker that does not run any more."""
        self.connect(worker, -1)

    def close(self) -> None:
        """Close all channels."""
        for worker in range(len(self._peers)):
            self._close(worker)
        deadline = time.monotonic() + _CLOSE_S
        have_ended = [channel.join(max(deadline - time.monotonic(), 0)) for channel in self._closed]
        if all(have_ended):
            self._arrival.close()  # otherwise a thread may still write there
        self._closed.clear()

    # --- sending ----------------------------------------------------------------------------------------------------

    def announce(self, message: HopMessage, num_bytes: int) -> Announcement | None:
        """Return the header of a message whose tensor goes on a channel. None means with the message.

        Args:
            num_bytes: size of the tensor.
        """
        peer = self._peers[message.hop.dst]
        if peer.device is None or num_bytes <= self._settings.inline_limit(peer.device):
            return None
        if peer.channel is None and peer.may_meet and peer.launch >= 0:
            self._meet(message.hop.dst, peer.meeting + 1)
        if peer.channel is None or peer.channel.is_broken or not peer.channel.is_open:
            return None
        return Announcement(message.hop, peer.meeting, peer.num_sent, num_bytes)

    def send_tensor(self, worker: int, tensor: Any) -> None:
        """Send the tensor of the message that was announced last."""
        peer = self._peers[worker]
        assert peer.channel is not None, "an announced tensor has a channel"
        peer.num_sent += 1
        tensors = self._tensors
        peer.channel.send(tensors.flatten(tensor) if peer.channel.reaches_device else tensors.pack(tensor))

    # --- receiving --------------------------------------------------------------------------------------------------

    def on_message(self, notice: Meet) -> None:
        """Take in a value of the rendezvous of a channel, which another worker may have begun."""
        peer = self._peers[notice.src]
        if peer.launch < 0 or notice.launch != peer.launch or notice.meeting < peer.meeting or peer.device is None:
            return  # another process, or a channel that this end has given up
        if notice.meeting > peer.meeting:
            if peer.channel is not None:
                self._give_up(notice.src)
            self._meet(notice.src, notice.meeting)
        if peer.channel is not None:
            peer.channel.on_message(notice.key, notice.value)

    def announced(self, message: AnnouncedHop) -> None:
        """Take in a message whose tensor follows."""
        announcement = message.announcement
        worker = announcement.hop.src
        peer = self._peers[worker]
        if peer.channel is None or announcement.meeting != peer.meeting:
            self.lost.add(worker)  # this end has given the channel up
        elif announcement.number != peer.num_announced:
            logger.error("announcements of worker %d are missing, and its channel is given up", worker)
            self._give_up(worker)
        else:
            peer.num_announced += 1
            peer.waiting.append(message)
            peer.unrequested.append(announcement.num_bytes)
            self._ask(peer)

    def keep(self, message: HopMessage) -> bool:
        """Keep a message if earlier ones of its sender wait for their tensors. Returns whether they do."""
        waiting = self._peers[message.hop.src].waiting
        if waiting:
            waiting.append(message)
        return bool(waiting)

    def receive(self) -> list[HopMessage]:
        """Return messages that lack nothing any more, those of each sender in order, and note broken channels."""
        if not self.has_news:
            return []
        self.has_news = False  # before anything is looked at, so that no news is missed
        self._arrival.clear()
        while self._notices:
            self._tell(*self._notices.popleft())
        messages: list[HopMessage] = []
        for worker, peer in enumerate(self._peers):
            self._take(peer, messages)
            if peer.channel is not None and peer.channel.is_broken:
                self._give_up(worker)
                self._take(peer, messages)
        return messages

    def _take(self, peer: _Peer, messages: list[HopMessage]) -> None:
        """Move messages that lack nothing to `messages`."""
        while peer.waiting:
            first = peer.waiting[0]
            if isinstance(first, AnnouncedHop):
                frame = None if peer.channel is None else peer.channel.take()
                if frame is None:
                    break
                peer.requested_bytes -= peer.requested.popleft()
                hop = first.announcement.hop
                first = HopMessage(hop, first.records, self._tensors.unpack(frame, hop.num_rows))
            messages.append(first)
            peer.waiting.popleft()
        self._ask(peer)

    def _ask(self, peer: _Peer) -> None:
        """Ask for announced tensors, as many as may be under way."""
        channel = peer.channel
        if channel is None or not channel.is_open or channel.is_broken:
            return
        while peer.unrequested:
            num_bytes = peer.unrequested[0]
            if peer.requested and peer.requested_bytes + num_bytes > MAX_REQUESTED_BYTES:
                break
            peer.unrequested.popleft()
            peer.requested.append(num_bytes)
            peer.requested_bytes += num_bytes
            channel.expect(num_bytes)

    # --- channels ---------------------------------------------------------------------------------------------------

    def _meet(self, worker: int, meeting: int) -> None:
        """Begin to open a channel."""

        def tell(key: str, value: bytes) -> None:
            self._notices.append((worker, Meet(self._own.src, self._own.launch, meeting, key, value)))
            self._wake()

        peer = self._peers[worker]
        peer.meeting = meeting
        assert peer.device is not None, "a worker is met after its hello"
        peer.channel = self._settings.channels.open(int(self._own.src > worker), peer.device, tell, self._wake)

    def _give_up(self, worker: int) -> None:
        """Close a channel between two processes that run."""
        peer = self._peers[worker]
        assert peer.channel is not None, "only a channel is given up"
        if not peer.channel.is_open or peer.meeting + 1 >= MAX_MEETINGS:
            peer.may_meet = False
            logger.warning("worker %d has no channel for tensors, which go over ZeroMQ instead", worker)
        self.lost.add(worker)
        self._close(worker)

    def _close(self, worker: int) -> None:
        """Close a channel, and drop the messages that lack their tensors."""
        peer = self._peers[worker]
        if peer.channel is None:
            return
        peer.channel.close()
        self._closed = [*(channel for channel in self._closed if not channel.join(0)), peer.channel]
        peer.channel, peer.num_sent, peer.num_announced, peer.requested_bytes = None, 0, 0, 0
        peer.requested.clear()
        peer.unrequested.clear()
        peer.waiting = deque(message for message in peer.waiting if isinstance(message, HopMessage))
        self.has_news = True  # the messages that are left lack nothing

    def _wake(self) -> None:
        """Note news; called by the threads of channels."""
        self.has_news = True
        self._arrival.wake()
