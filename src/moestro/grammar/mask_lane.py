"""A rank's end of a process that computes masks. No call waits for that process unless it says so."""

from __future__ import annotations

import contextlib
import select
import socket
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from moestro.grammar.host_messages import LEAVING, LaneWork, MaskAnswer, MaskJob

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(MaskAnswer).decode
_HEAD_BYTES = 4  # as in `text.render_job.write_message`
_READ_BYTES = 1 << 20
_MOST_DROPPED = 1024


class MaskLane:
    """Sends jobs to a process and takes its answers. The process is replaced when it ends.

    Args:
        fork: starts a process; returns the socket to it.

    Attributes:
        jobs: matchers of the jobs without an answer, in the order in which the process computes them.
        num_processes: processes started so far.
    """

    def __init__(self, fork: Callable[[], socket.socket]) -> None:
        self._fork = fork
        self._socket: socket.socket | None = None
        self._unsent, self._received = bytearray(), bytearray()
        self._has_begun = False
        self._poll = select.poll()
        self.jobs: OrderedDict[int, None] = OrderedDict()
        self._dropped: list[int] = []  # matchers to be forgotten with the next jobs
        self.num_processes = 0

    def send(self, jobs: Sequence[MaskJob]) -> None:
        """Queue jobs, which the process computes in order."""
        if self._socket is None:
            self._begin()
        self.jobs.update(dict.fromkeys(job.matcher for job in jobs))
        body = _encode(LaneWork(list(jobs), self._dropped))
        self._dropped = []
        self._unsent += len(body).to_bytes(_HEAD_BYTES, "big") + body
        self._flush()

    def drop(self, matcher: int) -> None:
        """Let the process forget a matcher, with the next jobs or before many are to be forgotten."""
        if self._socket is None:
            return
        self._dropped.append(matcher)
        if len(self._dropped) >= _MOST_DROPPED:
            self.send([])

    def receive(self, wait_s: float = 0) -> tuple[list[MaskAnswer], list[int] | None]:
        """Take the answers that are here.

        Args:
            wait_s: longest wait for the first of them, which is rounded up to a millisecond.

        Returns:
            The answers, and the matchers without an answer if the process has ended, the guilty one first. It has none
            where the process left by itself, or did not begin: the first element is then `LEAVING`. None means that
            the process lives.
        """
        if self._socket is None or (not self.jobs and not self._unsent):
            return [], None
        self._flush()
        if wait_s > 0:
            self._poll.poll(1e3 * wait_s)
        is_at_end = self._read()
        answers = self._parse()
        for answer in answers:
            self.jobs.pop(answer.matcher, None)
        has_left = not self._has_begun or (bool(answers) and answers[-1].matcher == LEAVING)
        if not (is_at_end or (has_left and self._has_begun)):
            return answers, None
        lost = [*([LEAVING] if has_left else []), *self.jobs]
        self.close()
        return [answer for answer in answers if answer.matcher != LEAVING], lost

    def close(self) -> None:
        """Close the socket, which ends the process after its present job."""
        if self._socket is not None:
            self._poll.unregister(self._socket)
            self._socket.close()
        self._socket, self._has_begun = None, False
        self._unsent.clear()
        self._received.clear()
        self.jobs.clear()
        self._dropped.clear()  # the next process knows no matcher

    def _begin(self) -> None:
        self._socket = self._fork()
        self._socket.settimeout(0)
        self._poll.register(self._socket, select.POLLIN)
        self.num_processes += 1

    def _flush(self) -> None:
        """Send what the socket takes; a process in a long job reads nothing meanwhile."""
        while self._unsent:
            assert self._socket is not None
            try:
                del self._unsent[: self._socket.send(self._unsent)]
            except BlockingIOError:
                return
            except OSError:  # the process has ended, which `receive` finds
                self._unsent.clear()

    def _read(self) -> bool:
        """Read what is here. Returns whether the process has ended."""
        assert self._socket is not None
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    part = self._socket.recv(_READ_BYTES)
                except ConnectionResetError:
                    return True
                if not part:
                    return True
                self._received += part
        return False

    def _parse(self) -> list[MaskAnswer]:
        """Take whole messages."""
        found, at, received = list[MaskAnswer](), 0, self._received
        while len(received) >= at + _HEAD_BYTES:
            start = at + _HEAD_BYTES
            end = start + int.from_bytes(received[at:start], "big")
            if len(received) < end:
                break
            if end == start:  # BEGUN
                self._has_begun = True
            else:
                found.append(_decode(bytes(received[start:end])))
            at = end
        del received[:at]
        return found
