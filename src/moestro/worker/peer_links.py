"""Links to the other workers of a group over ZeroMQ. The main loop owns the sockets; ZeroMQ's thread moves the bytes.

Each process has one socket that receives, and one for each worker to which it sends. Messages of a channel keep their
order. What goes to a worker that does not run is dropped: its home sends it again when the worker is back. Large
tensors may go apart from their messages (`worker/two_phase.py`).
"""

from __future__ import annotations

import heapq
import logging
import struct
from collections import deque
from typing import Any

import zmq

from moestro.core.stages import DISPATCH, REPLY, Hop, HopMessage
from moestro.cost.links import HOP_HEADER_BYTES, Link, hop_bytes
from moestro.cost.networks import NetworkShape
from moestro.wire.hop_frames import (
    AnnouncedHop,
    Hello,
    HopLimits,
    Meet,
    NoTensors,
    PeerNotice,
    SendAgain,
    TensorFrames,
    decode_frames,
    encode_announced,
    encode_hop,
    encode_notice,
)
from moestro.wire.messages import MAX_MESSAGE_BYTES
from moestro.wire.sockets import Doorkeeper, ListenAddress, allow_ipv6, is_readable, secure_client
from moestro.worker.two_phase import TwoPhase, TwoPhaseLinks

# Modelled links between paced workers: a message is held until the time at which the link would have brought it.
#
# The sender stamps each message with its arrival at the receiver's port, on the clock that the processes of one machine
# share. The receiver lets messages pass its port one after another, as `sim.virtual_links` does on virtual time.

_STAMP = struct.Struct("<q")


class StampFrames(NoTensors):
    """Frames of messages without tensors: the stamp, time.monotonic_ns() in 8 bytes, takes the tensor's place.

    Implements `wire.hop_frames.TensorFrames`.
    """

    def pack(self, tensor: Any) -> bytes:
        """Return the bytes of a stamp."""
        return _STAMP.pack(tensor)

    def num_bytes(self, num_rows: int) -> int:
        """Implement `TensorFrames.num_bytes`."""
        return _STAMP.size

    def unpack(self, frame: Any, num_rows: int) -> int:
        """Return the stamp in a frame.

        Raises:
            ValueError: the frame has another size.
        """
        if len(frame) != _STAMP.size:
            raise ValueError(f"{len(frame)} bytes where a stamp has {_STAMP.size}")
        stamp: int = _STAMP.unpack(frame)[0]
        return stamp


class LinkPace:
    """The port of one worker: stamps what it sends, and holds what it receives.

    Args:
        link: link to all other workers; a message occupies it from the sender's port to the receiver's.
        network: network whose hidden states the messages would contain.
        dilation: factor on the link's times.

    Attributes:
        num_messages: messages that were delivered.
        late_ns: times from the modelled arrival of each of them until its delivery.
    """

    def __init__(self, link: Link, network: NetworkShape, dilation: float = 1.0) -> None:
        self._link, self._network, self._dilation = link, network, dilation
        self._sends_at_ns = self._receives_at_ns = 0  # when the port is free
        self._under_way: list[tuple[int, int, HopMessage]] = []  # heap: (arrival at the port, order, message)
        self._in_port: deque[tuple[int, HopMessage]] = deque()  # (time at which it is through, message)
        self._num_held = 0
        self.num_messages = self.late_ns = 0

    def stamp(self, message: HopMessage, now_ns: int) -> HopMessage:
        """Return `message` with its arrival at the receiver's port in place of a tensor."""
        start_ns = max(now_ns, self._sends_at_ns)
        self._sends_at_ns = start_ns + round(self._link.message_ns * self._dilation) + self._port_ns(message)
        arrives_ns = self._sends_at_ns + round(self._link.latency_ns * self._dilation)
        return HopMessage(message.hop, message.records, arrives_ns)

    def deliver(self, messages: list[HopMessage], now_ns: int) -> list[HopMessage]:
        """Hold `messages`, which carry stamps, and return all held ones that are due, without stamps."""
        for message in messages:
            self._num_held += 1  # messages of one channel keep their order where stamps are equal
            heapq.heappush(self._under_way, (message.tensor, self._num_held, message))
        while self._under_way and self._under_way[0][0] <= now_ns:
            arrives_ns, _, message = heapq.heappop(self._under_way)
            self._receives_at_ns = max(arrives_ns, self._receives_at_ns + self._port_ns(message))
            self._in_port.append((self._receives_at_ns, message))
        due = []
        while self._in_port and self._in_port[0][0] <= now_ns:
            through_ns, message = self._in_port.popleft()
            self.num_messages += 1
            self.late_ns += now_ns - through_ns
            due.append(HopMessage(message.hop, message.records))
        return due

    def ready_at_ns(self) -> int | None:
        """Time at which `deliver` has something to do; None if it holds nothing."""
        times = [each[0][0] for each in (self._in_port, self._under_way) if each]
        return min(times, default=None)

    def _port_ns(self, message: HopMessage) -> int:
        num_bytes = HOP_HEADER_BYTES + hop_bytes(self._network, message.hop.num_rows, len(message.records))
        return round(self._link.port_ns(num_bytes) * self._dilation)


