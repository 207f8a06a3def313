"""Settings of the exchange with other routers."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from cyclopts import Group, Parameter

from moestro.core.setting_checks import CheckedSettings, between
from moestro.errors import ConfigError
from moestro.web.settings import CertificateFiles

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
