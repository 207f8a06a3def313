"""Sweeps the constants that decide in `moestro.placement`: each one alone, all others as they are.

    python bench/simulator/placement_constants.py --json bench/results/simulator/placement_constants.json
    python bench/simulator/placement_constants.py --only LEVELS KEPT

Every value plans the same seeded cases, of 12 layers each. Figures are computed by the traffic model, so a run repeats
them exactly; only the time is measured, as processor time of all plans together.

warm: after a drift (10 % noise) on 64 devices, from EPLB's placement. budget: the same with 15 % of the copies.
fresh: from vLLM's placement of the start. next: the fresh placement in the next window, with new shares alone.
swapped: on 32 devices after 15 % noise, with 10 % of the experts swapped; then also with 1 and 5 % of the copies, and
fresh at Zipf 0.4 with its next window, shares as they were. single: 128 experts on 8 devices without spare slots, after
10 % noise with 1, 3, 5 and 10 % of the copies; then fresh at Zipf 0.8, with its next window. dead: 4 of 64 devices die,
each alone. far: rows between nodes if these prefer different tasks. small: step of 12 problems of 9 to 40 slots against
the best value of this sweep. gimbal: objective of `gimbal_v2` on a large and four medium problems against the best
value of this sweep.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from moestro.config.run_record import run_record
from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import EMPTY
from moestro.placement.contract import PLACE_POLICIES, PlaceView
from moestro.placement.integer_program import objective_s
from moestro.placement.policies import gimbal, moestro
from moestro.placement.score import score
from moestro.placement.search import by_price, filling, packing, replicas, search

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import placement_loads as loads
from placement_loads import DEEPSEEK_V3, GPT_OSS_20B, QWEN3_30B, Bed
from shared.results import make_parser, save

NUM_LAYERS = 12
LARGE = Bed(replace(DEEPSEEK_V3, num_layers=NUM_LAYERS), 64, 5, 8)
MIDDLE = Bed(replace(DEEPSEEK_V3, num_layers=NUM_LAYERS), 32, 9, 4)
SINGLE = Bed(replace(QWEN3_30B, num_layers=NUM_LAYERS), 8, 16, 1)
TIGHT = Bed(replace(DEEPSEEK_V3, num_layers=NUM_LAYERS), 144, 2, 18)
SMALL = tuple(
    Bed(replace(GPT_OSS_20B, num_layers=1, num_experts=experts), devices, slots, nodes, rows_per_source=rows)
    for experts, devices, slots, nodes in ((5, 3, 3, 1), (8, 4, 3, 2), (32, 8, 5, 2))
    for rows in (256, 1024, 4096, 16_384)
)
Figures = dict[str, float]


@dataclass(frozen=True)
class Sweep:
    """Values of one constant, and the part of the cases that it can change."""

    module: ModuleType
    name: str
    values: tuple[float, ...]
    part: str = "moestro"


SWEEPS = (
    Sweep(moestro, "URGENT_TARGET", (0.94, 0.955, 0.97, 0.99)),
    Sweep(moestro, "FAR_OFF", (0.45, 0.55, 0.65, 0.75), "swapped"),
    Sweep(moestro, "MISSED_BY", (0.002, 0.01, 0.03)),
    Sweep(moestro, "CLOSER", (0.1, 0.25, 0.5, 1.0)),
    Sweep(search, "SHARE_STEPS", (1, 2, 3, 5, 8)),
    Sweep(filling, "RELIEF_SHARE_STEPS", (1, 2, 3)),
    Sweep(search, "LEVELS", (1, 2, 4, 6)),
    Sweep(search, "STALLED", (0.0, 0.003, 0.01, 0.05), "tight"),
    Sweep(packing, "SLOW", (0.0, 0.1, 0.2, 0.4)),
    Sweep(packing, "CYCLE", (2, 3, 4, 6), "single"),
    Sweep(search, "WIDEST", (1.0, 1.5, 2.5, 4.0), "single"),
    Sweep(search, "LIGHT_PART", (0.25, 0.5, 1.0), "single"),
    Sweep(search, "HEAVY_COPY", (0.0, 0.4, 0.6, 0.8), "swapped"),
    Sweep(search, "HEAVIER_COPY", (1.0, 1.05, 1.2, 1.5), "swapped"),
    Sweep(search, "STAY", (0.0, 0.1, 0.3)),
    Sweep(search, "NEAR", (0.0, 2.0, 8.0, 16.0)),
    Sweep(filling, "HARM_POWER", (2, 4, 8, 16, 32)),
    Sweep(filling, "NUM_SLOTS", (8, 16, 24, 64)),
    Sweep(filling, "RELIEFS", (1, 2, 3)),
    Sweep(filling, "COPIES_A_RELIEF", (1, 2, 4, 8)),
    Sweep(filling, "LEAST_RELIEF", (1e-4, 1e-3, 3e-3, 1e-2)),
    Sweep(replicas, "KEPT", (0.01, 0.05, 0.2)),
    Sweep(replicas, "COPIES_MAY_COST", (0.0, 0.005, 0.01, 0.02, 0.05)),
    Sweep(replicas, "NUM_GIVERS", (4, 8, 16), "tight"),
    Sweep(search, "MOST_STARTS", (32, 64, 128, 256, 512), "small"),
    Sweep(search, "NUM_CLIMBERS", (4, 12, 24), "small"),
    Sweep(search, "MOST_CLIMBS", (4, 12, 24), "small"),
    Sweep(by_price, "NUM_STARTS", (1, 2, 4), "gimbal"),
    Sweep(by_price, "NUM_KICKS", (0, 4, 8, 16), "gimbal"),
    Sweep(by_price, "MOST_STEPS", (16, 64, 256), "gimbal"),
)


def judged(view: PlaceView, text: str = "moestro") -> tuple[float, float]:
    """Return the balance after a policy's plan, and the copies that live devices receive per copy that was there."""
    table = PLACE_POLICIES.make(text)(view)
    received = (table.num_copies > 0) & (view.table.num_copies == 0) & view.devices.is_alive[:, None, None]
    balance = score(view.load, table, view.devices, view.prices).mean_balance
    return balance, float(received.sum() / (view.table.logical_of != EMPTY).sum())


