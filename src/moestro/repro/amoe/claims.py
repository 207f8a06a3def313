"""The claims of AMoE's paper as rows: what each compares, by which rule, and what the paper states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from moestro.repro.amoe.loads import LENGTHS, AmoeCell, AmoeFindings, ClosedRun, mean_stall, most_stall, throughput
from moestro.repro.amoe.paper import (
    FLFS,
    GAINS,
    LINEAR_BATCH,
    MTFS,
    POPULARITIES,
    RATES,
    RATIOS,
    SCALING,
    SKEWED,
    STALLS,
    TWO_MACHINES,
    panel,
)
from moestro.repro.amoe.systems import ASYNC, EP, EP_STALLS, OVERLAP, PING_PONG_NAME, REPLICAS
from moestro.repro.experiment import ClaimRow, PaperFigure
from moestro.repro.results import Claim

_EQUAL = 0.02  # figures that differ by less count as equal
_KEEPS_UP = 0.95  # of the input rate; a run of 20 s has a spread of 1.4 % at 250 requests a second
_HONEST = (EP, OVERLAP, PING_PONG_NAME, REPLICAS)
_PAPER = (ASYNC, EP, EP_STALLS)  # the paper's two systems, its baseline as ideal lock-step and with published stalls
_BASELINES = {EP: "against ideal lock-step", EP_STALLS: "against SGLang as published"}
_STALL = f"{100 * STALLS.value:g} %"
_STALLS_DECIDE = (
    f"the baseline stalls for {_STALL} of the time by assumption, which decides; ideal lock-step of equal prices stalls"
    " less"
)
_LOCK_STEP_WAITS = (
    "a wave of all ranks waits for the hottest expert of each layer, while async is bounded by the busiest GPU over all"
    " layers; attention has half of the GPUs"
)

Row = ClaimRow[AmoeFindings, Any]
BySystem = dict[str, AmoeCell]
Tokens = list[dict[str, float]]


def claims_of(findings: AmoeFindings) -> list[Claim]:
    """The paper's claims, in its order, as far as their parts were run."""
    return [claim for row in CLAIMS for claim in row.judged(findings)]


# --- capacities -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Gain:
    """`async` beside another system on one load, at the capacities of both."""

    findings: AmoeFindings
    ours: ClosedRun
    other: ClosedRun

    @property
    def ratio(self) -> float:
        """Its throughput over the other's."""
        return self.ours.tokens_per_s / self.other.tokens_per_s

    def text(self) -> str:
        """The ratio, also at equal ITL, and over the offered rates, which may end below the capacity of either."""
        ours, other = self.ours, self.other
        text = f"{self.ratio:.2f} x {other.system} (ITL {ours.itl_ms:.0f} and {other.itl_ms:.0f} ms)"
        if (most := self.findings.closed_at(ours.load, other.system, ours.itl_ms)) is not None:
            text += f", at that ITL {ours.tokens_per_s / most:.2f} x"
        first, second = (self.findings.best(run.load, run.system) for run in (ours, other))
        if first is not None and second is not None:
            text += f", over the offered rates {first.tokens_per_s / second.tokens_per_s:.2f} x"
        return text

    def reaches(self, figure: PaperFigure | None) -> bool | None:
        """Whether the ratio is the paper's, or above 1 without a figure. Even experts are not judged."""
        if self.ours.load.endswith("_uniform"):
            return None
        return self.ratio >= 1 + _EQUAL if figure is None else figure.is_reached(self.ratio)


def _against(load: str, others: tuple[str, ...], findings: AmoeFindings) -> Iterator[tuple[str, _Gain]]:
    """The case: `async` beside the best of other systems on a load."""
    ours, *runs = (findings.capacity(load, name) for name in (ASYNC, *others))
    served = [run for run in runs if run is not None]
    if ours is not None and served:
        yield load, _Gain(findings, ours, max(served, key=lambda run: run.tokens_per_s))


def _capacities(
    loads: Mapping[str, tuple[str, ...]], systems: tuple[str, ...], findings: AmoeFindings
) -> Iterator[tuple[str, Tokens]]:
    """Cases: by label, for each of its loads, tokens a second by system; where all were run."""
    for label, names in loads.items():
        runs = [[findings.capacity(load, system) for system in systems] for load in names]
        tokens = [{run.system: run.tokens_per_s for run in of_load if run is not None} for of_load in runs]
        if all(len(of_load) == len(systems) for of_load in tokens):
            yield label, tokens


