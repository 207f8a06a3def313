"""The launch spec: what the API server tells a rank process on stdin, before anything else."""

from __future__ import annotations

import signal
import struct
from typing import BinaryIO

import msgspec

from moestro.config.kv_events_settings import KvEventsSettings
from moestro.cost.settings import PacedSettings
from moestro.engine.settings import SchedulerOptions
from moestro.flow.settings import SteppingSettings
from moestro.model.settings import ModelSettings

STACK_DUMP = signal.SIGUSR1  # a rank that has loaded answers it with the stacks of all its threads, on stderr


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: who it is, where the front door listens, what to load, how much to take on and how to compute it."""

    rank: int
    launch: int  # 0, and one more at every restart
    address: str
    launched_ns: int  # time.monotonic_ns() of the front door when it started this process
    log_level: str
    model: ModelSettings
    scheduler: SchedulerOptions
    stepping: SteppingSettings
    paced: PacedSettings | None = None
    kv_events: KvEventsSettings | None = None


_LENGTH = struct.Struct(">I")
_decode = msgspec.msgpack.Decoder(LaunchSpec, dec_hook=lambda kind, text: kind(text)).decode  # of a Path


def write_launch_spec(spec: LaunchSpec) -> bytes:
    """The bytes to send to the process: a length, then MessagePack, which keeps every float (JSON has no inf)."""
    body = msgspec.msgpack.encode(spec, enc_hook=str)
    return _LENGTH.pack(len(body)) + body


def read_launch_spec(stream: BinaryIO) -> LaunchSpec:
    """The launch spec at the beginning of `stream`; what follows stays unread.

    Raises:
        EOFError: the stream ended too early, because the API server did.
    """
    header = stream.read(_LENGTH.size)
    length = _LENGTH.unpack(header)[0] if len(header) == _LENGTH.size else 0
    body = stream.read(length)
    if not length or len(body) < length:
        raise EOFError("stdin ended before its launch spec")
    return _decode(body)
