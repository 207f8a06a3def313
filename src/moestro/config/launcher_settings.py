"""The settings of what starts the processes of `moestro serve`. A docstring under a field is its text in `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from moestro.core.setting_checks import CheckedSettings, at_least, between
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
