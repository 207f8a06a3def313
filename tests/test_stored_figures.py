"""Figures in README.md and docs/ are those of the stored files, and README.md stays short."""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moestro.repro.amoe.loads import LENGTHS, AmoeFindings, mean_stall
from moestro.repro.amoe.paper import SIXTEEN, TOP_1, WHOLE, panel
from moestro.repro.amoe.systems import ASYNC, COLOCATED, EP, EP_STALLS, OVERLAP, PING_PONG_NAME, REPLICAS, Bed, build
from moestro.repro.gimbal.loads import GimbalFindings
from moestro.repro.gimbal.paper import whole as gimbal_parts
from moestro.repro.lmetric.experiment import POLICIES
from moestro.repro.lmetric.findings import FIGURES as LMETRIC_FIGURES
from moestro.repro.lmetric.findings import NETWORK, RIVALS, LmetricFindings, difference
from moestro.repro.modes.experiment import ModesFindings
from moestro.repro.qllm.loads import EXPERT, FCFS, FCFS_64
from moestro.repro.qllm.paper import QllmFindings, ls_ttft, sweep_point
from moestro.repro.qllm.paper import ratios as qllm_ratios
from moestro.repro.results import Reproduced

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from stored_results import records  # noqa: E402 (its folder is no package)

RESULTS = ROOT / "bench" / "results"
README = (ROOT / "README.md").read_text()
JUDGED = ("ttft_mean_ms", "ttft_p99_ms", "tpot_mean_ms", "tokens_per_s")  # figures of simulated fleets, in this order
KINDS = ("*measured*", "*paced*", "*simulated*")


