"""The settings of engine discovery. A docstring under a field is its text in `--help`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from moestro.core.setting_checks import PORT, CheckedSettings, above, at_least
from moestro.errors import ConfigError

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
