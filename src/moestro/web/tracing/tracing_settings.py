"""The settings of traces, of both servers. A docstring under a field is its text in `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from cyclopts import Group, Parameter

from moestro.core.setting_checks import CheckedSettings
from moestro.errors import ConfigError

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