def stored(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def vllm_ratios(*names: str) -> list[float]:
    """Medians of vLLM's tokens per second over Moestro's, in order."""
    rows = [row for name in names for row in stored(f"{name}.json")["rows"] if row["system"] == "vllm"]
    return sorted(row["output_tokens_per_s_over_moestro"]["median"] for row in rows)


def span(values: list[float]) -> str:
    return f"{values[0]:.2f} to {values[-1]:.2f}"


ROUTERS = ("routing/router_overhead", "routing/router_overhead_intel")
PEERS = ("smg 1.13.0", "sglang-router 0.3.2", "vllm-router 0.1.17")


def router_us(result: str, case: str, system: str) -> float:
    """Median CPU time of a request, in µs."""
    return stored(f"{result}.json")["summary"][case][system]["cpu_us"]["median"]


def over_best_peer(result: str, case: str, policy: str) -> str:
    best = min(router_us(result, case, peer) for peer in PEERS)
    return f"{router_us(result, case, f'moestro route, {policy}') / best:.2f}"


def router_cpu() -> str:
    """CPU time for a small body: `moestro route` under its default policy over each peer, on both machines."""
    ours = [router_us(result, "small", "moestro route, moestro") for result in ROUTERS]
    return "; ".join(
        ", ".join(f"{us / router_us(result, 'small', peer):.2f}" for peer in PEERS)
        for us, result in zip(ours, ROUTERS, strict=True)
    )


def router_cpu_of_best_peer() -> list[str]:
    """CPU time over the best peer's on both machines: small bodies under two policies, then streams."""
    rows = (("small", "least_loaded"), ("small", "moestro"), ("small, stream", "least_loaded"))
    return [over_best_peer(result, case, policy) for case, policy in rows for result in ROUTERS]


def kills() -> str:
    ways = [stored("robustness/failures.json")["ways"][way] for way in ("expert_worker", "expert_worker_two_copies")]
    assert all(len(way["kills"]) == 100 for way in ways)
    num_answers = sum(sum(way["answers"].values()) for way in ways)
    return f"{num_answers - sum(way['answers']['equal'] for way in ways)} of {num_answers}"


def preemption(over: str) -> str:
    (row,) = [
        row
        for row in stored("serving/preemption_640m_kernels.json")["summary"]
        if row["system"] == "expert-level preemption"
    ]
    return f"{row[f'over {over}']['ls_ttft_ms_mean']['median']:.2f}"


def poison() -> str:
    runs = stored("robustness/strangers.json")["poison"]
    return "; ".join(
        f"{runs[when]['num_honest_failed']:,} of {runs[when]['num_honest']:,}" for when in ("before", "after")
    )


def near_best() -> str:
    """Cells of four latencies in which `moestro` is within 5 % of the best policy of those that ran at all rates."""
    groups: dict[tuple[str, float], dict[str, dict]] = {}
    for cell in stored("repro/lmetric.json")["findings"]["cells"]:
        if cell["network"] == "qwen3-30b-a3b":
            groups.setdefault((cell["load"], cell["rate"]), {})[cell["policy"]] = cell["measured"]
    policies = set.intersection(*(set(group) for group in groups.values()))
    assert len(policies) == 7
    cells = [
        {policy: group[policy][figure][statistic] for policy in policies}
        for group in groups.values()
        for figure in ("ttft_ms", "tpot_ms")
        for statistic in ("mean", "p99")
    ]
    return f"{sum(cell['moestro'] <= 1.05 * min(cell.values()) for cell in cells)} of {len(cells)}"


def before_vllm() -> str:
    """Mean TTFT over round robin's at three shares of the capacity, of `moestro` and of the best policy."""
    by_share = stored("routing/vllm_loads.json")["by_share"]
    ratios = [
        {
            policy: each["ttft_mean_ms_over_round_robin"]["median"]
            for policy, each in by_share[share]["measured"].items()
        }
        for share in ("0.5", "0.8", "1")
    ]
    rows = ([found["moestro"] for found in ratios], [min(found.values()) for found in ratios])
    return "; ".join(", ".join(f"{ratio:.2f}" for ratio in row) for row in rows)


def predicted_vllm() -> str:
    """Mean absolute errors of mean TTFT and mean TPOT of each setting."""
    found = []
    for name in ACCURACY:
        rows = stored(f"{name}.json")["rows"]
        errors = (
            100 * statistics.fmean(abs(row["predicted"][figure] / row["measured"][figure] - 1) for row in rows)
            for figure in ("ttft_mean_ms", "tpot_mean_ms")
        )
        found.append(", ".join(f"{error:.0f}" for error in errors))
    return f"{'; '.join(found)} %"


ACCURACY = tuple(f"accuracy/vllm_cpu{setting}" for setting in ("", "_dense", "_wide", "_dense_wide"))
AMD = ("serving/engine_cpu_demo", "serving/engine_cpu_640m", "serving/engine_cpu_long")
INTEL = ("serving/engine_avx512_demo", "serving/engine_avx512_640m")
PREEMPTION = ("serving/preemption_640m_kernels",)

# What a row's claim contains, what its figure is, and the results that it is from.
FIGURES: dict[str, tuple[Callable[[], str], tuple[str, ...]]] = {
    "1 to 32 users, AMD": (lambda: span(vllm_ratios(*AMD)), AMD),
    "Intel CPU with AVX-512": (lambda: span(vllm_ratios(*INTEL)), INTEL),
    "CPU time of `moestro route`": (router_cpu, ROUTERS),
    "100 kills and stops of expert workers": (kills, ("robustness/failures",)),
    "as a multiple of FCFS": (lambda: preemption("continuous, FCFS"), PREEMPTION),
    "iteration-level priority": (lambda: preemption("iteration-level priority"), PREEMPTION),
    "whose requests poison engines": (poison, ("robustness/strangers",)),
    "LMetric's set-up": (near_best, ("repro/lmetric",)),
    "decided by 95 % intervals": (lambda: ", ".join(verdicts_of_pairs()), ("repro/lmetric",)),
    "error of the predicted mean TTFT": (predicted_vllm, ACCURACY),
    "before two vLLM 0.32 servers": (before_vllm, ("routing/vllm_loads",)),
}


def days(*names: str) -> str:
    """The days on which the runs of results were made, first to last, without the year."""
    starts = sorted(datetime.fromisoformat(each["started_at"]) for name in names for each in records(f"{name}.json"))
    first, last = (f"{start.day} {start:%b}" for start in (starts[0], starts[-1]))
    if first == last:
        return first
    return f"{first.split()[0] if starts[0].month == starts[-1].month else first} to {last}"


@cache
def findings(paper: str, kind: Any) -> Any:
    return msgspec.json.decode((RESULTS / "repro" / f"{paper}.json").read_bytes(), type=Reproduced[kind]).findings


def capacity(part: str, system: str) -> float:
    return findings("amoe", AmoeFindings).capacity(part, system).tokens_per_s


def last_doublings(system: str) -> list[str]:
    """Least and most that the last doubling of requests adds to the throughput, in %, with permuted hot experts."""
    by_load: dict[str, list[tuple[int, float]]] = {}
    for run in findings("amoe", AmoeFindings).closed:
        if run.system == system and run.load.endswith("_permuted"):
            by_load.setdefault(run.load, []).append((run.num_requests, run.tokens_per_s))
    runs = [sorted(each)[-2:] for each in by_load.values() if len(each) > 1]
    gains = sorted(100 * (last[1] / before[1] - 1) for before, last in runs)
    return [f"{gains[0]:.0f}", f"{gains[-1]:.0f}"]


def over_others(part: str, system: str = ASYNC) -> float:
    """A capacity over the best one of the systems that AMoE's paper does not propose and that no stalls slow down."""
    return capacity(part, system) / max(capacity(part, name) for name in (EP, OVERLAP, PING_PONG_NAME, REPLICAS))


def panels(top_k: int, popularity: str) -> list[str]:
    return [panel(lengths, top_k, popularity) for lengths in ("short", "medium", "reasonable")]


def ratios(values: Iterable[float]) -> list[str]:
    return [f"{value:.2f}" for value in values]


def ends(values: Iterable[float]) -> list[str]:
    low, *_, high = sorted(ratios(values))
    return [low, high]


def scaling() -> list[str]:
    two = "two_nodes_permuted"
    return ratios([over_others(two), capacity(two, ASYNC) / capacity("one_node_permuted", ASYNC)])


def colocated() -> list[str]:
    return ends(over_others(part, COLOCATED) for top_k in (1, 2) for part in panels(top_k, "permuted"))


def bounds_of_same() -> list[str]:
    """Bounds of AMoE's division where all layers have the same hot experts, in thousands of tokens a second."""
    lengths = LENGTHS["medium"]
    return [
        f"{build(ASYNC, bed, (lengths.mean_context, lengths.longest), 0).bound() / 1e3:.1f}"
        for bed in (
            Bed(network=TOP_1, gpu="a100-40g", popularity="same"),
            Bed(network=SIXTEEN, gpu="a100-40g", num_gpus=16, popularity="same"),
        )
    ]


def overloaded_over_closed() -> list[str]:
    """Throughput past saturation over the closed-loop maximum: least and most, and the two cells far above it."""
    runs = findings("amoe", AmoeFindings)
    ratios: dict[tuple[str, str], float] = {}
    for part in (part for part in WHOLE if part.overload):
        for cell in runs.cells:
            if cell.load == part.name and cell.rate == runs.rates(part.name)[-1]:
                closed = runs.capacity(part.name, cell.system)
                ratios[part.name, cell.system] = cell.tokens_per_s / closed.tokens_per_s
    apart = {(f"reasonable_top2_{popularity}", COLOCATED) for popularity in ("permuted", "uniform")}
    others = [ratio for name, ratio in ratios.items() if name not in apart]
    return [f"{ratio:.2f}" for ratio in (min(others), max(others), *sorted(ratios[name] for name in apart))]


def gimbal_change(system: str, seeds: tuple[int, ...], prefix: str = "scarce_") -> str:
    """Mean change of TTFT from `vllm` over the five shapes on an engine of the tables at the highest rate."""
    runs = findings("gimbal", GimbalFindings)
    changes = []
    for load in (load for load in runs.loads if load.startswith(prefix)):
        cells = [cell for cell in runs.of(load, runs.rates(load)[-1], system) if cell.seed in seeds]
        assert {cell.seed for cell in cells} == set(seeds)
        changes.append(runs.change("TTFT", cells, runs.of(load, runs.rates(load)[-1], "vllm")))
    assert len(changes) == 5
    return f"{sum(changes) / 5:+.1%}"


def gimbal_changes(*systems: str, seeds: tuple[int, ...]) -> list[str]:
    return [gimbal_change(system, seeds) for system in systems]


def gimbal_blocks() -> list[str]:
    (bed,) = {part.bed for part in gimbal_parts(200) if part.name.startswith("scarce_")}
    of_a100 = replace(bed, num_blocks=None).kv_blocks
    return [f"{bed.kv_blocks / of_a100:.1%}".replace("%", " %"), f"{of_a100:,}"]


def qllm_at_40() -> list[str]:
    runs = findings("qllm", QllmFindings)
    places = qllm_ratios(runs, "answers_40", (FCFS_64, EXPERT), ls_ttft)
    return [f"{sweep_point(runs, 'answers_40', FCFS).mean_factor:.1f}", f"{sum(places.values()) / len(places):.1f}"]


def preemption_shares() -> list[str]:
    """TTFT of LS: FCFS over vLLM, priority over FCFS, preemption over priority; throughput of vLLM over FCFS."""
    rows = {row["system"]: row for row in stored("serving/preemption_640m_kernels.json")["summary"]}
    fcfs, priority = "continuous, FCFS", "iteration-level priority"
    vllm = rows["vLLM, priority"][f"over {fcfs}"]
    return ratios(
        [
            1 / vllm["ls_ttft_ms_mean"]["median"],
            rows[priority][f"over {fcfs}"]["ls_ttft_ms_mean"]["median"],
            rows["expert-level preemption"][f"over {priority}"]["ls_ttft_ms_mean"]["median"],
            vllm["tokens_per_s"]["median"],
        ]
    )


def decisions(*, has_kv_events: bool, policy: str = "lmetric") -> list[str]:
    """Microseconds of a decision with 16 and 4,096 engines."""
    rows = stored("micro/router_decision.json")["rows"]
    taken = [row for row in rows if row.get("policy") == policy and row["kv_events"] == has_kv_events]
    taken = [row for row in taken if row.get("compiled", True)]
    return [f"{row['submit_us']['median']:.0f}" for row in taken if row["engines"] != 256]


def replay_ratios() -> list[str]:
    """CPU-seconds of Dynamo's replay over ours: 16 engines under two policies, and one engine."""
    found = stored("simulator/sim_speed.json")["dynamo's CPU-seconds over ours"]
    trace = "Mooncake conversation, 16 engines"
    ratios = [found[f"{trace}, round_robin"], found[f"{trace}, dynamo"]]
    return [*(f"{ratio:.1f}" for ratio in ratios), f"{found['one engine, 1024/256']:.2f}"]


def aged(share: float, policies: tuple[str, ...], period_ms: float) -> list[float]:
    """By policy, the change of mean TTFT by figures of engines that come at intervals, on chats."""
    runs = {(each.policy, each.period_ms): each for each in lmetric().ages if each.share == share}
    means = {key: each.measured.ttft_ms.mean for key, each in runs.items()}
    return [means[name, period_ms] / means[name, 0] - 1 for name in policies]


def largest_aged(share: float, policies: tuple[str, ...]) -> str:
    return f"{100 * max(abs(each) for age in (100, 1000) for each in aged(share, policies, age)):.1f}"


def exchanges() -> list[str]:
    """Microseconds of an exchange of 2 kB between two and four processes, and gloo's time over it; also with 1 MiB."""
    rows = {(row["bytes"], row["workers"]): row for row in stored("micro/group_exchange.json")["rows"]}
    taken = [f"{rows[2048, workers]['us']['sockets']['median']:.0f}" for workers in (2, 4)]
    over = (
        rows[num_bytes, workers]["gloo_over_sockets"]["median"] for num_bytes in (2048, 1 << 20) for workers in (2, 4)
    )
    return [*taken, *(f"{ratio:.1f}" for ratio in over)]


def group_speeds() -> list[str]:
    """CPU-seconds of a simulated second of three groups with compiled draws, then their shares of NumPy's."""
    found = stored("simulator/group_speed.json")
    runs = [found[name] for name in ("async", "ep", "gimbal")]
    seconds = [run["cpu_s_per_simulated_s"]["compiled"]["median"] for run in runs]
    return [*(f"{each:.2g}" for each in seconds), *ratios(run["compiled_over_numpy"]["median"] for run in runs)]


def plan_ms(case: str) -> list[str]:
    """Milliseconds of a plan by the kernel, by NumPy and by vLLM's function."""
    taken = {
        row["function"]: row["ms"]["median"] for row in stored("micro/plan_time.json")["rows"] if row["case"] == case
    }
    return [f"{taken[name]:.0f}" for name in ("moestro", "moestro, NumPy", "vLLM")]


def picker_cpu_us(case: str) -> list[str]:
    """Processor time a request of Envoy alone, Envoy with the picker, the picker, and one that decides nothing; µs."""
    found = stored("routing/picker_overhead.json")["summary"][case]
    names = ("alone_envoy_cpu_us", "moestro_envoy_cpu_us", "moestro_cpu_us", "minimal_cpu_us")
    over = found["moestro_over_minimal_cpu"]
    shares = [f"{over[which]:.2f}" for which in ("median", "min", "max")]
    return [*(f"{found[name]['median']:,.0f}" for name in names), *shares]


def picker_added_ms(picker: str) -> list[str]:
    """Milliseconds that a picker adds to the first byte of one user, with small and with large bodies."""
    found = stored("routing/picker_overhead.json")["summary"]
    return [f"{found[f'{size}, one user'][f'{picker}_added_p50_ms']['median']:.1f}" for size in ("2.4 kB", "400 kB")]


def picker_on_amd() -> list[str]:
    found = stored("routing/picker_overhead_amd.json")
    added = (found["summary"]["2.4 kB, one user"][f"{name}_added_p50_ms"] for name in ("moestro", "compiled"))
    return [*(f"{each['median']:.2f}" for each in added), f"{found['idle']['cores']['median']:.3f}"]


def loops(device: str, result: str = "step_parts_avx512") -> list[str]:
    """Microseconds of a rank's loop for a step with 1, 8, 32 and 256 sequences."""
    rows = stored(f"micro/{result}.json")["rows"]
    return [f"{row['loop_us']['median']:.0f}" for row in rows if row.get("device") == device]


def tokens_us(result: str) -> list[str]:
    """Microseconds of the API server for a streamed token of a completion with 1, 8, 32 and 256 streams."""
    rows = [row for row in stored(f"micro/{result}.json")["rows"] if row.get("path") == "/v1/completions"]
    return [f"{row['token_us']['median']:.0f}" for row in rows]


def scheduler_us() -> list[str]:
    return [f"{row['step_us']['median']:.0f}" for row in stored("micro/scheduler.json")["rows"]]


def vllm_pair(policy: str) -> list[str]:
    """Hit ratio, mean TTFT in ms, and that over round robin with the least and the most."""
    found = stored("routing/vllm_pair.json")["policies"][policy]
    over = found["over_round_robin"]["ttft_mean_ms"]
    shares = [f"{over[which]:.2f}" for which in ("median", "min", "max")]
    return [f"{found['hit_ratio']['median']:.2f}", f"{found['ttft_mean_ms']['median']:.0f}", *shares]


def load_report_us() -> list[str]:
    taken = stored("micro/load_report.json")["figures"]
    found, reported = taken["router: find a head with a load"], taken["router: read the load and report it"]
    more = found - taken["router: find a head without a load"]
    return [f"{each:.1f}" for each in (taken["server: sum and write, 1 engine"], more + reported, reported)]


def vllm_kill() -> list[str]:
    ends = stored("routing/vllm_pair.json")["kill"]["ends"]
    return [str(ends["answered"]), str(sum(ends.values()))]


def amoe_sized(system: str, *others: str) -> list[str]:
    """Throughput of a mode over that of the best of others within 250 ms, with 16 experts on 16 GPUs."""
    runs = findings("modes", ModesFindings)
    most = {name: runs.most("experts_top-1_of_16_on_16_GPUs", name, 250).mean() for name in (system, *others)}
    return ratios([most[system] / max(most[name] for name in others)])


@cache
def lmetric() -> LmetricFindings:
    return findings("lmetric", LmetricFindings)


def shares_of_best(policy: str) -> list[float]:
    """Each figure of a policy over the least of the seven policies that ran at all rates."""
    found = []
    for load in lmetric().loads:
        for share in lmetric().shares(load):
            runs = lmetric().by_policy(load, share)
            found += [
                of(runs[policy].measured) / min(of(runs[name].measured) for name in POLICIES)
                for of in LMETRIC_FIGURES.values()
            ]
    return found


def cells_near_best(*policies: str) -> list[str]:
    return [str(sum(share <= 1.05 for share in shares_of_best(policy))) for policy in policies]


def worst_cells() -> list[str]:
    worst = {policy: max(shares_of_best(policy)) for policy in POLICIES}
    others = [worst[name] for name in POLICIES if name not in ("moestro", "lmetric", "vllm-0.26")]
    shown = (worst["moestro"], worst["lmetric"], min(others), max(others))
    return [f"{shown[0]:.1f}", f"{shown[1]:.1f}", f"{worst['vllm-0.26']:.0f}", *(f"{each:.1f}" for each in shown[2:])]


def ttft_changes(share: float, *others: str) -> list[str]:
    """Least and most change of mean TTFT from each policy to `moestro`; "best" is the best of the others."""
    found = []
    for other in others:
        changes = []
        for load in lmetric().loads:
            runs = {name: run.measured.ttft_ms.mean for name, run in lmetric().by_policy(load, share).items()}
            theirs = min(runs[name] for name in POLICIES if name != "moestro") if other == "best" else runs[other]
            changes.append(runs["moestro"] / theirs - 1)
        found += [f"{min(changes):+.0%}", f"{max(changes):+.0%}"]
    return found


def verdicts_of_pairs() -> list[str]:
    verdicts = [pair.difference.verdict for pair in lmetric().pairs]
    return [str(verdicts.count(each)) for each in ("better", "undecided", "worse")]


def worse_by_rate() -> list[str]:
    worse = [pair.share for pair in lmetric().pairs if pair.difference.verdict == "worse"]
    return [str(worse.count(share)) for share in (0.5, 0.9, 1.2)]


def lowest_of_five() -> list[str]:
    """Loads on which LMetric has the lowest mean TTFT of the paper's policies, by rate."""
    counts = []
    for share in (0.5, 0.9, 1.2):
        means = [
            {name: runs[name].measured.ttft_ms.mean for name in ("lmetric", *RIVALS)}
            for runs in (lmetric().by_policy(load, share) for load in lmetric().loads)
        ]
        counts.append(str(sum(min(each, key=each.__getitem__) == "lmetric" for each in means)))
    return counts


def below(share: float, figure: str, load: str) -> str:
    """How far LMetric lies below vLLM's score, in the mean over the parts of a run."""
    runs = lmetric().by_policy(load, share, NETWORK)
    return f"{-difference(runs['lmetric'], runs['vllm-0.26'], figure).mean:.0%}"


def tuned_errors() -> list[str]:
    """Least and most percent of requests whose TTFT a predictor with the right prices misses by over 20 %."""
    shares = [each.share_above_20_percent for each in lmetric().errors if each.is_tuned]
    return [f"{share:.0%}"[:-1] for share in (min(shares), max(shares))]


def lock_step_stalls(load: str, rate: float) -> list[str]:
    """Least and most mean stall of ideal lock-step from a rate on, in %."""
    cells = [cell for cell in findings("amoe", AmoeFindings).cells if (cell.load, cell.system) == (load, EP)]
    stalls = sorted(mean_stall(cell) for cell in cells if cell.rate >= rate)
    return [f"{100 * each:.0f}" for each in (stalls[0], stalls[-1])]


def decode_stalls() -> list[str]:
    """At 600 requests a second with the roofline's kernels: mean stalls of `async`, of replicas, and of lock-step."""
    runs = findings("amoe", AmoeFindings)
    at = {cell.system: mean_stall(cell) for cell in runs.cells if (cell.load, cell.rate) == ("kernels_permuted", 600)}
    lock_step = [at[name] for name in (EP, EP_STALLS, OVERLAP, PING_PONG_NAME) if name in at]
    return [f"{each:.0%}"[:-1] for each in (at[ASYNC], at[REPLICAS], min(lock_step), max(lock_step))]


def mean_of(result: str, figure: str, /, **cell: object) -> float:
    """Mean of a figure over the rounds of a simulated result that belong to a cell."""
    rounds = [row for row in stored(f"simulator/{result}.json")["rounds"] if cell.items() <= row.items()]
    return statistics.mean(row[figure] for row in rounds)


def change_of(result: str, figure: str, other: str, /, **cell: object) -> float:
    """Change of a mean figure of `moestro` against that of another policy, in per cent."""
    ours, theirs = (mean_of(result, figure, policy=policy, **cell) for policy in ("moestro", other))
    return 100 * (ours / theirs - 1)


def equal_changes() -> list[str]:
    """The largest changes by learned speeds among equal engines, of the mean TTFT and of the other figures."""
    cells = [
        ("unlike_engines_agents" if load == "coding_agent" else "unlike_engines", load, share)
        for load in ("chat", "tool_agent", "coding_agent")
        for share in (0.75, 1.1)
    ]
    changes = [
        [
            abs(change_of(result, figure, "moestro, not learnt", fleet="12 equal", load=load, share=share))
            for figure in JUDGED
        ]
        for result, load, share in cells
    ]
    return [f"{math.ceil(max(row[0] for row in changes))}", f"{math.ceil(max(max(row[1:]) for row in changes))}"]


def overload_p99_over_lmetric() -> list[str]:
    """P99 TTFT of `moestro` over that of `lmetric` at overload, least and most."""
    cases = [(load, share) for load in ("coding_agent", "tool_agent") for share in (1.1, 1.2)]
    ours, others = (
        [mean_of("overload", "ttft_p99_ms", load=load, share=share, policy=policy) for load, share in cases]
        for policy in ("moestro", "lmetric")
    )
    return ends(one / other for one, other in zip(ours, others, strict=True))


def preble_waits() -> list[str]:
    """TTFT mean and P99 in seconds at half load, of the published ratio, of `moestro` and of the smallest ratio."""
    policies = ("preble:balance_ratio=15", "moestro", "preble:balance_ratio=1.25")
    cells = [
        [mean_of("overload", figure, load="coding_agent", share=0.5, policy=policy) / 1e3 for figure in JUDGED[:2]]
        for policy in policies
    ]
    return [text for mean_s, p99_s in cells for text in (f"{mean_s:.1f}", f"{p99_s:.0f}")]


def host_gain_on_a_cpu() -> list[str]:
    """By how much host memory lowers the measured mean TTFT of two models at most, in per cent."""
    found = []
    for name in ("host_tier", "host_tier_640m"):
        [model] = stored(f"serving/{name}.json")["models"].values()
        none = {each["tool_s"]: each["measured"] for each in model["cases"] if not each["host memory"]}
        ratios = [each["measured"]["ttft_mean_ms"] / none[each["tool_s"]]["ttft_mean_ms"] for each in model["cases"]]
        found.append(f"{100 * (1 - min(ratios)):.0f}")
    return found


def host_gains() -> list[str]:
    """Live KV, and what host memory of one and of four times the KV memory takes off the mean TTFT, by load."""
    cases, found = stored("simulator/host_tier.json")["cases"], []
    for rate in ("0.2", "0.3"):
        none, one, four = (cases[f"{rate} requests/s, host {size} x"] for size in (0, 1, 4))
        found.append(f"{none['live_kv']:.1f}")
        found += [f"{100 * (1 - each['ttft_mean_ms'] / none['ttft_mean_ms']):.0f}" for each in (one, four)]
    return found


# By page: a sentence with gaps, and the figures that stand in them.
SENTENCES: dict[str, dict[str, Callable[[], list[str]]]] = {
    "repro.md": {
        "the factor at 40 tokens is {}, of which most is waiting for a place: with as many places as QLLM it is {}":
        qllm_at_40,
        "the best of the seven in {} of 72 cells, `lmetric` in {}, `dynamo` in {}, `llm-d` in {}, `bailian` and":
        partial(cells_near_best, "moestro", "lmetric", "dynamo", "llm-d"),
        "and `miss_ratio` in {}, `vllm-0.26` in {}.": partial(cells_near_best, "miss_ratio", "vllm-0.26"),
        "it has {} times the best, `lmetric` {} times, `vllm-0.26` {} times, and the others {} to {}": worst_cells,
        "differs from LMetric's by {} to {}, and from the predictor's with the right prices by {} to {}.": partial(
            ttft_changes, 0.5, "lmetric", "llm-d"
        ),
        "the others by {} to {}: from LMetric's by {} to {}, from the tuned sum's of Bailian by {} to {}": partial(
            ttft_changes, 0.9, "best", "lmetric", "bailian"
        ),
        "chats and API agents, by {} to {}.": partial(ttft_changes, 0.9, "vllm-0.26"),
        "**At 120 %** it differs from the best of the others by {} to {};": partial(ttft_changes, 1.2, "best"),
        "better in {}, undecided in {}, worse in {}.": verdicts_of_pairs,
        "At 50 % it is worse in {} of 24, at 90 % in {}, at 120 % in {}.": worse_by_rate,
        "its GPUs stall for {} % of the time, those of replicas for {} %, and those of lock-step for {} to {} %.":
        decode_stalls,
        "it has the lowest mean TTFT on {}, {} and {} of 6 loads at 50, 90 and 120 %": lowest_of_five,
        "how far (on chats {} at 50 % of it, {} at 90 %)": lambda: [
            below(0.5, "TTFT mean", "chat"), below(0.9, "TTFT mean", "chat")
        ],
        "with the right prices for {} to {} % of them.": tuned_errors,
        "({} to {} % from 300 requests a second on)": lambda: lock_step_stalls("two_nodes_permuted", 300),
        "AMoE's division has {} to {} times the capacity, by lengths, top-k and skew.": lambda: ends(
            over_others(part) for top_k in (1, 2) for each in ("permuted", "uniform") for part in panels(top_k, each)
        ),
        "`async` still gains {} to {} % by the last doubling of requests up to it, `ep` {} to {} %": lambda: [
            *last_doublings(ASYNC), *last_doublings(EP)
        ],
        "AMoE's division is {} thousand tokens/s on one machine and {} thousand on two": bounds_of_same,
        "Overloaded runs reach {} to {} times the closed-loop maximum; replicas exceed it,"
        " as numbers of requests double from one closed-loop run to the next\n"
        "and memory holds a number between. `async_colocated` alone has {} and {} times": overloaded_over_closed,
        "`async` has {} times the best other capacity on one machine": lambda: ratios(
            [over_others("kernels_permuted")]
        ),
        "(`async_colocated`) has {} to {} times": colocated,
        "has {} times the best other capacity there, and {} times its own on one machine": scaling,
        "cost vLLM's two balancers {} and {} % of mean TTFT, of 100 ms ago {} and {} %.": lambda: [
            f"{100 * each:.{digits}f}"
            for age, digits in ((1000, 0), (100, 1))
            for each in aged(0.5, ("vllm-0.26", "vllm-0.27"), age)
        ],
        "mean TTFT changes by at most {} %.\n- At 90 %": lambda: [largest_aged(0.5, ("lmetric", "moestro"))],
        "no policy's mean TTFT changes by more than {} %.": lambda: [
            largest_aged(0.9, ("vllm-0.26", "vllm-0.27", "lmetric", "moestro"))
        ],
        "That is {} of the {} blocks": gimbal_blocks,
        "by seed `dplb` has {}, {}, {} on `scarce`, and `moestro` {}, {}, {} on `slow`": lambda: [
            gimbal_change(system, (seed,), prefix)
            for system, prefix in (("dplb", "scarce_"), ("moestro", "slow_"))
            for seed in (0, 1, 2)
        ],
        "{} with `gimbal_v1` (the paper: -17.8 %), {} with `gimbal_v2` (-42.9 %) and {} with `moestro`;\n"
        "with vLLM's own balancer it changes by {}.": partial(
            gimbal_changes, "gimbal_v1", "gimbal_v2", "moestro", "vllm_least", seeds=(0, 1, 2)
        ),
    },
    "bench.md": {
        "takes {} ms of one thread on 64 devices, {} with NumPy; vLLM's function takes {}.": partial(
            plan_ms, "58x256 on 64, 320 slots"
        ),
        "without redundancy it takes {}, {} and {}, on": partial(plan_ms, "48x128 on 8, 128 slots"),
        "on 144 devices {}, {} and {}\n": partial(plan_ms, "58x256 on 144, 288 slots"),
    },
    "envoy.md": {
        **{
            f"| {shown} | {{}} | {{}} | {{}} | {{}} | {{}} ({{}} to {{}}) |": partial(picker_cpu_us, case)
            for shown, case in {
                "2.4 kB, one user": "2.4 kB, one user",
                "2.4 kB, 8 users": "2.4 kB",
                "400 kB, one user": "400 kB, one user",
                "2.4 kB, streamed, 16 users": "2.4 kB, streamed",
            }.items()
        },
        "comes {} ms later than from Envoy alone at 2.4 kB, and {} ms at 400 kB": partial(picker_added_ms, "moestro"),
        "with the picker that decides nothing, {} and {} ms.": partial(picker_added_ms, "minimal"),
        "on the router's own transport add {} and {} ms": partial(picker_added_ms, "floor"),
        "compiled ones (`floor_picker.cpp`) {} and {} ms": partial(picker_added_ms, "compiled"),
        "took {} of a core": lambda: [f"{stored('routing/picker_overhead.json')['idle']['cores']['median']:.3f}"],
        "{} ms later, with compiled constants {} ms, and an idle router takes {} of a core.": picker_on_amd,
    },
    "architecture.md": {
        "A decision of `lmetric` takes {} and {} µs": partial(decisions, has_kv_events=False),
        "one of `moestro` {} and {}.": partial(decisions, has_kv_events=False, policy="moestro"),
        "fill, `lmetric` takes {} and {} µs": partial(decisions, has_kv_events=True),
        "and `moestro` {} and {}.": partial(decisions, has_kv_events=True, policy="moestro"),
        "with up to 8 sequences ({} and {} µs)": lambda: loops("awake")[:2],
        "With 32 and 256 a step takes {} and {} µs": lambda: loops("awake")[2:],
        "1 to 256 sequences take {} to {} µs": lambda: loops("asleep")[::3],
        "1 to 256 sequences take {} to {} µs awake, {} to {} asleep": lambda: [
            *loops("awake", "step_parts")[::3], *loops("asleep", "step_parts")[::3]
        ],
        "{}, {}, {}, {} µs with 1, 8, 32, 256 streams on": lambda: tokens_us("step_parts_avx512"),
        "{}, {}, {}, {} on the AMD one": lambda: tokens_us("step_parts"),
        "25 and 60 µs, kept ({} and {} on AMD": scheduler_us,
    },
    "policies.md": {
        "learning changes no mean TTFT by more than {} %, and no other figure by more than {} %.": equal_changes,
        "here its P99 is {} to {} times that of `lmetric`": overload_p99_over_lmetric,
        "has a mean TTFT of {} s and a P99 of {} s, where `moestro` has {} and {}:": lambda: preble_waits()[:4],
        "do not help (at 1.25, {} and {} s)": lambda: preble_waits()[4:],
        "with live KV of {} times its memory:\n"
        "host memory of that size takes {} % off the mean TTFT, four times as much {} %; with {} times, {} and {} %":
        host_gains,
        "On a CPU the demo model gains up to {} %, and one of 640M parameters up to {} %": host_gain_on_a_cpu,
    },
    "expert_groups.md": {
        "takes {} µs between two engines and {} between four; gloo takes {} and {} times as long, with 1 MiB {} and {}":
        exchanges,
    },
    "simulator.md": {
        "So Dynamo takes {} and {} times our time with 16 engines, and {} with one": replay_ratios,
        "expert workers take {} in `async` and {} in ideal `ep`,\nGimbal's two ranks at 1.4 requests a second {}.\n"
        "Compiled draws of experts take {}, {} and {} of the time with NumPy's": group_speeds,
    },
    "route.md": {
        "a small request takes {} and {} of the best peer's CPU with `least_loaded` (the goal, 0.6, is missed) and\n"
        "  {} and {} with `moestro` (1.0, missed); a stream takes {} and {} with": router_cpu_of_best_peer,
        "| `round_robin` | {} | {} | 1 |": lambda: vllm_pair("round_robin")[:2],
        "| `lmetric` | {} | {} | {} ({} to {}) |": partial(vllm_pair, "lmetric"),
        "| `moestro` | {} | {} | {} ({} to {}) |": partial(vllm_pair, "moestro"),
        "in mid-run, {} of {} requests were answered": vllm_kill,
        "At 50 and 100 % it holds for {} and {} of 10": lambda: [
            stored("routing/vllm_loads.json")["by_share"][share]["pairs_in_equal_order"].split()[0]
            for share in ("0.5", "1")
        ],
        "costs {} µs in the API server, and {} µs in the router, of which {} read and report it": load_report_us,
        "The header has {} bytes": lambda: [str(stored("micro/load_report.json")["figures"]["header, bytes"])],
    },
    "modes.md": {
        "which AMoE does not have, has {} times the best other mode": partial(
            amoe_sized, COLOCATED, EP, OVERLAP, PING_PONG_NAME, REPLICAS
        ),
        "AMoE's own division (`async`) has {} times ping-pong there": partial(amoe_sized, ASYNC, PING_PONG_NAME),
    },
    "flow.md": {
        "priority scheduling: {}.": lambda: preemption_shares()[:1],
        "priority over FCFS: {}.": lambda: preemption_shares()[1:2],
        "over iteration-level priority: {} (": lambda: preemption_shares()[2:3],
        "it has {} of the tokens/s of FCFS": lambda: preemption_shares()[3:],
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("page", "sentence"),
    [(page, text) for page, texts in SENTENCES.items() for text in texts],
    ids=lambda text: text[:60],
)
def test_a_sentence_of_a_page_has_the_stored_figures(page, sentence):
    expected = sentence.format(*SENTENCES[page][sentence]())
    assert expected in (ROOT / "docs" / page).read_text()


def rows() -> list[tuple[str, str, str, str]]:
    """Claim, figure, kind and days of each row of the table of figures."""
    found = []
    (table,) = re.findall(r"<!-- figures.*?-->\n(.*?)<!-- end -->", README, re.DOTALL)
    for line in table.splitlines()[2:]:
        claim, figure, kind, made = (part.strip() for part in line.strip("|").split("|"))
        found.append((claim, figure, kind, made))
    return found


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:60])
def test_each_figure_is_the_stored_one_and_names_its_kind(row):
    claim, figure, kind, made = row
    ((compute, results),) = [each for part, each in FIGURES.items() if part in claim]
    assert figure == compute()
    assert kind in KINDS
    assert made == days(*results)


