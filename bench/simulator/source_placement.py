"""Shows what placement gains from knowing the sources of tokens: where sources differ, and where they are shuffled.

    python bench/simulator/source_placement.py [--seeds 5] [--json bench/results/simulator/source_placement.json]

Everything is simulated. Each attention rank is a source, on the device of its number. Where sources differ, 90 % of the
tokens of a machine's ranks have tasks of the machine's own kind, which prefers experts of its own (`from_clusters` of
`placement_loads.py`). Shuffled, each of the same visits gets a source at random, so that all ranks send the same mix.
A policy plans on one window and is scored on the next one, whose visits are drawn anew. Its blind twin is the same
policy on the mean of all sources. Prices are H100, NVSwitch and one 400 Gb/s port a GPU; layers are cut to save time.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from moestro.config.run_record import run_record
from moestro.core.experts.expert_load import ExpertLoad
from moestro.placement.contract import PLACE_POLICIES
from moestro.placement.score import score

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from placement_loads import DEEPSEEK_V3, QWEN3_30B, Bed, from_clusters, load_of
from shared.results import make_parser, save

NUM_LAYERS = 2
STICKY = 0.9  # fraction of a machine's tokens that come from the kind of task that the machine prefers
SMALL = Bed(replace(QWEN3_30B, num_layers=NUM_LAYERS), num_devices=8, num_slots=18, num_nodes=2)
LARGE = Bed(replace(DEEPSEEK_V3, num_layers=NUM_LAYERS), num_devices=32, num_slots=9, num_nodes=4)
POLICIES = {SMALL: ("gimbal_v2", "moestro"), LARGE: ("moestro",)}  # gimbal_v2 takes minutes for the large one
SOURCES = ("differ", "shuffled")
BLIND = " without sources"
Figures = dict[str, float]


def window(mean: ExpertLoad, rng: np.random.Generator, *, is_shuffled: bool) -> ExpertLoad:
    """Draw the visits of one window; shuffled, each of them gets a source at random."""
    visits = rng.poisson(mean.tokens)
    if is_shuffled:
        num_sources = len(visits)
        drawn = rng.multinomial(visits.sum(axis=0), np.full(num_sources, 1 / num_sources))
        visits = np.moveaxis(drawn, -1, 0)
    return load_of(visits.astype(np.float64))


def without_sources(load: ExpertLoad) -> ExpertLoad:
    """Return the same load, as if all sources sent the same mix."""
    return replace(load, tokens=np.broadcast_to(load.tokens.mean(axis=0), load.tokens.shape).copy())


def run(bed: Bed, seed: int, *, is_shuffled: bool) -> dict[str, Figures]:
    """Plan with every policy, and score the plans under the next window."""
    rng = np.random.default_rng([3, seed])
    mean = from_clusters(bed, STICKY, rng)
    now, later = (window(mean, rng, is_shuffled=is_shuffled) for _ in range(2))
    seen = {"static": ("static", now), "eplb": ("eplb", now)}
    for name in POLICIES[bed]:
        seen[name + BLIND], seen[name] = (name, without_sources(now)), (name, now)
    found = {}
    for name, (policy, load) in seen.items():
        table = PLACE_POLICIES.make(policy)(bed.view(load))
        scored = score(later, table, bed.devices, bed.model.prices)
        found[name] = {
            "rows_between_nodes": scored.far_share,
            "balance": scored.mean_balance,
            "step_us_per_layer": 1e6 * scored.step_s / NUM_LAYERS,
        }
    return found


def mean_of(figures: list[Figures]) -> Figures:
    """Return the mean of each figure over the seeds."""
    return {name: round(statistics.mean(each[name] for each in figures), 4) for name in figures[0]}


def gains(runs: list[dict[str, Figures]], policy: str) -> dict[str, list[float]]:
    """Fractions by which a policy has fewer rows between nodes, and a shorter step, than its blind twin, by seed."""
    return {
        name: [round(1 - each[policy][figure] / each[policy + BLIND][figure], 4) for each in runs]
        for name, figure in (("rows", "rows_between_nodes"), ("step", "step_us_per_layer"))
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    conditions = run_record("simulated")
    found: dict[str, object] = {"seeds": args.seeds}
    for bed, policies in POLICIES.items():
        for sources in SOURCES:
            runs = [run(bed, seed, is_shuffled=sources == "shuffled") for seed in range(args.seeds)]
            means = {name: mean_of([each[name] for each in runs]) for name in runs[0]}
            gained = {name: gains(runs, name) for name in policies}
            found[f"{bed.name}, sources {sources}"] = {"mean": means, "gain_over_blind_twin": gained}
            print(f"{bed.name} ({bed.num_nodes} machines), sources {sources}")
            for name, figures in means.items():
                print(f"  {name:28}", ", ".join(f"{figure} {value:.3f}" for figure, value in figures.items()))
            for name, parts in gained.items():
                print(f"  {name} over its blind twin:", ", ".join(f"{part} {values}" for part, values in parts.items()))
    save(args.json, conditions, found)


if __name__ == "__main__":
    main()
