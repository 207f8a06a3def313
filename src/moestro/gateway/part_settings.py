"""The settings of the router's parts: discovery, peers, picker, queue, shadow, engines' traits and KV endpoints.

A docstring under a field is its text in `--help`.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from cyclopts import Group, Parameter

from moestro.core.clock import to_ns
from moestro.core.processes import in_address
from moestro.core.request import ServiceClass
from moestro.core.setting_checks import PORT, CheckedSettings, above, at_least, between
from moestro.core.views import OrderPolicy
from moestro.engine.registry import ORDER_POLICIES
from moestro.errors import ConfigError
from moestro.routing.route_queue import NO_QUEUE, QueueRules, SaturationRules
from moestro.routing.settings import ANY_ENGINE, EngineSpec
from moestro.web.settings import CertificateFiles

_DISCOVERY = Group.create_ordered(
    "Engine discovery",
    help="Lists of engines that the router follows while it runs, beside --engine and the admin plane.",
)
_LABEL = re.compile(r"[A-Za-z0-9./_-]{1,317}=[A-Za-z0-9._-]{0,63}")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DiscoverySettings(CheckedSettings):
    """Settings of the lists of engines."""

    engine_file: Annotated[Path | None, Parameter(group=_DISCOVERY)] = None
    (
        "File with the list of engines, YAML or lines of JSON: url, name, model, labels, dp_ranks, speed, api_key_file."
        " A change counts within two seconds; a wrong file leaves the last list in place."
    )
    engine_dns: Annotated[tuple[str, ...], Parameter(group=_DISCOVERY, consume_multiple=True, show_default=False)] = ()
    "http://NAME:PORT, each of whose addresses in DNS is an engine, such as a headless service of Kubernetes."
    dns_interval: Annotated[float, above(0), Parameter(group=_DISCOVERY)] = 5.0
    "Seconds between two lookups of --engine-dns."
    service_discovery: Annotated[bool, Parameter(group=_DISCOVERY)] = False
    (
        "Follow the engines of a Kubernetes cluster: the pods of --selector, the endpoints of"
        " --service-discovery-service, or the pods of --inference-pool."
    )
    selector: Annotated[tuple[str, ...], Parameter(group=_DISCOVERY, consume_multiple=True)] = ()
    "Labels that an engine's pod must have, KEY=VALUE; also those of the lines of --engine-file that count."
    service_discovery_service: Annotated[str | None, Parameter(group=_DISCOVERY)] = None
    "Service whose endpoints (EndpointSlices) are the engines."
    inference_pool: Annotated[str | None, Parameter(group=_DISCOVERY)] = None
    "InferencePool whose selector and target ports name the engines."
    service_discovery_namespace: Annotated[str | None, Parameter(group=_DISCOVERY)] = None
    "Namespace of the engines. Unset: that of the service account."
    service_discovery_port: Annotated[int | None, PORT, Parameter(group=_DISCOVERY)] = None
    "Port of the engines. Unset: the first port of the endpoint or of the pod's containers, or the pool's."
    kubernetes_api: Annotated[str | None, Parameter(group=_DISCOVERY)] = None
    "Address of the API server. Unset: that of the cluster in which the router runs."
    service_account_dir: Annotated[Path, Parameter(group=_DISCOVERY)] = Path(
        "/var/run/secrets/kubernetes.io/serviceaccount"
    )
    "Directory with the token, ca.crt and namespace of the service account; a renewed token counts at once."
    keep_vanished: Annotated[float, at_least(0), Parameter(group=_DISCOVERY)] = 300.0
    (
        "Seconds for which the router keeps what it knows of an engine that is listed no more (cache, health), as long"
        " as the engine answers health checks."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for text in self.selector:
            if not _LABEL.fullmatch(text):
                raise ConfigError(f"--selector {text}: give KEY=VALUE, such as app=vllm")
        if not self.service_discovery:
            return
        given = [
            flag
            for flag, value in (
                ("--selector", self.selector),
                ("--service-discovery-service", self.service_discovery_service),
                ("--inference-pool", self.inference_pool),
            )
            if value
        ]
        if not given:
            raise ConfigError(
                "--service-discovery needs to know which pods are engines: give --selector KEY=VALUE,"
                " --service-discovery-service NAME or --inference-pool NAME"
            )
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} each name the engines of Kubernetes: give one of them")

    @property
    def is_on(self) -> bool:
        """Whether there is a list besides `--engine`."""
        return self.engine_file is not None or bool(self.engine_dns) or self.service_discovery

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the selector."""
        pairs = (text.partition("=") for text in self.selector)
        return {key: value for key, _, value in pairs}


