"""The claims of Gimbal's two papers as rows: what each compares, by which rule, and what the papers state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from moestro.repro.experiment import ClaimRow, PaperFigure
from moestro.repro.gimbal.loads import GimbalFindings, PrefixCell
from moestro.repro.gimbal.paper import HITS, MARGIN, P99_GOAL_MS, V1, V2
from moestro.repro.gimbal.systems import (
    DPLB,
    EDR,
    GIMBAL_V1,
    GIMBAL_V2,
    MOESTRO,
    SJFS,
    STACK,
    V1_NO_USERS,
    VLLM,
    VLLM_EPLB,
    VLLM_LEAST,
)
from moestro.repro.results import Claim
from moestro.workload.generated.draws import SHAPES

Row = ClaimRow[GimbalFindings, Any]
_PARTS = (DPLB, SJFS, EDR)  # of the first paper's system, each alone
_LATENCIES = ("TTFT", "TPOT")
_RECORDED = "recorded_"  # beginning of the loads that whole systems serve under recorded routing
_ABOVE_THETA_KV = ("least KV", "least load", "saturated and even")  # branches of Algorithm 1


def claims_of(findings: GimbalFindings) -> list[Claim]:
    """The claims of both papers, in their order, of the parts that were run."""
    return [claim for row in CLAIMS for claim in row.judged(findings)]


# --- latencies over all shapes of lengths -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _TableEngine:
    """An engine of the latency tables.

    Attributes:
        prefix: beginning of the names of its loads, one load for each shape of lengths.
        name: engine in the source of a claim.
        why: what decides its latencies.
    """

    prefix: str
    name: str
    why: str


@dataclass(frozen=True, slots=True)
class _Gains:
    """Changes of a figure from vLLM over the shapes.

    Attributes:
        changes: change on each shape, by system or by rate.
        num_shapes: number of shapes that were run.
        num_seeds: number of seeds that count.
    """

    changes: dict[str, list[float]]
    num_shapes: int
    num_seeds: int

    @property
    def means(self) -> dict[str, float]:
        """Means over the shapes."""
        return {name: float(np.mean(changes)) for name, changes in self.changes.items()}

    @property
    def only(self) -> list[float]:
        """Changes of the only system."""
        [changes] = self.changes.values()
        return changes


Cases = Callable[[GimbalFindings], Iterator[tuple[str, _Gains]]]


def _changes(
    findings: GimbalFindings, loads: list[str], figure: str, system: str, seeds: set[int], nth_rate: int = -1
) -> list[float]:
    """Change of a figure from vLLM on each load, at its nth rate, over the seeds that count and that vLLM has too."""
    found = []
    for load in loads:
        rate = findings.rates(load)[nth_rate]
        cells = [cell for cell in findings.of(load, rate, system) if cell.seed in seeds]
        change = findings.change(figure, cells, findings.of(load, rate, VLLM))
        if change is not None:
            found.append(change)
    return found


def _loads(findings: GimbalFindings, prefix: str) -> list[str]:
    return [load for load in findings.loads if load.startswith(prefix)]


def _seeds(findings: GimbalFindings, loads: list[str], system: str) -> set[int]:
    return {cell.seed for cell in findings.cells if cell.load in loads and cell.system == system}


def _on_equal_seeds(engine: _TableEngine, figure: str, *systems: str) -> Cases:
    """The case: gains of systems at the highest rate, over the seeds that all of them have."""

    def cases(findings: GimbalFindings) -> Iterator[tuple[str, _Gains]]:
        loads = _loads(findings, engine.prefix)
        seeds = set.intersection(*(_seeds(findings, loads, name) for name in systems))
        changes = {name: _changes(findings, loads, figure, name, seeds) for name in systems}
        if all(changes.values()):
            yield engine.name, _Gains(changes, len(loads), len(seeds))

    return cases


def _at_both_ends(engine: _TableEngine, figure: str) -> Cases:
    """The case: gains in a figure at the lowest and at the highest rate, over the seeds of both."""

    def cases(findings: GimbalFindings) -> Iterator[tuple[str, _Gains]]:
        loads = _loads(findings, engine.prefix)
        if all(len(findings.rates(load)) == 1 for load in loads):
            return  # no load, or no shape with a second rate
        nths = {"lowest": 0, "highest": -1}
        seeds = set.intersection(*(
            {cell.seed for load in loads for cell in findings.of(load, findings.rates(load)[nth], GIMBAL_V1)}
            for nth in nths.values()
        ))  # fmt: skip
        changes = {name: _changes(findings, loads, figure, GIMBAL_V1, seeds, nth) for name, nth in nths.items()}
        if all(changes.values()):
            yield engine.name, _Gains(changes, len(loads), len(seeds))

    return cases


def _of_all_shapes(rule: Callable[[_Gains], bool | None]) -> Callable[[_Gains], bool | None]:
    """A rule that judges all shapes or nothing, because the paper's means are over all."""
    return lambda gains: rule(gains) if gains.num_shapes == len(SHAPES) else None


