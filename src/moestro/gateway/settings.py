"""What `moestro route` is told: frozen values, checked when made, with the words of its help."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from cyclopts import Group, Parameter

from moestro.core.setting_checks import check_floats
from moestro.errors import ConfigError
from moestro.gateway.kv_sources import KvSources
from moestro.gateway.paths import can_be_opened
from moestro.routing.registry import ROUTE_POLICIES
from moestro.web.access_settings import AccessSettings

_MAX_BREAKER_FAILURES = 1000  # their outcomes are remembered, of each engine
_NAME = re.compile(r"[A-Za-z0-9._:\[\]-]{1,64}")

LogLevel = Literal["debug", "info", "warning", "error"]

_ENGINES = Group.create_ordered("Engines", help="The servers that do the work: vLLM, SGLang, Moestro, or alike.")
_ROUTING = Group.create_ordered(
    "Routing",
    help=(
        "Which engine gets a request. Without --tokenizer prompts are compared as text, which needs nothing and costs"
        " microseconds; with it block by block as the engines do, which takes the tokenizer's time."
    ),
)
_RELIABILITY = Group.create_ordered(
    "Reliability",
    help="A request may go to another engine until the first byte of its answer, and never after.",
)
_SERVER = Group.create_ordered("Server", help="Where clients reach it, who may, and how much of them it bears.")
_ADMIN = Group.create_ordered("Administration", help="Engines come and go, decisions are explained: on its own port.")
_RECORD = Group.create_ordered("Record", help="What was decided, and why.")


@dataclass(frozen=True, slots=True)
class EngineUrl:
    """An engine as the operator writes it.

    Attributes:
        name: how it is called in headers, logs and metrics.
        url: scheme, host and port, and perhaps the path under which its API lies.
        netloc: host and port, as in a Host header.
    """

    name: str
    url: str
    netloc: str
    host: str
    port: int
    path: str
    is_tls: bool

    @classmethod
    def parse(cls, text: str) -> EngineUrl:
        """`URL` or `NAME=URL`.

        Raises:
            ConfigError: it is neither.
        """
        name, separator, url = text.partition("=")
        if not separator or "/" in name:
            name, url = "", text
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"--engine {text}: {error}") from None
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or parts.username:
            raise ConfigError(f"--engine {text}: give http://HOST:PORT or NAME=http://HOST:PORT")
        port = port or (443 if parts.scheme == "https" else 80)
        netloc, path = f"[{host}]:{port}" if ":" in host else f"{host}:{port}", parts.path.rstrip("/")
        path = path.removesuffix("/v1")
        name = name or netloc
        if not _NAME.fullmatch(name):
            raise ConfigError(f"--engine {text}: a name has letters, digits and . _ : - in it, 64 at most")
        is_tls = parts.scheme == "https"
        return cls(name, f"{parts.scheme}://{netloc}{path}", netloc, host, port, path, is_tls)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The engines."""

    engine: Annotated[tuple[str, ...], Parameter(group=_ENGINES, consume_multiple=True, show_default=False)] = ()
    "Where one is: http://HOST:PORT, or NAME=http://HOST:PORT to call it by name. Repeat it for each."
    engine_api_key: Annotated[str | None, Parameter(group=_ENGINES, show_default=False)] = field(
        default=None, repr=False
    )
    "Sent to engines in place of the client's key. Better set as MOESTRO_ENGINE_API_KEY than shown in the process list."
    connect_timeout: Annotated[float, Parameter(group=_ENGINES)] = 3.0
    "Seconds in which a connection to an engine must be made."
    health_path: Annotated[str, Parameter(group=_ENGINES)] = "/health"
    "What an engine is asked to see whether it is well; any answer below 300 says so."
    health_interval: Annotated[float, Parameter(group=_ENGINES)] = 5.0
    "Seconds between looks at an engine's health; one that is not well is looked at twice a second."
    metrics_interval: Annotated[float, Parameter(group=_ENGINES)] = 1.0
    "Seconds between looks at an engine's /metrics (its queue, its KV cache); 0: never."
    probe_timeout: Annotated[float, Parameter(group=_ENGINES)] = 3.0
    "Seconds in which it must answer these."
    kv_events: Annotated[tuple[str, ...], Parameter(group=_ENGINES, consume_multiple=True, show_default=False)] = ()
    "Where engines publish KV events: tcp://*:PORT, as vLLM is told it, for all; or NAME=tcp://HOST:PORT for one."
    kv_replay: Annotated[tuple[str, ...], Parameter(group=_ENGINES, consume_multiple=True, show_default=False)] = ()
    "Their replay_endpoint, likewise: without it a lost message costs all that was known of an engine's cache."
    kv_tiers: Annotated[tuple[str, ...], Parameter(group=_ENGINES, consume_multiple=True)] = (
        "GPU",
        "CPU",
        "CPU_PINNED",
    )
    "Media, as the events name them, whose blocks count as hits."

    def __post_init__(self) -> None:
        check_floats(self)
        _above("--connect-timeout", self.connect_timeout)
        _above("--health-interval", self.health_interval)
        _above("--probe-timeout", self.probe_timeout)
        _at_least("--metrics-interval", self.metrics_interval, 0)
        if self.engine_api_key == "":
            raise ConfigError("--engine-api-key is empty: give a key, or leave the flag out")
        self.kv_sources.check_names([url.name for url in map(EngineUrl.parse, self.engine)])

    @property
    def kv_sources(self) -> KvSources:
        """Who publishes KV events.

        Raises:
            ConfigError: what is given is no endpoint.
        """
        return KvSources(self.kv_events, self.kv_replay)

    @property
    def urls(self) -> tuple[EngineUrl, ...]:
        """The engines, parsed.

        Raises:
            ConfigError: there is none, or what is given is no address.
        """
        if not self.engine:
            raise ConfigError("there is no engine: give --engine http://HOST:PORT, once for each server")
        return tuple(EngineUrl.parse(text) for text in self.engine)


