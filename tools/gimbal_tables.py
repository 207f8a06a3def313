"""Tables of docs/repro.md that are made from the stored runs of Gimbal's experiment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
from repro_tables import stored

from moestro.repro.gimbal.loads import CELL_FIGURES, GimbalCell, GimbalFindings
from moestro.repro.gimbal.systems import DPLB, GIMBAL_V1, MOESTRO, PLACEMENTS, STACK, TABLE, VLLM
from moestro.workload.generated.draws import SHAPES

_STACK_NAMES = (
    "`vllm_eplb`: vLLM's balancer, first come first served, EPLB", "level 1 alone: routing",
    "level 2 alone: least uncached prefill first", "level 4 alone: placement", "all: `moestro`",
)  # fmt: skip
_ABOVE_KV = ("least KV", "least load", "saturated and even")  # branches of Algorithm 1 above theta_kv


@cache
def _findings(file: str) -> GimbalFindings:
    found: GimbalFindings = stored(file, GimbalFindings).findings
    return found


def table_of_rows(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _mean(figure: str, cells: list[GimbalCell]) -> float:
    return float(np.mean([CELL_FIGURES[figure](cell) for cell in cells]))


def _changes(findings: GimbalFindings, cells: list[GimbalCell], base: list[GimbalCell], digits: int = 1) -> list[str]:
    """Changes of TTFT and of TPOT from a baseline, on the seeds that both have."""
    changes = (findings.change(figure, cells, base) for figure in ("TTFT", "TPOT"))
    return [f"{change:+.{digits}%}" for change in changes if change is not None]


def shapes_table(prefix: str, file: str = "gimbal") -> str:
    """The change of TTFT and TPOT from `vllm` at the highest rate, by system and shape that was run."""
    findings, rows = _findings(file), []
    shapes = [shape for shape in SHAPES if f"{prefix}_{shape}" in findings.loads]
    loads = [f"{prefix}_{shape}" for shape in shapes]
    known = {cell.system for cell in findings.cells if cell.load in loads}
    for system in (name for name in TABLE if name in known):
        row = [f"`{system}`" + (", ms" if system == VLLM else "")]
        for load in loads:
            rate = findings.rates(load)[-1]
            cells, base = findings.of(load, rate, system), findings.of(load, rate, VLLM)
            milliseconds = f"{_mean('TTFT', base):,.0f} / {_mean('TPOT', base):.1f}"
            row.append(milliseconds if system == VLLM else " / ".join(_changes(findings, cells, base)))
        rows.append(row)
    return table_of_rows(["system", *shapes], rows)


def kv_memory_table() -> str:
    """By KV blocks of a rank: the factor on steps, decisions above theta_kv, and changes from `vllm`."""
    findings, rows = _findings("gimbal"), []
    [rate] = findings.rates("kv_memory")
    for blocks in findings.settings("kv_memory"):
        base = findings.of("kv_memory", rate, VLLM, blocks)
        runs = {name: findings.of("kv_memory", rate, name, blocks) for name in (DPLB, GIMBAL_V1, MOESTRO)}
        [dplb] = runs[DPLB]
        above = sum(dplb.branches.get(name, 0) for name in _ABOVE_KV)
        ttft, tpot = zip(*(_changes(findings, cells, base, 0) for cells in runs.values()), strict=True)
        level = findings.levels[f"kv_memory {blocks}"]
        rows.append([f"{int(blocks):,}", f"{level:g}", f"{above} of {dplb.num_requests}", *ttft, ", ".join(tpot)])
    heads = ["KV blocks of a rank", "factor on steps", "decisions above theta_kv, `dplb`", "TTFT `dplb`",
             "TTFT `gimbal_v1`", "TTFT `moestro`", "TPOT `dplb`, `gimbal_v1`, `moestro`"]  # fmt: skip
    return table_of_rows(heads, rows)


def _loaded(load: str, systems: Sequence[str], names: Sequence[str]) -> str:
    """All figures of the baseline, and the changes of the others from it."""
    findings, rows = _findings("gimbal"), []
    [rate] = findings.rates(load)
    base = findings.of(load, rate, systems[0])
    for system, name in zip(systems, names, strict=True):
        cells = findings.of(load, rate, system)
        if system == systems[0]:
            row = [f"{_mean('TTFT', cells):,.0f} ms", f"{_mean('TTFT P99', cells):,.0f} ms"]
            row += [f"{_mean('TPOT', cells):.1f} ms", f"{_mean('throughput', cells):.1f}"]
        else:
            row = [f"{findings.change(figure, cells, base):+.1%}" for figure in CELL_FIGURES]
        rows.append([name, *row, f"{cells[0].moved_gb:.0f}", f"{cells[0].stall_ms:,.0f}"])
    return table_of_rows(["system", "TTFT mean", "P99", "TPOT", "requests/s", "weights moved, GB", "stalls, ms"], rows)


def overload_table() -> str:
    """Overload of a healthy engine."""
    return _loaded("overload_random", TABLE, [f"`{name}`" for name in TABLE])


def stack_table() -> str:
    """Each level alone, and all together, beside vLLM with EPLB."""
    return _loaded("stack", STACK, _STACK_NAMES)


def prefixes_table(loads: Mapping[str, str]) -> str:
    """Hits of each system in the runs of each part, least to most, and the hit rate."""
    findings = _findings("gimbal")
    rows = []
    for system in dict.fromkeys(each.system for each in findings.prefixes):
        row = [f"`{system}`"]
        for load in loads:
            runs = [each for each in findings.prefixes if (each.load, each.system) == (load, system)]
            counts = [each.hit_blocks for each in runs]
            row.append(f"{min(counts):,} to {max(counts):,}, {np.mean([each.hit_rate for each in runs]):.2%}")
        rows.append(row)
    return table_of_rows(["system", *loads.values()], rows)


def sources_table() -> str:
    """Placements where sources differ: changes from experts in order."""
    findings, rows = _findings("gimbal"), []
    loads = ("sources", "sources_two_machines", "sources_shuffled")
    for system in PLACEMENTS[1:]:
        row = [f"`{system}`"]
        for load in loads:
            [rate] = findings.rates(load)
            base = findings.of(load, rate, PLACEMENTS[0])
            row.append(" / ".join(_changes(findings, findings.of(load, rate, system), base)))
        rows.append(row)
    heads = ["system", "users stay, one machine", "users stay, two machines", "shuffled, two machines"]
    return table_of_rows(heads, rows)


def skew_table() -> str:
    """Placements alone under more and more skew: changes from experts in order, and weights that they move."""
    findings, rows = _findings("gimbal"), []
    [rate] = findings.rates("skew")
    systems = ("place:eplb", "place:gimbal_v1", "place:moestro")
    for skew in findings.settings("skew"):
        [base] = findings.of("skew", rate, "place:static", skew)
        row = [skew, f"{base.balance:.3f}"]
        for system in systems:
            cells = findings.of("skew", rate, system, skew)
            row.append(f"{' / '.join(_changes(findings, cells, [base]))}, {cells[0].moved_gb:.1f} GB")
        rows.append(row)
    return table_of_rows(["exponent", "balance in order", *(f"`{system}`" for system in systems)], rows)


def routing_table(load: str, systems: Sequence[str] = PLACEMENTS) -> str:
    """Systems under recorded routing, and beside it: changes from the first."""
    findings, rows = _findings("gimbal"), []
    [rate] = findings.rates(load)
    for system in systems:
        row = [f"`{system}`"]
        for setting in findings.settings(load):
            cells, base = (findings.of(load, rate, name, setting) for name in (system, systems[0]))
            milliseconds = f"{_mean('TTFT', base):,.0f} / {_mean('TPOT', base):.1f} ms"
            change = milliseconds if system == systems[0] else " / ".join(_changes(findings, cells, base))
            [first, *_] = cells
            row.append(f"{change}, {first.balance:.3f}, {first.kept_pairs:.1%}, {first.moved_gb:.1f} GB")
        rows.append(row)
    return table_of_rows(["system", *(f"{name}" for name in findings.settings(load))], rows)


def recorded_systems_table() -> str:
    """Whole systems under recorded routing with scarce KV memory: changes from `vllm`."""
    return routing_table("recorded_scarce", TABLE)
