"""The settings of the API server and of the engine processes behind it. A docstring under a field is its text in
`--help`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from moestro.core.setting_checks import PORT, CheckedSettings, at_least, between
from moestro.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LauncherSettings(CheckedSettings):
    """Choice of the launcher, which starts the processes of engines and workers."""

    launcher: Literal["local", "ray"] = "local"
    (
        "local: processes of this machine. ray: an existing Ray cluster, one of whose nodes this machine is, places"
        " them; all sockets between them are encrypted. The model has to be at the same path on every node."
    )
    ray_address: str | None = None
    "With --launcher ray, HOST:PORT of the cluster's head. Unset: RAY_ADDRESS, else the cluster that runs here."
    ray_worker_cpus: Annotated[int, between(1, 1024)] = 1
    "With --launcher ray, cores that each process reserves, and threads with which it computes."
    ray_timeout: Annotated[float, at_least(1)] = 60.0
    "With --launcher ray, seconds in which the cluster must have room for the processes, and its nodes answer."

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.launcher != "ray" and self.ray_address is not None:
            raise ConfigError("--ray-address is for --launcher ray: add it, or leave the address out")
        if self.ray_address is not None and self.ray_address.startswith("ray://"):
            raise ConfigError(
                f"--ray-address {self.ray_address} is for Ray's remote client, and Moestro's API server is a node's own"
                " process: run it on a node of the cluster, and give HOST:PORT of the head"
            )


_ROOT_PATH = re.compile(r"(/(?!\.{1,2}(/|\Z))[A-Za-z0-9._~-]+)+")


@dataclass(frozen=True, kw_only=True)
class ServerSettings(CheckedSettings):
    """The API server."""

    host: str = "127.0.0.1"
    "Address to listen on; 0.0.0.0 opens the server to the network: set --api-key too."
    port: Annotated[int, PORT] = 8000
    "Port to listen on; 0 chooses a free port, shown at the start."
    root_path: str = ""
    "Prefix that a proxy in front of the server leaves in each path, such as /llm."
    served_model_name: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = ()
    "One or more names of the model for clients. Unset: the name on the command line."
    api_key: Annotated[tuple[str, ...], Parameter(consume_multiple=True, show_default=False)] = ()
    "Accepted keys: clients send one as a bearer token or in x-api-key. Unset: no key is required."
    router_api_key: Annotated[tuple[str, ...], Parameter(consume_multiple=True, show_default=False)] = ()
    (
        "Further accepted keys, of routers (moestro route --engine-api-key). A request with one counts for the client"
        " that the router names in X-Moestro-Client."
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    "Lowest severity that is logged. Prompts and answers are never logged."
    record: Path | None = None
    "Append each request's way through all levels, without text, to this file: for moestro explain, replay and sim."
    record_key_file: Path | None = None
    "File with the key of the record's block hashes, made if it does not exist. Unset: one in the state directory."
    record_max_size: Annotated[float, at_least(0)] = 16.0
    "GiB that the file of --record does not exceed; lines beyond are lost and counted. A request takes about 5 kB."
    strict_fields: bool = False
    "Refuse a request with an unknown field with a 400. Unset: the answer has a Warning header that names the field."
    users_are_clients: bool = False
    (
        "The user of a request is its API key, where there are several, or its address, whatever its field user says:"
        " then --scheduling-policy weighted_fair divides each engine between clients."
    )
    enable_force_include_usage: bool = False
    "End each stream with its usage, as stream_options.include_usage does."
    enable_tokenizer_info_endpoint: bool = False
    "Answer GET /tokenizer_info with the tokenizer's settings and the chat template."
    shutdown_timeout: Annotated[float, at_least(0)] = 10.0
    "Seconds in which running requests can finish after SIGTERM or Ctrl-C."
    write_timeout: Annotated[float, at_least(1)] = 60.0
    "Seconds that a client may leave its stream unread before it is disconnected."
    max_connections: Annotated[int, at_least(1)] = 4096
    (
        "Maximum number of connected clients. A further one takes the place of an idle one, or is refused with 503 and"
        " Retry-After."
    )

    admin_port: Annotated[int | None, PORT] = None
    "Port on 127.0.0.1 for operators: /admin/experts, /admin/placement, and in async mode /admin/workers. Unset: none."
    admin_api_key: Annotated[str | None, Parameter(show_default=False)] = field(default=None, repr=False)
    "Bearer token of the operators' port, which --api-key does not open. Unset: no key is required."

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.admin_api_key == "":
            raise ConfigError("--admin-api-key is empty: give a key, or leave the flag out")
        if self.admin_api_key is not None and self.admin_port is None:
            raise ConfigError("--admin-api-key protects --admin-port: add the port, or leave the key out")
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(
                f"--root-path must begin with / and not end with one, such as /llm, got {self.root_path!r}"
            )
        if not all(self.api_key):
            raise ConfigError("--api-key is empty: give a key, or leave the flag out to serve without one")
        if not all(self.router_api_key):
            raise ConfigError("--router-api-key is empty: give a key, or leave the flag out to trust no router")
        if both := set(self.api_key) & set(self.router_api_key):
            raise ConfigError(
                f"--api-key and --router-api-key have {len(both)} keys in common: a client with a router's key could"
                " take any name, so give routers keys of their own"
            )
        if not all(self.served_model_name):
            raise ConfigError("--served-model-name is empty: give a name, or leave the flag out")


@dataclass(frozen=True, kw_only=True)
class ProcessSettings(CheckedSettings):
    """The engine processes: their number, and the time-outs after which one counts as dead."""

    engines: Annotated[int, between(1, 1024)] = 1
    "Number of engines; a router spreads requests over them. Each has the whole model, in ep mode its share of experts."
    num_redundant_experts: Annotated[int, at_least(0)] = 0
    (
        "In async and ep mode, empty slots for experts in each layer, spread evenly over the workers that hold experts"
        " (async: rounded up; ep: all slots must divide evenly). Placement fills them with copies, and moves experts"
        " through empty ones."
    )
    kv_events_config: str | None = None
    (
        "KV events that each engine publishes for routers, in the form of vLLM:"
        """ '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557"}'."""
        " Engine r listens on port + r; there is no password."
    )
    bind_cores: bool = True
    "On one machine, give each engine an equal part of the cores for itself, if there are as many cores as engines."
    startup_timeout: Annotated[float, at_least(1)] = 600.0
    "Seconds in which engines must become ready."
    engine_timeout: Annotated[float, at_least(2)] = 10.0  # a rank sends a message four times a second
    "Seconds without a message, while the server runs, after which an engine is killed and restarted."
    watchdog_timeout: Annotated[float, at_least(1)] = 30.0
    "Seconds without a step, despite requests, after which an engine's stacks are dumped and it gets no new ones."
    step_timeout: float = 300.0
    "Seconds without a step after which an engine is killed and restarted; set it above the longest step."
    resume_streams: bool = False
    (
        "Continue the streams of an ended engine on another one in bfloat16 and float16 too, where the continuation may"
        " differ from the first engine's. Unset: such a stream ends with an error event."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_timeout < self.watchdog_timeout:
            raise ConfigError(
                f"--step-timeout {self.step_timeout:g} must be at least --watchdog-timeout {self.watchdog_timeout:g}"
            )