def _lead(tokens: dict[str, float], other: str) -> float:
    return tokens[ASYNC] / tokens[other]


def _growth(tokens: Tokens, system: str) -> float:
    return tokens[1][system] / tokens[0][system]


_TOP_1_AND_2 = {f"{each}, {SKEWED}": (panel(each, 1, SKEWED), panel(each, 2, SKEWED)) for each in RATES}
_MACHINES = partial(_capacities, {SKEWED: (f"one_node_{SKEWED}", f"two_nodes_{SKEWED}")}, _PAPER)


# --- runs at one rate, and prices -------------------------------------------------------------------------------------


def _at(findings: AmoeFindings, load: str, rate: float) -> BySystem:
    return {cell.system: cell for cell in findings.cells if (cell.load, cell.rate) == (load, rate)}


def _curves(findings: AmoeFindings) -> Iterator[tuple[str, tuple[bool, float, float]]]:
    """Cases: whether the GPU is the paper's, throughput with 128 rows over that with one, and with 1,024 over 128."""
    for name, points in findings.batch_curve.items():
        at = {point.num_rows: point.rows_per_s for point in points}
        yield name, ("40g" in name, at[128] / at[1], at[1024] / at[128])


def _stalls(findings: AmoeFindings) -> Iterator[tuple[str, AmoeCell]]:
    if (cell := findings.best("stalls", EP)) is not None:
        yield "same", cell  # the form of the gate


def _seeds(findings: AmoeFindings) -> Iterator[tuple[str, tuple[float, str, str]]]:
    """Cases: a rate with the gains of all seeds over the published stalls, and over the best of the others."""
    load = f"spread_{SKEWED}"
    for rate in findings.rates(load):
        ours, stalled, *others = (
            findings.values(load, rate, name, throughput) for name in (ASYNC, EP_STALLS, *_HONEST)
        )
        gains = ours / stalled, ours / np.max([tokens for tokens in others if len(tokens)], axis=0)
        over_stalled, over_best = (f"{gain.mean():.2f} x ({gain.min():.2f} to {gain.max():.2f})" for gain in gains)
        yield f"{len(ours)} seeds", (rate, over_stalled, over_best)


def _low_rates(findings: AmoeFindings) -> Iterator[tuple[str, BySystem]]:
    """Cases: `async` and either baseline at the lowest rate of each length mix."""
    for lengths, rates in RATES.items():
        cells = _at(findings, panel(lengths, 1, SKEWED), rates[0])
        if set(_PAPER) <= cells.keys():
            yield f"{lengths}, {SKEWED}", {name: cells[name] for name in _PAPER}


def _by_rate(load: str, label: str, findings: AmoeFindings) -> Iterator[tuple[str, BySystem]]:
    yield from ((f"{label}, {rate:.0f}/s", _at(findings, load, rate)) for rate in findings.rates(load))


def _schedulers(findings: AmoeFindings) -> Iterator[tuple[str, BySystem]]:
    """Cases: all schedulers at each rate; none of them with top-2 where only top-1 was run."""
    for top_k in (1, 2):
        load, label = f"schedulers_top{top_k}_{SKEWED}", f"top-{top_k}, {SKEWED}"
        if f"schedulers_top1_{SKEWED}" in findings.loads and load not in findings.loads:
            yield label, {}
        yield from _by_rate(load, label, findings)


def _point(cell: AmoeCell) -> str:
    return f"{cell.system} {cell.tokens_per_s:,.0f} tokens/s at {cell.itl_ms:.0f} ms"


def _is_defrag_best(cells: BySystem) -> bool:
    ours, others = cells[ASYNC], (cells[MTFS], cells[FLFS])
    has_lower_itl = all(ours.itl_ms < other.itl_ms for other in others)
    return has_lower_itl and all(ours.tokens_per_s >= (1 - _EQUAL) * other.tokens_per_s for other in others)


