"""What Gimbal's two papers say, beside what was found, and which assumption decides it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from moestro.repro.gimbal.loads import GimbalFindings
from moestro.repro.gimbal.paper import MARGIN, V1, V2
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

_ENGINES = {
    "scarce_": "scarce KV memory",
    "healthy_": "a healthy engine",
    "slow_": "a slow engine",
}
_WHY = {
    "scarce_": "whether requests wait for KV memory, and Algorithm 1 then avoids the full engine: 512 blocks bind for"
    " shapes with long prompts only; decodes take what they take",
    "healthy_": "the A100's kernels and vLLM's host bear ten times these rates: nothing waits, KV use stays far below"
    " theta_kv, and Algorithm 1 then takes the engines in turn, as the baseline does",
    "slow_": "TTFT is 4.9 s because steps are slow, not because requests wait; KV use stays below theta_kv, and"
    " Algorithm 1 compares loads only above it",
}


def claims_of(findings: GimbalFindings) -> list[Claim]:
    """The claims of both papers, in their order, of the parts that were run."""
    return [
        *(claim for prefix in _ENGINES for claim in _of_all_shapes(findings, prefix)),
        *_overload_claims(findings),
        *_memory_claims(findings),
        *_prefix_claims(findings),
        *_source_claims(findings),
        *_routing_claims(findings),
        *_stack_claims(findings),
    ]


# --- latencies ------------------------------------------------------------------------------------------------------


def _changes(
    findings: GimbalFindings,
    loads: list[str],
    figure: str,
    system: str,
    nth_rate: int = -1,
    seeds: set[int] | None = None,
) -> list[float]:
    """The change of a figure from vLLM on each load, at its nth rate.

    Args:
        seeds: seeds that count. None means all that both systems have.
    """
    found = []
    for load in loads:
        rate = findings.rates(load)[nth_rate]
        cells = [cell for cell in findings.of(load, rate, system) if seeds is None or cell.seed in seeds]
        change = findings.change(figure, cells, findings.of(load, rate, VLLM))
        if change is not None:
            found.append(change)
    return found


def _of_all_shapes(findings: GimbalFindings, prefix: str) -> Iterator[Claim]:
    """Claims of an engine's latency tables. The paper's means are over all shapes, so fewer judge nothing."""
    num_run = sum(load.startswith(prefix) for load in findings.loads)
    for claim in _shape_claims(findings, prefix):
        yield claim if num_run == len(SHAPES) else msgspec.structs.replace(claim, holds=None)


def _shape_claims(findings: GimbalFindings, prefix: str) -> Iterator[Claim]:
    loads = [load for load in findings.loads if load.startswith(prefix)]
    if not loads:
        return
    place, engine = _ENGINES[prefix], _WHY[prefix]
    for system, paper, section in ((GIMBAL_V1, V1, "v1, V-B"), (GIMBAL_V2, V2, "v2, abstract")):
        for figure, theirs in paper.items():
            found = _changes(findings, loads, figure, system)
            if found:
                mean = float(np.mean(found))
                ours = f"{mean:+.1%} ({min(found):+.1%} to {max(found):+.1%}; {_extent(findings, loads, system)})"
                yield Claim(
                    source=f"{section}, {place}", paper=f"{system}: {figure} {theirs.value:+.2%} from vLLM", ours=ours,
                    holds=theirs.is_reached(mean), why=engine,
                )  # fmt: skip
    yield from _v1_remarks(findings, loads, place, engine)


def _seeds(findings: GimbalFindings, loads: list[str], system: str) -> set[int]:
    return {cell.seed for load in loads for cell in findings.cells if (cell.load, cell.system) == (load, system)}


def _extent(findings: GimbalFindings, loads: list[str], system: str) -> str:
    seeds = len(_seeds(findings, loads, system))
    return f"{len(loads)} of 5 shapes, {seeds} seed{'s' if seeds > 1 else ''}"


def _v1_remarks(findings: GimbalFindings, loads: list[str], place: str, engine: str) -> Iterator[Claim]:
    throughput = _changes(findings, loads, "throughput", GIMBAL_V1)
    if throughput:
        most = max(throughput, key=abs)
        yield Claim(
            source=f"v1, V-B2, {place}", paper="throughput comparable to vLLM's", ours=f"at most {most:+.1%}",
            holds=abs(most) <= MARGIN,
        )  # fmt: skip
    means, text = _on_equal_seeds(findings, loads, (DPLB, SJFS, EDR, GIMBAL_V1))
    if means:
        alone = {name: means[name] for name in (DPLB, SJFS, EDR)}
        yield Claim(
            source=f"v1, V-B1, {place}", paper="Gimbal has a lower TTFT than each part alone", ours=text,
            holds=bool(means[GIMBAL_V1] < min(alone.values()) and means[GIMBAL_V1] < -MARGIN), why=engine,
        )  # fmt: skip
        yield Claim(
            source=f"v1, V-B1, {place}", paper="DPLB gives most of the gain in TTFT", ours=text,
            holds=bool(min(alone, key=lambda name: alone[name]) == DPLB and alone[DPLB] < -MARGIN), why=engine,
        )  # fmt: skip
    yield from _beside_balancer(findings, loads, place, engine)
    rates = [[findings.of(load, findings.rates(load)[nth], GIMBAL_V1) for load in loads] for nth in (0, -1)]
    seeds = set.intersection(*({cell.seed for cells in at_rate for cell in cells} for at_rate in rates))
    first, last = (_changes(findings, loads, "TTFT", GIMBAL_V1, nth, seeds) for nth in (0, -1))
    if first and last and any(len(findings.rates(load)) > 1 for load in loads):
        low, high = float(np.mean(first)), float(np.mean(last))
        yield Claim(
            source=f"v1, V-B1, {place}", paper="the gain in TTFT grows with the rate",
            ours=f"{low:+.1%} at the lowest rate, {high:+.1%} at the highest; {_equal(seeds)}",
            holds=bool(high < low - MARGIN), why=engine,
        )  # fmt: skip


def _on_equal_seeds(
    findings: GimbalFindings, loads: list[str], systems: tuple[str, ...]
) -> tuple[dict[str, float], str]:
    """The mean change of TTFT from vLLM over the seeds that all systems have, and a text; empty if there are none."""
    common = set.intersection(*(_seeds(findings, loads, name) for name in systems))
    found = {name: _changes(findings, loads, "TTFT", name, seeds=common) for name in systems}
    if not all(found.values()):
        return {}, ""
    means = {name: float(np.mean(changes)) for name, changes in found.items()}
    return means, ", ".join(f"{name} {mean:+.1%}" for name, mean in means.items()) + f"; {_equal(common)}"


def _equal(seeds: set[int]) -> str:
    return f"{len(seeds)} equal seed{'s' if len(seeds) > 1 else ''}"


def _beside_balancer(findings: GimbalFindings, loads: list[str], place: str, engine: str) -> Iterator[Claim]:
    """Judge the gain over the balancer that vLLM's code has, which the paper describes as round robin."""
    means, text = _on_equal_seeds(findings, loads, (VLLM_LEAST, GIMBAL_V1, GIMBAL_V2, MOESTRO))
    if means:
        yield Claim(
            source=f"v1, V-B, {place}", paper="TTFT is lower than vLLM's; here with the balancer of vLLM's code",
            ours=text, holds=means[GIMBAL_V1] < means[VLLM_LEAST] - MARGIN, why=engine,
        )  # fmt: skip


