"""The settings of the endpoint picker. A docstring under a field is its text in `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from moestro.core.setting_checks import PORT, CheckedSettings
from moestro.web.settings import CertificateFiles

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