def _items(findings: AmoeFindings) -> Iterator[tuple[str, AmoeCell]]:
    cell = _at(findings, panel("medium", 1, SKEWED), RATES["medium"][-1]).get(ASYNC)
    if cell is not None and cell.attention_step is not None and cell.expert_step is not None:
        yield SKEWED, cell


# --- the rows ---------------------------------------------------------------------------------------------------------


def _gains(load: str, figure: PaperFigure | None) -> Iterator[Row]:
    """The capacity beside that of the published stalls, and beside that of the best honest baseline."""
    stated = "more" if figure is None else f"{figure.value} x the"
    for against, others, why in (
        ("SGLang as published", (EP_STALLS,), _STALLS_DECIDE),
        ("the best of the others", _HONEST, _LOCK_STEP_WAITS),
    ):
        yield ClaimRow(
            where="Fig. 9", sentence=f"{stated} throughput; against {against}", ours=_Gain.text,
            cases=partial(_against, load, others), holds=partial(_Gain.reaches, figure=figure),
            figures=() if figure is None else (figure,), why=why,
        )  # fmt: skip


CLAIMS: tuple[Row, ...] = (
    ClaimRow(
        where="Fig. 3",
        sentence=f"throughput of an expert grows almost linearly up to a batch of {LINEAR_BATCH.value:g} (A100 40 GB)",
        figures=(LINEAR_BATCH,), quote="increases throughput almost linearly until the batch size of 128",
        cases=_curves,
        ours=lambda case: f"128 rows give {case[1]:.0f} times one row's, 1,024 rows {case[2]:.1f} times that",
        holds=lambda case: LINEAR_BATCH.is_reached(case[1]) if case[0] else None,
        why="the host's part of an item and reading the weights do not depend on rows",
    ),
    ClaimRow(
        where="Fig. 4", sentence=f"GPUs of expert parallelism stall for up to {_STALL} of the time",
        figures=(STALLS,), cases=_stalls,
        ours=lambda cell: f"ideal lock-step: {mean_stall(cell):.0%} in the mean, {most_stall(cell):.0%} on the idlest"
        " GPU",
        holds=lambda cell: STALLS.is_reached(most_stall(cell)),
        why=f"the skew of experts was chosen so that experts alone stall for {_STALL}; attention, which all GPUs share"
        " evenly, takes most of a step here, and SGLang's own waits are not priced",
    ),
    *(
        row
        for top_k in (1, 2)
        for lengths in RATES
        for popularity in POPULARITIES
        for row in _gains(panel(lengths, top_k, popularity), GAINS[lengths] if top_k == 1 else None)
    ),
    *_gains(f"kernels_{SKEWED}", GAINS["medium"]),
    ClaimRow(
        where=f"Fig. 9, medium, top-1, {SKEWED}", sentence=f"{GAINS['medium'].value} x the throughput",
        figures=(GAINS["medium"],), cases=_seeds, holds=lambda _: None,
        ours=lambda case: f"at {case[0]:g}/s, which offers {case[0] * LENGTHS['medium'].mean_output:,.0f} tokens/s:"
        f" {case[1]} SGLang as published, {case[2]} the best of the others",
        why="the offered load bounds both sides, so this row shows how far seeds differ and no capacity",
    ),
    ClaimRow(
        where="Fig. 9", sentence="under low load the baseline's ITL is lower", cases=_low_rates,
        ours=lambda cells: f"at {cells[ASYNC].rate:g}/s: "
        + ", ".join(f"{name} {cell.itl_ms:.0f} ms" for name, cell in cells.items()),
        holds=lambda cells: max(cells[EP].itl_ms, cells[EP_STALLS].itl_ms) < cells[ASYNC].itl_ms,
        why=f"ideal lock-step is lower; published stalls of {_STALL} are those of a loaded system",
    ),
    ClaimRow(
        where="Fig. 9", sentence="the gain is smaller with top-2 than with top-1",
        cases=partial(_capacities, _TOP_1_AND_2, _PAPER),
        ours=lambda found: "; ".join(
            f"{words} {_lead(found[0], name):.2f} x with top-1, {_lead(found[1], name):.2f} x with top-2"
            for name, words in _BASELINES.items()
        ),
        holds=lambda found: all(_lead(found[1], name) < _lead(found[0], name) for name in _BASELINES),
        why="with half of the GPUs for experts, top-2 doubles their work; lock-step uses all GPUs",
    ),
    ClaimRow(
        where="Fig. 10", sentence=f"{TWO_MACHINES.value:g} x the baseline's throughput with 16 experts on 16 GPUs",
        figures=(TWO_MACHINES,), cases=_MACHINES,
        ours=lambda found: f"{_lead(found[1], EP_STALLS):.2f} x SGLang as published, {_lead(found[1], EP):.2f} x ideal"
        " lock-step",
        holds=lambda found: TWO_MACHINES.is_reached(_lead(found[1], EP_STALLS)),
        why="lock-step of 16 GPUs waits for the slowest and for the wire, so that the published stalls add nothing",
    ),
    ClaimRow(
        where="Fig. 10", sentence=f"{SCALING.value} x the throughput of one machine", figures=(SCALING,),
        cases=_MACHINES, ours=lambda found: f"{_growth(found, ASYNC):.2f} x",
        holds=lambda found: SCALING.is_reached(_growth(found, ASYNC)),
        why="with the same hot experts in all layers no scheduler gains: one GPU holds the two hottest of 16, as of 8",
    ),
    ClaimRow(
        where="Fig. 10", sentence="the baseline gains nothing from the second machine", cases=_MACHINES,
        ours=lambda found: f"ideal lock-step {_growth(found, EP):.2f} x, with published stalls"
        f" {_growth(found, EP_STALLS):.2f} x",
        holds=lambda found: all(_growth(found, name) <= 1 + 5 * _EQUAL for name in _BASELINES),
        why="ideal lock-step loses by the wire; with published stalls one machine is slower by assumption",
    ),
    ClaimRow(
        where="Fig. 11",
        sentence="defrag has lower ITL and higher throughput than mtfs and flfs at 80 % of its highest throughput",
        quote="when the system operates at approximately 80% of its maximum achievable throughput",
        cases=_schedulers, ours=lambda cells: ", ".join(map(_point, cells.values())) or "not run",
        holds=lambda cells: _is_defrag_best(cells) if cells else None,
        why=lambda cells: "without saturation every policy that keeps up has the throughput of the input; the rate is"
        " 0.8 of our own maximum"
        if cells
        else "the paper has top-1 and top-2",
    ),
    ClaimRow(
        where="Fig. 12", sentence="the output rate of flfs falls behind the input rate; defrag's is closer to it",
        cases=partial(_by_rate, f"cold_{SKEWED}", SKEWED),
        ours=lambda cells: f"output of flfs {cells[FLFS].requests_per_s:.0f}/s, of defrag"
        f" {cells[ASYNC].requests_per_s:.0f}/s",
        holds=lambda cells: cells[FLFS].requests_per_s
        < min(_KEEPS_UP * cells[FLFS].rate, cells[ASYNC].requests_per_s),
        why="flfs stops later layers only where the workers of the first layers cannot keep up with arrivals",
    ),
    ClaimRow(
        where="Fig. 13", sentence="an attention step takes 2.7 ms, an expert step 0.8 ms",
        quote="The attention execution takes 2.7 ms in total while the expert execution takes 0.8 ms.",
        cases=_items, holds=lambda _: None,
        ours=lambda cell: f"{cell.attention_step.ms:.2f} ms for {cell.attention_step.tokens:.0f} tokens,"
        f" {cell.expert_step.ms:.2f} ms for {cell.expert_step.tokens:.0f}, in the mean at {cell.rate:g}/s",
        why="the prices were fitted to these times; only the batches are found",
    ),
    ClaimRow(
        where="section 3.3", sentence="more GPUs for attention raise throughput where contexts are longer",
        cases=partial(_capacities, {f"medium, {SKEWED}": (f"ratio_medium_{SKEWED}",)}, RATIOS),
        ours=lambda found: ", ".join(f"{name.partition(':')[2]} {tokens:,.0f}" for name, tokens in found[0].items()),
        holds=lambda found: max(found[0]["async:5+3"], found[0]["async:6+2"]) > (1 + _EQUAL) * found[0]["async:4+4"],
        why="the prototype's prices do not depend on contexts, and KV memory does not bind on 80 GB",
    ),
)  # fmt: skip
