"""Channels on which two processes send each other large tensors, over `torch.distributed`: NCCL or gloo.

A channel has its own groups of two processes, because the workers of a group start again one by one. The processes
meet without a server: what the backend stores for its rendezvous travels with the caller's messages.

Bytes cross a channel only after their receiver has requested them, so only the two buffers hold them.
`choose_backend` chooses the wire by the devices at both ends: NCCL sends the memory of GPUs, and gloo host memory, to
which tensors of an accelerator are copied first. Neither encrypts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch
from torch import Tensor, distributed
from torch.distributed import Store  # type: ignore[attr-defined]  # torch re-exports it unmarked

from moestro.model.step import to_host

# Between looks whether a transfer has ended, of which NCCL reports nothing to the host: short at first, then longer.
_FIRST_LOOK_S, _LAST_LOOK_S = 50e-6, 1e-3
_SENDER, _RECEIVER = 0, 1  # ranks in the group of a direction


class NcclWire:
    """Implements `tensor_channel.Wire`.

    Each direction has a group of its own, because NCCL runs the calls of a group in order: two sends that wait for each
    other's receive would never end. The sizes are known before, and both ends make a direction's calls in the order of
    the announcements.

    The stream that computes never waits for the other process: a receive has a stream of its own, and its tensor is
    handed over when it is there. So a process that has died holds up no work of this one, until an abort ends the
    calls that wait for it.

    Args:
        device: this process's GPU.
        limit_s: longest transfer, in seconds. A longer one breaks the wire.
    """

    reaches_device = True

    def __init__(self, device: torch.device, limit_s: float) -> None:
        self._device, self._limit_s = device, limit_s
        self._is_over = threading.Event()
        self._groups: list[Any] = []
        self._outgoing: Any = None
        self._incoming: Any = None
        self._stream: Any = None

    def meet(self, store: Store, rank: int) -> None:
        """Implement `Wire.meet`. One byte goes each way, because NCCL connects at the first transfer."""
        # The watchdog would end this process, which must outlive the other one. `_ended` looks after transfers instead.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        with torch.cuda.device(self._device):
            self._stream = cast(Any, torch.cuda.Stream)(self._device)
            for sender in range(2):
                group = make_group(store, sender, _SENDER if rank == sender else _RECEIVER, self._limit_s)
                self._groups.append(group)
                byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
                move = group.send if rank == sender else group.recv
                self.wait(move([byte], _RECEIVER if rank == sender else _SENDER, 0))
            self._outgoing, self._incoming = self._groups[rank], self._groups[1 - rank]

    def send(self, frame: Any) -> tuple[Any, Any]:
        """Implement `Wire.send`. `frame`: uint8[bytes], written by the current stream."""
        return self._outgoing.send([frame], _RECEIVER, 0), frame

    def receive(self, num_bytes: int) -> tuple[Any, Any]:
        """Implement `Wire.receive`."""
        with torch.cuda.stream(self._stream):
            frame = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            work = self._incoming.recv([frame], _SENDER, 0)
        # Its memory is used again only after what the computing stream does with it.
        frame.record_stream(torch.cuda.current_stream(self._device))
        return work, frame

    def wait(self, work: Any) -> None:
        """Implement `Wire.wait`. No stream waits: what is launched afterwards comes after the transfer."""
        if not self._ended(work):
            self.stop()
            raise RuntimeError("a transfer over NCCL did not end in time, or the channel was closed")
        if not work.is_success():
            raise RuntimeError("a transfer over NCCL failed")

    def stop(self) -> None:
        """Implement `Wire.stop`. NCCL's kernels that wait for the other process end by an abort."""
        if not self._is_over.is_set():
            self._is_over.set()
            threading.Thread(target=self._abort, name="nccl-abort", daemon=True).start()

    def _ended(self, work: Any) -> bool:
        """Wait for the end of a transfer. False means that it did not end in time, or that the wire was stopped."""
        waited_s, look_s = 0.0, _FIRST_LOOK_S
        while not work.is_completed():
            if waited_s >= self._limit_s or self._is_over.wait(look_s):
                return False
            waited_s, look_s = waited_s + look_s, min(1.05 * look_s, _LAST_LOOK_S)
        return not self._is_over.is_set()

    def _abort(self) -> None:
        for group in self._groups:
            with contextlib.suppress(RuntimeError):
                group.abort()


