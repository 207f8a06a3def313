"""A load balancer of verl (`rollout.router_config_path`) that chooses servers by a routing policy of Moestro."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from moestro.core.hashing import hash_blocks, hash_key
from moestro.core.request import Request, SamplingParams
from moestro.errors import MoestroError, NoEngineError
from moestro.routing.policies.moestro import Moestro, MoestroConstants
from moestro.routing.registry import policy_from
from moestro.routing.router import Router as EngineRouter
from moestro.routing.settings import RouterSettings

_MODEL_KEY = hash_key("rollout")  # One model at a time: a phase switch forgets all prompts.


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The keys of the YAML file beside `router_class`.

    Attributes:
        route_policy: Policy of `moestro route`, with settings if any (`lmetric`, `bounded_hash:bound=1.25`).
        route_score: Expression over indicators in place of a policy; the lowest value wins.
        answer_tokens: Mean length of answers, by which `moestro` weighs servers' batches; verl reports no lengths.
        block_size: Tokens of a KV block of the servers.
        seed: Random seed of draws between equal servers.
    """

    route_policy: str = "moestro"
    route_score: str | None = None
    answer_tokens: int = 4096
    block_size: int = 16
    seed: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Settings:
        """Read the file that verl has loaded.

        Raises:
            ValueError: A key is unknown or a value cannot be used.
        """
        known = [field.name for field in fields(cls)]
        given = {key: value for key, value in config.items() if key != "router_class"}
        if unknown := sorted(given.keys() - known):
            raise ValueError(f"moestro_verl.Router knows no {', '.join(unknown)}: give {', '.join(known)}")
        return cls(**given)


class Router:
    """Chooses a rollout server for each request of a trajectory. verl makes a Ray actor of it.

    Prompts of one GRPO group share their prefix, so they meet the cache of one server, as long as its load allows it.
    Its view of caches is a prediction from the prompts that it has sent; `clear_sticky_cache`, which verl calls when
    weights change, forgets it.

    Args:
        servers: Handles of the servers by name.
        config: The YAML file, see `Settings`.

    Raises:
        ValueError: The file cannot be used; the text names the key.
    """

    def __init__(self, servers: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        settings = Settings.of(config)
        self._block_size = settings.block_size
        try:
            policy = policy_from(settings.route_policy, settings.route_score)
            if isinstance(policy, Moestro):
                policy = Moestro(MoestroConstants(first_answer_tokens=settings.answer_tokens))
            self._router = EngineRouter(policy, RouterSettings(block_size=settings.block_size, seed=settings.seed))
        except MoestroError as error:
            raise ValueError(f"moestro_verl.Router: {error}") from None
        self._rows: dict[str, int] = {}
        self._handles: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._serials = itertools.count()
        # Requests in flight by server and trajectory: a trajectory begins its next turn before verl has released the
        # one before, so each may have several.
        self._running: dict[tuple[str, str], deque[str]] = {}
        self.add_servers(servers)

    # --- verl's protocol (`verl.workers.rollout.router.RequestLoadBalancer`)

    def require_acquire_fields(self) -> list[str]:
        """Return the fields of `generate` that decisions read."""
        return ["prompt_ids"]

    def require_release_fields(self) -> list[str]:
        """Return the fields that `release_server` reads."""
        return ["request_id"]

    def acquire_server(self, request_id: str, prompt_ids: Sequence[int] = (), **_: Any) -> tuple[str, Any]:
        """Choose a server.

        Args:
            request_id: Name of the trajectory, equal for all of its turns.
            prompt_ids: Tokens of the prompt, earlier turns included.

        Returns:
            Name and handle of the server.

        Raises:
            RuntimeError: There is no server.
        """
        tokens = np.asarray(prompt_ids, np.int32)
        request = Request(
            request_id=f"{request_id}#{next(self._serials)}",
            num_prompt_tokens=max(1, len(tokens)),
            sampling=SamplingParams(),
            arrival_ns=time.monotonic_ns(),
            block_hashes=hash_blocks(_MODEL_KEY, tokens, self._block_size),
            session_id=request_id,
        )
        try:
            decision = self._router.submit(request, request.arrival_ns)
        except NoEngineError:
            raise RuntimeError("No available servers in load balancer") from None
        name = self._names[decision.engine]
        self._running.setdefault((name, request_id), deque()).append(request.request_id)
        return name, self._handles[name]

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Record the end of a request. One that is not in flight has no effect."""
        key = (server_id, "" if request_id is None else request_id)
        running = self._running.get(key)
        if running is None:
            return
        self._router.ended(running.popleft(), time.monotonic_ns())
        if not running:
            del self._running[key]

    def add_servers(self, servers: Mapping[str, Any]) -> None:
        """Add servers, or replace the handles of known ones."""
        for name, handle in servers.items():
            self._handles[name] = handle
            if name not in self._rows:
                row = self._rows[name] = self._router.add_engine()
                self._names[row] = name
                self._router.set_routable(row, routable=True)

    def remove_servers(self, server_ids: Iterable[str]) -> None:
        """Remove servers. Their requests in flight still count there until they are released."""
        for name in server_ids:
            row = self._rows.pop(name, None)
            if row is not None:
                del self._handles[name]
                self._router.remove_engine(row, time.monotonic_ns())

    def get_all_servers(self) -> list[str]:
        """Return the names of all servers."""
        return list(self._rows)

    def get_inflight_count(self, server_id: str) -> int:
        """Return the number of requests in flight on one server."""
        row = self._rows.get(server_id)
        return 0 if row is None else self._router.num_in_flight_on(row)

    def get_total_inflight(self) -> int:
        """Return the number of requests in flight on all servers."""
        return sum(map(self.get_inflight_count, self._rows))

    def get_status(self) -> dict[str, Any]:
        """Return the state of the load balancer, for people."""
        return {
            "servers": {name: self.get_inflight_count(name) for name in self._rows},
            "total_inflight": self.get_total_inflight(),
            "active_servers": len(self._rows),
            "registered_handles": list(self._handles),
        }

    def clear_sticky_cache(self) -> dict[str, Any]:
        """Forget which server holds which prompts: the servers' caches are void, because the weights have changed."""
        num_prompts = sum(len(self._router.prompts_sent(row)) for row in self._rows.values())
        for row in self._rows.values():
            self._router.engine_lost(row, time.monotonic_ns())
        return {"cleared_entries": num_prompts, "server_loads": self.get_status()["servers"]}
