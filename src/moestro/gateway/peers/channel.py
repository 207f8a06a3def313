"""PeerChannel between two routers: both ends prove the shared key, then exchange frames that no stranger can forge.

A frame is its length (4 bytes), its code (16 bytes) and a part of a compressed stream, in which repeated names of
blocks and URLs cost next to nothing. Without TLS frames are not encrypted: they name engines by URLs, blocks by hashes,
sessions and users.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import ssl
from hashlib import blake2b
from typing import IO, Annotated, TypeVar, cast

import msgspec
import zstandard
from msgspec import Meta

from moestro.routing.replication.messages import MAX_MESSAGE_BYTES, Message, RouterRun, decode_message, encode_message

HANDSHAKE_S = 5.0
_GREETING = b"moestro peers 1\n"
_NONCE_BYTES = 16
_MAC_BYTES = 16
_LENGTH_BYTES = 4
_MAX_HELLO_BYTES = 8 << 10
_MAX_FRAME_BYTES = MAX_MESSAGE_BYTES + (64 << 10)
_WINDOW_LOG = 20  # 1 MiB, the names of 65,536 blocks
_LEVEL = 3


_Kind = TypeVar("_Kind", "_Hello", "_Welcome")


class PeerRefusedError(Exception):
    """The other end cannot be a peer; the text says why."""


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    """First frame of the end that connects."""

    origin: RouterRun
    reading: Annotated[str, Meta(max_length=1024)]
    nonce: Annotated[bytes, Meta(min_length=_NONCE_BYTES, max_length=_NONCE_BYTES)]
    proof: Annotated[bytes, Meta(max_length=64)] = b""


class _Welcome(msgspec.Struct, frozen=True, array_like=True):
    """Answer to it. A refusal comes with its cause."""

    origin: RouterRun
    refusal: Annotated[str, Meta(max_length=2048)]
    proof: Annotated[bytes, Meta(max_length=64)] = b""


class Identity(msgspec.Struct, frozen=True):
    """What an end says of itself.

    Attributes:
        reading: method of comparing prompts, in words, which all routers must share.
        key: shared key; empty means that none is needed.
    """

    origin: RouterRun
    reading: str
    key: bytes = b""


class PeerChannel:
    """One connection to another router, after the handshake.

    Args:
        secret: key of this connection's frames.
        is_dialer: whether this end connected.

    Attributes:
        peer: the other router.
        num_sent_bytes, num_received_bytes: bytes of frames.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        secret: bytes,
        peer: RouterRun,
        *,
        is_dialer: bool,
    ) -> None:
        self.peer = peer
        self.num_sent_bytes = self.num_received_bytes = 0
        self._reader = reader
        self._writer = writer
        self._send_code = _FrameCode(secret, b"d" if is_dialer else b"l")
        self._receive_code = _FrameCode(secret, b"l" if is_dialer else b"d")
        parameters = zstandard.ZstdCompressionParameters.from_level(_LEVEL, window_log=_WINDOW_LOG)
        self._compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        self._plain = _Bounded()
        unpacker = zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG)
        self._unpacker = unpacker.stream_writer(cast(IO[bytes], self._plain))

    async def send(self, message: Message) -> None:
        """Send a message, and wait while the other end is slow.

        Raises:
            OSError: the connection is lost.
        """
        data = self._compressor.compress(encode_message(message))
        data += self._compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        frame = len(data).to_bytes(_LENGTH_BYTES) + self._send_code.of(data) + data
        self.num_sent_bytes += len(frame)
        self._writer.write(frame)
        await self._writer.drain()

    async def receive(self) -> Message:
        """Return the next message.

        Raises:
            OSError: the connection is lost.
            PeerRefusedError: the other end sent what no router sends.
        """
        data = await _read_frame(self._reader, _MAX_FRAME_BYTES, self._receive_code)
        self.num_received_bytes += len(data) + _LENGTH_BYTES + _MAC_BYTES
        self._plain.clear()
        try:
            self._unpacker.write(data)
            return decode_message(self._plain.data)
        except (zstandard.ZstdError, ValueError) as error:
            raise PeerRefusedError(str(error)) from None

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()


async def dial(identity: Identity, host: str, port: int, tls: ssl.SSLContext | None = None) -> PeerChannel:
    """Connect to another router.

    Args:
        tls: context of the connection; None means no TLS.

    Raises:
        OSError: it cannot be reached.
        PeerRefusedError: it refuses this router, or does not prove the key.
    """
    async with asyncio.timeout(HANDSHAKE_S):
        reader, writer = await asyncio.open_connection(host, port, limit=1 << 18, ssl=tls)
        try:
            return await _greet(identity, reader, writer)
        except BaseException:
            writer.close()
            raise


