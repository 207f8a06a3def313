"""The figures of `moestro serve` for the page at `/`."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

import numpy as np

from moestro.config.serve_settings import ServeSettings
from moestro.core.clock import NS_PER_S
from moestro.core.model_info import ModelInfo
from moestro.server.engines.engine_client import EngineClient
from moestro.server.engines.expert_loads import GroupLoad
from moestro.server.engines.metrics import Metrics
from moestro.server.engines.traffic import Traffic
from moestro.web.prometheus import merge
from moestro.web.statistics import Durations, EngineStatistics, ExpertHeat, LiveStatistics

_DIGITS = 3  # of an expert's load relative to its layer


@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """Reads the figures from the API server's own state, without waiting for an engine.

    Attributes:
        listener: Socket of the clients' port.
    """

    settings: ServeSettings
    engines: EngineClient
    metrics: Metrics
    traffic: Traffic
    info: ModelInfo
    listener: socket.socket

    def read(self, with_experts: bool) -> LiveStatistics:  # noqa: FBT001 - the only argument
        """Return the present figures. The load of experts is the one that an earlier call requested."""
        now_ns, metrics, routing = time.monotonic_ns(), self.metrics, self.settings.routing
        has_experts, experts = self.info.num_experts > 0, None
        if with_experts and has_experts:
            self.engines.expert_loads.refresh(now_ns)
            merged = self.engines.expert_loads.merged()
            experts = None if merged is None else _heat(merged)
        return LiveStatistics(
            program="serve",
            policy=routing.route_score or routing.route_policy,
            mode=self.settings.stepping.mode,
            time_s=now_ns / NS_PER_S,
            num_requests=self.traffic.num_answering,
            num_refused=metrics.refusals.total(),
            num_client_errors=metrics.refusals.num_client_errors,
            num_overload=metrics.refusals.num_overload,
            num_retried=sum(each.num_moved for each in metrics.engines),
            first_token_s=Durations.of(merge(each.first_token_s.values()) for each in metrics.engines),
            gap_s=Durations.of(each.gap_s for each in metrics.engines),
            clients_port=self.listener.getsockname()[1],
            operators_port=self.settings.server.admin_port,
            engines=[self._engine(engine) for engine in range(len(metrics.engines))],
            has_experts=has_experts,
            experts=experts,
        )

    def _engine(self, engine: int) -> EngineStatistics:
        own = self.metrics.engines[engine]
        return EngineStatistics(
            name=f"engine {engine}",
            condition="up" if self.engines.is_routable(engine) else "down",
            breaker=None,
            num_in_flight=self.engines.num_in_flight_on(engine),
            num_requests=sum(own.ended.values()),
            num_prompt_tokens=own.num_prompt_tokens,
            num_cached_tokens=own.num_cached_tokens,
            num_generated_tokens=own.num_generated_tokens,
            prompt_token_s=own.prefill_s.total / own.computed_tokens.total if own.computed_tokens.total else None,
            load=self.engines.loads[engine],
        )


def _heat(merged: GroupLoad) -> ExpertHeat:
    total = merged.load.total
    mean = total.mean(axis=1)
    relative = np.divide(total, mean[:, None], out=np.zeros_like(total), where=mean[:, None] > 0)
    return ExpertHeat(
        layers=merged.layers.tolist(),
        tokens=mean.tolist(),
        relative=np.round(relative, _DIGITS).tolist(),
        num_steps=float(merged.load.num_steps),
    )
