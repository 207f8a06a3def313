"""The settings of `--kv-events-config`: how engines publish changes of their prefix caches."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from typing import Annotated, ClassVar, Literal

from moestro.core.setting_checks import CheckedSettings, at_least
from moestro.errors import ConfigError

_MAX_PORT = 65_535
_ENDPOINT = re.compile(r"tcp://([^:/\[\]]+|\[[^\[\]]+\]):[1-9][0-9]{0,4}")


@dataclass(frozen=True, kw_only=True)
class KvEventsSettings(CheckedSettings):
    """Publication of KV events, with the field names of vLLM.

    Attributes:
        enable_kv_cache_events: whether events are published.
        publisher: `zmq`, or `null` to publish nothing.
        endpoint: tcp://HOST:PORT on which engine 0 listens; engine r listens on PORT + r.
        replay_endpoint: the same for the replay of missed events. None means no replay.
        buffer_steps: number of batches kept for a replay and for slow subscribers.
        hwm: number of batches that a subscriber may be behind before it is disconnected. 0 means all that are kept.
        topic: first frame of every batch.
    """

    PLACE: ClassVar[str | None] = "--kv-events-config: "

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: Annotated[int, at_least(1)] = 10_000
    hwm: Annotated[int, at_least(0)] = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("endpoint", "replay_endpoint"):
            given = getattr(self, name)
            if given is not None and not _ENDPOINT.fullmatch(given):
                raise ConfigError(f"--kv-events-config: {name} must be tcp://HOST:PORT, as tcp://*:5557, got {given!r}")

    def check_ports(self, num_engines: int) -> None:
        """Raise ConfigError if an engine's port is above the highest, or the port ranges of the engines overlap."""
        endpoints = [each for each in (self.endpoint, self.replay_endpoint) if each is not None]
        first, *others = ports = [int(each.rpartition(":")[2]) for each in endpoints]
        last = max(ports) + num_engines - 1
        if last > _MAX_PORT:
            raise ConfigError(f"--kv-events-config: engine {num_engines - 1} has port {last}, above {_MAX_PORT}")
        for second in others:
            if abs(first - second) < num_engines:
                raise ConfigError(
                    f"--kv-events-config: {num_engines} engines listen on {num_engines} ports from {first} and from"
                    f" {second} on. The port ranges overlap: choose another port for replay_endpoint"
                )


def kv_events_from(text: str | None) -> KvEventsSettings | None:
    """Parse the value of `--kv-events-config`. None means that nothing is published.

    Raises:
        ConfigError: the text is not JSON, or has an unknown field.
    """
    if text is None:
        return None
    try:
        settings = KvEventsSettings(**json.loads(text))
    except (ValueError, TypeError) as error:
        known = ", ".join(each.name for each in fields(KvEventsSettings))
        raise ConfigError(f"--kv-events-config must be a JSON object with fields among {known}: {error}") from None
    return settings if settings.enable_kv_cache_events and settings.publisher == "zmq" else None
