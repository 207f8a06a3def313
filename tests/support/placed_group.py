"""A group of two workers with a fake migration, whose steps, loads and clock a test sets."""

from __future__ import annotations

import asyncio
import functools
from types import SimpleNamespace

import numpy as np
from support.expert_loads import PRICES
from support.fake_migration import FakeEngines, FakeMigration

from moestro.core.experts.expert_table import spread_evenly
from moestro.placement.live.control import DecisionOutcome, PlacementControl
from moestro.placement.live.plan import GroupView, PlaceableGroup, group_places
from moestro.placement.settings import LivePlacementSettings
from moestro.server.experts.live_placement import PlacementDriver
from moestro.server.experts.placement_views import LivePrices

NUM_WORKERS, NUM_LAYERS, NUM_EXPERTS = 2, 3, 8
LAYERS = (1, 2, 4)  # of the network; the others are dense
SECOND = 10**9
SKEWED = [40, 30, 20, 10, 1, 1, 1, 1]  # the first worker has 100 of 104 tokens
EVEN = [13] * 8


def tokens_of(shares: list[float]) -> np.ndarray:
    return np.tile(np.array(shares, float) * 100, (NUM_WORKERS, NUM_LAYERS, 1))


class PlacedGroup:
    """The group and what controls it."""

    def __init__(self, shares=SKEWED, policy: str = "eplb", **flags) -> None:
        table = spread_evenly(NUM_LAYERS, NUM_EXPERTS, list(range(NUM_WORKERS)), NUM_WORKERS)
        self.migration, self.engines = FakeMigration(table), FakeEngines(tokens_of(shares))
        settings = LivePlacementSettings(placement_policy=policy, **flags)
        self.control = PlacementControl(self.migration, settings)
        network = SimpleNamespace(name="a-network", groups=())
        self.prices = LivePrices(network=network, gpu="a-gpu", link="a-link", link_across="a-wire", prices=PRICES)
        places = group_places(range(NUM_WORKERS), range(NUM_WORKERS))
        self.now_ns, self.is_complete = 0, True
        group = PlaceableGroup(
            migration=self.migration,
            places=lambda: places,
            layers=lambda: LAYERS,
            is_complete=lambda: self.is_complete,
            has_shares=True,
        )
        view = GroupView(group, PRICES, settings.limits)
        self.driver = PlacementDriver(self.control, view, self.engines.loads, lambda: self.now_ns)

    def serve(self, num_steps: int, shares: list[float] | None = None) -> None:
        self.engines.num_steps += num_steps
        if shares is not None:
            self.engines.tokens = tokens_of(shares)

    def tick(self, seconds: float = 1.0) -> None:
        self.now_ns += int(seconds * SECOND)
        self.control.tick(self.now_ns)

    async def check(self) -> None:
        await self.driver.check()
        self.tick()

    @property
    def outcome(self) -> DecisionOutcome:
        return self.control.decision.outcome


def run(test):
    """Run an async test."""

    @functools.wraps(test)
    def running(**fixtures):
        return asyncio.run(test(**fixtures))

    return running