def test_readme_says_how_many_cells_are_not_near_the_best():
    near, total = map(int, near_best().split(" of "))
    assert f"In the other {total - near} cells another policy is better by more" in README


def test_readme_says_where_the_tail_pays_at_overload():
    runs = {load: lmetric().by_policy(load, 1.2) for load in ("chat", "coder")}
    means = {load: {name: (c.measured.ttft_ms.mean, c.measured.ttft_ms.p99) for name, c in found.items()}
             for load, found in runs.items()}  # fmt: skip
    assert min(means["chat"], key=lambda name: means["chat"][name][0]) == "moestro"
    assert means["chat"]["moestro"][1] > means["chat"]["miss_ratio"][1]
    assert all(miss < ours for miss, ours in zip(means["coder"]["miss_ratio"], means["coder"]["moestro"], strict=True))


@pytest.mark.parametrize("policy", ["lmetric", "dynamo"])
def test_ttft_of_api_agents_grows_at_90_percent_of_the_capacity_as_the_page_says(policy):
    parts = lmetric().by_policy("api_agent", 0.9)[policy].batches["TTFT mean"]
    assert list(parts[-4:]) == sorted(parts[-4:])
    assert parts[-1] > 2 * parts[0]


def test_sentences_about_policies_before_vllm_under_load() -> None:
    """docs/route.md says who is ahead of round robin in all rounds, and how far the simulation is from the servers."""
    by_share = stored("routing/vllm_loads.json")["by_share"]
    over = {
        share: {policy: each["ttft_mean_ms_over_round_robin"] for policy, each in found["measured"].items()}
        for share, found in by_share.items()
    }
    assert {policy for policy, ratio in over["1"].items() if ratio["max"] < 1} == {"moestro", "cache_aware"}
    assert over["1"]["lmetric"]["median"] < 1
    assert {policy for policy, ratio in over["0.8"].items() if ratio["max"] < 1} == {"cache_aware", "vllm-0.27"}
    at_80 = sorted(over["0.8"], key=lambda policy: over["0.8"][policy]["median"])
    assert (at_80[0], at_80[-2:]) == ("cache_aware", ["moestro", "round_robin"])
    assert by_share["0.8"]["pairs_in_equal_order"] == "5 of 10"
    assert all(ratio["min"] <= 1 <= ratio["max"] for ratio in over["0.5"].values())
    for share, found in by_share.items():
        for policy, measured in found["measured"].items():
            simulated = found["simulated"][policy]
            medians = [(each["hit_ratio"]["median"], each["ttft_mean_ms"]["median"]) for each in (simulated, measured)]
            assert abs(medians[0][0] - medians[1][0]) <= 0.06
            ratio = medians[0][1] / medians[1][1]
            assert 0.4 < ratio < 0.6 if share == "0.5" else ratio < 0.36