def make_group(store: Store, sender: int, rank: int, limit_s: float) -> Any:
    """Make the group of a direction.

    Args:
        store: common store of the two processes.
        sender: end of the channel that sends.
        rank: rank of this process in the group.
        limit_s: longest abort, in seconds.
    """
    nccl = cast(Any, distributed).ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=limit_s)
    return nccl(cast(Any, distributed).PrefixStore(f"from-{sender}", store), rank, 2, options)


Backend = Literal["gloo", "nccl"]

CPU = "cpu"  # name of a device


def name_device(device: torch.device) -> str:
    """Return the name of a process's device: no two GPUs of a machine have the same one, whatever their numbers."""
    return CPU if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


def choose_backend(names: Sequence[str]) -> Backend:
    """Choose how processes send each other the tensors of their devices.

    Args:
        names: name of each process's device, from `name_device`.

    Returns:
        "nccl" where each has a GPU of its own. NCCL refuses two processes on one GPU, and knows no CPU.
    """
    have_own = CPU not in names and len(set(names)) == len(names)
    return "nccl" if have_own and distributed.is_nccl_available() else "gloo"


def describe_backend(names: Sequence[str], host: str = "gloo") -> str:
    """Describe the choice of `choose_backend` for the operator; "" for processes without GPUs.

    Args:
        names: as for `choose_backend`.
        host: what carries host memory.
    """
    if all(name == CPU for name in names):
        return ""
    if choose_backend(names) == "nccl":
        return "NCCL, because each process has a GPU of its own"
    if CPU in names:
        return f"{host} through host memory, because a process has no GPU"
    if len(set(names)) < len(names):
        return f"{host} through host memory, because processes share a GPU, which NCCL refuses"
    return f"{host} through host memory, because this torch was built without NCCL"


def copy_to_host(tensor: Tensor) -> Tensor:
    """Return a tensor in host memory, pinned for one of an accelerator, after waiting for it."""
    copy = to_host(tensor)
    if tensor.device.type != "cpu":
        torch.cuda.current_stream(tensor.device).synchronize()
    return copy


