"""The settings of `moestro route`. A docstring under a field is its text in `--help`."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from cyclopts import Group, Parameter

from moestro.config.idle_flags import Need
from moestro.core.processes import in_address
from moestro.core.setting_checks import PORT, CheckedSettings, above, at_least, between
from moestro.errors import ConfigError
from moestro.gateway.clients.paths import can_be_opened
from moestro.gateway.part_settings import (
    ANY_TRAITS,
    DiscoverySettings,
    EngineTraits,
    KvSources,
    PickerSettings,
    QueueSettings,
    RouterPeerSettings,
    ShadowSettings,
)
from moestro.routing.scrape import MAX_RANKS
from moestro.routing.settings import RoutePolicySettings
from moestro.web.settings import AccessSettings, TlsSettings, TracingSettings

_NAME = re.compile(r"[A-Za-z0-9._:\[\]-]{1,253}")  # as long as the name of a pod

_AUTO = "auto"
MAX_WORKERS = 64
_FAILURE_STATUSES = range(400, 600)

LogLevel = Literal["debug", "info", "warning", "error"]

_ENGINES = Group.create_ordered("Engines", help="The servers behind the router: vLLM, SGLang, Moestro, or similar.")
_ROUTING = Group.create_ordered(
    "Routing",
    help=(
        "Choice of the engine. Without --tokenizer prompts are compared as text, which takes microseconds."
        " With --tokenizer they are compared by blocks of tokens as in the engines, which costs tokenizer time."
    ),
)
_RELIABILITY = Group.create_ordered(
    "Reliability",
    help="A request may go to another engine until the first byte of its answer, and never after.",
)
_SERVER = Group.create_ordered("Server", help="The address of the router, the access to it, and its limits.")
_ADMIN = Group.create_ordered(
    "Administration", help="A separate port to add and remove engines and to explain decisions."
)
_RECORD = Group.create_ordered("Record", help="Decisions and their reasons.")


@dataclass(frozen=True, slots=True)
class EngineUrl:
    """Address of an engine, parsed from the operator's text.

    Attributes:
        name: the engine's name in headers, logs and metrics.
        url: scheme, host and port, and the path of the API if it has one.
        netloc: host and port, as in a Host header.
        traits: what the operator says of the engines behind the address.
    """

    name: str
    url: str
    netloc: str
    host: str
    port: int
    path: str
    is_tls: bool
    traits: EngineTraits = ANY_TRAITS

    @classmethod
    def parse(cls, text: str, place: str = "--engine") -> EngineUrl:
        """Parse `URL` or `NAME=URL`, with traits of the engine behind commas: `URL,speed=2,group=a`.

        Args:
            place: Where the text stands, for the error.

        Raises:
            ConfigError: `text` is neither, or a trait is unknown or out of range.
        """
        address, *traits = text.split(",")
        name, separator, url = address.partition("=")
        if not separator or "/" in name:
            name, url = "", address
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"{place} {text}: {error}") from None
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or parts.username:
            raise ConfigError(f"{place} {text}: give http://HOST:PORT or NAME=http://HOST:PORT")
        port = port or (443 if parts.scheme == "https" else 80)
        netloc, path = f"{in_address(host)}:{port}", parts.path.rstrip("/")
        path = path.removesuffix("/v1")
        name = name or netloc
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{place} {text}: a name has letters, digits and . _ : - in it, 253 at most")
        is_tls = parts.scheme == "https"
        base, known = f"{parts.scheme}://{netloc}{path}", EngineTraits.parse(f"{place} {text}", traits)
        return cls(name, base, netloc, host, port, path, is_tls, known)

    def check_is_endpoint(self) -> None:
        """Check that an address and a port name this engine, as the endpoint picker protocol demands.

        Raises:
            ConfigError: The engine's API is below a path.
        """
        if self.path:
            raise ConfigError(
                f"--engine {self.name}={self.url}: --ext-proc names engines by address and port, so the API cannot be"
                f" below {self.path}; serve it at / or leave --ext-proc out"
            )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class EngineSettings(CheckedSettings):
    """Settings of the engines and the connections to them."""

    engine: Annotated[tuple[str, ...], Parameter(group=_ENGINES, consume_multiple=True, show_default=False)] = ()
    (
        "Address of an engine: http://HOST:PORT, or NAME=http://HOST:PORT with a name. Repeat the flag for each engine."
        " Traits follow behind commas: speed=2 against a mean engine and copy_price=0.1, which the router otherwise"
        " learns, and group=NAME for engines that begin every step together (group=none: ranks that do not)."
    )
    dp_ranks: Annotated[str, Parameter(group=_ENGINES)] = "1"
    (
        "Data-parallel ranks behind each address, which are engines of their own: a number, or auto, by what the server"
        " shows in /metrics or server info. Of vLLM (--data-parallel-size) and SGLang (--dp-size)."
    )
    engine_api_key: Annotated[str | None, Parameter(group=_ENGINES, show_default=False)] = field(
        default=None, repr=False
    )
    "Key that engines get in place of the client's. MOESTRO_ENGINE_API_KEY keeps it out of the process list."
    engine_ca_certs: Annotated[Path | None, Parameter(group=_ENGINES)] = None
    "File with the authorities of https:// engines, in PEM form. Unset: those of the system."
    engine_certfile: Annotated[Path | None, Parameter(group=_ENGINES)] = None
    "File with the router's own certificate for https:// engines that want one, in PEM form."
    engine_keyfile: Annotated[Path | None, Parameter(group=_ENGINES)] = None
    "File with the private key of --engine-certfile. Unset: the certificate's own file."
    connect_timeout: Annotated[float, above(0), Parameter(group=_ENGINES)] = 3.0
    "Seconds in which a connection to an engine must be made."
    health_path: Annotated[str, Parameter(group=_ENGINES)] = "/health"
    "Path of an engine's health check; any status below 300 means healthy."
    health_interval: Annotated[float, above(0), Parameter(group=_ENGINES)] = 5.0
    "Seconds between health checks of an engine that sends bytes; an unhealthy engine is checked twice a second."
    hang_timeout: Annotated[float, above(0), Parameter(group=_ENGINES)] = 4.0
    (
        "Seconds without any byte, also of health checks, after which an engine is down and its requests without a"
        " first byte move; after three quarters of it at the latest, it gets no new requests."
    )
    metrics_interval: Annotated[float, at_least(0), Parameter(group=_ENGINES)] = 1.0
    "Seconds between reads of an engine's /metrics (its queue, its KV cache); 0 disables them."
    probe_timeout: Annotated[float, above(0), Parameter(group=_ENGINES)] = 3.0
    "Seconds in which an engine must answer a health check or a read of /metrics."
    kv_events: Annotated[tuple[str, ...], Parameter(group=_ENGINES, consume_multiple=True, show_default=False)] = ()
    "Where engines publish KV events: tcp://*:PORT, as in vLLM's settings, for all; or NAME=tcp://HOST:PORT for one."
    kv_replay: Annotated[tuple[str, ...], Parameter(group=_ENGINES, consume_multiple=True, show_default=False)] = ()
    "Replay endpoints of engines in the same form. Without one, a lost message discards the known cache contents."
    kv_tiers: Annotated[tuple[str, ...], Parameter(group=_ENGINES, consume_multiple=True)] = (
        "GPU",
        "CPU",
        "CPU_PINNED",
    )
    "Storage media, by their names in KV events, whose blocks count as hits."

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine_api_key == "":
            raise ConfigError("--engine-api-key is empty: give a key, or leave the flag out")
        if self.engine_keyfile is not None and self.engine_certfile is None:
            raise ConfigError("--engine-keyfile is the key of --engine-certfile: give the certificate too")
        if self.num_ranks is None and not self.metrics_interval:
            raise ConfigError("--dp-ranks auto reads /metrics: set --metrics-interval above 0, or give a number")

    def check_kv_sources(self, *, are_all_named: bool) -> None:
        """Check that publishers of KV events and engines fit together.

        Args:
            are_all_named: Whether `engine` names all engines, so that a publisher of another one is a mistake.

        Raises:
            ConfigError: They do not.
        """
        names = [url.name for url in self.urls]
        if are_all_named:
            self.kv_sources.check_names(names)
        if self.num_ranks is not None:
            self.kv_sources.check_ranks(names, self.num_ranks)

    @property
    def num_ranks(self) -> int | None:
        """Number of data-parallel ranks behind each address; None means that each server shows it.

        Raises:
            ConfigError: `dp_ranks` is neither a number of ranks nor auto.
        """
        return parsed_ranks(self.dp_ranks)

    @property
    def kv_sources(self) -> KvSources:
        """The publishers of KV events.

        Raises:
            ConfigError: an endpoint is invalid.
        """
        return KvSources(self.kv_events, self.kv_replay)

    @property
    def urls(self) -> tuple[EngineUrl, ...]:
        """Addresses of the engines of `engine`.

        Raises:
            ConfigError: An address is invalid.
        """
        return tuple(EngineUrl.parse(text) for text in self.engine)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RoutingSettings(CheckedSettings):
    """Settings of prompt comparison and its memory."""

    tokenizer: Annotated[str | None, Parameter(group=_ROUTING)] = None
    (
        "A directory with the model's tokenizer.json and chat template, or the model's name on the Hugging Face hub;"
        " prompts are then compared by tokens, not text."
    )
    block_size: Annotated[int, at_least(1), Parameter(group=_ROUTING)] = 16
    (
        "Tokens of one KV block of the engines (vLLM's --block-size), unless their /metrics say otherwise; a hit is"
        " whole blocks. With --tokenizer also of the router's blocks."
    )
    text_block_bytes: Annotated[int, at_least(16), Parameter(group=_ROUTING)] = 512
    "Without --tokenizer: bytes of one block of text. Smaller blocks match more finely, and take longer."
    index_memory_bytes: Annotated[int, at_least(1 << 20), Parameter(group=_ROUTING)] = 1 << 30
    "Bytes of memory for the index of the engines' caches."
    seed: Annotated[int, Parameter(group=_ROUTING)] = 0
    "Random seed of draws between equal engines."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ReliabilitySettings(CheckedSettings):
    """Settings of retries, time limits and circuit breakers."""

    max_retries: Annotated[int, at_least(0), Parameter(group=_RELIABILITY)] = 3
    "Other engines that get a request when one answers with a status of --retry-on."
    retry_on: Annotated[tuple[int, ...], Parameter(group=_RELIABILITY, consume_multiple=True)] = (
        *(429, 502, 503, 504, 529),
    )
    (
        "Statuses of an engine's answer after which another engine gets the request. 500 is not among them, because the"
        " request itself mostly causes it."
    )
    retry_share: Annotated[float, at_least(0), Parameter(group=_RELIABILITY)] = 0.2
    "Average number of such retries for each request, so that retries do not multiply an overload."
    # At least 2, so that no client alone takes an engine from the others. At most 1000, because they are remembered.
    breaker_failures: Annotated[int, between(2, 1000), Parameter(group=_RELIABILITY)] = 3
    (
        "Failures in a row (5xx, cut answers, time limits; never a 4xx) that open the breaker, of as many different"
        " clients and bodies; a refused connection opens it at once."
    )
    first_byte_timeout: Annotated[float, above(0), Parameter(group=_RELIABILITY)] = 600.0
    "Seconds until the first byte of an answer, queueing included."
    idle_timeout: Annotated[float, above(0), Parameter(group=_RELIABILITY)] = 300.0
    "Maximum seconds between two bytes of an answer."
    stall_timeout: Annotated[float, above(0), Parameter(group=_RELIABILITY)] = 30.0
    "Seconds without a token, while its queue grows, after which an engine gets no more requests."
    slow_start: Annotated[float, at_least(0), Parameter(group=_RELIABILITY)] = 30.0
    "Seconds in which a returning engine, whose cache is cold, is brought up to its share of requests."
    resume_streams: Annotated[bool, Parameter(group=_RELIABILITY)] = False
    (
        "Let another engine continue a stream whose engine dies, hangs or drains, if the continuation is exact. Asks"
        " engines for token ids, which clients do not get unless they want them."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if wrong := [status for status in self.retry_on if status not in _FAILURE_STATUSES]:
            raise ConfigError(f"--retry-on {wrong[0]}: give statuses of failed answers, between 400 and 599")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class FrontSettings(CheckedSettings):
    """Settings of the server that clients reach."""

    host: Annotated[str, Parameter(group=_SERVER)] = "127.0.0.1"
    "Address to listen on; 0.0.0.0 opens the server to the network: set --api-key too."
    port: Annotated[int, PORT, Parameter(group=_SERVER)] = 8080
    "Port to listen on; 0 selects a free port, shown at the start."
    api_key: Annotated[tuple[str, ...], Parameter(group=_SERVER, consume_multiple=True, show_default=False)] = ()
    (
        "Accepted client keys, sent as a bearer token or in x-api-key. If unset, the router asks for no key and"
        " passes on the client's."
    )
    workers: Annotated[int, between(1, MAX_WORKERS), Parameter(group=_SERVER)] = 1
    (
        "Processes that share the port; each routes as a router of its own, and they exchange their requests like"
        " --peer. Limits of requests by key and address count in all of them; those of connections and of the queue are"
        " divided among them."
    )
    open_path: Annotated[tuple[str, ...], Parameter(group=_SERVER, consume_multiple=True, show_default=False)] = ()
    "Other paths that the router forwards to an engine, such as /my_api, or /my_api/* for all paths below it."
    route_headers: Annotated[bool, Parameter(group=_SERVER)] = True
    "Show clients the answering engine and the reason for its choice, in x-moestro-engine and x-moestro-reason."
    max_body_bytes: Annotated[int, at_least(1024), Parameter(group=_SERVER)] = 32 << 20
    "Bytes of the largest request body."
    max_connections: Annotated[int, at_least(1), Parameter(group=_SERVER)] = 4096
    "Clients connected at a time. A further one takes the place of an idle one, or is refused with 503 and Retry-After."
    body_timeout: Annotated[float, above(0), Parameter(group=_SERVER)] = 60.0
    "Seconds in which a request's body must arrive."
    write_timeout: Annotated[float, above(0), Parameter(group=_SERVER)] = 60.0
    "Seconds that a client may leave its answer unread before it is disconnected."
    shutdown_timeout: Annotated[float, at_least(0), Parameter(group=_SERVER)] = 30.0
    "Seconds that running requests have to finish after SIGTERM or Ctrl-C."
    log_level: Annotated[LogLevel, Parameter(group=_SERVER)] = "info"
    "The least severe level that is logged. Prompts and answers are never logged."

    def __post_init__(self) -> None:
        super().__post_init__()
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
class AdminSettings(CheckedSettings):
    """Settings of the admin plane."""

    admin_host: Annotated[str, Parameter(group=_ADMIN)] = "127.0.0.1"
    "Address of the admin plane; any but a loopback address requires --admin-api-key."
    admin_port: Annotated[int, PORT, Parameter(group=_ADMIN)] = 8081
    "Port of the admin plane; 0 selects a free port, shown at the start."
    admin_api_key: Annotated[str | None, Parameter(group=_ADMIN, show_default=False)] = field(default=None, repr=False)
    "Bearer token of the admin plane, which --api-key does not open."

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.admin_api_key == "":
            raise ConfigError("--admin-api-key is empty: give a key, or leave the flag out")
        if self.admin_api_key is None and not is_loopback(self.admin_host):
            raise ConfigError(
                f"--admin-host {self.admin_host} opens the admin plane to the network: give --admin-api-key too"
            )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RecordSettings(CheckedSettings):
    """Settings of the decision record."""

    record: Annotated[Path | None, Parameter(group=_RECORD)] = None
    "Append the decisions to this file, for moestro explain and moestro replay. The file holds no prompts."
    record_key_file: Annotated[Path | None, Parameter(group=_RECORD)] = None
    "File with the key of the record's block hashes, made if it does not exist. Unset: one in the state directory."
    remember: Annotated[int, at_least(0), Parameter(group=_RECORD)] = 10_000
    "Ended requests that stay in memory for moestro explain."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RouteSettings:
    """All settings of `moestro route`."""

    engines: EngineSettings = field(default_factory=EngineSettings)
    discovery: DiscoverySettings = field(default_factory=DiscoverySettings)
    policy: Annotated[RoutePolicySettings, Parameter(name="*", group=_ROUTING)] = field(
        default_factory=RoutePolicySettings
    )
    routing: RoutingSettings = field(default_factory=RoutingSettings)
    reliability: ReliabilitySettings = field(default_factory=ReliabilitySettings)
    front: FrontSettings = field(default_factory=FrontSettings)
    access: AccessSettings = field(default_factory=AccessSettings)
    queue: QueueSettings = field(default_factory=QueueSettings)
    tls: TlsSettings = field(default_factory=TlsSettings)
    tracing: TracingSettings = field(default_factory=TracingSettings)
    picker: PickerSettings = field(default_factory=PickerSettings)
    peers: RouterPeerSettings = field(default_factory=RouterPeerSettings)
    admin: AdminSettings = field(default_factory=AdminSettings)
    record: RecordSettings = field(default_factory=RecordSettings)
    shadow: ShadowSettings = field(default_factory=ShadowSettings)

    def __post_init__(self) -> None:
        self.engines.check_kv_sources(are_all_named=not self.discovery.is_on)
        if self.engines.kv_sources and self.routing.tokenizer is None:
            raise ConfigError("--kv-events describes blocks of tokens: give --tokenizer, and the engines' --block-size")
        if self.picker.ext_proc is not None:
            for url in self.engines.urls:
                url.check_is_endpoint()
            if self.engines.num_ranks != 1:
                raise ConfigError("--ext-proc names addresses, not ranks: leave --dp-ranks out")
            if self.front.workers > 1:
                raise ConfigError("--ext-proc has one process: leave --workers out, and start routers with --peer")
        if self.queue.has_queue and not self.engines.metrics_interval:
            raise ConfigError("--queue-policy reads the engines' /metrics: set --metrics-interval above 0")
        if self.shadow.shadow:
            self._check_shadow()

    def _check_shadow(self) -> None:
        self.shadow.check_stands_alone(
            {
                "--ext-proc": self.picker.ext_proc is not None,
                "--workers": self.front.workers > 1,
                "--peer": self.peers.has_peers,
                "--queue-policy": self.queue.has_queue,
                "--resume-streams": self.reliability.resume_streams,
                "--otlp-traces-endpoint": self.tracing.otlp_traces_endpoint is not None,
            }
        )
        if self.record.record is None:
            raise ConfigError("--shadow needs --record: moestro sim --replay makes the report from that file")
        if self.engines.num_ranks != 1:
            raise ConfigError("--shadow knows engines by the addresses in --access-log: leave --dp-ranks out")
        if not self.engines.metrics_interval:
            raise ConfigError("--shadow reads the engines' /metrics: set --metrics-interval above 0")

    def check_has_engines(self) -> None:
        """Check that there is an engine, or a list that may name one.

        Raises:
            ConfigError: There is neither.
        """
        if not self.engines.engine and not self.discovery.is_on:
            raise ConfigError(
                "there is no engine: give --engine http://HOST:PORT, once for each server, or a list of engines"
                " (--engine-file, --engine-dns, --service-discovery)"
            )


ROUTE_NEEDS: tuple[Need[RouteSettings], ...] = (
    Need("leave --tokenizer out", lambda settings: settings.routing.tokenizer is None, ("text_block_bytes",)),
    Need("leave --route-score out", lambda settings: settings.policy.route_score is None, ("route_policy",)),
    Need("needs --kv-events", lambda settings: bool(settings.engines.kv_events), ("kv_tiers",)),
    Need(
        "leave --max-retries 0 out", lambda settings: settings.reliability.max_retries > 0, ("retry_on", "retry_share")
    ),
    Need(
        "needs --ext-proc",
        lambda settings: settings.picker.ext_proc is not None,
        ("ext_proc_host", "ext_proc_ssl_certfile", "ext_proc_ssl_keyfile", "ext_proc_ssl_ca_certs"),
    ),
    Need(
        "needs --peer",
        lambda settings: settings.peers.has_peers,
        ("peer_host", "peer_port", "peer_key", "peer_ssl_certfile", "peer_ssl_keyfile", "peer_ssl_ca_certs"),
    ),
    Need(
        "needs --queue-policy",
        lambda settings: settings.queue.has_queue,
        (
            *("queue_kv_usage", "queue_waiting", "queue_ttft", "queue_ttl", "queue_max_requests", "queue_max_tokens"),
            *("queue_refusal", "evict_best_effort"),
        ),
    ),
    Need(
        "needs an --engine with https://",
        lambda settings: settings.discovery.is_on or any(url.is_tls for url in settings.engines.urls),
        ("engine_ca_certs", "engine_certfile", "engine_keyfile"),
    ),
    Need("needs --engine-dns", lambda settings: bool(settings.discovery.engine_dns), ("dns_interval",)),
    Need(
        "needs --engine-file or --service-discovery",
        lambda settings: settings.discovery.engine_file is not None or settings.discovery.service_discovery,
        ("selector",),
    ),
    Need(
        "needs --service-discovery",
        lambda settings: settings.discovery.service_discovery,
        (
            *("service_discovery_service", "inference_pool", "service_discovery_namespace", "service_discovery_port"),
            *("kubernetes_api", "service_account_dir"),
        ),
    ),
    Need(
        "needs --engine-file, --engine-dns or --service-discovery",
        lambda settings: settings.discovery.is_on,
        ("keep_vanished",),
    ),
    Need("needs --shadow", lambda settings: settings.shadow.shadow, ("access_log",)),
    Need("needs --record", lambda settings: settings.record.record is not None, ("record_key_file",)),
    Need(
        "needs --allowed-origins",
        lambda settings: bool(settings.access.allowed_origins),
        ("allowed_methods", "allowed_headers"),
    ),
)


def parsed_ranks(text: str, place: str = "--dp-ranks") -> int | None:
    """Return a number of data-parallel ranks; None for `auto`, which means that the server shows it.

    Args:
        place: Where the text stands, for the error.

    Raises:
        ConfigError: The text is neither.
    """
    if text == _AUTO:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= MAX_RANKS:
        raise ConfigError(f"{place} {text}: give auto, or a number from 1 to {MAX_RANKS}")
    return int(text)


def is_loopback(host: str) -> bool:
    """Return whether `host` can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