async def _greet(identity: Identity, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> PeerChannel:
    greeting = await _exactly(reader, len(_GREETING) + _NONCE_BYTES)
    if not greeting.startswith(_GREETING):
        raise PeerRefusedError("the other end is no --peer-port of a router of this version")
    nonces = greeting[len(_GREETING) :] + secrets.token_bytes(_NONCE_BYTES)
    hello = _Hello(identity.origin, identity.reading, nonces[_NONCE_BYTES:])
    hello = msgspec.structs.replace(hello, proof=_proof(identity.key, b"hello", nonces, _body(hello)))
    writer.write(_framed(msgspec.msgpack.encode(hello)))
    welcome = _decoded(await _read_frame(reader, _MAX_HELLO_BYTES), _Welcome)
    if not hmac.compare_digest(welcome.proof, _proof(identity.key, b"welcome", nonces, _body(welcome))):
        raise PeerRefusedError(welcome.refusal or "the other end does not have this router's --peer-key")
    if welcome.refusal:
        raise PeerRefusedError(welcome.refusal)
    return PeerChannel(reader, writer, _secret(identity.key, nonces), welcome.origin, is_dialer=True)


async def accept(identity: Identity, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> PeerChannel:
    """Let another router connect.

    Raises:
        OSError: the connection is lost.
        PeerRefusedError: the other end is no peer; it has been notified.
    """
    async with asyncio.timeout(HANDSHAKE_S):
        nonce = secrets.token_bytes(_NONCE_BYTES)
        writer.write(_GREETING + nonce)
        hello = _decoded(await _read_frame(reader, _MAX_HELLO_BYTES), _Hello)
        nonces = nonce + hello.nonce
        is_proved = hmac.compare_digest(hello.proof, _proof(identity.key, b"hello", nonces, _body(hello)))
        refusal = _refusal_of(identity, hello) if is_proved else "the --peer-key of the two routers differs"
        welcome = _Welcome(identity.origin if is_proved else RouterRun("-", 0), refusal)
        if is_proved:
            proof = _proof(identity.key, b"welcome", nonces, _body(welcome))
            welcome = msgspec.structs.replace(welcome, proof=proof)
        writer.write(_framed(msgspec.msgpack.encode(welcome)))
        await writer.drain()
        if refusal:
            raise PeerRefusedError(refusal)
        return PeerChannel(reader, writer, _secret(identity.key, nonces), hello.origin, is_dialer=False)


def _refusal_of(identity: Identity, hello: _Hello) -> str:
    """Return why a router with the right key cannot be a peer; empty if it can."""
    if hello.origin == identity.origin:
        return SELF
    if hello.origin.name == identity.origin.name:
        return f"both routers have the name {identity.origin.name}: give them different host names or ports"
    if hello.reading != identity.reading:
        return f"one router compares prompts {hello.reading}, the other {identity.reading}"
    return ""


SELF = "this is the router itself"


class _FrameCode:
    """Makes the codes of the frames of one direction, each of which depends on the number of frames before."""

    def __init__(self, secret: bytes, direction: bytes) -> None:
        self._secret = secret
        self._direction = direction
        self._num = 0

    def of(self, data: bytes) -> bytes:
        """Return the code of the next frame."""
        self._num += 1
        number = self._num.to_bytes(8)
        return blake2b(number + data, digest_size=_MAC_BYTES, key=self._secret, person=self._direction).digest()


class _Bounded:
    """Receives the unpacked bytes of one frame, which are as many as a message may have."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._num_bytes = 0

    @property
    def data(self) -> bytes:
        """The unpacked bytes."""
        return b"".join(self._pieces)

    def clear(self) -> None:
        """Begin a frame."""
        self._pieces, self._num_bytes = [], 0

    def write(self, piece: bytes) -> int:
        """Add unpacked bytes."""
        self._num_bytes += len(piece)
        if self._num_bytes > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message has more than {MAX_MESSAGE_BYTES} bytes")
        self._pieces.append(bytes(piece))
        return len(piece)


async def _read_frame(reader: asyncio.StreamReader, most: int, code: _FrameCode | None = None) -> bytes:
    num_bytes = int.from_bytes(await _exactly(reader, _LENGTH_BYTES))
    if num_bytes > most:
        raise PeerRefusedError(f"a frame has {num_bytes} bytes, and may have {most}")
    given = b"" if code is None else await _exactly(reader, _MAC_BYTES)
    data = await _exactly(reader, num_bytes)
    if code is not None and not hmac.compare_digest(given, code.of(data)):
        raise PeerRefusedError("a frame was changed on its way")
    return data


async def _exactly(reader: asyncio.StreamReader, num_bytes: int) -> bytes:
    try:
        return await reader.readexactly(num_bytes)
    except asyncio.IncompleteReadError:
        raise ConnectionResetError("the other router closed the connection") from None


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(_LENGTH_BYTES) + data


def _decoded(data: bytes, kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise PeerRefusedError(f"the handshake cannot be read: {error}") from None


def _body(message: _Hello | _Welcome) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(message, proof=b""))


def _proof(key: bytes, purpose: bytes, nonces: bytes, body: bytes) -> bytes:
    return hmac.digest(key, purpose + nonces + body, "sha256")


def _secret(key: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, b"frames" + nonces, "sha256")