def empty_on_host(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate host memory from which a copy to `device` makes the host wait as little as possible."""
    return torch.empty(*shape, dtype=dtype, pin_memory=device.type != "cpu")


logger = logging.getLogger(__name__)

Tell = Callable[[str, bytes], None]
Wake = Callable[[], None]

MEET_S = 10.0  # for which one end waits for the other; within a machine a meeting takes milliseconds
# gloo says nothing when a connection ends in the middle of a tensor: the wait for it ends by this limit alone. The end
# of a process is known long before, from the coordinator. A transfer that takes longer breaks the channel.
TRANSFER_S = 10.0
_AT_ONCE = timedelta(milliseconds=1)
_DATA, _NEVER_SENT = 0, 1  # tags
_CPU = torch.device("cpu")


class Wire(Protocol):
    """Carries frames between the two processes of a channel. A frame is a piece of memory that the wire knows.

    All calls but `meet` and `stop` need a wire that has met. They raise RuntimeError where the wire is broken.

    Attributes:
        reaches_device: whether frames are tensors uint8[bytes] of the device; else they are host memory.
    """

    reaches_device: bool

    def meet(self, store: Store, rank: int) -> None:
        """Connect with the other process. `rank`: 0 at one end, and 1 at the other."""
        ...

    def send(self, frame: Any) -> tuple[Any, Any]:
        """Begin to send a frame. Returns the work, and what has to live until it ends."""
        ...

    def receive(self, num_bytes: int) -> tuple[Any, Any]:
        """Begin to receive so many bytes. Returns the work, and the frame."""
        ...

    def wait(self, work: Any) -> None:
        """Wait for the end of a work, up to `TRANSFER_S`."""
        ...

    def stop(self) -> None:
        """End all waits in this process, and mostly those of the other one; within a few milliseconds."""
        ...


class TensorChannels:
    """Opens the channels of one process. Those over gloo share its thread, which starts with the first channel.

    Args:
        host: name or address of this machine for the other workers.
        device: device of this process.
    """

    def __init__(self, host: str, device: torch.device = _CPU) -> None:
        self._host, self._device = host, device
        self.device_name = name_device(device)
        self._gloo: Any = None
        self._making = threading.Lock()

    def reaches_device(self, peer: str) -> bool:
        """Whether a channel sends the memory of both devices, without a copy on the host.

        Args:
            peer: name of the other process's device.
        """
        return choose_backend((self.device_name, peer)) == "nccl"

    def describe(self, peers: Sequence[str]) -> str:
        """Describe for the operator how tensors go to other workers; "" where all are without accelerators.

        Args:
            peers: names of the other processes' devices.
        """
        ways = Counter(way for peer in peers if (way := describe_backend((self.device_name, peer))))
        return "; ".join(
            f"large tensors go to {count} of {len(peers)} workers by {way}" for way, count in sorted(ways.items())
        )

    def open(self, rank: int, peer: str, tell: Tell, wake: Wake) -> TensorChannel:
        """Begin to meet another process on a new channel.

        Args:
            rank: 0 at one end, and 1 at the other.
            peer: name of the other process's device.
            tell: called from another thread with what the other end's `on_message` must get.
            wake: called from other threads after `is_open`, `is_broken` or the result of `take` has changed.
        """
        is_nccl = self.reaches_device(peer)
        wire = NcclWire(self._device, TRANSFER_S) if is_nccl else GlooWire(self._shared_gloo)
        return TensorChannel(rank, wire, tell, wake)

    def _shared_gloo(self) -> Any:
        with self._making:
            if self._gloo is None:
                self._gloo = distributed.ProcessGroupGloo.create_device(hostname=self._host)
            return self._gloo


class GlooWire:
    """Implements `Wire` over gloo.

    Args:
        make_device: supplier of gloo's device; raises RuntimeError if the host has no such address.
    """

    reaches_device = False

    def __init__(self, make_device: Callable[[], Any]) -> None:
        self._make_device = make_device
        self._group: Any = None
        self._peer = -1

    def meet(self, store: Store, rank: int) -> None:
        """Implement `Wire.meet`."""
        self._peer = 1 - rank
        self._group = _make_group(store, rank, self._make_device())

    def send(self, frame: Any) -> tuple[Any, Any]:
        """Implement `Wire.send`. `frame`: writable memory."""
        tensor = torch.frombuffer(frame, dtype=torch.uint8)
        return self._group.send([tensor], self._peer, _DATA), tensor

    def receive(self, num_bytes: int) -> tuple[Any, Any]:
        """Implement `Wire.receive`."""
        buffer = np.empty(num_bytes, np.uint8)
        return self._group.recv([torch.from_numpy(buffer)], self._peer, _DATA), buffer.data

    def wait(self, work: Any) -> None:
        """Implement `Wire.wait`."""
        work.wait(timedelta(seconds=TRANSFER_S))

    def stop(self) -> None:
        """Implement `Wire.stop`."""
        # Python cannot abort a work of gloo. A wait that ends by its time limit closes the connection, and so ends all
        # other waits.
        if self._group is not None:
            with contextlib.suppress(RuntimeError):
                self._group.recv([torch.empty(1, dtype=torch.uint8)], self._peer, _NEVER_SENT).wait(_AT_ONCE)


class TensorChannel:
    """One end of a channel. One thread waits for arrivals, and another one for the ends of sends.

    Args:
        rank, tell, wake: as in `TensorChannels.open`.
        wire: carries the bytes.

    Attributes:
        reaches_device: as in `Wire`.
        is_open: whether both ends have met.
        is_broken: whether the channel has failed or was closed. What has not arrived by then is lost.
    """

    def __init__(self, rank: int, wire: Wire, tell: Tell, wake: Wake) -> None:
        self.reaches_device = wire.reaches_device
        self.is_open = self.is_broken = False
        self._wake = wake
        self._meeting = _Meeting(tell)
        self._wire: Wire | None = wire
        self._arrived: deque[Any] = deque()
        # Works with their frames, which have to live until the works end. None ends the thread.
        self._receives: SimpleQueue[tuple[Any, Any] | None] = SimpleQueue()
        self._sends: SimpleQueue[tuple[Any, Any] | None] = SimpleQueue()
        self._receiver = threading.Thread(
            target=self._meet_and_receive, args=(wire, rank), name="tensors-in", daemon=True
        )
        self._sender: threading.Thread | None = None
        self._receiver.start()

    def on_message(self, key: str, value: bytes) -> None:
        """Take in a value that the other end sent."""
        self._meeting.put(key, value)

    def send(self, frame: Any) -> None:
        """Send a frame, whose memory stays as it is from now on. The call does not wait.

        The channel must be open. A failure sets `is_broken`.
        """
        wire = self._wire
        if wire is None:
            return
        if self._sender is None:
            self._sender = threading.Thread(target=self._end_sends, args=(wire,), name="tensors-out", daemon=True)
            self._sender.start()
        with self._breaking():
            self._sends.put(wire.send(frame))

    def expect(self, num_bytes: int) -> None:
        """Ask the other end for its next bytes, which are so many; `take` returns them. The channel must be open."""
        with self._breaking():
            if self._wire is not None:
                self._receives.put(self._wire.receive(num_bytes))

    def take(self) -> Any:
        """Return the oldest frame that has arrived, which may be written; None if there is none."""
        return self._arrived.popleft() if self._arrived else None

    def close(self) -> None:
        """Give up what is under way in both directions; a few milliseconds. The other end fails, mostly at once.

        Threads that wait for part of a tensor end after `TRANSFER_S`.
        """
        self.is_broken = True
        self._meeting.close()
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.stop()
        del wire  # the threads drop it, because the end of a group can take a while
        self._receives.put(None)
        self._sends.put(None)

    def join(self, wait_s: float) -> bool:
        """Wait for the threads of a closed channel, up to `wait_s` for each. Returns whether they have ended.

        They may take `MEET_S` while they meet the other end, and `TRANSFER_S` in the middle of a tensor.
        """
        threads = [thread for thread in (self._receiver, self._sender) if thread is not None]
        for thread in threads:
            thread.join(wait_s)
        return not any(thread.is_alive() for thread in threads)

    # --- threads ----------------------------------------------------------------------------------------------------

    def _meet_and_receive(self, wire: Wire, rank: int) -> None:
        with self._breaking():
            wire.meet(self._meeting, rank)
            self.is_open = True
        self._wake()
        while (item := self._receives.get()) is not None:
            work, frame = item
            with self._breaking():
                wire.wait(work)
                if not self.is_broken:
                    self._arrived.append(frame)
            del work, item, frame
            self._wake()
        wire.stop()  # if `close` came before both ends had met

    def _end_sends(self, wire: Wire) -> None:
        while (item := self._sends.get()) is not None:
            with self._breaking():
                wire.wait(item[0])
            del item
            if self.is_broken:
                self._wake()

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """Turn an error of the wire into `is_broken`."""
        try:
            yield
        except RuntimeError as error:
            if not self.is_broken:
                logger.info("a channel for tensors is broken: %s", error)
            self.is_broken = True


class _Meeting(Store):
    """The store of a rendezvous: each end keeps its own values and those that the other end sends.

    Args:
        tell: called with what the other end must receive.
    """

    def __init__(self, tell: Tell) -> None:
        super().__init__()
        self._tell = tell
        self._values: dict[str, bytes] = {}
        self._is_closed = False
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        """Take in a value of the other end."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def close(self) -> None:
        """End all waits with an error."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def set(self, key: str, value: Any) -> None:
        """Implement `Store.set`."""
        own = value.encode() if isinstance(value, str) else bytes(value)
        self.put(key, own)
        self._tell(key, own)

    def get(self, key: str) -> bytes:
        """Implement `Store.get`."""
        self.wait([key])
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        """Implement `Store.check`."""
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Implement `Store.wait`; the time limit is `MEET_S`."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self.check(keys), MEET_S)
            if self._is_closed or not self.check(keys):
                raise RuntimeError("the other end did not come")


def _make_group(store: Store, rank: int, device: Any) -> Any:
    """Make the group of a channel. Raises RuntimeError if the other end does not come."""
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()  # the public constructor takes no address, and gloo would look one up
    options._devices, options._threads = [device], 1
    options._timeout = timedelta(seconds=MEET_S)
    return gloo(store, rank, 2, options)
