"""The settings of `--kv-events-config`: what engines tell others of their prefix caches."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from typing import Annotated, ClassVar, Literal

from moestro.core.setting_checks import CheckedSettings, at_least
from moestro.errors import ConfigError

_ENDPOINT = re.compile(r"tcp://([^:/\[\]]+|\[[^\[\]]+\]):[1-9][0-9]{0,4}")


@dataclass(frozen=True, kw_only=True)
class KvEventsSettings(CheckedSettings):
    """What the engines publish of their prefix caches, by vLLM's names.

    Attributes:
        enable_kv_cache_events: False: nothing.
        publisher: `zmq`, or `null`: nothing.
        endpoint, replay_endpoint: tcp://HOST:PORT to listen on, of engine 0; engine r has PORT + r. The second answers
            listeners that missed something; None: no replay.
        buffer_steps: batches that are kept for a replay.
        hwm: batches that wait for a listener that does not keep up; with more, it misses some.
        topic: the first frame of every batch.
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
        """Raise ConfigError if the port ranges of the engines overlap."""
        if self.replay_endpoint is None:
            return
        first, second = (int(each.rpartition(":")[2]) for each in (self.endpoint, self.replay_endpoint))
        if abs(first - second) < num_engines:
            raise ConfigError(
                f"--kv-events-config: {num_engines} engines listen on {num_engines} ports from {first} and from"
                f" {second} on, and these overlap: choose another port for replay_endpoint"
            )


def kv_events_from(text: str | None) -> KvEventsSettings | None:
    """The settings that `--kv-events-config` holds; None: nothing is to be published.

    Raises:
        ConfigError: it is not JSON, or has an unknown field.
    """
    if text is None:
        return None
    try:
        settings = KvEventsSettings(**json.loads(text))
    except (ValueError, TypeError) as error:
        known = ", ".join(each.name for each in fields(KvEventsSettings))
        raise ConfigError(f"--kv-events-config must be a JSON object with fields among {known}: {error}") from None
    return settings if settings.enable_kv_cache_events and settings.publisher == "zmq" else None
