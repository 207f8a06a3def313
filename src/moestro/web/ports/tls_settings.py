"""The settings of TLS at the port of clients, of both servers. A docstring under a field is its text in `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from moestro.core.setting_checks import CheckedSettings
from moestro.errors import ConfigError


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