def zipf_view(bed: Bed, seed: int, exponent: float = 0.6) -> PlaceView:
    rng = np.random.default_rng([4, seed])
    return bed.view(loads.from_every_source(loads.zipf(bed.model, exponent, rng), bed))


def moestro_cases() -> Callable[[], Figures]:
    """Prepare the cases of the policy `moestro` on many devices."""
    rng = np.random.default_rng([5, 0])
    before = loads.zipf(LARGE.model, 0.6, rng)
    table = PLACE_POLICIES.make("eplb:hierarchy=never")(LARGE.view(loads.from_every_source(before, LARGE)))
    warm = LARGE.view(loads.from_every_source(loads.drifted(before, 0.1, 0.0, rng), LARGE), table)
    most = int(0.15 * (table.logical_of != EMPTY).sum() * warm.prices.expert_bytes)
    budget = replace(warm, limits=replace(warm.limits, max_bytes=most))
    fresh = zipf_view(LARGE, 0)
    following = loads.with_noise(fresh.load, np.random.default_rng([6, 0]))
    dead = [loads.kill(LARGE.view(warm.load, table), rank) for rank in (0, 17, 34, 51)]
    apart = LARGE.view(loads.from_clusters(LARGE, 0.9, np.random.default_rng([7, 0])))

    def run() -> Figures:
        found = dict(zip(("warm", "warm_moved"), judged(warm), strict=True))
        found |= dict(zip(("budget", "budget_moved"), judged(budget), strict=True))
        plan = PLACE_POLICIES.make("moestro")(fresh)
        found["fresh"] = score(fresh.load, plan, fresh.devices, fresh.prices).mean_balance
        refreshed = replace(fresh, table=plan, load=following, limits=replace(fresh.limits, max_receives=0))
        found["next"] = judged(refreshed)[0]
        deaths = np.array([judged(view) for view in dead])
        found["dead"], found["dead_moved"] = deaths[:, 0].min(), deaths[:, 1].max()
        near = PLACE_POLICIES.make("moestro")(apart)
        found["far"] = score(apart.load, near, apart.devices, apart.prices).far_share
        return {name: float(each) for name, each in found.items()}

    return run


def swapped_cases() -> Callable[[], Figures]:
    """Prepare the cases of the policy `moestro` on fewer devices, where other experts are hot than before."""
    scenes = []
    for seed in range(4):
        rng = np.random.default_rng([8, seed])
        before = loads.zipf(MIDDLE.model, 0.6, rng)
        table = PLACE_POLICIES.make("eplb:hierarchy=never")(MIDDLE.view(loads.from_every_source(before, MIDDLE)))
        now = MIDDLE.view(loads.from_every_source(loads.drifted(before, 0.15, 0.1, rng), MIDDLE), table)
        num_bytes = (table.logical_of != EMPTY).sum() * now.prices.expert_bytes
        tight = [replace(now, limits=replace(now.limits, max_bytes=int(part * num_bytes))) for part in (0.01, 0.05)]
        fresh = zipf_view(MIDDLE, seed, 0.4)
        scenes.append((now, *tight, fresh, loads.with_noise(fresh.load, rng)))

    def figures(scene: tuple[PlaceView, PlaceView, PlaceView, PlaceView, ExpertLoad]) -> Figures:
        now, one, five, fresh, following = scene
        found = dict(zip(("swapped", "swapped_moved"), judged(now), strict=True))
        found |= {"with_1_%": judged(one)[0], "with_5_%": judged(five)[0]}
        found |= dict(zip(("fresh", "fresh_moved"), judged(fresh), strict=True))
        plan = PLACE_POLICIES.make("moestro")(fresh)
        return found | {"next": score(following, plan, fresh.devices, fresh.prices).mean_balance}

    def run() -> Figures:
        found = [figures(scene) for scene in scenes]
        return {name: float(np.mean([each[name] for each in found])) for name in found[0]}

    return run