def _overload_claims(findings: GimbalFindings) -> Iterator[Claim]:
    for load in findings.loads:
        if not load.startswith("overload"):
            continue
        rate = findings.rates(load)[-1]
        for system, paper in ((GIMBAL_V1, V1), (GIMBAL_V2, V2)):
            found = {figure: _changes(findings, [load], figure, system) for figure in paper}
            if not all(found.values()):
                continue
            aged = findings.of(load, rate, system)[0].num_aged
            yield Claim(
                source=f"v{system[-1]}, {load}, a healthy engine, {rate:g} requests/s, P99 TTFT of vLLM near 4.9 s",
                paper=", ".join(f"{figure} {theirs.value:+.1%}" for figure, theirs in paper.items()),
                ours=", ".join(f"{figure} {each[0]:+.1%}" for figure, each in found.items())
                + f"; {aged} requests aged",
                holds=all(theirs.is_reached(found[figure][0]) for figure, theirs in paper.items()),
                why="requests wait for their prefill here, so the order of the queue decides TTFT; decodes take what"
                " they take, so TPOT hardly changes",
            )


# --- KV memory ------------------------------------------------------------------------------------------------------


def _memory_claims(findings: GimbalFindings) -> Iterator[Claim]:
    results, binds = [], []
    for load in findings.loads:
        for setting in findings.settings(load) if load.startswith("kv_") else ():
            rate = findings.rates(load)[-1]
            cells, base = (findings.of(load, rate, name, setting) for name in (DPLB, VLLM))
            if not cells or not base:
                continue
            branches, change = cells[0].branches, findings.change("TTFT", cells, base)
            above = sum(branches.get(name, 0) for name in ("least KV", "least load", "saturated and even"))
            counted = ", ".join(f"{name} {count}" for name, count in sorted(branches.items()))
            results.append(f"{setting} blocks: TTFT {change or 0:+.1%} ({counted})")
            if above:
                binds.append(change or 0.0)
    if results:
        yield Claim(
            source="v1, Algorithm 1, over KV blocks of a rank",
            paper="where KV use exceeds theta_kv, requests go to the engine with the least KV or load, and TTFT falls",
            ours="; ".join(results),
            holds=None if not binds else bool(np.mean(binds) < -MARGIN),
            why="the share of decisions above theta_kv; with the KV memory that an A100 has beside the weights it is 0",
        )


# --- prefix hits ----------------------------------------------------------------------------------------------------


def _hits(findings: GimbalFindings, load: str, system: str) -> tuple[list[int], float]:
    runs = [each for each in findings.prefixes if (each.load, each.system) == (load, system)]
    return [each.hit_blocks for each in runs], float(np.mean([each.hit_rate for each in runs])) if runs else 0.0


