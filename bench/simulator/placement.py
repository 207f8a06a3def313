"""Compares placement policies on generated and recorded loads: balance, what moves, rows between nodes, time.

    python bench/simulator/placement.py --seeds 5 --routing DIR --json bench/results/simulator/placement.json \
        --png bench/results/simulator/placement.png
    python bench/simulator/placement.py --quick                           # half a minute, a part of the cases
    python bench/simulator/placement.py --policies static eplb moestro:NAME=VALUE --parts drift

All policies plan on the same loads, seed by seed. A policy that cannot take a case is left out, and the reason is
printed. Balance and rows are computed with the traffic model of `moestro.placement.score`; time is measured: processor
time of the process, median of the repeats after one that warms up. `search` in the result says which code searched:
the compiled kernel, or NumPy where there is none. In the parts fresh and dead, rows "moestro, NumPy" are the same plans
without the kernel.

fresh: plan from vLLM's placement of the start, on Zipf loads. drift: plan from the placement that --start made for the
window before; policies that keep to limits are swept over the bytes that they may move. sources: nodes prefer different
kinds of tasks. real: recorded choices of GPT-OSS-20B, planned on a window, scored on the next one and on other domains;
DIR holds the two files of the trace. dead: one rank after another dies. functions: `moestro.placement.eplb` beside the
peers' code, of which --deepseek names `eplb.py`, and --vllm an unpacked wheel.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from moestro.config.run_record import run_record
from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.errors import MoestroError
from moestro.placement.contract import PLACE_POLICIES, PlaceView
from moestro.placement.eplb import rebalance_experts
from moestro.placement.kernel.choice import placement_kernel
from moestro.placement.score import score

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import placement_loads as loads
from placement_functions import time_functions
from placement_loads import DEEPSEEK_V3, GPT_OSS_20B, QWEN3_30B, Bed
from placement_picture import draw
from shared.results import make_parser, save

PARTS = ("fresh", "drift", "sources", "real", "dead", "functions")
BEDS = (
    Bed(DEEPSEEK_V3, 32, 9, 4),
    Bed(DEEPSEEK_V3, 64, 5, 8),
    Bed(DEEPSEEK_V3, 144, 2, 18),
    Bed(QWEN3_30B, 8, 18, 1),
    Bed(QWEN3_30B, 8, 16, 1),
)
QUICK_BEDS = (BEDS[1], BEDS[4])
EXPONENTS = (0.4, 0.6, 0.8, 1.2)
DRIFTS = {"10 % noise": (0.10, 0.0), "15 % noise, 10 % swapped": (0.15, 0.10)}
SOURCE_BEDS = (Bed(DEEPSEEK_V3, 32, 9, 4), Bed(DEEPSEEK_V3, 64, 5, 8), Bed(QWEN3_30B, 2, 64, 2))
STICKY = (0.0, 0.5, 0.9)
REAL_BEDS = (Bed(GPT_OSS_20B, 8, 5, 2), Bed(GPT_OSS_20B, 8, 4, 2))
BESIDE_NUMPY = ("fresh", "dead")  # parts in which plans are also timed without the compiled kernel
BUDGETS = (0.01, 0.03, 0.05, 0.10, 0.15, 0.20, 0.30)  # parts of all copies whose bytes may move
FRONT = (0.05, 0.15, 0.30)  # moved copies at most, for which the best balance is printed
SLOW_S, QUICK_SLOW_S = 20.0, 2.0  # a policy that plans for longer is left out of the other trials of that case
Figures = dict[str, float]


@dataclass(frozen=True)
class Scene:
    """The view that a policy plans on, and the later loads under which its plan is scored."""

    view: PlaceView
    later: dict[str, list[ExpertLoad]] = field(default_factory=dict)


@dataclass(frozen=True)
class Trial:
    """One load under one seed, for all policies."""

    part: str
    case: str
    load: str
    make: Callable[[], Scene]


def fresh_trials(beds: Iterable[Bed], exponents: Iterable[float], seeds: range) -> list[Trial]:
    def make(bed: Bed, exponent: float, seed: int) -> Scene:
        rng = np.random.default_rng([0, seed])
        load = loads.from_every_source(loads.zipf(bed.model, exponent, rng), bed)
        return Scene(bed.view(load), {"next": [loads.with_noise(load, rng)]})

    return [
        Trial("fresh", bed.name, f"s={exponent:g}", lambda b=bed, e=exponent, s=seed: make(b, e, s))
        for bed in beds
        for exponent in exponents
        for seed in seeds
    ]


def drift_trials(beds: Iterable[Bed], start: str, seeds: range) -> list[Trial]:
    def make(bed: Bed, drift: tuple[float, float], seed: int) -> Scene:
        rng = np.random.default_rng([1, seed])
        before = loads.zipf(bed.model, 0.6, rng)
        now = loads.from_every_source(loads.drifted(before, *drift, rng), bed)
        table = PLACE_POLICIES.make(start)(bed.view(loads.from_every_source(before, bed)))
        return Scene(bed.view(now, table), {"next": [loads.with_noise(now, rng)]})

    return [
        Trial("drift", bed.name, name, lambda b=bed, d=drift, s=seed: make(b, d, s))
        for bed in beds
        for name, drift in DRIFTS.items()
        for seed in seeds
    ]


def source_trials(beds: Iterable[Bed], sticky: Iterable[float], seeds: range) -> list[Trial]:
    def make(bed: Bed, own: float, seed: int) -> Scene:
        rng = np.random.default_rng([2, seed])
        load = loads.from_clusters(bed, own, rng)
        return Scene(bed.view(load), {"next": [loads.with_noise(load, rng)]})

    return [
        Trial("sources", bed.name, f"sticky {own:g}", lambda b=bed, o=own, s=seed: make(b, o, s))
        for bed in beds
        for own in sticky
        for seed in seeds
    ]


def real_trials(folder: Path, beds: Iterable[Bed], seeds: range) -> list[Trial]:
    trace = loads.read_trace(folder)
    names = loads.domains(trace)

    def make(bed: Bed, domain: str, seed: int) -> Scene:
        load, following = loads.windows(trace, domain, bed, seed)
        others = [next(loads.windows(trace, name, bed, seed)) for name in names if name != domain]
        return Scene(bed.view(load), {"next": [following], "other": others})

    return [
        Trial("real", bed.name, domain, lambda b=bed, d=domain, s=seed: make(b, d, s))
        for bed in beds
        for domain in names
        for seed in seeds
    ]


def dead_trials(bed: Bed, start: str, ranks: Iterable[int], num_seeds: int) -> list[Trial]:
    """One trial for each rank that dies; the seeds take turns."""

    def make(rank: int) -> Scene:
        rng = np.random.default_rng([3, rank % num_seeds])
        load = loads.from_every_source(loads.zipf(bed.model, 0.6, rng), bed)
        table = PLACE_POLICIES.make(start)(bed.view(load))
        return Scene(loads.kill(bed.view(load, table), rank))

    return [Trial("dead", bed.name, "s=0.6", lambda r=rank: make(r)) for rank in ranks]


# --- one plan ---------------------------------------------------------------------------------------------------------


def plan(text: str, view: PlaceView, repeats: int, slow_s: float) -> tuple[ExpertTable, float]:
    """Return a policy's plan, and the milliseconds of processor time that it takes: of all repeats but the first.

    A plan that takes longer than `slow_s` over the repeats is timed once.
    """
    spent, table = [], None
    for _ in range(repeats + 1):
        policy = PLACE_POLICIES.make(text)  # a new one each time, because a policy may have a history
        begin = time.process_time()
        table = policy(view)
        spent.append(1e3 * (time.process_time() - begin))
        if spent[0] > 1e3 * slow_s / repeats:
            break
    return table, statistics.median(spent[1:] or spent)


def mean_balance(load: ExpertLoad, view: PlaceView, table: ExpertTable) -> float:
    return score(load, table, view.devices, view.prices).mean_balance


def share_received(view: PlaceView, table: ExpertTable) -> float:
    """Copies that live devices receive per copy that was there; which device sends them does not matter here."""
    received = (table.num_copies > 0) & (view.table.num_copies == 0) & view.devices.is_alive[:, None, None]
    return float(received.sum() / (view.table.logical_of != EMPTY).sum())


def judge(scene: Scene, table: ExpertTable) -> Figures:
    """Return the figures of a plan; the coverage alone where an expert has no live copy."""
    view, live = scene.view, scene.view.devices.is_alive
    held = table.num_copies[live].sum(axis=0) > 0
    found = {"coverage": float(held.mean())}
    if not held.all() or not (live | ~table.is_alive).all():
        return found
    now = score(view.load, table, view.devices, view.prices)
    by_layer = now.tokens.mean(axis=1) / now.tokens.max(axis=1)
    is_slot = np.arange(table.logical_of.shape[2]) < view.devices.num_slots[:, None, None]
    found |= {
        "balance_vllm": now.balance_of_sums,
        "balance_sglang": now.mean_balance,
        "least_layer": float(by_layer.min()),
        "moved": share_received(view, table),
        "far_share": now.far_share,
        "empty": float(((table.logical_of == EMPTY) & is_slot)[live].sum()),
        "step_ms": 1e3 * now.step_s,
    }
    for name, later in scene.later.items():
        found[name] = statistics.mean(mean_balance(load, view, table) for load in later)
    return found


def bound(view: PlaceView) -> Figures:
    """Balance that no placement exceeds: no copy has less than its part of the hottest expert."""
    if not view.devices.is_alive.all():
        return {}
    total, num_slots = view.load.total, int(view.devices.num_slots.sum())
    count = rebalance_experts(total, num_slots, 1, 1, 1)[2]
    mean = total.sum(axis=1) / view.devices.num_devices
    best = mean / np.maximum(mean, (total / count).max(axis=1))
    return {"balance_sglang": float(best.mean()), "least_layer": float(best.min())}


def limited(view: PlaceView, budget: float) -> PlaceView:
    num_copies = int((view.table.logical_of != EMPTY).sum())
    return replace(view, limits=replace(view.limits, max_bytes=int(budget * num_copies * view.prices.expert_bytes)))


# --- all plans --------------------------------------------------------------------------------------------------------


class Results:
    """Figures by part, case, load and policy, and why a policy was left out."""

    def __init__(self, slow_s: float = SLOW_S) -> None:
        self.slow_s = slow_s
        self.runs: dict[tuple[str, str, str, str], list[Figures]] = {}
        self.skipped: dict[tuple[str, str, str], str] = {}

    def run(self, trial: Trial, policies: list[str], repeats: int) -> None:
        scene = trial.make()
        most = bound(scene.view)
        if most:
            self._add(trial, "(upper bound)", most)
        for text in policies:
            if (trial.part, trial.case, text) in self.skipped:
                continue
            found = self._try(trial, text, scene, repeats)
            if found is not None and trial.part == "drift":
                self._sweep(trial, text, scene, found["moved"])
            is_searched = text.split(":")[0] == "moestro" and placement_kernel.search().library is not None
            if found is not None and is_searched and trial.part in BESIDE_NUMPY:
                with placement_kernel.left_out():
                    self._try(trial, text, scene, repeats, f"{text}, NumPy")

    def _sweep(self, trial: Trial, text: str, scene: Scene, moved: float) -> None:
        """Plan again under each budget below the share that a policy moved without one."""
        for budget in BUDGETS:
            tight = replace(scene, view=limited(scene.view, budget))
            label = f"{text}, {budget:.0%} may move"
            if budget >= moved or self._try(trial, text, tight, 1, label) is None:
                return
            if self.runs[(trial.part, trial.case, trial.load, label)][-1]["moved"] > budget:
                self.runs[(trial.part, trial.case, trial.load, label)].pop()
                return  # this policy knows no limits

    def _try(self, trial: Trial, text: str, scene: Scene, repeats: int, label: str = "") -> Figures | None:
        try:
            table, plan_ms = plan(text, scene.view, repeats, self.slow_s)
        except (ValueError, MoestroError) as error:
            self.skipped[(trial.part, trial.case, text)] = str(error)
            return None
        if plan_ms > 1e3 * self.slow_s:
            self.skipped[(trial.part, trial.case, text)] = (
                f"a plan took {plan_ms / 1e3:.0f} s; the others were left out"
            )
        found = judge(scene, table) | {"plan_ms": plan_ms}
        self._add(trial, label or text, found)
        return found

    def _add(self, trial: Trial, label: str, found: Figures) -> None:
        self.runs.setdefault((trial.part, trial.case, trial.load, label), []).append(found)

    def rows(self) -> list[dict[str, object]]:
        """Mean, minimum and maximum over seeds of each figure; a part's rows are ordered by case, load and policy."""
        found = []
        for (part, case, load, policy), runs in self.runs.items():
            if not runs:
                continue
            names = dict.fromkeys(name for run in runs for name in run)
            figures = {name: [run[name] for run in runs if name in run] for name in names}
            spread = {name: [round(f(each), 5) for f in (statistics.mean, min, max)] for name, each in figures.items()}
            found.append({"part": part, "case": case, "load": load, "policy": policy, "runs": len(runs), **spread})
        return found


