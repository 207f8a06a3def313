"""Varies each constant of the route policy `moestro` on one window of sessions, and scores the best on another one.

    python bench/simulator/moestro_constants.py [--requests 400] [--json FILE]

Everything is simulated: eight H20 engines with Qwen3-30B-A3B, production router and schedulers, generated sessions in
closed loop, figures with the output of every step. The cost of a run is its mean TTFT and its mean TPOT, each over that
of the policy's own constants, in the geometric mean of both and of all loads; below 1 is better. A value is chosen on
the windows of seed 0 and scored on those of seed 1, at which nothing was looked before. The first quarter of the
requests finds cold caches and is in no figure.
"""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, replace
from pathlib import Path

from moestro.config.run_record import run_record
from moestro.routing.policies.moestro import CONSTANTS, Moestro, MoestroConstants
from moestro.routing.router import Router
from moestro.routing.settings import EngineSpec, RouterSettings
from moestro.sim.cluster import Cluster
from moestro.sim.groups.group import Group
from moestro.sim.scenario import Scenario, make_scenario
from moestro.sim.settings import SimEngineSettings, SimSettings, WorkloadSettings
from moestro.sim.signals import ChannelSettings, SignalSettings

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save
from simulator.session_pauses import figures_of

CHOOSE_SEED, SCORE_SEED = 0, 1
LOADS = {"chat": 25.0, "coder": 8.0, "coding_agent": 1.2}  # shapes, and requests a second of all engines
NUM_ENGINES, BLOCK_SIZE = 8, 64
VARIANTS: dict[str, tuple[MoestroConstants, ...]] = {
    "horizon": tuple(replace(CONSTANTS, horizon=value) for value in (64, 256, 4096)),
    "rounds": tuple(replace(CONSTANTS, rounds=value) for value in (1, 4, 64, 256)),
    "decode_weight": tuple(replace(CONSTANTS, decode_weight=value) for value in (0.0, 1.0, 4.0)),
    "least_weight": tuple(replace(CONSTANTS, least_weight=value) for value in (0.0, 2.0, 4.0)),
    "first_answer_tokens": tuple(replace(CONSTANTS, first_answer_tokens=value) for value in (1.0, 256.0)),
}
FRESH_S = (1.0, 2.0, 20.0)  # variants of the age up to which a report counts; 5 s is the router's own


def scenario_of(shape: str, rate: float, num_requests: int, seed: int) -> Scenario:
    return make_scenario(
        SimSettings(
            workload=WorkloadSettings(sessions=shape, num_requests=num_requests, rate=rate),
            engines=SimEngineSettings(count=NUM_ENGINES, block_size=BLOCK_SIZE),
            seed=seed,
        ),
        Path(),
    )


def run_with(scenario: Scenario, constants: MoestroConstants, fresh_s: float = 5.0) -> dict[str, float]:
    """Run a scenario under the policy with these constants."""
    policy = Moestro(constants)
    figures = tuple(name for name in policy.needs.figures if name != "expert_pressure")
    settings = RouterSettings(block_size=BLOCK_SIZE, seed=scenario.seed, fresh_ns=int(fresh_s * 1e9))
    router = Router(policy, settings)
    for _ in range(NUM_ENGINES):
        router.set_routable(router.add_engine(EngineSpec(num_blocks=scenario.bounds.num_blocks)), routable=True)
    groups = [Group(scenario.bounds, scenario.prices) for _ in range(NUM_ENGINES)]
    cluster = Cluster(groups, router, SignalSettings(channels=(ChannelSettings(figures=figures),)))
    return figures_of(cluster.run(scenario.workload, scenario.arrivals))


def cost(runs: list[dict[str, float]], base: list[dict[str, float]]) -> float:
    """Return the geometric mean of TTFT and TPOT over those of `base`, of all loads."""
    ratios = [
        math.log(run[key] / own[key])
        for run, own in zip(runs, base, strict=True)
        for key in ("ttft_mean_ms", "tpot_mean_ms")
    ]
    return math.exp(sum(ratios) / len(ratios))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=400)
    args = parser.parse_args()
    windows = {
        seed: [scenario_of(shape, rate, args.requests, seed) for shape, rate in LOADS.items()]
        for seed in (CHOOSE_SEED, SCORE_SEED)
    }
    base = {seed: [run_with(each, CONSTANTS) for each in window] for seed, window in windows.items()}
    rows: list[dict[str, object]] = []

    def add(name: str, value: float, constants: MoestroConstants, fresh_s: float = 5.0) -> None:
        found = {
            seed: cost([run_with(each, constants, fresh_s) for each in window], base[seed])
            for seed, window in windows.items()
        }
        rows.append({"constant": name, "value": value, "chosen_on": found[CHOOSE_SEED], "scored_on": found[SCORE_SEED]})
        print(f"| `{name}` | {value:g} | {found[CHOOSE_SEED]:.3f} | {found[SCORE_SEED]:.3f} |", flush=True)

    print("| constant | value | cost, window 1 | cost, window 2 |\n|---|---|---|---|")
    for name, variants in VARIANTS.items():
        for constants in variants:
            add(name, asdict(constants)[name], constants)
    for fresh_s in FRESH_S:
        add("fresh_s", fresh_s, CONSTANTS, fresh_s)
    figures = {"requests": args.requests, "own": asdict(CONSTANTS) | {"fresh_s": 5.0}, "base": base, "variants": rows}
    save(args.json, run_record("simulated"), figures)


if __name__ == "__main__":
    main()
