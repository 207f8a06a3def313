"""A rank's end of the connection to the API server. Its thread receives, so that the main loop never waits for it.

While a step computes on the only core of an engine, the thread waits for that core. Between steps the main loop
therefore also takes in what has arrived; else a request would often wait for one more step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from moestro.core.clock import NS_PER_MS
from moestro.core.curve_keys import CurveKeys
from moestro.wire.local_stream import local_path
from moestro.wire.messages import FromRank, Heartbeat, ToRank, decode_to_rank, encode
from moestro.worker.channel_links import LINGER_MS, ChannelLink, LocalLink, LostLinkError, ZmqLink
from moestro.worker.wake_pipe import WakePipe

logger = logging.getLogger(__name__)

ORPHANED = 3  # exit status of a rank whose parent, or the connection to it, is gone
_DEAF = 4  # exit status of a rank whose channel thread failed, so that no message could reach it


class Beats:
    """Decides when a rank sends a heartbeat: seldom while it has nothing to do, because each costs the API server time.

    Args:
        beat_ms: time between heartbeats.
        idle_beat_ms: the same while nothing is owed and no step is made.
    """

    def __init__(self, beat_ms: int = 500, idle_beat_ms: int = 500) -> None:
        self.beat_ms = beat_ms
        self._idle_ns = max(beat_ms, idle_beat_ms) * NS_PER_MS
        self._look_at_ns = self._idle_until_ns = 0
        self._num_steps = -1

    def next(self, num_steps: int, now_ns: int, *, owes: bool) -> Heartbeat | None:
        """Return the heartbeat to send now; None means none."""
        if now_ns < self._look_at_ns:
            return None
        self._look_at_ns = now_ns + self.beat_ms * NS_PER_MS
        is_idle = not owes and num_steps == self._num_steps
        if is_idle and now_ns < self._idle_until_ns:
            return None
        self._num_steps = num_steps
        self._idle_until_ns = now_ns + self._idle_ns if is_idle else 0
        return Heartbeat(num_steps, owes, is_idle)


class Channel:
    """Receives for the main loop and sends for it.

    The thread ends the whole process when `parent_fd` reaches its end. A rank therefore never outlives its API server,
    even if that was killed while the main loop is inside a kernel. The thread also sends heartbeats. When the thread
    fails, for instance on a message that does not decode, the process ends too: the API server notices, and every
    request gets an end.

    Args:
        address: address on which the API server listens.
        identity: name under which the API server expects this process.
        parent_fd: a pipe whose other end only the parent holds.
        beats: heartbeats to send.
        keys: keys of the sockets; None means an API server on this machine.

    Attributes:
        num_steps, owes: set by the main loop, sent with every heartbeat.
        now_ns: reads the API server's clock; another machine replaces it, see `worker.server_clock`.
        arrival: woken after a message came, for main loops that wait for something else too.
    """

    def __init__(
        self, address: str, identity: bytes, parent_fd: int, beats: Beats | None = None, keys: CurveKeys | None = None
    ) -> None:
        self.num_steps = 0
        self.owes = True
        self.now_ns: Callable[[], int] = time.monotonic_ns
        self._beats = beats or Beats()
        self._link: ChannelLink = (
            LocalLink(local_path(address), identity) if keys is None else ZmqLink(address, identity, keys)
        )
        self.arrival = WakePipe()
        self._inbox: SimpleQueue[ToRank] = SimpleQueue()
        self._receiving = threading.Lock()  # held from reading to `_inbox`, so that messages keep their order
        self._parent_fd = parent_fd
        self._to_send = WakePipe()
        self._close_by_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="channel", daemon=True)
        self._thread.start()

    def receive(self, wait_s: float | None) -> list[ToRank]:
        """Return all received messages. Waits up to `wait_s` for the first (None means no limit); 0 takes a few µs."""
        messages = []
        self._take_in()
        if wait_s != 0 and self._inbox.empty():
            with contextlib.suppress(Empty):
                messages.append(self._inbox.get(timeout=wait_s))
        while not self._inbox.empty():
            messages.append(self._inbox.get())
        return messages

    def has_messages(self) -> bool:
        """Whether `receive` would return a message now; a few µs."""
        if self._inbox.empty():
            self._take_in()
        return not self._inbox.empty()

    def _take_in(self) -> None:
        """Read what has arrived, if the main loop may."""
        if not self._link.has_arrivals():
            return
        with self._receiving, contextlib.suppress(LostLinkError):  # the channel's thread ends the process
            for message in self._link.receive():
                self._inbox.put(decode_to_rank(message))

    def send(self, message: FromRank) -> None:
        """Send `message`, or queue it for the thread to send."""
        if self._link.send(encode(message)):
            self._to_send.wake()

    def close(self) -> None:
        """Send queued messages (for at most `LINGER_MS`) and disconnect."""
        self._close_by_s = time.monotonic() + LINGER_MS / 1e3
        self._to_send.wake()
        self._thread.join()

    # --- the thread

    def _run(self) -> None:
        try:
            self._link.open()
            self._exchange(self._link)
        except LostLinkError as error:  # Requests whose messages are lost would never end; the next process has none.
            logger.error("%s", error)
            os._exit(ORPHANED)
        except BaseException:
            logger.exception("the channel to the API server failed")
            os._exit(_DEAF)

    def _exchange(self, link: ChannelLink) -> None:
        is_all_sent = link.flush()
        while self._close_by_s is None or not (is_all_sent or time.monotonic() > self._close_by_s):
            ready = link.wait((self._to_send.fd, self._parent_fd), self._beats.beat_ms)
            if self._parent_fd in ready and not os.read(self._parent_fd, 4096):
                os._exit(ORPHANED)
            if self._to_send.fd in ready:
                self._to_send.clear()
            is_all_sent = link.flush()
            if (beat := self._beats.next(self.num_steps, time.monotonic_ns(), owes=self.owes)) is not None:
                link.offer(encode(beat))
            with self._receiving:
                for message in link.receive():
                    self._inbox.put(decode_to_rank(message))
                    self.arrival.wake()
        link.close()