DEFAULT_PEER_PORT = 8082

_PEERS = Group.create_ordered(
    "Other routers",
    help="Routers before the same engines, which count each other's requests and learn each other's prompts.",
)


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where another router listens for its peers. A name may stand for several addresses, this router's among them."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> PeerAddress:
        """Parse `http://HOST:PORT`, `https://HOST:PORT`, `HOST:PORT` or `HOST`.

        Raises:
            ConfigError: `text` is none of them.
        """
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"--peer {text}: {error}") from None
        if parts.scheme not in ("http", "https") or not host or parts.path.strip("/") or parts.query or parts.username:
            raise ConfigError(f"--peer {text}: give http://HOST:PORT, with the --peer-port of the other router")
        return cls(host, port or DEFAULT_PEER_PORT)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RouterPeerSettings(CheckedSettings):
    """Settings of the port for other routers, and of their addresses."""

    peer: Annotated[tuple[str, ...], Parameter(group=_PEERS, consume_multiple=True, show_default=False)] = ()
    (
        "Address of another router, http://HOST:PORT with its --peer-port, or a name that resolves to all of them."
        " Repeat the flag for each. Each router needs the addresses of all others; its own is left out by itself."
    )
    peer_host: Annotated[str, Parameter(group=_PEERS)] = "127.0.0.1"
    "Address to listen on for other routers; any but a loopback address requires --peer-key or --peer-ssl-certfile."
    peer_port: Annotated[int, between(1, 65535), Parameter(group=_PEERS)] = DEFAULT_PEER_PORT
    "Port to listen on for other routers, once there is a --peer."
    peer_key: Annotated[str | None, Parameter(group=_PEERS, show_default=False)] = field(default=None, repr=False)
    "Key that all routers share. MOESTRO_PEER_KEY keeps it out of the process list."
    peer_ssl_certfile: Annotated[Path | None, Parameter(group=_PEERS)] = None
    (
        "PEM file with this router's certificate and its chain: routers then speak TLS with each other alone. A renewed"
        " one counts for new connections within two seconds."
    )
    peer_ssl_keyfile: Annotated[Path | None, Parameter(group=_PEERS)] = None
    "PEM file with the key of that certificate. Unset: the certificate's own file."
    peer_ssl_ca_certs: Annotated[Path | None, Parameter(group=_PEERS)] = None
    "PEM file of authorities, of one of which each router must have a certificate. --peer-ssl-certfile needs it."

    def __post_init__(self) -> None:
        super().__post_init__()
        addresses = self.addresses
        if self.files.certfile is not None and self.files.ca_certs is None:
            raise ConfigError("--peer-ssl-certfile needs --peer-ssl-ca-certs: each router shows a certificate")
        if self.peer_key == "":
            raise ConfigError("--peer-key is empty: give a key, or leave the flag out")
        if addresses and self.peer_key is None and self.files.certfile is None and not _is_loopback(self.peer_host):
            raise ConfigError(
                f"--peer-host {self.peer_host} opens the routers' port to the network: give --peer-key or"
                " --peer-ssl-certfile too"
            )
        for text in self.peer if self.files.certfile is None else ():
            if text.startswith("https:"):
                raise ConfigError(f"--peer {text} speaks TLS: give --peer-ssl-certfile and --peer-ssl-ca-certs too")

    @property
    def files(self) -> CertificateFiles:
        """The files of TLS between routers."""
        return CertificateFiles("--peer-ssl", self.peer_ssl_certfile, self.peer_ssl_keyfile, self.peer_ssl_ca_certs)

    @property
    def addresses(self) -> tuple[PeerAddress, ...]:
        """Where the other routers listen.

        Raises:
            ConfigError: an address is invalid.
        """
        return tuple(PeerAddress.parse(text) for text in self.peer)

    @property
    def has_peers(self) -> bool:
        """Whether there may be other routers."""
        return bool(self.peer)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


