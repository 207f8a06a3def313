"""Several routers on virtual time: their messages arrive late or never, and no request is counted for ever."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.routers import BLOCK_SIZE, request

from moestro.core.load_figures import LoadFigures
from moestro.errors import ConfigError
from moestro.routing.registry import ROUTE_POLICIES
from moestro.routing.router import Router
from moestro.routing.settings import RouterSettings
from moestro.sim.scenario import make_scenario, run
from moestro.sim.settings import PolicySettings, SimEngineSettings, SimSettings, WorkloadSettings
from moestro.sim.signals import RouterFleet, RouterLinks

MS = 1_000_000


def fleet(num: int, links: RouterLinks, policy: str = "least_loaded") -> RouterFleet:
    def make() -> Router:
        router = Router(ROUTE_POLICIES.make(policy), RouterSettings(block_size=BLOCK_SIZE))
        for _ in range(4):
            router.set_routable(router.add_engine(), routable=True)
        return router

    return RouterFleet(make, num, links, seed=0)


def spread_of(made: RouterFleet, pause_ns: int) -> list[int]:
    """Requests on each engine after 40 that do not end, sent at intervals."""
    chosen = [made.submit(request(f"r{i}"), i * pause_ns).engine for i in range(40)]
    return sorted(chosen.count(engine) for engine in range(4))


def test_routers_that_know_of_each_other_spread_requests_as_one_does():
    assert spread_of(fleet(1, RouterLinks(None)), 100 * MS) == [10] * 4
    assert spread_of(fleet(3, RouterLinks(MS)), 100 * MS) == [10] * 4
    assert spread_of(fleet(3, RouterLinks(None)), 100 * MS) != [10] * 4
    apart, late = (spread_of(fleet(3, links), 100 * MS) for links in (RouterLinks(None), RouterLinks(5000 * MS)))
    assert apart == late, "no message arrives in time"


@pytest.mark.parametrize("loss", [0.0, 0.5])
def test_counts_return_to_zero(loss):
    made = fleet(3, RouterLinks(20 * MS, loss), "lmetric")
    for i in range(60):
        made.submit(request(f"r{i}", prompt=range(64)), i * MS)
    for i in range(60):
        made.first_token(f"r{i}", (100 + i) * MS)
    for i in range(59):
        made.ended(f"r{i}", (200 + i) * MS, 5)
    for i in range(100):  # time passes while one request is in flight
        made.report(0, LoadFigures(), (1000 + 100 * i) * MS, (1000 + 100 * i) * MS)
    assert [int(router.table.num_in_flight.sum()) for router in made._routers] == [1, 1, 1]
    made.ended("r59", 20_000 * MS, 5)
    made.report(0, LoadFigures(), 21_000 * MS, 21_000 * MS)
    if not loss:  # the last message may be lost, and no further one follows
        assert [int(router.table.num_in_flight.sum()) for router in made._routers] == [0, 0, 0]


def test_a_simulation_with_several_routers_answers_all_and_is_deterministic():
    settings = SimSettings(
        workload=WorkloadSettings(sessions="chat", num_requests=60, rate=20.0),
        engines=SimEngineSettings(count=3, max_num_seqs=8),
        policies=(PolicySettings(),),
    )
    scenario = make_scenario(settings, Path())
    policy = PolicySettings(routers=3, router_delay_ms=20, router_loss=0.2)
    one, again = run(scenario, policy), run(scenario, policy)
    assert one.is_answered.all()
    assert (one.last_token_ns == again.last_token_ns).all()
    with pytest.raises(ConfigError, match="queue_policy needs one router, and routers is 3"):
        run(scenario, PolicySettings(routers=3, queue_policy="fcfs"))
    with pytest.raises(ConfigError, match="router_loss"):
        PolicySettings(router_loss=1.0)