_ROUTE_POLICY = f"""How an engine is chosen, settings after a colon (bailian:hit_weight=0.5); or FILE.py:NAME.

{ROUTE_POLICIES.help_text()}"""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RoutingSettings:
    """The choice."""

    route_policy: Annotated[str, Parameter(group=_ROUTING, help=_ROUTE_POLICY)] = "moestro"
    route_score: Annotated[str | None, Parameter(group=_ROUTING)] = None
    "In place of a policy: an expression over indicators, the lowest wins: 'p_tokens * (batch_size + 1)'."
    tokenizer: Annotated[Path | None, Parameter(group=_ROUTING)] = None
    "Directory with the model's tokenizer.json and chat template: blocks of tokens instead of blocks of text."
    block_size: Annotated[int, Parameter(group=_ROUTING)] = 16
    "With --tokenizer: tokens of one block, as the engines have it (vLLM's --block-size)."
    text_block_bytes: Annotated[int, Parameter(group=_ROUTING)] = 512
    "Without: bytes of one block of text. Smaller: finer, and more work for each request."
    index_memory_bytes: Annotated[int, Parameter(group=_ROUTING)] = 1 << 30
    "Most memory for what the engines' caches hold."
    seed: Annotated[int, Parameter(group=_ROUTING)] = 0
    "Of draws between equals."

    def __post_init__(self) -> None:
        _at_least("--block-size", self.block_size, 1)
        _at_least("--text-block-bytes", self.text_block_bytes, 16)
        _at_least("--index-memory-bytes", self.index_memory_bytes, 1 << 20)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ReliabilitySettings:
    """When engines fail."""

    max_retries: Annotated[int, Parameter(group=_RELIABILITY)] = 3
    "Other engines that a request is given to when one answers 429, 500, 502, 503 or 504."
    retry_share: Annotated[float, Parameter(group=_RELIABILITY)] = 0.2
    "Such retries for each request, in the long run: they must not multiply an overload."
    breaker_failures: Annotated[int, Parameter(group=_RELIABILITY)] = 5
    "Failures in a row (5xx, time limits; never a 4xx) that take an engine out; one that hangs up is out at once."
    first_byte_timeout: Annotated[float, Parameter(group=_RELIABILITY)] = 600.0
    "Seconds in which an answer must begin, queueing included."
    idle_timeout: Annotated[float, Parameter(group=_RELIABILITY)] = 300.0
    "Seconds that may pass between two bytes of an answer."
    stall_timeout: Annotated[float, Parameter(group=_RELIABILITY)] = 30.0
    "Seconds without a token, while its queue grows, after which an engine gets no more requests."
    slow_start: Annotated[float, Parameter(group=_RELIABILITY)] = 30.0
    "Seconds in which an engine that comes back is brought up to its share; its cache is cold."

    def __post_init__(self) -> None:
        check_floats(self)
        _at_least("--max-retries", self.max_retries, 0)
        _at_least("--retry-share", self.retry_share, 0)
        _at_least("--breaker-failures", self.breaker_failures, 1)
        if self.breaker_failures > _MAX_BREAKER_FAILURES:
            raise ConfigError(f"--breaker-failures may be {_MAX_BREAKER_FAILURES} at most, got {self.breaker_failures}")
        for flag, value in (
            ("--first-byte-timeout", self.first_byte_timeout),
            ("--idle-timeout", self.idle_timeout),
            ("--stall-timeout", self.stall_timeout),
        ):
            _above(flag, value)
        _at_least("--slow-start", self.slow_start, 0)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class FrontSettings:
    """The clients' side."""

    host: Annotated[str, Parameter(group=_SERVER)] = "127.0.0.1"
    "Address to listen on; 0.0.0.0 opens it to the network, which wants --api-key."
    port: Annotated[int, Parameter(group=_SERVER)] = 8080
    "Port to listen on; 0: any free one, shown at the start."
    api_key: Annotated[tuple[str, ...], Parameter(group=_SERVER, consume_multiple=True, show_default=False)] = ()
    (
        "Keys of which clients must send one, as a bearer token or in x-api-key. Unset: the router asks for none and"
        " passes on what it gets."
    )
    open_path: Annotated[tuple[str, ...], Parameter(group=_SERVER, consume_multiple=True, show_default=False)] = ()
    "Other paths that are sent on to an engine, such as /my_api, or /my_api/* for all below it."
    route_headers: Annotated[bool, Parameter(group=_SERVER)] = True
    "Tell clients, in x-moestro-engine and x-moestro-reason, which engine answered and why."
    max_body_bytes: Annotated[int, Parameter(group=_SERVER)] = 32 << 20
    "The largest request."
    max_connections: Annotated[int, Parameter(group=_SERVER)] = 4096
    "Clients connected at a time; one more is refused with 503 and Retry-After."
    body_timeout: Annotated[float, Parameter(group=_SERVER)] = 60.0
    "Seconds in which a request's body must arrive."
    write_timeout: Annotated[float, Parameter(group=_SERVER)] = 60.0
    "Seconds that a client may leave its answer unread before it is cut off."
    shutdown_timeout: Annotated[float, Parameter(group=_SERVER)] = 30.0
    "Seconds that running requests have to finish after SIGTERM or Ctrl-C."
    log_level: Annotated[LogLevel, Parameter(group=_SERVER)] = "info"
    "How much is logged. Prompts and answers are never logged."

    def __post_init__(self) -> None:
        check_floats(self)
        _port("--port", self.port)
        _at_least("--max-body-bytes", self.max_body_bytes, 1024)
        _at_least("--max-connections", self.max_connections, 1)
        _above("--body-timeout", self.body_timeout)
        _above("--write-timeout", self.write_timeout)
        _at_least("--shutdown-timeout", self.shutdown_timeout, 0)
        if not all(self.api_key):
            raise ConfigError("--api-key is empty: give a key, or leave the flag out to ask for none")
        for path in self.open_path:
            if not can_be_opened(path):
                raise ConfigError(
                    f"--open-path {path} must be a path like /my_api, or /my_api/* for all below it: without escapes,"
                    " empty or dotted segments and a slash at the end, and none that the router answers itself"
                )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class AdminSettings:
    """The operator's side."""

    admin_host: Annotated[str, Parameter(group=_ADMIN)] = "127.0.0.1"
    "Address of the admin plane; any but a loopback address wants --admin-api-key."
    admin_port: Annotated[int, Parameter(group=_ADMIN)] = 8081
    "Its port; 0: any free one, shown at the start."
    admin_api_key: Annotated[str | None, Parameter(group=_ADMIN, show_default=False)] = field(default=None, repr=False)
    "Its bearer token; --api-key does not open it."

    def __post_init__(self) -> None:
        _port("--admin-port", self.admin_port)
        if self.admin_api_key == "":
            raise ConfigError("--admin-api-key is empty: give a key, or leave the flag out")
        if self.admin_api_key is None and not is_loopback(self.admin_host):
            raise ConfigError(
                f"--admin-host {self.admin_host} opens the admin plane to the network: give --admin-api-key too"
            )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """The record."""

    record: Annotated[Path | None, Parameter(group=_RECORD)] = None
    "Append what is decided to this file, for moestro explain and moestro replay. Prompts are not in it."
    remember: Annotated[int, Parameter(group=_RECORD)] = 10_000
    "Requests that are over and kept in memory, for moestro explain."

    def __post_init__(self) -> None:
        _at_least("--remember", self.remember, 0)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RouteSettings:
    """All of `moestro route`."""

    engines: EngineSettings = field(default_factory=EngineSettings)
    routing: RoutingSettings = field(default_factory=RoutingSettings)
    reliability: ReliabilitySettings = field(default_factory=ReliabilitySettings)
    front: FrontSettings = field(default_factory=FrontSettings)
    access: AccessSettings = field(default_factory=AccessSettings)
    admin: AdminSettings = field(default_factory=AdminSettings)
    record: RecordSettings = field(default_factory=RecordSettings)

    def __post_init__(self) -> None:
        if self.engines.kv_sources and self.routing.tokenizer is None:
            raise ConfigError("--kv-events tells of blocks of tokens: give --tokenizer, and the engines' --block-size")


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _above(flag: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{flag} must be above 0, got {value:g}")


def _at_least(flag: str, value: float, low: float) -> None:
    if not value >= low:
        raise ConfigError(f"{flag} must be at least {low:g}, got {value:g}")


def _port(flag: str, value: int) -> None:
    if not 0 <= value <= 65535:
        raise ConfigError(f"{flag} must be between 0 and 65535, got {value}")