def _prefix_claims(findings: GimbalFindings) -> Iterator[Claim]:
    for load in dict.fromkeys(each.load for each in findings.prefixes):
        (base, base_rate), (ours, our_rate) = (_hits(findings, load, name) for name in (VLLM, GIMBAL_V1))
        without, no_rate = _hits(findings, load, V1_NO_USERS)
        if not base or not ours:
            continue
        spread = f"{min(ours):,} to {max(ours):,} hits, vLLM {min(base):,} to {max(base):,}"
        yield Claim(
            source=f"v1, figure 11, {load}", paper="18,992 hits in every run; vLLM 16,096 to 20,416", ours=spread,
            holds=len(set(ours)) == 1 and len(set(base)) > 1,
            why="requests reach the router with a jitter, so a user's first request, which goes to the engines in turn,"
            " may land elsewhere in another run; with constant times both systems repeat their runs exactly",
        )  # fmt: skip
        gain = float(np.mean(ours)) / max(float(np.mean(base)), 1.0) - 1
        yield Claim(
            source=f"v1, figures 11 and 12, {load}", paper="hits +3 %, hit rate 3.80 % against 3.64 %",
            ours=f"hits {gain:+.1%}, hit rate {our_rate:.2%} against {base_rate:.2%}"
            + (f"; without user affinity {no_rate:.2%}" if without else ""),
            holds=gain > MARGIN,
            why="how much of a user's later requests repeats earlier ones; with two engines, half of the repeats are"
            " found by chance",
        )  # fmt: skip


# --- sources and the stack ------------------------------------------------------------------------------------------


def _source_claims(findings: GimbalFindings) -> Iterator[Claim]:
    for load in findings.loads:
        if not load.startswith("sources"):
            continue
        rate = findings.rates(load)[-1]
        base = findings.of(load, rate, "place:eplb")
        results, gains = [], {}
        for policy in ("gimbal_v2", "moestro"):
            cells = findings.of(load, rate, f"place:{policy}")
            found = [findings.change(figure, cells, base) for figure in ("TTFT", "TPOT")]
            if None not in found:
                gains[policy] = [each or 0.0 for each in found]
                results.append(f"{policy}: TTFT {gains[policy][0]:+.1%}, TPOT {gains[policy][1]:+.1%}")
        if gains:
            yield Claim(
                source=f"v2, abstract, {load}, placement alone",
                paper="placing experts by source lowers latencies against counts alone (EPLB)",
                ours="; ".join(results),
                holds=None if load.endswith("shuffled") or "gimbal_v2" not in gains
                else bool(min(gains["gimbal_v2"]) < -MARGIN and max(gains["gimbal_v2"]) <= MARGIN),
                why="sources that see the same mix of experts have nothing to gain; the shuffled load is that control",
            )  # fmt: skip


def _routing_claims(findings: GimbalFindings) -> Iterator[Claim]:
    """Judge Algorithm 3 alone where experts of consecutive layers have affinity, and where the same ones have none."""
    for load in (each for each in findings.loads if each.startswith("routing")):
        [rate] = findings.rates(load)
        results, changes = [], {}
        for routing in findings.settings(load):
            ours, base = (findings.of(load, rate, f"place:{name}", routing) for name in ("gimbal_v1", "static"))
            found = {figure: findings.change(figure, ours, base) or 0.0 for figure in ("TTFT", "TPOT")}
            changes[routing] = found["TPOT"]
            kept = f"{ours[0].kept_pairs:.1%} of pairs on one GPU, in order {base[0].kept_pairs:.1%}"
            results.append(f"{routing}: TTFT {found['TTFT']:+.1%}, TPOT {found['TPOT']:+.1%}, {kept}")
        yield Claim(
            source=f"v1, III-D, GPT-OSS-20B, {load}",
            paper="experts with affinity between layers on one GPU lower TPOT", ours="; ".join(results),
            holds=changes["recorded"] < min(-MARGIN, changes.get("shifted", 0.0)),
            why="answers return to the token's rank after each layer, so that a pair on one GPU saves no transfer; only"
            " the balance of a placement counts",
        )  # fmt: skip


def _stack_claims(findings: GimbalFindings) -> Iterator[Claim]:
    if "stack" not in findings.loads:
        return
    rate = findings.rates("stack")[-1]
    base = findings.of("stack", rate, VLLM_EPLB)
    results, whole = [], []
    for system in STACK[1:]:
        cells = findings.of("stack", rate, system)
        found = {figure: findings.change(figure, cells, base) for figure in ("TTFT", "TPOT", "throughput")}
        results.append(f"{system}: " + ", ".join(f"{name} {each or 0:+.1%}" for name, each in found.items()))
        if system == MOESTRO:
            whole = [each or 0.0 for each in found.values()]
    yield Claim(
        source="our own goal", paper="all levels together are better than vLLM's defaults with EPLB",
        ours="; ".join(results), holds=bool(whole and whole[0] < -MARGIN and whole[1] < MARGIN),
        why="one load; levels 1, 2 and 4. Level 3 has nothing to decide in lock-step",
    )  # fmt: skip
