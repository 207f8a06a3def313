"""Simulates engines of unequal speed behind a router that learns their speeds, and equal ones that must stay equal.

    python bench/simulator/unlike_engines.py [--seeds 5] [--requests 600] [--loads chat,tool_agent] [--json FILE]

Everything is simulated: Qwen3-30B-A3B on twelve engines with KV memory of one size, production router and schedulers,
chats, calls of tools and coding agents. The unlike fleet has eight A100 and four H100 engines, the equal one has twelve
A100. Saturation is the rate at which a fleet answers under `least_loaded` when all requests arrive at once.
`not learnt` is the policy with speed 1 for all engines, `configured` has the ratio of the peaks of the two cards. The
first quarter of the requests is in no figure.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from moestro.config.run_record import run_record
from moestro.cost.gpus import gpu_named
from moestro.routing.router import Router
from moestro.routing.settings import EngineSpec, RouterSettings
from moestro.sim.cluster import AtTimes, Cluster
from moestro.sim.groups.group import Group
from moestro.sim.results import Results
from moestro.sim.scenario import Scenario, make_route_policy, make_scenario, middle_rate, route_inputs
from moestro.sim.settings import SimEngineSettings, SimSettings, WorkloadSettings
from moestro.workload.generated.sessions import Pace, Sessions

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save
from step_groups import figures_of, policy_settings

SLOW, FAST = "a100-80g", "h100"
FLEETS = {"8 slow, 4 fast": (SLOW,) * 8 + (FAST,) * 4, "12 equal": (SLOW,) * 12}
SHARES = {"8 slow, 4 fast": (0.5, 0.9), "12 equal": (0.75, 1.1)}
LOADS = ("chat", "tool_agent", "coding_agent")
NUM_BLOCKS, BLOCK_SIZE = 6000, 64


@dataclass(frozen=True)
class Case:
    """One policy, and what the router is given of an engine by its card."""

    route: str
    spec: Callable[[str], EngineSpec]


def of_peaks(card: str) -> EngineSpec:
    """Return the ratio of the peaks, against the mean of the unlike fleet."""
    peaks = {name: gpu_named(name).bf16_flops_per_s for name in (SLOW, FAST)}
    return EngineSpec(speed=peaks[card] / statistics.mean(peaks[each] for each in FLEETS["8 slow, 4 fast"]))


CASES = {
    "least_loaded": Case("least_loaded", lambda _: EngineSpec()),
    "moestro, not learnt": Case("moestro", lambda _: EngineSpec(speed=1.0)),
    "moestro, configured": Case("moestro", of_peaks),
    "moestro": Case("moestro", lambda _: EngineSpec()),
}


def scenarios(load: str, rate: float, num_requests: int, seed: int) -> dict[str, Scenario]:
    """Make the same load with the prices of each card."""
    workload = WorkloadSettings(sessions=load, num_requests=num_requests, rate=rate)
    return {
        card: make_scenario(
            SimSettings(
                workload=workload,
                engines=SimEngineSettings(gpu=card, count=1, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS),
                seed=seed,
            ),
            Path(),
        )
        for card in (SLOW, FAST)
    }


def serve(
    by_card: dict[str, Scenario], fleet: tuple[str, ...], case: Case, *, at_once: bool = False
) -> tuple[Results, Router]:
    """Run a load on a fleet."""
    policy, scenario = policy_settings(case.route, case.route), by_card[SLOW]
    settings = RouterSettings(block_size=BLOCK_SIZE, seed=scenario.seed)
    router = Router(make_route_policy(policy, route_inputs(scenario, policy)), settings)
    for card in fleet:
        spec = msgspec.structs.replace(case.spec(card), num_blocks=NUM_BLOCKS)
        router.set_routable(router.add_engine(spec), routable=True)
    groups = [Group(by_card[card].bounds, by_card[card].prices) for card in fleet]
    arrivals = scenario.arrivals
    if at_once:
        assert isinstance(arrivals, Sessions)
        order = np.argsort(arrivals.arrival_ns(Pace()), kind="stable")
        arrivals = AtTimes(np.arange(len(scenario.workload), dtype=np.int64), order)
    assert policy.signals is not None
    return Cluster(groups, router, policy.signals).run(scenario.workload, arrivals), router


def saturation(load: str, fleet: tuple[str, ...], num_requests: int, seed: int) -> float:
    """Return the most requests a second of a fleet."""
    rate = 1.0
    for _ in range(2):  # how soon conversations return depends on the rate
        results, _ = serve(scenarios(load, rate, num_requests, seed), fleet, CASES["least_loaded"], at_once=True)
        rate = middle_rate(results.last_token_ns[results.is_answered])
    return rate


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--loads", default=",".join(LOADS))
    args = parser.parse_args()
    rounds: list[dict[str, object]] = []
    conditions = run_record("simulated")
    for seed in range(args.seeds):
        for load in args.loads.split(","):
            for title, fleet in FLEETS.items():
                full = saturation(load, fleet, args.requests, seed)
                for share in SHARES[title]:
                    by_card = scenarios(load, share * full, args.requests, seed)
                    for name, case in CASES.items():
                        if title == "12 equal" and name == "moestro, configured":
                            continue
                        results, router = serve(by_card, fleet, case)
                        speeds = router.table.speed.round(3).tolist()
                        cell = {"load": load, "fleet": title, "share": share, "policy": name, "seed": seed}
                        rounds.append({**cell, **figures_of(results), "speeds": speeds})
                        print(rounds[-1], file=sys.stderr, flush=True)
        save(args.json, conditions, {"seeds": seed + 1, "requests": args.requests, "rounds": rounds})  # after each seed
    print("| fleet, load, share | policy | TTFT mean, ms | P99, ms | TPOT, ms | tokens/s |\n|---|---|---|---|---|---|")
    cells = dict.fromkeys((each["fleet"], each["load"], each["share"], each["policy"]) for each in rounds)
    for key in cells:
        runs = [each for each in rounds if (each["fleet"], each["load"], each["share"], each["policy"]) == key]
        mean = {
            name: statistics.mean(float(str(each[name])) for each in runs)
            for name in ("ttft_mean_ms", "ttft_p99_ms", "tpot_mean_ms", "tokens_per_s")
        }
        print(
            f"| {key[0]}, {key[1]}, {key[2]:.0%} | {key[3]} | {mean['ttft_mean_ms']:,.0f} |"
            f" {mean['ttft_p99_ms']:,.0f} | {mean['tpot_mean_ms']:.1f} | {mean['tokens_per_s']:,.0f} |"
        )


if __name__ == "__main__":
    main()
