"""The launch spec, which the API server writes to the stdin of a rank process before anything else."""

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

STACK_DUMP = signal.SIGUSR1  # a loaded rank then writes the stacks of all its threads to stderr


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's identity, the address of the API server, and the rank's settings."""

    rank: int
    launch: int  # 0, and one more at every restart
    address: str
    launched_ns: int  # time.monotonic_ns() of the API server when it started this process
    log_level: str
    model: ModelSettings
    scheduler: SchedulerOptions
    stepping: SteppingSettings
    paced: PacedSettings | None = None
    kv_events: KvEventsSettings | None = None


_LENGTH = struct.Struct(">I")
_decode = msgspec.msgpack.Decoder(LaunchSpec, dec_hook=lambda kind, text: kind(text)).decode  # of a Path


def write_launch_spec(spec: LaunchSpec) -> bytes:
    """Encode `spec` for the process: a length, then MessagePack, which keeps every float (JSON has no inf)."""
    body = msgspec.msgpack.encode(spec, enc_hook=str)
    return _LENGTH.pack(len(body)) + body


def read_launch_spec(stream: BinaryIO) -> LaunchSpec:
    """Read the launch spec at the beginning of `stream`, and nothing after it.

    Raises:
        EOFError: the stream ended too early, because the API server ended.
    """
    header = stream.read(_LENGTH.size)
    length = _LENGTH.unpack(header)[0] if len(header) == _LENGTH.size else 0
    body = stream.read(length)
    if not length or len(body) < length:
        raise EOFError("stdin ended before its launch spec")
    return _decode(body)