logger = logging.getLogger(__name__)

_MESSAGES_A_TURN = 64  # that are received before the main loop does other things
_MAX_QUEUED = 20_000  # messages in each direction of a channel; a queue is far shorter, because credits bound it
_COPIED_BYTES = 16 << 10  # up to here copying a frame is cheaper than tracking it


class LinkCounts:
    """Totals of one direction of a channel.

    Attributes:
        num_messages, num_bytes: what was sent.
        num_two_phase, two_phase_bytes: those whose tensors went on a channel of their own.
    """

    __slots__ = ("num_bytes", "num_messages", "num_two_phase", "two_phase_bytes")

    def __init__(self) -> None:
        self.num_messages = self.num_bytes = self.num_two_phase = self.two_phase_bytes = 0

    def add(self, num_bytes: int, *, is_two_phase: bool) -> None:
        """Count a message."""
        self.num_messages += 1
        self.num_bytes += num_bytes
        if is_two_phase:
            self.num_two_phase += 1
            self.two_phase_bytes += num_bytes


class PeerLinks:
    """The links of one worker; implements `flow.executor.Links`.

    Args:
        hello: what this process says first on each link.
        endpoint: where it listens.
        tensors: turns the device's tensors into frames and back.
        limits: bounds that arriving messages keep.
        way: a `LinkPace` holds messages for as long as a modelled link takes; `TwoPhase` says which tensors go on
            channels of their own. None means that all go with their messages.

    Attributes:
        address: address at which it listens, with its port.
        sent: totals of what was sent to each worker.
        fds: descriptors, one of which is readable after something has arrived.
        launches: the process of each worker that has sent its hello, as the number of its launch; -1 means none.
        devices: name of the device of each worker that has sent its hello.
        to_resend: workers from or to which a message was lost; the main loop takes them out.
        num_notices: frames that brought no message of tokens, or only its announcement.
        num_garbage: messages that were dropped, because they could not be read.
        num_undelivered: messages that were dropped, because their receiver did not run or read.
    """

    def __init__(
        self,
        hello: Hello,
        endpoint: ListenAddress,
        tensors: TensorFrames,
        limits: HopLimits,
        way: LinkPace | TwoPhase | None = None,
    ) -> None:
        self._hello, self._tensors, self._limits = hello, tensors, limits
        self._pace = way if isinstance(way, LinkPace) else None
        self._two_phase = (
            TwoPhaseLinks(hello, limits.num_workers, way, tensors, self._notify) if isinstance(way, TwoPhase) else None
        )
        self._context = zmq.Context()
        self._inbox: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, _MAX_QUEUED)
        # libzmq holds frames of this size for peers that have not proved the keys yet. Rows beside a tensor are small.
        largest = 2 * tensors.num_bytes(max(limits.num_places, limits.num_remote_places))
        self._inbox.setsockopt(zmq.MAXMSGSIZE, max(largest, MAX_MESSAGE_BYTES))
        self._keys = endpoint.keys
        self._doorkeeper = None if endpoint.keys is None else Doorkeeper(self._inbox, endpoint.keys)
        allow_ipv6(self._inbox, endpoint.address)
        self._inbox.bind(endpoint.address)
        self.address = str(self._inbox.getsockopt_string(zmq.LAST_ENDPOINT))
        self.fds = [int(self._inbox.FD)] + ([] if self._two_phase is None else [self._two_phase.fd])
        self._peers: list[zmq.Socket[bytes] | None] = [None] * limits.num_workers
        self._breaks: dict[int, zmq.Socket[bytes]] = {}  # events of the connections to other machines, by worker
        self.sent = [LinkCounts() for _ in range(limits.num_workers)]
        self.launches = [-1] * limits.num_workers
        self.devices: dict[int, str] = {}
        self.to_resend: set[int] = set()
        self.num_garbage = self.num_undelivered = self.num_notices = 0
        self._next_of: dict[tuple[int, int], tuple[int, int]] = {}  # (worker, kind) -> epoch, next number

    def connect(self, worker: int, address: str, launch: int) -> None:
        """Send a hello, and all later messages for `worker`, to its `launch`-th process at `address`."""
        self.disconnect(worker)
        if self._two_phase is not None:
            self._two_phase.connect(worker, launch)
        peer: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        peer.setsockopt(zmq.SNDHWM, _MAX_QUEUED)
        peer.setsockopt(zmq.LINGER, 0)
        secure_client(peer, self._keys)
        if self._keys is not None:
            self._breaks[worker] = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        allow_ipv6(peer, address)
        peer.connect(address)
        self._peers[worker] = peer
        self._notify(worker, self._hello)

    def disconnect(self, worker: int) -> None:
        """Send nothing to a worker any more, and drop what it has not read."""
        peer, self._peers[worker] = self._peers[worker], None
        if peer is not None:
            if (events := self._breaks.pop(worker, None)) is not None:
                peer.disable_monitor()
                events.close(linger=0)
            peer.close()
        if self._two_phase is not None:
            self._two_phase.disconnect(worker)

    def close(self) -> None:
        """Close all sockets; what is under way is lost."""
        for worker in range(len(self._peers)):
            self.disconnect(worker)
        if self._two_phase is not None:
            self._two_phase.close()
        self._inbox.close(linger=0)
        self._context.term()

    @property
    def may_break(self) -> bool:
        """Whether connections leave this machine, so that `find_breaks` has to be called."""
        return self._keys is not None

    @property
    def num_refused(self) -> int:
        """Connections of strangers, who did not prove the keys."""
        return 0 if self._doorkeeper is None else self._doorkeeper.num_refused

    @property
    def num_sent(self) -> int:
        """Messages sent to all workers."""
        return sum(counts.num_messages for counts in self.sent)

    # --- sending ----------------------------------------------------------------------------------------------------

    def send(self, message: HopMessage, now_ns: int) -> None:
        """Implement `Links.send`."""
        worker = message.hop.dst
        if self._pace is not None:
            message = self._pace.stamp(message, now_ns)
        num_bytes = self._announce(message)
        is_two_phase = num_bytes is not None
        if num_bytes is None:
            num_bytes = self._send(worker, encode_hop(message, self._tensors))
        if not num_bytes:
            self.num_undelivered += 1
            if self._peers[worker] is not None:
                self._lost(worker, is_home=message.hop.kind == DISPATCH)
            return
        self.sent[worker].add(num_bytes, is_two_phase=is_two_phase)

    def _announce(self, message: HopMessage) -> int | None:
        """Send a message in two phases, and return its bytes, 0 if it was not sent. None means to send it in one."""
        if self._two_phase is None:
            return None
        tensor_bytes = self._tensors.num_bytes(message.hop.num_rows)
        announcement = self._two_phase.announce(message, tensor_bytes)
        if announcement is None:
            return None
        num_bytes = self._send(message.hop.dst, encode_announced(AnnouncedHop(announcement, message.records)))
        if not num_bytes:
            return 0
        self._two_phase.send_tensor(message.hop.dst, message.tensor)
        return num_bytes + tensor_bytes

    def _send(self, worker: int, frames: Any) -> int:
        """Send frames, and return their bytes; 0 where their receiver has no room for them."""
        peer = self._peers[worker]
        if peer is None:
            return 0
        sizes = [memoryview(frame).nbytes for frame in frames]
        try:
            peer.send_multipart(frames, zmq.NOBLOCK, copy=sizes[-1] <= _COPIED_BYTES)
        except zmq.Again:
            return 0
        return sum(sizes)

    def _notify(self, worker: int, notice: PeerNotice) -> None:
        self._send(worker, (encode_notice(notice),))

    def _lost(self, worker: int, *, is_home: bool) -> None:
        """Have the home send again what a worker owes: this worker is the home, or `worker` is."""
        if is_home:
            self.to_resend.add(worker)
        else:
            self._notify(worker, SendAgain(self._hello.src))

    def find_breaks(self) -> None:
        """Have the homes send again what connections may have lost that broke, about 2 µs a worker.

        ZeroMQ connects again by itself. What the former connection had taken may not have arrived, whatever it was.
        """
        for worker, events in self._breaks.items():
            if events.poll(0):
                while events.poll(0):
                    events.recv_multipart()
                self._lost(worker, is_home=True)
                self._lost(worker, is_home=False)

    # --- receiving --------------------------------------------------------------------------------------------------

    def has_messages(self) -> bool:
        """Whether something has arrived; under 2 µs."""
        if self._two_phase is not None and self._two_phase.has_news:
            return True
        return is_readable(self._inbox)

    def ready_at_ns(self) -> int | None:
        """Time at which a message is due that the pace holds; None if there is none."""
        return None if self._pace is None else self._pace.ready_at_ns()

    def receive(self, now_ns: int) -> list[HopMessage]:
        """Return messages that are due, and take in notices; at most `_MESSAGES_A_TURN` of both are read."""
        messages = []
        for _ in range(_MESSAGES_A_TURN):
            if not is_readable(self._inbox):
                break
            frames = self._inbox.recv_multipart(zmq.NOBLOCK, copy=False)
            if (message := self._read([frame.buffer for frame in frames])) is not None:
                messages.append(message)
            else:
                self.num_notices += 1
        if self._two_phase is not None:
            messages += self._two_phase.receive()
            for worker in self._two_phase.lost:  # a broken channel loses what both directions had under way
                self._lost(worker, is_home=True)
                self._lost(worker, is_home=False)
            self._two_phase.lost.clear()
        return messages if self._pace is None else self._pace.deliver(messages, now_ns)

    def _read(self, frames: list[memoryview]) -> HopMessage | None:
        try:
            message = decode_frames(frames, self._tensors, self._limits)
        except Exception as error:  # a notice may hold text that is not UTF-8, which raises an error of its own
            self._drop(error)
            return None
        match message:
            case Hello(src, launch, device) if 0 <= src < len(self.launches):
                self.launches[src], self.devices[src] = launch, device
                if self._two_phase is not None:
                    self._two_phase.greeted(message)
            case SendAgain(src) if 0 <= src < len(self.launches):
                self.to_resend.add(src)
            case HopMessage(hop=hop):
                self._look_for_gap(hop)
                return None if self._two_phase is not None and self._two_phase.keep(message) else message
            case AnnouncedHop(announcement) if self._two_phase is not None:
                self._look_for_gap(announcement.hop)
                self._two_phase.announced(message)
            case Meet(src) if 0 <= src < len(self.launches):
                if self._two_phase is not None:
                    self._two_phase.on_message(message)
            case _:
                self._drop(ValueError(f"{message} comes from outside of the group"))
        return None

    def _look_for_gap(self, hop: Hop) -> None:
        """Have the home send again if a message before this one is missing."""
        epoch, seq = self._next_of.get((hop.src, hop.kind), (hop.epoch, 0))
        if hop.epoch > epoch:
            seq = 0
        elif hop.epoch < epoch:
            return  # the sender does not know yet that this worker gave the epoch up
        if hop.seq > seq:
            logger.error("%d messages of worker %d are missing, and are sent for again", hop.seq - seq, hop.src)
            self._lost(hop.src, is_home=hop.kind == REPLY)
        self._next_of[hop.src, hop.kind] = (hop.epoch, max(hop.seq + 1, seq))

    def _drop(self, error: Exception) -> None:
        self.num_garbage += 1
        if self.num_garbage & (self.num_garbage - 1) == 0:  # the first, second, fourth, …: a flood fills no disk
            logger.error("a message of another worker was dropped (%d so far): %s", self.num_garbage, error)