_PICKER = Group.create_ordered(
    "Endpoint picker",
    help="A gRPC port by which Envoy and the gateways of Kubernetes get an engine for each of their requests.",
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PickerSettings(CheckedSettings):
    """Settings of the endpoint picker's port."""

    ext_proc: Annotated[int | None, PORT, Parameter(group=_PICKER)] = None
    "Port of the endpoint picker (Envoy's ext_proc); 0 selects a free port, shown at the start. Unset: no picker."
    ext_proc_host: Annotated[str, Parameter(group=_PICKER)] = "127.0.0.1"
    "Address of the endpoint picker; on any but a loopback address, give --ext-proc-ssl-ca-certs too."
    ext_proc_ssl_certfile: Annotated[Path | None, Parameter(group=_PICKER)] = None
    "PEM file with the picker's certificate and its chain. A renewed one counts for new connections within two seconds."
    ext_proc_ssl_keyfile: Annotated[Path | None, Parameter(group=_PICKER)] = None
    "PEM file with the key of that certificate. Unset: the certificate's own file."
    ext_proc_ssl_ca_certs: Annotated[Path | None, Parameter(group=_PICKER)] = None
    "PEM file of authorities: only proxies with a certificate of one of them may use the picker."

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.files  # Checks them.

    @property
    def files(self) -> CertificateFiles:
        """The files of the port."""
        return CertificateFiles(
            "--ext-proc-ssl", self.ext_proc_ssl_certfile, self.ext_proc_ssl_keyfile, self.ext_proc_ssl_ca_certs
        )


_QUEUE = Group.create_ordered(
    "Queue",
    help="While every engine for a request is saturated, the request waits in the router and not in an engine.",
)
_QUEUE_HELP = (
    "Order policy of waiting requests (sjf:theta_age_s=2), or none: engines get every request at once."
    f"\n\n{ORDER_POLICIES.help_text()}"
)
# Fields and values by which engines know the classes.
_CLASS_FIELDS: dict[str, tuple[str, dict[ServiceClass, bytes]]] = {
    "vllm": ("priority", {ServiceClass.LS: b"0", ServiceClass.BE: b"1"}),
    "sglang": ("priority", {ServiceClass.LS: b"1", ServiceClass.BE: b"0"}),
    "moestro": ("service_class", {each: b'"%b"' % each.value.encode() for each in ServiceClass}),
}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class QueueSettings(CheckedSettings):
    """Settings of the queue."""

    queue_policy: Annotated[str, Parameter(group=_QUEUE, help=_QUEUE_HELP)] = NO_QUEUE
    queue_kv_usage: Annotated[float, above(0, at_most=1), Parameter(group=_QUEUE)] = 0.95
    "Fraction of its KV cache in use from which an engine is saturated; 1: when it is full."
    queue_waiting: Annotated[int, at_least(1), Parameter(group=_QUEUE)] = 2
    "Requests that may wait in an engine before it is saturated, so that it has work between two reads of /metrics."
    queue_ttft: Annotated[float | None, above(0), Parameter(group=_QUEUE)] = None
    "Predicted seconds to a first token from which an engine is saturated. Unset: its queue and its KV cache decide."
    queue_ttl: Annotated[float, above(0), Parameter(group=_QUEUE)] = 60.0
    "Longest wait in the queue, seconds, after which a request is refused."
    queue_max_requests: Annotated[int | None, at_least(1), Parameter(group=_QUEUE)] = 1024
    "Requests of one client (a key, or an address) that may wait."
    queue_max_tokens: Annotated[int | None, at_least(1), Parameter(group=_QUEUE)] = None
    "Prompt tokens of one client's waiting requests. Unset: no limit."
    queue_refusal: Annotated[Literal[429, 503], Parameter(group=_QUEUE)] = 429
    "Status of refusals by the queue, which have Retry-After."
    evict_best_effort: Annotated[bool, Parameter(group=_QUEUE)] = False
    (
        'Take a best-effort request (service_class "be") from its engine, once, if no byte of its answer has left and'
        " a latency-sensitive one waits. It is sent again later."
    )
    send_class: Annotated[Literal["none", "vllm", "sglang", "moestro"], Parameter(group=_QUEUE)] = "none"
    (
        "Write the class of a request into its body: priority 0 or 1 (vllm), 1 or 0 (sglang), or service_class"
        " (moestro). none leaves bodies as they are."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.has_queue:
            self.make_policy()

    @property
    def has_queue(self) -> bool:
        """Whether requests may wait in the router."""
        return self.queue_policy != NO_QUEUE

    def make_policy(self) -> OrderPolicy:
        """Return a new policy.

        Raises:
            ConfigError: there is no such policy, or none with these settings.
        """
        try:
            return ORDER_POLICIES.make(self.queue_policy)
        except ConfigError as error:
            raise ConfigError(f"--queue-policy: {error} (or none)") from None

    @property
    def rules(self) -> QueueRules:
        """Bounds of the queue."""
        return QueueRules(
            ttl_ns=to_ns(self.queue_ttl), max_requests=self.queue_max_requests, max_tokens=self.queue_max_tokens
        )

    @property
    def saturation(self) -> SaturationRules:
        """When an engine is saturated."""
        return SaturationRules(
            kv_usage=self.queue_kv_usage,
            num_waiting=self.queue_waiting,
            ttft_ns=None if self.queue_ttft is None else to_ns(self.queue_ttft),
        )

    @property
    def class_fields(self) -> dict[ServiceClass, dict[str, bytes | None]]:
        """Fields that the body of a request of each class gets; empty if bodies stay as they are."""
        if self.send_class == "none":
            return {}
        name, values = _CLASS_FIELDS[self.send_class]
        return {service_class: {name: value} for service_class, value in values.items()}


_SHADOW = Group.create_ordered(
    "Shadow", help="Decide beside the router in use, and send engines no request: what would --route-policy change?"
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ShadowSettings(CheckedSettings):
    """Settings of the shadow."""

    shadow: Annotated[bool, Parameter(group=_SHADOW, negative=())] = False
    (
        "Take copies of requests (nginx' mirror, Envoy's request_mirror_policies) on --port, answer them with 202, and"
        " record what --route-policy would decide. moestro sim --replay RECORD then states what it would change."
    )
    access_log: Annotated[Path | None, Parameter(group=_SHADOW)] = None
    "Access log of the router in use, which a shadow follows: JSON lines of nginx or Envoy, as docs/shadow.md has them."

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shadow and self.access_log is None:
            raise ConfigError("--shadow needs --access-log: without it the engine of a request is unknown")

    def check_stands_alone(self, flags: dict[str, bool]) -> None:
        """Check that a shadow is not given what a router needs that sends requests.

        Args:
            flags: whether each flag that needs such a router is given.

        Raises:
            ConfigError: One is.
        """
        if self.shadow and (given := [flag for flag, is_given in flags.items() if is_given]):
            raise ConfigError(f"--shadow sends no request, so {given[0]} has no meaning: leave it out")


NO_GROUP = "none"
_GROUP = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TRAIT_BOUNDS: Mapping[str, tuple[float, float]] = {"speed": (0.01, 100), "copy_price": (0, 1)}
_TRAIT_NAMES = (*_TRAIT_BOUNDS, "group")


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """Traits of the engines behind one address.

    Attributes:
        spec: speed and copy price; None in it means that the router learns them.
        group: name of the group whose engines begin every step together. NO_GROUP means that each steps alone. None
            means that the ranks of the address are one group.
    """

    spec: EngineSpec = ANY_ENGINE
    group: str | None = None

    @classmethod
    def parse(cls, place: str, traits: Sequence[str]) -> EngineTraits:
        """Parse traits, each as NAME=VALUE.

        Args:
            place: Where they stand, for the error.

        Raises:
            ConfigError: a trait is unknown, given twice or out of range.
        """
        found: dict[str, str] = {}
        for trait in traits:
            name, _, value = trait.partition("=")
            if name not in _TRAIT_NAMES or name in found:
                problem = "is given twice" if name in found else "is no trait of an engine"
                raise ConfigError(f"{place}: {name!r} {problem}; give {', '.join(_TRAIT_NAMES)}, each once")
            found[name] = value
        group = found.pop("group", None)
        if group is not None and not _GROUP.fullmatch(group):
            raise ConfigError(
                f"{place}: a group has letters, digits and . _ - in it, 64 at most; group={NO_GROUP} means that"
                " data-parallel ranks step alone"
            )
        speed, copy_price = (
            _trait_number(place, name, found[name]) if name in found else None for name in _TRAIT_BOUNDS
        )
        return cls(EngineSpec(speed=speed, copy_price=copy_price), group)


ANY_TRAITS = EngineTraits()


def _trait_number(place: str, name: str, value: str) -> float:
    least, most = _TRAIT_BOUNDS[name]
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        raise ConfigError(f"{place}: {name}={value}: give a number from {least:g} to {most:g}")
    return number


_ENDPOINT = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})|ipc://.+")
_ALL = ""  # key of the endpoint for all engines
_RANK = re.compile(r"@\d{1,4}\Z")
_LAST_PORT = 65_535


@dataclass(frozen=True, slots=True)
class KvSource:
    """Endpoints of one publisher.

    Attributes:
        events: endpoint of the events, in zmq's form.
        replay: endpoint of the replay; None means no replay.
    """

    events: str
    replay: str | None


class KvSources:
    """The publishers of all engines.

        events: `tcp://*:PORT` for the same port at every engine's address, as in vLLM's settings; or
            `NAME=tcp://HOST:PORT` for one engine or address, which takes precedence. Data-parallel rank r of an address
            publishes at PORT + r, as in vLLM and SGLang, unless its own name `NAME@r` has an endpoint.
        replay: replay endpoints in the same form.

    Raises:
        ConfigError: an endpoint is invalid, or a replay endpoint has no events endpoint.
    """

    def __init__(self, events: Collection[str], replay: Collection[str]) -> None:
        self._events = _by_engine("--kv-events", events)
        self._replay = _by_engine("--kv-replay", replay)
        lone = next((name for name in self._replay if name not in self._events and _ALL not in self._events), None)
        if lone is not None:
            raise ConfigError(f"--kv-replay {self._replay[lone]} is for events that --kv-events does not name")

    def __bool__(self) -> bool:
        return bool(self._events)

    def check_names(self, known: Collection[str]) -> None:
        """Raise ConfigError if an endpoint names no address of `known`, and no rank of one."""
        for name in (self._events | self._replay).keys() - {_ALL}:
            if name not in known and _RANK.sub("", name) not in known:
                raise ConfigError(f"--kv-events names unknown engine {name}; known engines: {', '.join(sorted(known))}")

    def check_ranks(self, names: Collection[str], num_ranks: int) -> None:
        """Raise ConfigError if a data-parallel rank of an address in `names` cannot have the endpoint after the last.

        Args:
            num_ranks: ranks of each address.
        """
        for name in names:
            rank = next((each for each in range(num_ranks) if self._lacks(name, each)), None)
            if rank is not None:
                raise ConfigError(
                    f"--kv-events: rank {rank} of {name} has no port: give tcp://*:PORT with PORT + {rank} up"
                    f" to {_LAST_PORT}, or {name}@{rank}=tcp://HOST:PORT"
                )

    def _lacks(self, name: str, rank: int) -> bool:
        """Return whether rank 0 of an address has an endpoint, and `rank` has none."""
        first, own = self.of(name, "", 0), self.of(name, "", rank)
        if first is None:
            return False
        return own is None or (first.replay is not None and own.replay is None)

    def of(self, name: str, host: str, rank: int | None = None) -> KvSource | None:
        """Return the endpoints of an engine, or None for an engine without KV events.

        Args:
            name: name of the engine's address.
            host: host of the address.
            rank: number of the data-parallel rank at the address; None means that it has one engine.
        """
        events = self._endpoint(self._events, name, host, rank)
        return None if events is None else KvSource(events, self._endpoint(self._replay, name, host, rank))

    def _endpoint(self, given: Mapping[str, str], name: str, host: str, rank: int | None) -> str | None:
        if rank is not None and (own := given.get(f"{name}@{rank}")):
            return _endpoint_at(own, host)
        endpoint = given.get(name, given.get(_ALL))
        shifted = None if endpoint is None else _endpoint_of_rank(endpoint, rank or 0)
        return None if shifted is None else _endpoint_at(shifted, host)


def _by_engine(flag: str, given: Collection[str]) -> dict[str, str]:
    endpoints: dict[str, str] = {}
    for text in given:
        name, separator, endpoint = text.partition("=")
        if not separator:
            name, endpoint = _ALL, text
        if not _ENDPOINT.fullmatch(endpoint) or (endpoint.startswith("tcp:") and not _port_is_real(endpoint)):
            raise ConfigError(f"{flag} {text}: give tcp://*:PORT for all engines, or NAME=tcp://HOST:PORT for one")
        if name == _ALL and "*" not in endpoint:
            raise ConfigError(f"{flag} {text}: name the engine, NAME={endpoint}; tcp://*:PORT stands for all engines")
        if name in endpoints:
            raise ConfigError(f"{flag} {text}: {endpoints[name]} is already given for the same engines")
        endpoints[name] = endpoint
    return endpoints


def _port_is_real(endpoint: str) -> bool:
    return 0 < int(endpoint.rpartition(":")[2]) <= _LAST_PORT


def _endpoint_of_rank(endpoint: str, rank: int) -> str | None:
    """Return the endpoint of a data-parallel rank, where rank 0 publishes at `endpoint`; None: it cannot have one."""
    before, _, port = endpoint.rpartition(":")
    if not rank:
        return endpoint
    if not endpoint.startswith("tcp:") or int(port) + rank > _LAST_PORT:
        return None
    return f"{before}:{int(port) + rank}"


def _endpoint_at(endpoint: str, host: str) -> str:
    return endpoint.replace("//*:", f"//{in_address(host)}:")