COLUMNS = {
    "balance_vllm": "vLLM's balance",
    "balance_sglang": "SGLang's (least, most)",
    "least_layer": "least layer",
    "next": "next window",
    "other": "other domains",
    "coverage": "coverage",
    "moved": "moved",
    "far_share": "between nodes",
    "empty": "empty slots",
    "plan_ms": "ms (least, most)",
}


def cell(name: str, spread: list[float]) -> str:
    mean, least, most = spread
    if name == "balance_sglang":
        return f"{mean:.4f} ({least:.4f}, {most:.4f})"
    if name == "plan_ms":
        return f"{mean:.1f} ({least:.1f}, {most:.1f})"
    if name in {"moved", "far_share", "coverage"}:
        return f"{mean:.1%}"
    return f"{mean:.0f}" if name == "empty" else f"{mean:.4f}"


def show(console: Console, part: str, rows: list[dict[str, object]]) -> None:
    """Print a table for each case and load of a part."""
    rows = [row for row in rows if row["part"] == part]
    columns = [name for name in COLUMNS if any(name in row for row in rows)]
    if part != "dead":
        columns.remove("coverage")  # every placement covers all experts while all devices live
    for case, load in dict.fromkeys((row["case"], row["load"]) for row in rows):
        table = Table(title=f"{part}: {case}, {load}", title_justify="left")
        for heading in ("policy", *(COLUMNS[name] for name in columns)):
            table.add_column(heading, no_wrap=heading == "policy")
        for row in rows:
            if (row["case"], row["load"]) == (case, load):
                table.add_row(row["policy"], *(cell(name, row[name]) if name in row else "" for name in columns))
        console.print(table)


