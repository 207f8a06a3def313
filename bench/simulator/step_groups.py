"""Compares route policies on engines that begin every step together, at 50 to 120 % of saturation.

    python bench/simulator/step_groups.py [--seeds 5] [--requests 300] [--loads chat,coder] [--shares 0.5,0.75] \\
        [--json FILE]

Everything is simulated: one group of eight H20 engines that share the experts of Qwen3-30B-A3B, production router and
schedulers, every generated load. Saturation is the rate at which the group answers under `least_loaded` when all
requests arrive at once. `moestro, engines alone` is the policy without its knowledge of the group. Each policy gets the
signals of `moestro serve`: figures with the output of every step, and KV events. The first quarter of the requests is
in no latency; throughput is that of the middle half of the answers.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from moestro.config.run_record import run_record
from moestro.core.rng import Draws
from moestro.routing.policies.moestro import Moestro
from moestro.routing.policy_contract import Choice, RouteView
from moestro.routing.registry import ROUTE_POLICIES, policy_from
from moestro.sim.results import Results
from moestro.sim.scenario import at_load, make_scenario, run
from moestro.sim.settings import PolicySettings, SimEngineSettings, SimSettings, WorkloadSettings
from moestro.sim.signals import ChannelSettings, SignalSettings
from moestro.workload.generated.sessions import SHAPES

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save

LEAD_IN = 0.25
NUM_RANKS, BLOCK_SIZE = 8, 64


@ROUTE_POLICIES.register(
    "moestro-alone", "Takes the least delay, as if each engine began its steps alone.", source="this bench"
)
class EnginesAlone(Moestro):
    """The policy `moestro` on engines of which it does not know that they step together."""

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """Implement `RoutePolicy.decide`."""
        engines = replace(view.engines, group=None)
        return super().decide(msgspec.structs.replace(view, engines=engines), draws)


POLICIES = {
    "least_loaded": "least_loaded",
    "lmetric": "lmetric",
    "moestro, engines alone": "moestro-alone",
    "moestro": "moestro",
}


def policy_settings(name: str, route: str) -> PolicySettings:
    """Return a policy with the figures that it reads, with the output of every step."""
    figures = tuple(each for each in policy_from(route).needs.figures if each != "expert_pressure")
    channels = (ChannelSettings(figures=figures),) if figures else ()
    return PolicySettings(name=name, route=route, signals=SignalSettings(channels=channels, kv_events_delay_ms=0.0))


def figures_of(results: Results) -> dict[str, float]:
    """Return latencies, hits and throughput of one run, without its beginning."""
    assert results.is_answered.all(), results.refusals
    rows = np.argsort(results.arrival_ns)[int(LEAD_IN * len(results)) :]
    ttft_ms = (results.first_token_ns - results.arrival_ns)[rows] / 1e6
    gaps = results.num_tokens[rows].astype(np.int64) - 1
    spans = (results.last_token_ns - results.first_token_ns)[rows] / 1e6
    ends = np.argsort(results.last_token_ns)
    middle = ends[len(ends) // 4 : 3 * len(ends) // 4]
    seconds = (results.last_token_ns[middle[-1]] - results.last_token_ns[middle[0]]) / 1e9
    return {
        "ttft_mean_ms": float(ttft_ms.mean()),
        "ttft_p99_ms": float(np.percentile(ttft_ms, 99)),
        "tpot_mean_ms": float((spans[gaps > 0] / gaps[gaps > 0]).mean()),
        "hit_ratio": float(results.num_hit_tokens[rows].sum() / results.num_prompt_tokens[rows].sum()),
        "tokens_per_s": float(results.num_tokens[middle].sum() / seconds),
        "last_end_s": float(results.last_token_ns.max() / 1e9),
    }


def cells(
    load: str, num_requests: int, shares: tuple[float, ...], seed: int
) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Yield the share of saturation, the policy and the figures of each run of one load."""
    settings = SimSettings(
        workload=WorkloadSettings(sessions=load, num_requests=num_requests, load=1.0),
        engines=SimEngineSettings(count=1, ep_ranks=NUM_RANKS, block_size=BLOCK_SIZE),
        policies=(policy_settings("least_loaded", "least_loaded"),),
        seed=seed,
    )
    full, _ = at_load(settings, Path())
    assert full.workload.rate is not None
    for share in shares:
        workload = msgspec.structs.replace(full.workload, rate=share * full.workload.rate)
        scenario = make_scenario(msgspec.structs.replace(full, workload=workload), Path())
        for name, route in POLICIES.items():
            yield f"{share:.0%}", name, figures_of(run(scenario, policy_settings(name, route)))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0, help="5: none on which the score was chosen")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--loads", default=",".join(SHAPES))
    parser.add_argument("--shares", default="0.5,0.75,1.0,1.2", help="of saturation")
    args = parser.parse_args()
    shares = tuple(float(share) for share in args.shares.split(","))
    rounds: list[dict[str, object]] = []
    conditions = run_record("simulated")
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    for nth, seed in enumerate(seeds, 1):
        for load in args.loads.split(","):
            for share, name, figures in cells(load, args.requests, shares, seed):
                rounds.append({"load": load, "share": share, "policy": name, "seed": seed, **figures})
                found.setdefault(f"{load}, {share}", {}).setdefault(name, []).append(figures)
                print(load, share, name, seed, figures, file=sys.stderr, flush=True)
        measured = {"first_seed": args.first_seed, "seeds": nth, "requests": args.requests, "rounds": rounds}
        save(args.json, conditions, measured)  # after each seed
    means = {
        cell: {name: {key: statistics.mean(each[key] for each in runs) for key in runs[0]} for name, runs in of.items()}
        for cell, of in found.items()
    }
    for cell, of in means.items():
        print(f"\n{cell}\n| policy | TTFT mean, ms | P99, ms | TPOT, ms | tokens/s | hits |\n|---|---|---|---|---|---|")
        for name, each in of.items():
            print(
                f"| {name} | {each['ttft_mean_ms']:,.0f} | {each['ttft_p99_ms']:,.0f} | {each['tpot_mean_ms']:.1f} |"
                f" {each['tokens_per_s']:,.0f} | {each['hit_ratio']:.1%} |"
            )


if __name__ == "__main__":
    main()