def single_cases() -> Callable[[], Figures]:
    """Prepare the cases of the policy `moestro` where no expert can have a second copy."""
    scenes = []
    for seed in range(6):
        rng = np.random.default_rng([9, seed])
        before = loads.zipf(SINGLE.model, 0.6, rng)
        table = PLACE_POLICIES.make("eplb:hierarchy=never")(SINGLE.view(loads.from_every_source(before, SINGLE)))
        now = SINGLE.view(loads.from_every_source(loads.drifted(before, 0.1, 0.0, rng), SINGLE), table)
        num_bytes = table.logical_of.size * now.prices.expert_bytes
        scarce = {
            f"with_{percent}_%": replace(now, limits=replace(now.limits, max_bytes=percent * num_bytes // 100))
            for percent in (1, 3, 5, 10)
        }
        hot = zipf_view(SINGLE, seed, 0.8)
        scenes.append((scarce, hot, loads.with_noise(hot.load, rng)))

    def figures(scarce: dict[str, PlaceView], hot: PlaceView, following: ExpertLoad) -> Figures:
        found = {name: judged(view)[0] for name, view in scarce.items()}
        plan = PLACE_POLICIES.make("moestro")(hot)
        found["fresh"] = score(hot.load, plan, hot.devices, hot.prices).mean_balance
        return found | {"next": score(following, plan, hot.devices, hot.prices).mean_balance}

    def run() -> Figures:
        found = [figures(*scene) for scene in scenes]
        return {name: float(np.mean([each[name] for each in found])) for name in found[0]}

    return run


def tight_cases() -> Callable[[], Figures]:
    views = [zipf_view(TIGHT, seed, 0.4) for seed in range(2)]
    return lambda: {"fresh": float(np.mean([judged(view)[0] for view in views]))}


def small_cases() -> Callable[[], Figures]:
    views = [zipf_view(bed, seed) for seed, bed in enumerate(SMALL)]

    def run() -> Figures:
        plans = [PLACE_POLICIES.make("moestro:weighted=0")(view) for view in views]
        return {f"small {i}": objective_s(view, plan) for i, (view, plan) in enumerate(zip(views, plans, strict=True))}

    return run


def gimbal_cases() -> Callable[[], Figures]:
    few = replace(LARGE, model=replace(LARGE.model, num_layers=3))
    views = [zipf_view(few, 0), *(zipf_view(bed, seed) for seed, bed in enumerate(SMALL[::3]))]
    return lambda: {f"gimbal {i}": objective_s(view, gimbal.gimbal_v2(view)) for i, view in enumerate(views)}


CASES = {
    "moestro": moestro_cases,
    "swapped": swapped_cases,
    "single": single_cases,
    "tight": tight_cases,
    "small": small_cases,
    "gimbal": gimbal_cases,
}


@contextmanager
def changed(sweep: Sweep, value: float) -> Iterator[None]:
    """Set a constant for a while."""
    before = getattr(sweep.module, sweep.name)
    setattr(sweep.module, sweep.name, value)
    try:
        yield
    finally:
        setattr(sweep.module, sweep.name, before)


def swept(sweep: Sweep, run: Callable[[], Figures]) -> list[dict[str, object]]:
    """Return a row for each value; costs become their mean excess over the best value's."""
    rows, figures = [], []
    for value in sweep.values:
        with changed(sweep, value):
            begin = time.process_time()
            figures.append(run())
            spent_ms = 1e3 * (time.process_time() - begin)
        is_default = value == getattr(sweep.module, sweep.name)
        rows.append({"constant": sweep.name, "value": value, "is_default": is_default, "ms": round(spent_ms)})
    if sweep.part in {"small", "gimbal"}:
        costs = np.array([list(each.values()) for each in figures])
        excess = costs / costs.min(axis=0) - 1
        figures = [{"mean_excess": each.mean(), "most_excess": each.max()} for each in excess]
    return [
        row | {name: round(float(each), 5) for name, each in of.items()} for row, of in zip(rows, figures, strict=True)
    ]


def show(console: Console, rows: list[dict[str, object]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row if name not in {"constant", "value", "is_default"}))
    table = Table(title=str(rows[0]["constant"]), title_justify="left")
    for heading in ("value", *names):
        table.add_column(heading)
    for row in rows:
        star = " *" if row["is_default"] else ""
        table.add_row(f"{row['value']:g}{star}", *(f"{row[name]:g}" if name in row else "" for name in names))
    console.print(table)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=[sweep.name for sweep in SWEEPS], help="constants to sweep")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 190)
    chosen = [sweep for sweep in SWEEPS if args.only is None or sweep.name in args.only]
    runs = {part: CASES[part]() for part in dict.fromkeys(sweep.part for sweep in chosen)}
    rows: list[dict[str, object]] = []
    for sweep in track(chosen, "constants", console=console, auto_refresh=False, transient=True):
        rows += (found := swept(sweep, runs[sweep.part]))
        show(console, found)
    conditions = run_record("simulated", "balance, moves and prices are computed; ms is processor time of all plans")
    save(args.json, conditions, {"rows": rows})


if __name__ == "__main__":
    main()