def show_front(console: Console, rows: list[dict[str, object]]) -> None:
    """Print the best balance of `moestro` and of all others within some shares of moved copies, by case and drift."""
    rows = [row for row in rows if row["part"] == "drift" and "moved" in row]
    table = Table(title="drift: best balance for moved copies at most", title_justify="left")
    for heading in ("case", "drift", "policies", *(f"{most:.0%}" for most in (*FRONT, 1.0))):
        table.add_column(heading)
    for case, load in dict.fromkeys((row["case"], row["load"]) for row in rows):
        for name, is_ours in (("moestro", True), ("others", False)):
            best = []
            for most in (*FRONT, 1.0):
                fits = [
                    row["balance_sglang"][0]
                    for row in rows
                    if (row["case"], row["load"]) == (case, load)
                    and row["moved"][0] <= most
                    and row["policy"].startswith("moestro") == is_ours
                ]
                best.append(f"{max(fits):.4f}" if fits else "")
            table.add_row(case, load, name, *best)
    console.print(table)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--policies", nargs="+", help="NAME or NAME:SETTING=VALUE,...; all of them by default")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5, help="timed plans of each trial")
    parser.add_argument(
        "--rows",
        type=int,
        default=loads.ROWS_PER_SOURCE,
        help="rows that a device sends to experts in a layer and step",
    )
    parser.add_argument("--start", default="eplb:hierarchy=never", help="policy that made the placement before a drift")
    parser.add_argument("--quick", action="store_true", help="two seeds and a part of the cases")
    parser.add_argument("--routing", type=Path, help="folder of the recorded choices")
    parser.add_argument("--deepseek", type=Path, help="DeepSeek's eplb.py")
    parser.add_argument("--vllm", type=Path, help="unpacked wheel of vLLM")
    parser.add_argument("--png", type=Path, help="draw balance against moved slots here")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 190)
    policies = args.policies or default_policies()
    conditions = run_record("measured", "balance and rows are computed, times are measured")
    kernel_search = placement_kernel.search()
    has_kernel = kernel_search.wait() is not None  # before the first plan, so that all are made by the same code
    search = "compiled kernel" if has_kernel else f"NumPy: {kernel_search.failure}"
    console.print(f"Search: {search}")
    results = Results(QUICK_SLOW_S if args.quick else SLOW_S)
    figures: dict[str, object] = {"seeds": args.seeds, "start": args.start, "rows": args.rows, "search": search}
    for part in args.parts:
        if part == "functions":
            beds, seeds = (QUICK_BEDS, range(1)) if args.quick else (BEDS, range(args.seeds))
            figures["functions"] = time_functions(console, beds, args.deepseek, args.vllm, seeds, args.repeats)
        elif part == "real" and args.routing is None:
            console.print("real: left out, because --routing is not given")
        else:
            # Threads of a bar would count as time of the plan, so it is drawn only between trials.
            for trial in track(trials_of(part, args), part, console=console, auto_refresh=False, transient=True):
                results.run(trial, policies, args.repeats)
            show(console, part, results.rows())
            if part == "drift":
                show_front(console, results.rows())
            for (of_part, case, text), reason in results.skipped.items():
                if of_part == part:
                    console.print(f"{part}: {case}: {text} was left out: {reason}", soft_wrap=True)
        left_out = [[*key, reason] for key, reason in results.skipped.items()]
        save(args.json, conditions, figures | {"left_out": left_out, "rows": results.rows()})
    if args.png:
        draw(args.png, [row for row in results.rows() if row["part"] == "drift"])


def default_policies() -> list[str]:
    """All registered policies, and EPLB without groups where its own choice would keep them."""
    return [*PLACE_POLICIES.names(), "eplb:hierarchy=never"]


def trials_of(part: str, args: object) -> list[Trial]:
    quick = args.quick
    seeds = range(2 if quick else args.seeds)

    def loaded(beds: Iterable[Bed]) -> list[Bed]:
        return [replace(bed, rows_per_source=args.rows) for bed in beds]

    beds = loaded(QUICK_BEDS if quick else BEDS)
    if part == "fresh":
        return fresh_trials(beds, (0.6,) if quick else EXPONENTS, seeds)
    if part == "drift":
        return drift_trials(beds, args.start, seeds)
    if part == "sources":
        return source_trials(loaded(SOURCE_BEDS[:1] if quick else SOURCE_BEDS), (0.9,) if quick else STICKY, seeds)
    if part == "real":
        return real_trials(args.routing, loaded(REAL_BEDS[:1] if quick else REAL_BEDS), seeds)
    (bed,) = loaded(BEDS[1:2])
    return dead_trials(bed, args.start, range(0, bed.num_devices, 15 if quick else 1), max(16, args.seeds))


if __name__ == "__main__":
    main()