def _shown(changes: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {change:+.1%}" for name, change in changes.items())


def _counted(num: int, what: str) -> str:
    return f"{num} {what}{'s' if num > 1 else ''}"


def _mean_text(gains: _Gains) -> str:
    return (
        f"{np.mean(gains.only):+.1%} ({min(gains.only):+.1%} to {max(gains.only):+.1%};"
        f" {gains.num_shapes} of {len(SHAPES)} shapes, {_counted(gains.num_seeds, 'seed')})"
    )


def _is_mean_reached(figure: PaperFigure, gains: _Gains) -> bool:
    return figure.is_reached(float(np.mean(gains.only)))


def _largest(gains: _Gains) -> float:
    return max(gains.only, key=abs)


def _means_text(gains: _Gains) -> str:
    return f"{_shown(gains.means)}; {_counted(gains.num_seeds, 'equal seed')}"


def _is_below_parts(gains: _Gains) -> bool:
    whole = gains.means[GIMBAL_V1]
    return whole < min(gains.means[name] for name in _PARTS) and whole < -MARGIN


def _is_below_parts_everywhere(gains: _Gains) -> bool:
    whole, *parts = (gains.changes[name] for name in (GIMBAL_V1, *_PARTS))
    return all(ours < min(others) for ours, *others in zip(whole, *parts, strict=True))


def _is_dplb_best(gains: _Gains) -> bool | None:
    """Whether DPLB gains more than each other part. None where the best other one gains nearly the same."""
    dplb, other = gains.means[DPLB], min(gains.means[name] for name in _PARTS if name != DPLB)
    if dplb >= -MARGIN:
        return False
    return None if abs(dplb - other) <= MARGIN else dplb < other


def _is_below_balancer(gains: _Gains) -> bool:
    return gains.means[GIMBAL_V1] < gains.means[VLLM_LEAST] - MARGIN


def _ends_text(gains: _Gains) -> str:
    lowest, highest = gains.means.values()
    seeds = _counted(gains.num_seeds, "equal seed")
    return f"{lowest:+.1%} at the lowest rate, {highest:+.1%} at the highest; {seeds}"


def _grows(gains: _Gains) -> bool:
    lowest, highest = gains.means.values()
    return highest < lowest - MARGIN


# --- changes on one load ----------------------------------------------------------------------------------------------


def _beside(
    findings: GimbalFindings, load: str, pair: tuple[str, str], figures: Iterable[str] = _LATENCIES, setting: str = ""
) -> dict[str, float]:
    """Changes of figures from the second system to the first, at the highest rate; empty where they share no seed."""
    ours, base = (findings.of(load, findings.rates(load)[-1], name, setting) for name in pair)
    changes = {figure: findings.change(figure, ours, base) for figure in figures}
    return {figure: change for figure, change in changes.items() if change is not None}


Overload = tuple[dict[str, float], int]


def _overloads(
    system: str, figures: Mapping[str, PaperFigure], findings: GimbalFindings
) -> Iterator[tuple[str, Overload]]:
    """Cases: a system on each load at whose rate requests wait: its changes from vLLM, and number of aged requests."""
    for load in _loads(findings, "overload"):
        rate = findings.rates(load)[-1]
        changes = _beside(findings, load, (system, VLLM), figures)
        if changes:
            place = f"a healthy engine, {rate:g} requests/s, P99 TTFT of vLLM near {P99_GOAL_MS / 1e3:g} s"
            yield f"{load}, {place}", (changes, findings.of(load, rate, system)[0].num_aged)


def _overload_text(overload: Overload) -> str:
    changes, num_aged = overload
    return f"{_shown(changes)}; {num_aged} requests aged"


def _are_all_reached(figures: Mapping[str, PaperFigure], changes: Mapping[str, float]) -> bool:
    return all(figure.is_reached(changes[name]) for name, figure in figures.items())


def _recordings(
    system: str, figures: Mapping[str, PaperFigure], findings: GimbalFindings
) -> Iterator[tuple[str, dict[str, float]]]:
    """Cases: a system under recorded routing, and under shifted routing, beside vLLM."""
    for load in _loads(findings, _RECORDED):
        for routing in findings.settings(load):
            changes = _beside(findings, load, (system, VLLM), figures, routing)
            if changes:
                yield f"GPT-OSS-20B with scarce KV memory, {routing} routing", changes


@dataclass(frozen=True, slots=True)
class _Memory:
    """DPLB beside vLLM with so many KV blocks of a rank: change of TTFT, and decisions by branch of Algorithm 1."""

    num_blocks: str
    change: float
    branches: dict[str, int]

    @property
    def binds(self) -> bool:
        """Whether KV use of an engine exceeded theta_kv at some decision."""
        return any(self.branches.get(name, 0) for name in _ABOVE_THETA_KV)


def _memories(findings: GimbalFindings) -> Iterator[tuple[str, list[_Memory]]]:
    """The case: all numbers of KV blocks."""
    found = []
    for load in _loads(findings, "kv_"):
        for setting in findings.settings(load):
            changes = _beside(findings, load, (DPLB, VLLM), ("TTFT",), setting)
            if changes:
                [first, *_] = findings.of(load, findings.rates(load)[-1], DPLB, setting)
                found.append(_Memory(setting, changes["TTFT"], first.branches))
    if found:
        yield "over KV blocks of a rank", found


def _memories_text(memories: list[_Memory]) -> str:
    return "; ".join(
        f"{each.num_blocks} blocks: TTFT {each.change:+.1%}"
        f" ({', '.join(f'{name} {count}' for name, count in sorted(each.branches.items()))})"
        for each in memories
    )


def _memories_hold(memories: list[_Memory]) -> bool | None:
    binding = [each.change for each in memories if each.binds]
    return bool(np.mean(binding) < -MARGIN) if binding else None


# --- prefix hits ------------------------------------------------------------------------------------------------------

Runs = dict[str, list[PrefixCell]]


def _runs(findings: GimbalFindings) -> Iterator[tuple[str, Runs]]:
    """Cases: by system, the runs of a load."""
    for load in dict.fromkeys(each.load for each in findings.prefixes):
        of_load = [each for each in findings.prefixes if each.load == load]
        runs = {name: [each for each in of_load if each.system == name] for name in (VLLM, GIMBAL_V1, V1_NO_USERS)}
        if runs[VLLM] and runs[GIMBAL_V1]:
            yield load, runs


def _num_hits(runs: Runs) -> tuple[list[int], list[int]]:
    """Hits of each run of Gimbal and of vLLM."""
    ours, base = ([each.hit_blocks for each in runs[name]] for name in (GIMBAL_V1, VLLM))
    return ours, base


def _num_hits_text(runs: Runs) -> str:
    ours, base = _num_hits(runs)
    return f"{min(ours):,} to {max(ours):,} hits, vLLM {min(base):,} to {max(base):,}"


def _is_steady(runs: Runs) -> bool:
    ours, base = (len(set(hits)) for hits in _num_hits(runs))
    return ours == 1 and base > 1


def _hits_gain(runs: Runs) -> float:
    ours, base = (float(np.mean(hits)) for hits in _num_hits(runs))
    return ours / max(base, 1.0) - 1


def _hits_gain_text(runs: Runs) -> str:
    rates = {name: np.mean([each.hit_rate for each in cells]) for name, cells in runs.items() if cells}
    without = f"; without user affinity {rates[V1_NO_USERS]:.2%}" if V1_NO_USERS in rates else ""
    return f"hits {_hits_gain(runs):+.1%}, hit rate {rates[GIMBAL_V1]:.2%} against {rates[VLLM]:.2%}{without}"


# --- placement and the stack ------------------------------------------------------------------------------------------

Systems = dict[str, dict[str, float]]  # changes by system and figure
Sources = tuple[str, Systems]


def _sources(findings: GimbalFindings) -> Iterator[tuple[str, Sources]]:
    """Cases: a load with its name, and placements that count by source beside EPLB, which counts all alike."""
    for load in _loads(findings, "sources"):
        found = {name: _beside(findings, load, (f"place:{name}", "place:eplb")) for name in (GIMBAL_V2, MOESTRO)}
        systems = {name: changes for name, changes in found.items() if changes}
        if systems:
            yield f"{load}, placement alone", (load, systems)


def _systems_text(systems: Systems) -> str:
    return "; ".join(f"{name}: {_shown(changes)}" for name, changes in systems.items())


def _source_pays(sources: Sources) -> bool | None:
    load, systems = sources
    if load.endswith("shuffled") or GIMBAL_V2 not in systems:
        return None
    changes = systems[GIMBAL_V2].values()
    return min(changes) < -MARGIN and max(changes) <= MARGIN


@dataclass(frozen=True, slots=True)
class _Affinity:
    """Placement by affinity between layers beside experts in order.

    Attributes:
        changes: changes by figure.
        kept, kept_in_order: shares of visits to experts of consecutive layers that stay on one GPU.
    """

    changes: dict[str, float]
    kept: float
    kept_in_order: float


def _affinities(findings: GimbalFindings) -> Iterator[tuple[str, dict[str, _Affinity]]]:
    """Cases: by origin of the experts of tokens, Algorithm 3 alone; shifted choices have no affinity between layers."""
    for load in _loads(findings, "routing") + _loads(findings, _RECORDED):
        systems = (EDR, VLLM) if load.startswith(_RECORDED) else (f"place:{GIMBAL_V1}", "place:static")
        by_routing = {}
        for routing in findings.settings(load):
            changes = _beside(findings, load, systems, setting=routing)
            if changes:
                ours, base = (findings.of(load, findings.rates(load)[-1], name, routing)[0] for name in systems)
                by_routing[routing] = _Affinity(changes, ours.kept_pairs, base.kept_pairs)
        if "recorded" in by_routing:
            yield f"GPT-OSS-20B, {load}", by_routing


def _affinities_text(by_routing: dict[str, _Affinity]) -> str:
    return "; ".join(
        f"{routing}: {_shown(each.changes)}, {each.kept:.1%} of pairs on one GPU, in order {each.kept_in_order:.1%}"
        for routing, each in by_routing.items()
    )


def _affinity_pays(by_routing: dict[str, _Affinity]) -> bool:
    tpot = {routing: each.changes["TPOT"] for routing, each in by_routing.items()}
    return tpot["recorded"] < min(-MARGIN, tpot.get("shifted", 0.0))


def _stack(findings: GimbalFindings) -> Iterator[tuple[str, Systems]]:
    """The case: each level, and all together, beside vLLM's defaults with EPLB."""
    if "stack" in findings.loads:
        figures = (*_LATENCIES, "throughput")
        found = {name: _beside(findings, "stack", (name, VLLM_EPLB), figures) for name in STACK[1:]}
        if found[MOESTRO]:
            yield "", {name: changes for name, changes in found.items() if changes}


# --- the rows ---------------------------------------------------------------------------------------------------------

_ENGINES = (
    _TableEngine(
        "scarce_", "scarce KV memory",
        "whether requests wait for KV memory, and Algorithm 1 then avoids the full engine: 512 blocks bind for shapes"
        " with long prompts only; decodes take what they take",
    ),
    _TableEngine(
        "healthy_", "a healthy engine",
        "the A100's kernels and vLLM's host bear ten times these rates: nothing waits, KV use stays far below theta_kv,"
        " and Algorithm 1 then takes the engines in turn, as the baseline does",
    ),
    _TableEngine(
        "slow_", "a slow engine",
        "TTFT is 4.9 s because steps are slow, not because requests wait; KV use stays below theta_kv, and Algorithm 1"
        " compares loads only above it",
    ),
)  # fmt: skip


def _of_engine(engine: _TableEngine) -> Iterator[Row]:
    """Claims about the latencies of an engine."""
    for where, system, figures in (("v1, V-B", GIMBAL_V1, V1), ("v2, abstract", GIMBAL_V2, V2)):
        for name, figure in figures.items():
            yield ClaimRow(
                where=where, sentence=f"{system}: {name} {figure.value:+.2%} from vLLM", figures=(figure,),
                cases=_on_equal_seeds(engine, name, system), ours=_mean_text,
                holds=_of_all_shapes(partial(_is_mean_reached, figure)), why=engine.why,
            )  # fmt: skip
    yield ClaimRow(
        where="v1, V-B2", sentence="throughput comparable to vLLM's",
        cases=_on_equal_seeds(engine, "throughput", GIMBAL_V1), ours=lambda gains: f"at most {_largest(gains):+.1%}",
        holds=_of_all_shapes(lambda gains: abs(_largest(gains)) <= MARGIN),
    )  # fmt: skip
    parts = _on_equal_seeds(engine, "TTFT", *_PARTS, GIMBAL_V1)
    yield ClaimRow(
        where="v1, V-B1", sentence="Gimbal has a lower TTFT than each part alone", cases=parts, ours=_means_text,
        holds=_of_all_shapes(_is_below_parts), why=engine.why,
    )  # fmt: skip
    yield ClaimRow(
        where="v1, V-B1", sentence="DPLB gives most of the gain in TTFT", cases=parts, ours=_means_text,
        holds=_of_all_shapes(_is_dplb_best), why=engine.why,
    )  # fmt: skip
    yield ClaimRow(  # the paper describes vLLM's balancer as round robin
        where="v1, V-B", sentence="TTFT is lower than vLLM's; here with the balancer of vLLM's code",
        cases=_on_equal_seeds(engine, "TTFT", VLLM_LEAST, GIMBAL_V1, GIMBAL_V2, MOESTRO), ours=_means_text,
        holds=_of_all_shapes(_is_below_balancer), why=engine.why,
    )  # fmt: skip
    for where, name in (("v1, V-B1", "TTFT"), ("v1, V-B2", "TPOT")):
        yield ClaimRow(
            where=where, sentence=f"the gain in {name} grows with the rate", cases=_at_both_ends(engine, name),
            ours=_ends_text, holds=_of_all_shapes(_grows), why=engine.why,
        )  # fmt: skip
    yield ClaimRow(
        where="v1, V-B2", sentence="Gimbal has a lower TPOT than each part alone, for each shape",
        cases=_on_equal_seeds(engine, "TPOT", *_PARTS, GIMBAL_V1), ours=_means_text,
        holds=_of_all_shapes(_is_below_parts_everywhere), why=engine.why,
    )  # fmt: skip
    yield ClaimRow(
        where="v1, V-B1", sentence="TTFT is lower than vLLM's for each shape",
        cases=_on_equal_seeds(engine, "TTFT", GIMBAL_V1), ours=_mean_text,
        holds=_of_all_shapes(lambda gains: max(gains.only) < -MARGIN), why=engine.why,
    )  # fmt: skip


def _under_recording(where: str, system: str, figures: Mapping[str, PaperFigure]) -> Row:
    stated = _shown({name: figure.value for name, figure in figures.items()})
    return ClaimRow(
        where=where, sentence=f"{system} with real routing: {stated} from vLLM", figures=tuple(figures.values()),
        cases=partial(_recordings, system, figures), ours=_shown,
        holds=partial(_are_all_reached, figures),
        why="requests wait for KV memory, as in the table of scarce memory; where experts lie changes the time of a"
        " step little, with affinity between layers and without",
    )  # fmt: skip


def _under_overload(where: str, system: str, figures: Mapping[str, PaperFigure]) -> Row:
    return ClaimRow(
        where=where, sentence=_shown({name: figure.value for name, figure in figures.items()}),
        figures=tuple(figures.values()), cases=partial(_overloads, system, figures),
        ours=_overload_text, holds=lambda overload: _are_all_reached(figures, overload[0]),
        why="requests wait for their prefill here, so the order of the queue decides TTFT; decodes take what they"
        " take, so TPOT hardly changes",
    )  # fmt: skip


CLAIMS: tuple[Row, ...] = (
    *(row for engine in _ENGINES for row in _of_engine(engine)),
    _under_overload("v1", GIMBAL_V1, V1),
    _under_overload("v2", GIMBAL_V2, V2),
    ClaimRow(
        where="v1, Algorithm 1",
        sentence="where KV use exceeds theta_kv, requests go to the engine with the least KV or load, and TTFT falls",
        cases=_memories, ours=_memories_text, holds=_memories_hold,
        why="the share of decisions above theta_kv; with the KV memory that an A100 has beside the weights it is 0",
    ),
    ClaimRow(
        where="v1, figure 11", sentence="18,992 hits in every run; vLLM 16,096 to 20,416",
        quote="vLLM achieved 19,888, 17,056, 18,800, 16,096, and 20,416 hits in the five rounds, averaging 18,451"
        " hits per round. Gimbal, on the other hand, achieved a consistent number of hits across all five runs,"
        " totaling 18,992 hits per round",
        cases=_runs, ours=_num_hits_text, holds=_is_steady,
        why="requests reach the router with a jitter, so a user's first request, which goes to the engines in turn,"
        " may land elsewhere in another run; with constant times both systems repeat their runs exactly",
    ),
    ClaimRow(
        where="v1, figures 11 and 12", sentence=f"hits {HITS}, hit rate 3.80 % against 3.64 %", figures=(HITS,),
        quote="averaging 3.64%. Gimbal maintains a stable hit rate of 3.80% across all five runs",
        cases=_runs, ours=_hits_gain_text, holds=lambda runs: HITS.is_reached(_hits_gain(runs)),
        why="how much of a user's later requests repeats earlier ones; with two engines, half of the repeats are"
        " found by chance",
    ),
    ClaimRow(
        where="v2, abstract",
        sentence="placing experts by source lowers latencies against counts alone (EPLB)",
        cases=_sources, ours=lambda sources: _systems_text(sources[1]), holds=_source_pays,
        why="sources that see the same mix of experts have nothing to gain; the shuffled load is that control",
    ),
    ClaimRow(
        where="v1, III-D", sentence="experts with affinity between layers on one GPU lower TPOT", cases=_affinities,
        ours=_affinities_text, holds=_affinity_pays,
        why="answers return to the token's rank after each layer, so that a pair on one GPU saves no transfer; only the"
        " balance of a placement counts",
    ),
    _under_recording("v1, V-B", GIMBAL_V1, V1),
    _under_recording("v2, abstract", GIMBAL_V2, V2),
    ClaimRow(
        where="our own goal", sentence="all levels together are better than vLLM's defaults with EPLB", cases=_stack,
        ours=_systems_text,
        holds=lambda systems: systems[MOESTRO]["TTFT"] < -MARGIN and systems[MOESTRO]["TPOT"] < MARGIN,
        why="one load; levels 1, 2 and 4. Level 3 has nothing to decide in lock-step",
    ),
)  # fmt: skip
