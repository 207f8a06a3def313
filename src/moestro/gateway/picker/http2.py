"""Server's end of an HTTP/2 connection (RFC 9113), sans-IO: bytes and the time come in, bytes go out.

It carries gRPC alone: requests are answered with constant header blocks, and nothing is pushed. Whatever a peer sends,
the connection's memory is bounded, and frames that carry nothing are limited in rate.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol

from moestro.gateway.picker.http2_frames import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    FRAME_HEAD_BYTES,
    GOAWAY,
    HAS_PRIORITY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_BYTES,
    MAX_FRAME_SIZE,
    MAX_HEADER_BYTES,
    MAX_HEADER_LIST_SIZE,
    MAX_WINDOW,
    NUMBER,
    PADDED,
    PING,
    PREFACE,
    PUSH_PROMISE,
    RST_STREAM,
    SETTING,
    SETTINGS,
    WINDOW_UPDATE,
    Fields,
    FrameBudget,
    HeaderReader,
    Http2Code,
    Http2Error,
    frame,
    number_in,
    pack_head,
    reset,
    settings,
    unpack_head,
    window_update,
    without_padding,
)

MAX_STREAMS: Final = 4096
STREAM_WINDOW: Final = 1 << 20
CONNECTION_WINDOW: Final = 16 << 20
MAX_UNSENT_BYTES: Final = 128 << 20  # Of all streams together, which wait for the peer's windows.
_HELD_BYTES = 256 << 10  # Unsent bytes of a stream from which on its peer may send nothing more.
_MAX_SETTINGS = 64  # In one frame; a peer has six to set.

_GREETING = settings(
    {
        MAX_CONCURRENT_STREAMS: MAX_STREAMS,
        INITIAL_WINDOW_SIZE: STREAM_WINDOW,
        MAX_HEADER_LIST_SIZE: MAX_HEADER_BYTES,
    }
) + window_update(0, CONNECTION_WINDOW - DEFAULT_WINDOW)


class StreamReceiver(Protocol):
    """Takes what the peer sends on one stream."""

    def received(self, data: bytes, begin: int, end: int) -> None:
        """Take the bytes of `data` from `begin` to `end`, at least one."""

    def half_closed(self) -> None:
        """Note that the peer sends nothing more."""

    def closed(self) -> None:
        """Note that the stream is gone, because the peer or its connection has ended it."""


class StreamHost(Protocol):
    """Takes the streams of a connection."""

    def opened(self, stream: Http2Stream, fields: Fields) -> StreamReceiver:
        """Return the receiver of a new stream, which may have been answered already.

        Args:
            fields: The request's header fields; other streams may share them.
        """


class SendSide:
    """The sending side of a connection: frames for the next write, and the flow-control windows of the peer.

    Attributes:
        frames: Frames for the next write, as bytes and views of bytes.
        window: Bytes of all streams that the peer takes now.
        first_window: Bytes that the peer takes on a new stream.
        blocked: Streams that wait for `window`.
        num_unsent: Bytes of all streams that wait for windows.
        num_sent: Frames of DATA since the connection last read.
    """

    __slots__ = ("blocked", "first_window", "frames", "num_sent", "num_unsent", "window")

    def __init__(self) -> None:
        self.frames: list[bytes | memoryview] = []
        self.window = self.first_window = DEFAULT_WINDOW
        self.blocked: dict[int, Http2Stream] = {}
        self.num_unsent = self.num_sent = 0


class Http2Stream:
    """One stream, and what waits to be sent on it. Its receiver calls `send_head`, `send`, `end` and `release`.

    Attributes:
        is_held: Whether the peer may send no more than it may now, because the receiver is busy.
        is_over: Whether nothing more can be sent; the receiver then gets nothing more.
        is_half_closed: Whether the peer sends nothing more.
        has_answer: Whether anything has been sent.
        num_unsent: Bytes that wait for the peer's windows.
        window: Bytes that the peer takes on this stream now.
        num_uncredited: Bytes received since the last WINDOW_UPDATE.
    """

    __slots__ = (
        "_connection", "_queue", "_side", "_trailers", "has_answer", "is_half_closed", "is_held", "is_over",
        "num_uncredited", "num_unsent", "receiver", "stream_id", "window",
    )  # fmt: skip

    def __init__(self, connection: Http2Connection, side: SendSide, stream_id: int) -> None:
        self._connection = connection
        self._side = side
        self._queue: deque[memoryview] = deque()
        self._trailers: bytes | None = None
        self.stream_id = stream_id
        self.window = side.first_window
        self.num_unsent = self.num_uncredited = 0
        self.has_answer = self.is_half_closed = self.is_held = self.is_over = False
        self.receiver: StreamReceiver | None = None

    # --- called by the receiver

    def send_head(self, block: bytes) -> None:
        """Send the header block that begins an answer."""
        self.has_answer = True
        self._side.frames.append(frame(HEADERS, END_HEADERS, self.stream_id, block))

    def send(self, data: bytes) -> None:
        """Send a part of the answer's body, as soon as the peer's windows let it pass."""
        side, size = self._side, len(data)
        if size <= self.window and size <= side.window and size <= MAX_FRAME_BYTES and not self._queue:
            self.window -= size
            side.window -= size
            side.num_sent += 1
            side.frames += (pack_head(0, size, DATA, 0, self.stream_id), data)
            return
        self._queue.append(memoryview(data))
        self.num_unsent += size
        side.num_unsent += size
        self.drain()
        if side.num_unsent > MAX_UNSENT_BYTES:
            self._connection.fail(Http2Code.ENHANCE_YOUR_CALM, "the peer does not take its answers")

    def end(self, block: bytes) -> None:
        """End the answer with a header block, once all of its body has been sent."""
        if self.is_over:
            return
        self.is_over = True
        self._trailers = block
        if not self._queue:
            self._finish(block)

    def release(self) -> None:
        """Let the peer send again after `is_held`."""
        self.is_held = False
        self.credit()

    # --- called by the connection

    def received(self, data: bytes, begin: int, end: int) -> None:
        """Pass on what the peer has sent."""
        if not self.is_over and self.receiver is not None:
            self.receiver.received(data, begin, end)

    def half_closed(self) -> None:
        """Pass on that the peer sends nothing more."""
        if not self.is_over and self.receiver is not None:
            self.receiver.half_closed()

    def drain(self) -> None:
        """Send what waits, as far as the windows let it pass."""
        side, queue = self._side, self._queue
        while queue:
            room = min(MAX_FRAME_BYTES, self.window, side.window)
            if room <= 0:
                if self.window > 0:
                    side.blocked[self.stream_id] = self
                return
            data = queue[0]
            part = data[:room]
            size = len(part)
            if size == len(data):
                queue.popleft()
            else:
                queue[0] = data[room:]
            self.window -= size
            side.window -= size
            self.num_unsent -= size
            side.num_unsent -= size
            side.num_sent += 1
            side.frames += (pack_head(0, size, DATA, 0, self.stream_id), part)
        if self._trailers is not None:
            self._finish(self._trailers)
        else:
            self.credit()

    def credit(self) -> None:
        """Let the peer send as much again as it has sent, once that is half of the window."""
        if self.num_uncredited < STREAM_WINDOW // 2 or self.is_held or self.is_half_closed or self.is_over:
            return
        if self.num_unsent <= _HELD_BYTES:
            self._side.frames.append(window_update(self.stream_id, self.num_uncredited))
            self.num_uncredited = 0

    def forgotten(self) -> None:
        """Drop what waits, and the receiver, which holds this stream."""
        self.is_over = True
        self.receiver = None
        self._queue.clear()
        self._side.num_unsent -= self.num_unsent
        self.num_unsent = 0
        self._side.blocked.pop(self.stream_id, None)

    def _finish(self, block: bytes) -> None:
        self._side.frames.append(frame(HEADERS, END_HEADERS | END_STREAM, self.stream_id, block))
        if not self.is_half_closed:
            # The whole answer has been sent, so the peer needs to send no more (RFC 9113, section 8.1).
            self._side.frames.append(reset(self.stream_id, Http2Code.NO_ERROR))
        self._connection.forget(self)


class Http2Connection:
    """One connection, whose frames it reads and writes.

    Args:
        host: Takes the streams.
        now_ns: Present time.

    Attributes:
        is_over: Whether the connection closes once `take` has been sent.
        has_failed: Whether a fault of the peer has ended it.
    """

    def __init__(self, host: StreamHost, now_ns: int) -> None:
        self._host = host
        self._budget = FrameBudget(now_ns)
        self._headers = HeaderReader(self._budget)
        self._side = SendSide()
        self._side.frames.append(_GREETING)
        self._streams: dict[int, Http2Stream] = {}
        self._rest = b""  # The beginning of the next frame.
        self._last_id = 0
        self._num_uncredited = 0
        self._has_preface = self._has_settings = self._is_draining = False
        self.is_over = self.has_failed = False

    @property
    def num_streams(self) -> int:
        """Open streams."""
        return len(self._streams)

    def take(self) -> bytes:
        """Return what is to be sent now."""
        frames = self._side.frames
        if not frames:
            return b""
        data = b"".join(frames)
        frames.clear()
        return data

    def receive(self, data: bytes, now_ns: int) -> None:
        """Read what the peer has sent."""
        if self.is_over:
            return
        self._budget.now_ns = now_ns
        self._budget.earn(2 * self._side.num_sent)  # A peer may credit each of them in two windows.
        self._side.num_sent = 0
        try:
            at = self._complete_frame(data) if self._rest else 0
            if at >= 0:
                self._rest = data[self._read(data, at) :]
        except Http2Error as error:
            self.has_failed = True
            self.fail(error.code, str(error))

    def ping(self) -> None:
        """Ask the peer for a sign of life."""
        self._side.frames.append(frame(PING, 0, 0, bytes(8)))

    def drain(self) -> None:
        """Refuse new streams, which the peer opens on another connection."""
        if not self._is_draining and not self.is_over:
            self._is_draining = True
            self._side.frames.append(self._goaway(Http2Code.NO_ERROR, ""))

    def fail(self, code: Http2Code, text: str) -> None:
        """End the connection and all its streams."""
        if not self.is_over:
            self._side.frames.append(self._goaway(code, text))
            self.lost()

    def lost(self) -> None:
        """End all streams, because the connection is gone."""
        self.is_over = True
        for stream in list(self._streams.values()):
            self._abandon(stream)

    def forget(self, stream: Http2Stream) -> None:
        """Remove a stream at its end."""
        self._streams.pop(stream.stream_id, None)
        stream.forgotten()

    # --- frames

    def _complete_frame(self, data: bytes) -> int:
        """Read the frame that earlier data has begun; return where the next one begins, or -1 if it is not complete.

        Only as much of `data` is copied as a frame may lack.
        """
        joined = self._rest + data[: FRAME_HEAD_BYTES + MAX_FRAME_BYTES]
        at = self._read(joined, 0) - len(self._rest)
        if at < 0:
            self._rest = joined
            return -1
        return at

    def _read(self, data: bytes, at: int) -> int:
        """Read the complete frames of `data` from `at` on; return where the next one begins."""
        size = len(data)
        if not self._has_preface:
            if not PREFACE.startswith(data[: len(PREFACE)]):
                raise Http2Error(Http2Code.PROTOCOL_ERROR, "the connection does not begin as one of HTTP/2")
            if size < len(PREFACE):
                return 0
            at, self._has_preface = len(PREFACE), True
        while at + FRAME_HEAD_BYTES <= size and not self.is_over:
            high, low, kind, flags, stream_id = unpack_head(data, at)
            length = high << 16 | low
            if length > MAX_FRAME_BYTES:
                raise Http2Error(Http2Code.FRAME_SIZE_ERROR, f"a frame may have {MAX_FRAME_BYTES} bytes")
            begin = at + FRAME_HEAD_BYTES
            end = begin + length
            if end > size:
                break
            at = end
            stream_id &= MAX_WINDOW  # Without the reserved bit.
            if kind == DATA and self._has_settings and not self._headers.stream_id:
                self._on_data(data, begin, end, flags, stream_id)
            else:
                self._on_other(kind, flags, stream_id, data[begin:end])
        return at

    def _on_data(self, data: bytes, begin: int, end: int, flags: int, stream_id: int) -> None:
        size = end - begin
        self._num_uncredited += size
        if self._num_uncredited >= CONNECTION_WINDOW // 2:
            self._side.frames.append(window_update(0, self._num_uncredited))
            self._num_uncredited = 0
        if flags & PADDED:
            begin, end = without_padding(data, begin, end)
        stream = self._streams.get(stream_id)
        if stream is None:
            self._check_was_open(stream_id)
            return
        if stream.is_half_closed:
            self._reset(stream, Http2Code.STREAM_CLOSED)
            return
        stream.num_uncredited += size
        if stream.num_uncredited > STREAM_WINDOW:
            self._reset(stream, Http2Code.FLOW_CONTROL_ERROR)
            return
        stream.is_half_closed = bool(flags & END_STREAM)
        if begin < end:
            stream.received(data, begin, end)
        elif not stream.is_half_closed:
            self._budget.spend()
        if stream.is_half_closed:
            stream.half_closed()
        else:
            stream.credit()

    def _on_other(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Read a frame without a body."""
        if not self._has_settings:
            if kind != SETTINGS or flags & ACK:
                raise Http2Error(Http2Code.PROTOCOL_ERROR, "the first frame is no SETTINGS")
            self._has_settings = True
        if self._headers.stream_id and (kind != CONTINUATION or stream_id != self._headers.stream_id):
            raise Http2Error(Http2Code.PROTOCOL_ERROR, "a header block is not complete")
        if (reader := _READERS.get(kind)) is not None:
            reader(self, flags, stream_id, payload)
        else:  # PRIORITY and GOAWAY change nothing here, and unknown frames are ignored.
            self._budget.spend()

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id % 2 == 0:
            raise Http2Error(Http2Code.PROTOCOL_ERROR, "clients open streams of odd numbers")
        begin, end = 0, len(payload)
        if flags & PADDED:
            begin, end = without_padding(payload, begin, end)
        if flags & HAS_PRIORITY:
            begin += 5
            if begin > end:
                raise Http2Error(Http2Code.FRAME_SIZE_ERROR, "HEADERS is too short for its priority")
        if flags & END_HEADERS:
            self._on_block(flags, stream_id, payload[begin:end])
        else:
            self._headers.begin(stream_id, flags, payload[begin:end])

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not self._headers.stream_id:
            raise Http2Error(Http2Code.PROTOCOL_ERROR, "CONTINUATION follows no header block")
        if (complete := self._headers.go_on(flags, payload)) is not None:
            first_flags, block = complete
            self._on_block(first_flags, stream_id, block)

    def _on_block(self, flags: int, stream_id: int, block: bytes) -> None:
        """Open a stream with its request, or take the trailers of one."""
        fields = self._headers.read(block)
        stream = self._streams.get(stream_id)
        if stream is not None:
            if stream.is_half_closed:
                self._reset(stream, Http2Code.STREAM_CLOSED)
            elif not flags & END_STREAM:
                self._reset(stream, Http2Code.PROTOCOL_ERROR)
            else:
                stream.is_half_closed = True
                stream.half_closed()
            return
        if stream_id <= self._last_id:
            self._budget.spend()  # Trailers of a stream that has been ended here.
            return
        self._last_id = stream_id
        is_refused = self._is_draining or len(self._streams) >= MAX_STREAMS
        if fields is None or is_refused:
            code = Http2Code.REFUSED_STREAM if is_refused else Http2Code.PROTOCOL_ERROR
            self._side.frames.append(reset(stream_id, code))
            self._budget.spend()
            return
        self._streams[stream_id] = stream = Http2Stream(self, self._side, stream_id)
        stream.is_half_closed = bool(flags & END_STREAM)
        stream.receiver = self._host.opened(stream, fields)
        if stream.is_half_closed:
            stream.half_closed()

    def _on_window_update(self, _flags: int, stream_id: int, payload: bytes) -> None:
        self._budget.spend()
        increment = number_in(payload, "WINDOW_UPDATE") & MAX_WINDOW
        side = self._side
        if stream_id == 0:
            if not increment:
                raise Http2Error(Http2Code.PROTOCOL_ERROR, "a window may not grow by nothing")
            side.window += increment
            if side.window > MAX_WINDOW:
                raise Http2Error(Http2Code.FLOW_CONTROL_ERROR, "the connection's window is too large")
            while side.blocked and side.window > 0:
                side.blocked.pop(next(iter(side.blocked))).drain()
            return
        stream = self._streams.get(stream_id)
        if stream is None:
            self._check_was_open(stream_id)
            return
        stream.window += increment
        if not increment:
            self._reset(stream, Http2Code.PROTOCOL_ERROR)
        elif stream.window > MAX_WINDOW:
            self._reset(stream, Http2Code.FLOW_CONTROL_ERROR)
        elif stream.num_unsent:
            stream.drain()

    def _on_reset(self, _flags: int, stream_id: int, payload: bytes) -> None:
        number_in(payload, "RST_STREAM")
        stream = self._streams.get(stream_id)
        if stream is None:
            self._check_was_open(stream_id)
            return
        # A request that is given up at once has cost more than the frames that opened it.
        self._budget.spend(1 if stream.has_answer else 10)
        self._abandon(stream)

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise Http2Error(Http2Code.PROTOCOL_ERROR, "SETTINGS are of the connection")
        if len(payload) % SETTING.size or (flags & ACK and payload):
            raise Http2Error(Http2Code.FRAME_SIZE_ERROR, "SETTINGS has a wrong size")
        if len(payload) > _MAX_SETTINGS * SETTING.size:
            raise Http2Error(Http2Code.ENHANCE_YOUR_CALM, "too many settings")
        self._budget.spend(10)  # A new window changes all streams.
        if flags & ACK:
            return
        first_window = self._side.first_window
        for name, value in SETTING.iter_unpack(payload):
            if name == ENABLE_PUSH and value > 1:
                raise Http2Error(Http2Code.PROTOCOL_ERROR, "ENABLE_PUSH is 0 or 1")
            if name == MAX_FRAME_SIZE and not MAX_FRAME_BYTES <= value < 1 << 24:
                raise Http2Error(Http2Code.PROTOCOL_ERROR, "MAX_FRAME_SIZE is out of its range")
            if name == INITIAL_WINDOW_SIZE:
                first_window = value
                if value > MAX_WINDOW:
                    raise Http2Error(Http2Code.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE is too large")
        self._set_first_window(first_window)
        self._side.frames.append(frame(SETTINGS, ACK, 0))

    def _set_first_window(self, value: int) -> None:
        """Change the windows of all streams, as RFC 9113 demands in section 6.9.2."""
        change = value - self._side.first_window
        self._side.first_window = value
        if not change:
            return
        for stream in list(self._streams.values()):
            stream.window += change
            if stream.window > MAX_WINDOW:
                raise Http2Error(Http2Code.FLOW_CONTROL_ERROR, "a stream's window is too large")
            if stream.num_unsent:
                stream.drain()

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise Http2Error(Http2Code.PROTOCOL_ERROR, "PING is of the connection")
        if len(payload) != 8:
            raise Http2Error(Http2Code.FRAME_SIZE_ERROR, "PING has a wrong size")
        self._budget.spend()
        if not flags & ACK:
            self._side.frames.append(frame(PING, ACK, 0, payload))

    def _on_push(self, _flags: int, _stream_id: int, _payload: bytes) -> None:
        raise Http2Error(Http2Code.PROTOCOL_ERROR, "clients push nothing")

    # --- streams

    def _reset(self, stream: Http2Stream, code: Http2Code) -> None:
        """End a stream because of a fault of the peer."""
        self._side.frames.append(reset(stream.stream_id, code))
        self._abandon(stream)
        self._budget.spend(10)

    def _abandon(self, stream: Http2Stream) -> None:
        """Remove a stream before its end."""
        receiver = None if stream.is_over else stream.receiver
        self.forget(stream)
        if receiver is not None:
            receiver.closed()

    def _check_was_open(self, stream_id: int) -> None:
        """Allow frames that the peer has sent before it knew of the end of their stream."""
        if not stream_id % 2 or stream_id > self._last_id:
            raise Http2Error(Http2Code.PROTOCOL_ERROR, "the stream has never been opened")
        self._budget.spend()

    def _goaway(self, code: Http2Code, text: str) -> bytes:
        return frame(GOAWAY, 0, 0, NUMBER.pack(self._last_id) + NUMBER.pack(code) + text.encode())


_READERS = {
    HEADERS: Http2Connection._on_headers,
    RST_STREAM: Http2Connection._on_reset,
    SETTINGS: Http2Connection._on_settings,
    PUSH_PROMISE: Http2Connection._on_push,
    PING: Http2Connection._on_ping,
    WINDOW_UPDATE: Http2Connection._on_window_update,
    CONTINUATION: Http2Connection._on_continuation,
}
