"""Channels on which two processes send each other large tensors, over `torch.distributed` (gloo).

A channel has its own group of two processes, because the workers of a group start again one by one. The processes
meet without a server: what gloo stores for its rendezvous travels with the caller's messages.

Bytes cross a channel only after their receiver has asked for them, so only the two buffers hold them. gloo does not
encrypt, and sends host memory: tensors of an accelerator are copied there first.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.distributed import Store  # type: ignore[attr-defined]  # torch re-exports it unmarked

logger = logging.getLogger(__name__)

Tell = Callable[[str, bytes], None]
Wake = Callable[[], None]

MEET_S = 10.0  # for which one end waits for the other; within a machine a meeting takes milliseconds
# gloo says nothing when a connection ends in the middle of a tensor: the wait for it ends by this limit alone. The end
# of a process is known long before, from the coordinator. A transfer that takes longer breaks the channel.
TRANSFER_S = 10.0
_AT_ONCE = timedelta(milliseconds=1)
_DATA, _NEVER_SENT = 0, 1  # tags


class TensorChannels:
    """Opens the channels of one process. They share gloo's thread, which starts with the first channel.

    Args:
        host: name or address of this machine for the other workers.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._device: Any = None
        self._making = threading.Lock()

    def open(self, rank: int, tell: Tell, wake: Wake) -> TensorChannel:
        """Begin to meet another process on a new channel.

        Args:
            rank: 0 at one end, and 1 at the other.
            tell: called from another thread with what the other end's `heard` must get.
            wake: called from other threads after `is_open`, `is_broken` or the result of `take` has changed.
        """
        return TensorChannel(rank, self._shared_device, tell, wake)

    def _shared_device(self) -> Any:
        with self._making:
            if self._device is None:
                self._device = distributed.ProcessGroupGloo.create_device(hostname=self._host)
            return self._device


class TensorChannel:
    """One end of a channel. One thread waits for arrivals, and another one for the ends of sends.

    Args:
        rank, tell, wake: as in `TensorChannels.open`.
        make_device: supplier of gloo's device; raises RuntimeError if the host has no such address.

    Attributes:
        is_open: whether both ends have met.
        is_broken: whether the channel has failed or was closed. What has not arrived by then is lost.
    """

    def __init__(self, rank: int, make_device: Callable[[], Any], tell: Tell, wake: Wake) -> None:
        self.is_open = self.is_broken = False
        self._rank, self._wake = rank, wake
        self._meeting = _Meeting(tell)
        self._group: Any = None
        self._arrived: deque[memoryview] = deque()
        # Works of gloo with their buffers, which have to live until the works end. None ends the thread.
        self._receives: SimpleQueue[tuple[Any, memoryview] | None] = SimpleQueue()
        self._sends: SimpleQueue[tuple[Any, torch.Tensor] | None] = SimpleQueue()
        self._receiver = threading.Thread(
            target=self._meet_and_receive, args=(make_device,), name="tensors-in", daemon=True
        )
        self._sender: threading.Thread | None = None
        self._receiver.start()

    def heard(self, key: str, value: bytes) -> None:
        """Take in what the other end told."""
        self._meeting.put(key, value)

    def send(self, frame: memoryview) -> None:
        """Send the bytes of writable memory, which stays as it is from now on. The call does not wait.

        The channel must be open. A failure sets `is_broken`.
        """
        if self._sender is None:
            self._sender = threading.Thread(target=self._end_sends, name="tensors-out", daemon=True)
            self._sender.start()
        tensor = torch.frombuffer(frame, dtype=torch.uint8)
        with self._breaking():
            self._sends.put((self._group.send([tensor], 1 - self._rank, _DATA), tensor))

    def expect(self, num_bytes: int) -> None:
        """Ask the other end for its next bytes, which are so many; `take` returns them. The channel must be open."""
        buffer = np.empty(num_bytes, np.uint8)
        with self._breaking():
            work = self._group.recv([torch.from_numpy(buffer)], 1 - self._rank, _DATA)
            self._receives.put((work, buffer.data))

    def take(self) -> memoryview | None:
        """Return the oldest bytes that have arrived, in writable memory; None if there are none."""
        return self._arrived.popleft() if self._arrived else None

    def close(self) -> None:
        """Give up what is under way in both directions; a few milliseconds. The other end fails, mostly at once.

        Threads that wait for part of a tensor end after `TRANSFER_S`.
        """
        self.is_broken = True
        self._meeting.close()
        group, self._group = self._group, None
        if group is not None:
            # Python cannot abort a work of gloo. A wait that ends by its time limit closes the connection, and so
            # ends all other waits.
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1, dtype=torch.uint8)], 1 - self._rank, _NEVER_SENT).wait(_AT_ONCE)
        del group  # the thread that receives drops the group, because that can take a while
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

    def _meet_and_receive(self, make_device: Callable[[], Any]) -> None:
        group: Any = None
        with self._breaking():
            group = self._group = _make_group(self._meeting, self._rank, make_device())
            self.is_open = True
        self._wake()
        while (item := self._receives.get()) is not None:
            work, buffer = item
            with self._breaking():
                work.wait(timedelta(seconds=TRANSFER_S))
                if not self.is_broken:
                    self._arrived.append(buffer)
            del work, item
            self._wake()
        self._group = None  # if `close` came before it was set
        del group  # the last reference, after which gloo ends its threads

    def _end_sends(self) -> None:
        while (item := self._sends.get()) is not None:
            with self._breaking():
                item[0].wait(timedelta(seconds=TRANSFER_S))
            del item
            if self.is_broken:
                self._wake()

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """Turn an error of gloo into `is_broken`."""
        try:
            yield
        except RuntimeError as error:
            if not self.is_broken:
                logger.info("a channel for tensors is broken: %s", error)
            self.is_broken = True


class _Meeting(Store):
    """The store of gloo's rendezvous: each end keeps its own values and those that it was told.

    Args:
        tell: called with what the other end must hear.
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


def _make_group(meeting: _Meeting, rank: int, device: Any) -> Any:
    """Make the group of a channel. Raises RuntimeError if the other end does not come."""
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()  # the public constructor takes no address, and gloo would look one up
    options._devices, options._threads = [device], 1
    options._timeout = timedelta(seconds=MEET_S)
    return gloo(meeting, rank, 2, options)
