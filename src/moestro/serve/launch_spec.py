"""What a rank process is told on its first line of stdin."""

from __future__ import annotations

import signal

import msgspec

from moestro.config import KvEventsSettings, PacedSettings, SchedulerLimits, SteppingSettings
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
    limits: SchedulerLimits
    stepping: SteppingSettings
    paced: PacedSettings | None = None
    kv_events: KvEventsSettings | None = None
