"""Settings of every server's ports: keys and limits of access, TLS, and tracing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from cyclopts import Group, Parameter

from moestro.core.setting_checks import CheckedSettings, at_least
from moestro.errors import ConfigError

# Access settings of both servers: limits for each key and address, and CORS.

_ACCESS = Group("Access", help="Keys, limits for each client, and the web pages that may send requests.")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class AccessSettings(CheckedSettings):
    """Keys of a file, limits for each client, and CORS. None means no limit."""

    api_key_file: Annotated[Path | None, Parameter(group=_ACCESS)] = None
    (
        "File with accepted keys and their tenants, KEY: TENANT on each line, or keys alone. A change counts within two"
        " seconds. Requests of one tenant share limits and places, whatever key and address they have."
    )
    max_requests_per_minute_per_key: Annotated[int | None, at_least(1), Parameter(group=_ACCESS)] = None
    "Most requests in a minute with one API key; a further one gets 429 and Retry-After. Needs --api-key or its file."
    max_requests_per_minute_per_address: Annotated[int | None, at_least(1), Parameter(group=_ACCESS)] = None
    "Most requests in a minute from one client address, or IPv6 /64 network; a proxy counts as one address."
    max_concurrent_requests_per_key: Annotated[int | None, at_least(1), Parameter(group=_ACCESS)] = None
    "Most concurrent requests with one API key; a further one gets 429. Needs --api-key or its file."
    max_connections_per_address: Annotated[int | None, at_least(1), Parameter(group=_ACCESS)] = None
    "Most concurrent connections from one client address; a further one gets 503."
    allowed_origins: Annotated[tuple[str, ...], Parameter(group=_ACCESS, consume_multiple=True, json_list=True)] = ()
    "Origins whose web pages may send requests (CORS), such as https://chat.example, or *. Unset: no CORS headers."
    allowed_methods: Annotated[tuple[str, ...], Parameter(group=_ACCESS, consume_multiple=True, json_list=True)] = (
        "*",
    )
    "HTTP methods that these pages may use."
    allowed_headers: Annotated[tuple[str, ...], Parameter(group=_ACCESS, consume_multiple=True, json_list=True)] = (
        "*",
    )
    "Headers that these pages may send."
    allow_credentials: Annotated[bool, Parameter(group=_ACCESS)] = False
    "Let these pages send credentials such as cookies; needs explicit origins."

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.allow_credentials and ("*" in self.allowed_origins or not self.allowed_origins):
            raise ConfigError("--allow-credentials needs --allowed-origins with explicit origins, not *")


# The settings of TLS at the port of clients, of both servers. A docstring under a field is its text in `--help`.


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """The files of a port's TLS, in PEM form, and the flags that name them.

    Attributes:
        prefix: Beginning of the flags, such as `--ssl`.
        certfile: The port's certificate and its chain; None means no TLS.
        keyfile: The certificate's key; None means that the certificate's file has it.
        ca_certs: Authorities of clients' certificates; None means that clients need none.

    Raises:
        ConfigError: A file is given that needs the certificate.
    """

    prefix: str
    certfile: Path | None
    keyfile: Path | None
    ca_certs: Path | None

    def __post_init__(self) -> None:
        for flag, file in (("keyfile", self.keyfile), ("ca-certs", self.ca_certs)):
            if file is not None and self.certfile is None:
                raise ConfigError(f"{self.prefix}-{flag} is for TLS: give {self.prefix}-certfile too, or leave it out")

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that are given."""
        return tuple(file for file in (self.certfile, self.keyfile, self.ca_certs) if file is not None)


_TLS = Group("TLS", help="HTTPS at the port of clients, and certificates of clients.")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TlsSettings(CheckedSettings):
    """TLS at the port of clients, with vLLM's names. Without a certificate the port speaks plain HTTP."""

    ssl_certfile: Annotated[Path | None, Parameter(group=_TLS)] = None
    "File with the server's certificate and its chain, in PEM form: the port then speaks HTTPS alone."
    ssl_keyfile: Annotated[Path | None, Parameter(group=_TLS)] = None
    "File with the private key of --ssl-certfile, in PEM form, without a password. Unset: the certificate's own file."
    ssl_ca_certs: Annotated[Path | None, Parameter(group=_TLS)] = None
    "File with the authorities whose certificates of clients are accepted, in PEM form."
    ssl_cert_reqs: Annotated[Literal[0, 1, 2] | None, Parameter(group=_TLS)] = None
    (
        "Whether clients need a certificate of --ssl-ca-certs. 0: none is read; 1: one that is sent must be valid; 2:"
        " each client needs one. Unset: 2 with --ssl-ca-certs, else 0."
    )
    ssl_ciphers: Annotated[str | None, Parameter(group=_TLS)] = None
    "Ciphers of TLS 1.2 in OpenSSL's form. Unset: Python's choice."
    enable_ssl_refresh: Annotated[bool, Parameter(group=_TLS)] = False
    "Read the files again when they change, so that new connections get a renewed certificate without a restart."

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.files  # Checks them.
        others = {
            "--ssl-cert-reqs": self.ssl_cert_reqs,
            "--ssl-ciphers": self.ssl_ciphers,
            "--enable-ssl-refresh": self.enable_ssl_refresh or None,
        }
        given = [flag for flag, value in others.items() if value is not None]
        if self.ssl_certfile is None and given:
            raise ConfigError(f"{given[0]} is for TLS: give --ssl-certfile too, or leave it out")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError(
                f"--ssl-cert-reqs {self.ssl_cert_reqs} checks clients' certificates: give --ssl-ca-certs with their"
                " authorities"
            )

    @property
    def files(self) -> CertificateFiles:
        """The files of the port."""
        return CertificateFiles("--ssl", self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)


# The settings of traces, of both servers. A docstring under a field is its text in `--help`.

_TRACES = Group("Traces", help="Spans of each request, for OpenTelemetry.")
_PATH = "/v1/traces"


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TracingSettings(CheckedSettings):
    """Settings of traces."""

    otlp_traces_endpoint: Annotated[str | None, Parameter(group=_TRACES)] = None
    (
        "Collector that gets a trace of each request by OTLP over HTTP, such as http://127.0.0.1:4318. Sampler, headers"
        " and service name are those of OpenTelemetry's environment variables. Needs the extra otel. Unset: no traces."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.url  # Checks it.

    @property
    def url(self) -> str | None:
        """URL to which spans are sent; None means that there are no traces.

        Raises:
            ConfigError: The endpoint is no URL of HTTP.
        """
        text = self.otlp_traces_endpoint
        if text is None:
            return None
        try:
            parts = urlsplit(text)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            is_url = False
        if not is_url:
            raise ConfigError(
                f"--otlp-traces-endpoint {text}: give http://HOST:4318, where the collector takes OTLP over HTTP (not"
                " gRPC, whose port is 4317)"
            )
        return text if parts.path.strip("/") else text.rstrip("/") + _PATH
