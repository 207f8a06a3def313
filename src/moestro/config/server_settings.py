"""The settings of the API server and of the engine processes behind it. A docstring under a field is its text in
`--help`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from moestro.core.setting_checks import PORT, CheckedSettings, at_least, between
from moestro.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServerSettings(CheckedSettings):
    """The API server."""

    host: str = "127.0.0.1"
    "Address to listen on; 0.0.0.0 opens it to the network, which wants --api-key."
    port: Annotated[int, PORT] = 8000
    "Port to listen on; 0: any free one, shown at the start."
    served_model_name: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = ()
    "What clients call the model, one or more names; unset: what you called it."
    api_key: Annotated[tuple[str, ...], Parameter(consume_multiple=True, show_default=False)] = ()
    "Keys of which clients must send one, as a bearer token or in x-api-key. Unset: no key is asked for."
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    "How much is logged. Prompts and answers are never logged."
    record: Path | None = None
    "Append a line for each answered request to this file, without its text, for moestro sim --replay."
    shutdown_timeout: Annotated[float, at_least(0)] = 10.0
    "Seconds that running requests have to finish after SIGTERM or Ctrl-C."
    write_timeout: Annotated[float, at_least(1)] = 60.0
    "Seconds that a client may leave its stream unread before it is cut off."
    max_connections: Annotated[int, at_least(1)] = 4096
    "Clients connected at a time; one more is refused with 503 and Retry-After."

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(self.api_key):
            raise ConfigError("--api-key is empty: give a key, or leave the flag out to serve without one")
        if not all(self.served_model_name):
            raise ConfigError("--served-model-name is empty: give a name, or leave the flag out")


@dataclass(frozen=True, kw_only=True)
class ProcessSettings(CheckedSettings):
    """The engine processes: how many there are, and when one counts as dead."""

    engines: Annotated[int, between(1, 1024)] = 1
    "Processes, each with the whole model; requests are spread over them."
    kv_events_config: str | None = None
    (
        "What each engine tells routers of its prefix cache, as vLLM is told it:"
        """ '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557"}'."""
        " Engine r listens on port + r; there is no password."
    )
    startup_timeout: Annotated[float, at_least(1)] = 600.0
    "Seconds that engines have to be ready."
    engine_timeout: Annotated[float, at_least(2)] = 10.0  # a rank speaks twice a second
    "Seconds without a sign of life, while the server runs, after which an engine is killed and started again."
    watchdog_timeout: Annotated[float, at_least(1)] = 30.0
    "Seconds without a step, although it has requests, after which an engine's stacks are dumped and it gets no more."
    step_timeout: float = 300.0
    "Seconds without a step after which it is killed and started again: longer than any step may take."
    resume_streams: bool = False
    (
        "When an engine ends, its streams continue on another one in bfloat16 and float16 too, where the continuation"
        " may differ from what the first engine would have sent. Unset: such a stream ends with an error event."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_timeout < self.watchdog_timeout:
            raise ConfigError(
                f"--step-timeout {self.step_timeout:g} must be at least --watchdog-timeout {self.watchdog_timeout:g}"
            )
