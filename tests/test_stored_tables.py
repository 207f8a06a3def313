"""Tables in docs/ that no tool generates have the figures of their stored files."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec
import pytest

from moestro.repro.modes.experiment import CASES, OURS, SYSTEMS, ModesFindings
from moestro.repro.qllm.loads import EXPERT, FCFS_64, ITERATION, RUN_TO_COMPLETION
from moestro.repro.qllm.paper import QllmFindings, ls_ttft, throughput
from moestro.repro.qllm.paper import ratios as qllm_ratios
from moestro.repro.results import Reproduced

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
from routing.shadow import DILATION
from routing.shadow import LOADS as SHADOW_LOADS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
Spread = dict[str, float]  # median, min and max of rounds
Rows = Iterator[str]


@cache
def stored(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def findings(paper: str, kind: Any) -> Any:
    return msgspec.json.decode((RESULTS / "repro" / f"{paper}.json").read_bytes(), type=Reproduced[kind]).findings


def of_rounds(spread: Spread, digits: int = 0, factor: float = 1.0, to: str = " to ") -> str:
    """Median, with the least and the most in brackets."""
    median, least, most = (f"{factor * spread[which]:,.{digits}f}" for which in ("median", "min", "max"))
    return f"{median} ({least}{to}{most})"


def signed(ratio: float) -> str:
    return f"{ratio:+.0%}".removesuffix("%")


# bench.md


def engines() -> Rows:
    """Tokens per second of each engine on a CPU."""
    for name, prompts in (("demo", ""), ("640m", ""), ("long", ", 1,024 + 128")):
        models = {"demo": f"demo{prompts or ', 8M'}"}
        models["random-640m"] = f"640M{prompts}" if prompts else "random Qwen3-MoE, 640M"
        rows = stored(f"serving/engine_cpu_{name}.json")["rows"]
        for ours, vllm, transformers in zip(*(rows[start::3] for start in range(3)), strict=True):
            assert [row["system"] for row in (ours, vllm, transformers)] == ["moestro", "vllm", "transformers"]
            ratios = [row["output_tokens_per_s_over_moestro"] for row in (vllm, transformers)]
            shown = (
                f"{ratio['median']:.2f} × ({ratio['min']:.2f}–{ratio['max']:.2f})"  # noqa: RUF001 (as on the page)
                for ratio in ratios
            )
            tokens = ours["output_tokens_per_s"]["median"]
            yield f"| {models[ours['model']]} | {ours['users']} | {tokens:,.0f} | {' | '.join(shown)} |"
    shares = [
        [
            f"{row['output_tokens_per_s_over_moestro']['median']:.2f}"
            for row in stored(f"serving/engine_avx512_{name}.json")["rows"]
            if row["system"] == "vllm"
        ]
        for name in ("demo", "640m")
    ]
    demo, large = (f"{one}, {eight} and {many}" for one, eight, many in shares)
    yield f"vLLM has {demo} of Moestro's tokens/s at 1, 8 and 32 users of the demo model, and {large} of the 640M"


def async_measured() -> Rows:
    names = {
        "fused": "one engine", "ep 2": "`ep` 2", "async 1+1": "`async` 1+1", "async 2+2": "`async` 2+2",
        "async 2 colocated": "`async` 2 colocated",
    }  # fmt: skip
    for row in stored("serving/async_ep.json")["measured"]["summary"]:
        cpu = row["cpu_ms_per_token"]["median"]
        digits = 2 if cpu < 4 else 1
        over = of_rounds(row["cpu_ms_per_token_over_fused"], 1)
        messages = ""
        if "messages_per_token" in row:
            messages = f"{row['messages_per_token']['median']:.1f}, {row['kib_per_token']['median']:.0f} "
        yield (
            f"| {names[row['system']]} | {of_rounds(row['tokens_per_s'])} | {row['ttft_mean_ms']['median']:.0f} |"
            f" {row['itl_mean_ms']['median']:.0f} / {row['itl_p99_ms']['median']:.0f} | {cpu:.{digits}f} |"
            f" {'1' if row['system'] == 'fused' else over} | {messages}|"
        )


def async_paced() -> Rows:
    """Paced and simulated figures of `async`, and how far the host is busy."""
    spans: dict[str, list[float]] = defaultdict(list)
    for name in ("async_ep_paced", "async_ep_uniform"):
        for case in stored(f"serving/{name}.json")["compared"]:
            cells = []
            for figure, most in (("tokens_per_s", 0), ("itl_mean_ms", 1), ("itl_p99_ms", 0), ("ttft_mean_ms", 0)):
                pair = case[figure]
                digits = most if pair["paced"] < 100 else 0
                cells.append(f"{pair['paced']:.{digits}f} / {pair['simulated']:.{digits}f} ({pair['difference']:+.1%})")
            yield cells[0]
            yield cells[2]
            yield cells[3]
    for row in [
        *stored("serving/async_ep_paced.json")["host"]["runs"],
        *stored("serving/async_ep_paced.json")["paced_rows"],
    ]:
        for part, figures in row["host"].items():
            spans[part].append(figures["elapsed_us"])
    attention, experts = (f"{min(spans[part]):,.0f} to {max(spans[part]):,.0f} µs" for part in ("attention", "experts"))
    yield f"for {attention} (attention) and {experts} (experts)"
    forecast = [f"{row['tokens_per_s']:,.0f}" for row in stored("serving/async_ep_paced.json")["forecast"]]
    yield f"`async` would serve {forecast[0]} tokens/s uniform and {forecast[1]} skewed"
    lock_step = [f"{row['tokens_per_s']:,.0f}" for row in stored("serving/async_ep_lock_step.json")["forecast"]]
    yield f"`ep` would serve {lock_step[0]} and {lock_step[1]}."
    late = max(1 + case["itl_p99_ms"]["difference"] for case in stored("serving/async_ep_lock_step.json")["compared"])
    yield f"the P99 of ITL is up to {late:.1f} times the simulated one"


def migration() -> Rows:
    runs = stored("serving/migration.json")
    for name, shown in (("experts stay", "experts stay"), ("experts move", "experts move without a rest")):
        cells = (of_rounds(runs[name][figure]) for figure in ("gap_p50_ms", "gap_p99_ms", "tokens_per_s"))
        yield f"| {shown} | {' | '.join(cells)} |"
    moved, num_answers = runs["moved_bytes"] / 1e6, runs["num_answers"]
    assert runs["num_differing"] == 0
    yield f"{runs['num_moved_layers']} layers moved ({moved:.0f} MB), and all {num_answers} answers are equal."


def drift() -> Rows:
    for name in ("none", "eplb", "moestro"):
        row = stored("serving/drift.json")[name]
        moved = of_rounds(row["moved_mb"]) if row["moved_mb"]["max"] else "0"
        yield f"| `{name}` | {of_rounds(row['balance'], 3)} | {of_rounds(row['priced_step_us'], 3)} | {moved} |"


def drift_in_short() -> Rows:
    eplb, ours = (stored("serving/drift.json")[name] for name in ("eplb", "moestro"))
    moved, step = (ours[figure]["median"] / eplb[figure]["median"] for figure in ("moved_mb", "priced_step_us"))
    shorter = f"{100 * (1 - step):.0f} % shorter"
    yield f"moves {100 * moved:.0f} % of EPLB's bytes (*measured*), and its priced step is {shorter}"


def copies() -> Rows:
    for name, row in stored("serving/async_replicas.json")["summary"].items():
        gate, system = name.split(", ")
        over = "" if system == "in_order" else f"{of_rounds(row['throughput_over_in_order'], 2)} "
        cells = f"{row['itl_mean_ms']['median']:.0f} | {row['expert_balance']['median']:.2f}"
        yield f"| {gate}, `{system}` | {of_rounds(row['tokens_per_s'])} | {over}| {cells} |"
    gains = [
        signed(
            found[f"hot ids {ids}, gap {gap}"]["tokens_per_s"][0]
            / found[f"hot ids {ids}, gap never"]["tokens_per_s"][0]
            - 1
        )
        for found in [stored("simulator/replica_choice.json")]
        for gap, ids in product((64, 256), ("same", "permuted"))
    ]
    yield f"by {gains[0]} % where these are hot in all layers,\nand by {gains[1]} % where they are permuted"
    yield f"at 256 pairs by {gains[2]} and {gains[3]} %"


def real_routing() -> Rows:
    """Placements of recorded routing, and the functions that they share with EPLB."""
    rows = [row for row in stored("simulator/placement.json")["rows"] if row["part"] == "real"]
    step: dict[tuple[str, str, str], float] = {}
    spans: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        if row["policy"] != "(upper bound)":
            step[row["case"], row["load"], row["policy"]] = row["step_ms"][0]
            for figure in ("next", "other"):
                spans[figure, row["policy"]].append(row[figure][0])

    def span(values: list[float], form: str = ".2f") -> str:
        return f"{min(values):{form}} to {max(values):{form}}"

    def below(policy: str) -> str:
        gains = [1 - ms / step[case, load, "eplb"] for (case, load, name), ms in step.items() if name == policy]
        return span([100 * gain for gain in gains], ".0f")

    plans = [value for name in ("eplb", "gimbal_v2", "moestro") for value in spans["other", name]]
    yield f"balance in a benchmark's next window is {span(spans['next', 'static'])} without a plan,"
    yield f"{span(spans['next', 'eplb'])} with EPLB, {span(spans['next', 'moestro'])} with `moestro`"
    yield f"whose priced step is {below('moestro')} % below EPLB's; `gimbal_v2` has {below('gimbal_v2')} %."
    yield f"a plan is worth little: {span(plans)}, without one {span(spans['other', 'static'])}."


def next_windows() -> Rows:
    """Balance in the window after the one that was planned for."""
    rows = {
        (row["load"], row["policy"]): row
        for row in stored("simulator/placement_windows.json")["rows"]
        if row["case"] == "58x256 on 32, 288 slots"
    }
    loads = {f"s={skew}": f"Zipf {skew}" for skew in (0.4, 0.6, 1.2)}
    for load, shown in (loads | {"four kinds of tasks": "four kinds of tasks, one mix from all sources"}).items():
        eplb, ours = (rows[load, policy] for policy in ("eplb:hierarchy=never", "moestro"))
        figures = [
            rows[load, "(estimate)"]["next"],
            *(row[each] for row in (eplb, ours) for each in ("next", "refreshed")),
        ]
        yield f"| {shown} | {' | '.join(f'{figure[0]:.3f}' for figure in figures)} |"


def lasting() -> Rows:
    cases: dict[tuple[str, int], list[str]] = defaultdict(list)
    for row in stored("simulator/placement_lasting.json")["rows"]:
        cell = f"{row['of_best_plain'][0]:.3f}, {mean(row['lasting moestro']['migrations']):.1f}"
        cases[row["case"].split()[3], row["rows_per_source"] // 4].append(cell)
    for (slots, tokens), cells in cases.items():
        yield f"| {slots} slots, {tokens:,} tokens"
        yield f" | {' | '.join(cells)} |"


# modes.md and README.md


@cache
def modes() -> ModesFindings:
    return findings("modes", ModesFindings)


def gains(case: str, bound_ms: float, systems: tuple[str, ...]) -> Any:
    """The best of some modes over the best other mode, by seed."""
    best = [
        max(modes().most(case, name, bound_ms)[seed] for name in systems) for seed, _ in enumerate(modes().seeds(case))
    ]
    others = [
        max(modes().most(case, name, bound_ms)[seed] for name in SYSTEMS if name not in OURS)
        for seed, _ in enumerate(modes().seeds(case))
    ]
    return [ours / other for ours, other in zip(best, others, strict=True)]


def map_of_modes() -> Rows:
    for case in CASES:
        num_seeds = len(modes().seeds(case.name))
        cells = []
        for name in (*OURS,):
            each = [modes().most(case.name, name, bound).mean() / 1e3 for bound in (100, 250)]
            cells.append(f"{each[0]:.1f} / {each[1]:.1f}" if any(each) else "-")
        others = [name for name in SYSTEMS if name not in OURS]
        best = max(others, key=lambda name: modes().most(case.name, name, 250).mean())
        at = [modes().most(case.name, best, bound).mean() / 1e3 for bound in (100, 250)]
        cells.append(f"`{best}` {at[0]:.1f} / {at[1]:.1f}")
        for bound in (100, 250):
            found = gains(case.name, bound, OURS)
            spread = f" ({min(found):.2f} to {max(found):.2f})" if num_seeds > 1 else ""
            cells.append(f"{mean(found):.2f}{spread}" if any(found) else "-")
        yield f"| {case.axis}: {case.about} | {num_seeds} | {' | '.join(cells)} |"


def num_gains() -> list[int]:
    """Cases in which the best form gains within 250 and 100 ms, and those in which AMoE's division does."""
    return [
        sum(mean(gains(case.name, bound, systems)) > 1 for case in CASES)
        for systems in (OURS, ("async",))
        for bound in (250, 100)
    ]


def gains_of_modes() -> Rows:
    within_250, within_100, *of_division = num_gains()
    assert of_division == [0, 0]
    yield (
        f"Of {len(CASES)} cases the best form gains in {within_250} within 250 ms and in {within_100} within 100 ms;"
        " AMoE's division gains in none."
    )


def gains_in_readme() -> Rows:
    within_250, within_100, *of_division = num_gains()
    assert of_division == [0, 0]
    yield f"`async` on whole GPUs beats all other modes in {within_250} of {len(CASES)} cases"
    yield f"within 100 ms these are {within_100} and none (*simulated*"


def preemption_below() -> Rows:
    """Expert-level preemption over priority between steps, below vLLM's saturation."""
    rows = stored("serving/preemption_640m_below.json")["summary"]
    (over,) = [row["over iteration-level priority"] for row in rows if row["system"] == "expert-level preemption"]
    ttft, turnaround = (over[name]["median"] for name in ("ls_ttft_ms_mean", "ls_turnaround_ms_mean"))
    yield f"preemption has {ttft:.2f} of the TTFT of priority, at {turnaround:.2f} of its turnaround (*measured*"


def demo_preemption() -> Rows:
    (row,) = [
        row
        for row in stored("serving/preemption_demo.json")["summary"]
        if (row["rate"], row["system"]) == (36, "expert-level preemption")
    ]
    over = row["over iteration-level priority"]
    assert over["ls_ttft_ms_mean"]["max"] > 1
    yield f"preemption has {over['ls_ttft_ms_mean']['median']:.2f} of the TTFT of priority between steps"
    yield f"and {over['ls_turnaround_ms_mean']['median']:.2f} times its turnaround (*measured*"


# placement.md and policies.md


def sources() -> Rows:
    found = stored("simulator/source_placement.json")
    beds = {
        "2x128 on 8, 144 slots": "Qwen3-30B-A3B on 8 GPUs, 2 machines: ",
        "2x256 on 32, 288 slots": "DeepSeek-V3 on 32 GPUs, 4 machines: ",
    }
    for bed, title in beds.items():
        for policy in ("eplb", "gimbal_v2", "moestro"):
            cells = []
            for mix in ("differ", "shuffled"):
                row = found[f"{bed}, sources {mix}"]["mean"].get(policy)
                if row is not None:
                    cells.append(f"{100 * row['rows_between_nodes']:.1f} %, {row['step_us_per_layer'] / 1e3:.3f}")
            if cells:
                yield f"| {title if policy == 'eplb' else ''}`{policy}` | {' | '.join(cells)} |"
    rows, balance, longer = [], [], []
    for part, each in found.items():
        if "sources" in part:
            for policy, gain in each["gain_over_blind_twin"].items():
                ours, blind = each["mean"][policy], each["mean"][f"{policy} without sources"]
                if part.endswith("differ"):
                    rows += gain["rows"]
                    balance.append(1 - ours["balance"] / blind["balance"])
                else:
                    longer.append(ours["step_us_per_layer"] / blind["step_us_per_layer"] - 1)
    yield f"They have {100 * min(rows):.0f} to {100 * max(rows):.0f} % fewer rows between machines"
    yield f"at {100 * min(balance):.1f} to {100 * max(balance):.1f} % less balance;"
    yield f"their step is {100 * min(longer):.1f} to {100 * max(longer):.1f} % longer than without sources"


def session_pauses() -> Rows:
    found = stored("simulator/session_pauses.json")["loads"]
    policies = (
        "moestro, exact caches",
        "moestro",
        "lmetric",
        "llm-d",
        "cache_aware",
        "session_affinity",
        "preble",
        "least_loaded",
    )
    for policy in policies:
        cells = []
        for load in ("0.8 requests a second", "1.2 requests a second"):
            row = found[load][policy]
            cells += [f"{row['ttft_mean_ms']:,.0f}, {row['ttft_p99_ms']:,.0f}", f"{100 * row['hit_ratio']:.1f}"]
        name, *more = policy.split(", ")
        yield f"| {', '.join([f'`{name}`', *more])} | {' | '.join(cells)} |"


FIGURES = ("ttft_mean_ms", "ttft_p99_ms", "tpot_mean_ms", "tokens_per_s")


def over_seeds(name: str) -> dict[tuple[Any, ...], dict[str, list[dict]]]:
    """Runs by load and share, and by policy."""
    runs: dict[tuple[Any, ...], dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for row in stored(f"simulator/{name}.json")["rounds"]:
        if row.get("fleet", "8").startswith("8"):
            runs[row["load"], row["share"]][row["policy"]].append(row)
    return runs


def change(ours: list[dict], others: list[dict], figure: str) -> str:
    return signed(mean(row[figure] for row in ours) / mean(row[figure] for row in others) - 1)


def unlike_engines() -> Rows:
    with_peaks = []
    for name in ("unlike_engines", "unlike_engines_agents"):
        for (load, share), runs in over_seeds(name).items():
            ours, base = runs["moestro"], runs["moestro, not learnt"]
            by_seed = [one["ttft_mean_ms"] / other["ttft_mean_ms"] - 1 for one, other in zip(ours, base, strict=True)]
            cells = [change(ours, base, figure) for figure in FIGURES]
            cells[0] += f" ({signed(min(by_seed))} to {signed(max(by_seed))})"
            yield f"| `{load}` at {100 * share:.0f} % | {' | '.join(cells)} |"
            with_peaks.append(float(change(runs["moestro, configured"], base, FIGURES[0])))
    yield f"the cards' peaks give mean TTFT {min(with_peaks):.0f} to {max(with_peaks):.0f} %."


def step_groups() -> Rows:
    """The change of `moestro` against itself without the group, `lmetric` and `least_loaded`."""
    for name, requests in (("", ""), ("_chat", ", 600 requests"), ("_long", ", 1,200 requests"), ("_agents", "")):
        for (load, share), runs in over_seeds(f"step_groups{name}").items():
            cells = [
                [
                    change(runs["moestro"], runs[other], figure)
                    for other in ("moestro, engines alone", "lmetric", "least_loaded")
                ]
                for figure in FIGURES
            ]
            if abs(float(cells[0][0])) >= 5 and (load, share, name) != ("chat", "50%", "_chat"):
                title = f"| `{load}`{requests}, {share.replace('%', ' %')} |"
                yield f"{title} {' | '.join(', '.join(cell) for cell in cells)} |"


def overload() -> Rows:
    one_seed = ", 1,000 requests, one seed"
    for name, shares, requests in (("overload", (1.1, 1.2), ""), ("overload_tools", (1.2,), one_seed)):
        for (load, share), runs in over_seeds(name).items():
            if share not in shares:
                continue
            cells = []
            for policy in ("moestro", "lmetric", "least_loaded"):
                mean_s, p99_s = (mean(row[of] for row in runs[policy]) / 1e3 for of in ("ttft_mean_ms", "ttft_p99_ms"))
                hits = f"{mean(row['hit_ratio'] for row in runs[policy]):.0%}".replace("%", " %")
                cells.append(f"{mean_s:.2f}, {p99_s:.{2 if p99_s < 10 else 1}f}; {hits}")
            yield f"| `{load}` at {100 * share:.0f} %{requests}"
            yield f" | {' | '.join(cells)} |"


# route.md


def several_routers() -> Rows:
    for policy, delays in stored("simulator/routers.json")["over_one_router"]["chat"].items():
        figures = (
            delays[delay]["ttft_mean"]["median"] for delay in ("apart", "20 ms", "200 ms", "2 s", "20 ms, 30 % lost")
        )
        yield f"| `{policy}` | {' | '.join(f'{figure:.2f}' for figure in figures)} |"


# simulator.md, repro.md and flow.md


def simulator_speed() -> Rows:
    found = stored("simulator/sim_speed.json")
    ours, theirs = found["moestro"], found["dynamo 1.6.1"]
    trace = "Mooncake conversation, 16 engines"

    def cpu_s(rows: dict, case: str) -> str:
        return f"{rows[case]['cpu_s']['median']:.{1 if trace in case else 2}f}"

    def whole(rows: dict, case: str) -> str:
        return f"{rows[case]['whole_process_cpu_s']:.{1 if trace in case else 2}f}"

    for title, case in (
        ("Mooncake's conversation trace on 16 engines, round robin", f"{trace}, round_robin"),
        ("4,000 requests (1,024 and 256 tokens) on one engine", "one engine, 1024/256"),
    ):
        yield f"| {title} | {cpu_s(ours, case)} | {cpu_s(theirs, case)} | {whole(ours, case)}, {whole(theirs, case)} |"
    cases = (f"{trace}, dynamo", f"{trace}, lmetric")
    other = f"{trace}, kv_router"
    cells = ["; ".join(cpu_s(ours, case) for case in cases), f"{cpu_s(theirs, other)}; –"]  # noqa: RUF001 (as on the page)
    cells.append(f"{whole(ours, cases[0])}, {whole(theirs, other)}; –")  # noqa: RUF001
    yield f"| the same, Dynamo's formula; LMetric | {' | '.join(cells)} |"
    ratios = found["dynamo's CPU-seconds over ours"]
    shares = [
        ratios[f"{case}, whole process"]
        for case in (f"{trace}, round_robin", f"{trace}, dynamo", "one engine, 1024/256")
    ]
    yield f"as whole processes {shares[0]:.1f}, {shares[1]:.1f} and {shares[2]:.2f}."


def recorded_vllm() -> Rows:
    for name, row in stored("simulator/vllm_fidelity.json")["figures_ms"].items():
        digits = 0 if row["measured"] >= 1000 else 1
        error = 100 * row["error"]
        shown = f"{error:+.{0 if abs(error) > 10 else 1}f} %"
        yield f"| {name} | {row['measured']:,.{digits}f} | {row['simulated']:,.{digits}f} | {shown} |"


def own_server() -> Rows:
    found = stored("simulator/sim_fidelity.json")
    for policy, figures in found["over_seeds"].items():
        cells = []
        for name, digits in (("ttft_ms mean", 1), ("tpot_ms mean", 2)):
            row = figures[name]
            cells.append(f"{row['measured']:.{digits}f}, simulated {row['simulated']:.{digits}f}")
            errors = [f"{signed(row[which])} %" for which in ("error", "least_error", "largest_error")]
            cells.append(f"{errors[0]} ({errors[1]} to {errors[2]})")
        yield f"| `{policy}` | {' | '.join(cells)} |"
    medians = [f"{-100 * figures['ttft_ms p50']['error']:.0f}" for figures in found["over_seeds"].values()]
    yield f"its median by more: {medians[0]}, {medians[1]} and {medians[2]} %."
    without = [run["causes"]["ttft_error_without_api"] for runs in found["runs"].values() for run in runs.values()]
    num_within = sum(abs(error) <= 0.15 for error in without)
    yield f"{num_within} of {len(without)} runs are within 15 %, and the worst is {-100 * min(without):.0f} % too low."


def qllm_shares() -> Rows:
    runs = findings("qllm", QllmFindings)

    def loss(baseline: str) -> str:
        lost = [
            100 * (1 - ratio)
            for load in ("answers_40", "answers_60", "answers_80")
            for ratio in qllm_ratios(runs, load, (EXPERT, baseline), throughput).values()
        ]
        return f"{min(lost):.0f} to {max(lost):.0f} %"

    factors = [
        mean(qllm_ratios(runs, load, (ITERATION, EXPERT), ls_ttft).values())
        for load in dict.fromkeys(cell.load for cell in runs.cells)
    ]
    yield f"from 40 to 80 tokens {loss(RUN_TO_COMPLETION)} less than run-to-completion's"
    yield f"and {loss(FCFS_64)} less than with as many places."
    yield f"`iteration_priority` has {min(factors):.1f} to {max(factors):.1f} times the TTFT of `expert_level`"


def gimbal_waits() -> Rows:
    """P99 of TTFT of `vllm` at the paper's highest rate, by shape, and what changes on a healthy engine."""
    runs = stored("repro/gimbal.json")["findings"]
    waits: dict[str, list[float]] = defaultdict(list)
    changes = []
    base: dict[tuple, float] = {}
    for cell in runs["cells"]:
        key = cell["load"], cell["rate"], cell["seed"]
        if cell["system"] == "vllm":
            base[key] = cell["ttft_ms"]["mean"]
            if cell["rate"] == pytest.approx(1.4):
                waits[cell["load"]].append(cell["ttft_ms"]["p99"] / 1e3)
        elif cell["load"].startswith("healthy_"):
            changes.append((key, cell["ttft_ms"]["mean"]))
    slow = [factor for name, factor in runs["levels"].items() if name.startswith("slow_")]
    others = [each for name in waits if name.startswith("scarce_") and "central" not in name for each in waits[name]]
    central = waits["scarce_central"]
    yield f"one whose steps take {min(slow):.0f} to {max(slow):.0f} times as long (`slow`, by shape)"
    yield f"{min(central):.1f} to {max(central):.1f} s there, and {min(others):.1f} to {max(others):.1f} s with"
    low, same, high = sorted(waits["scarce_random"])
    assert same < 2 * low
    yield f"(P99 of `vllm` {high:.1f} s, else {low:.1f} s)"
    tails = [
        cell["ttft_ms"]["p99"] / 1e3
        for cell in runs["cells"]
        if cell["load"].startswith("kv_memory") and cell["system"] == "vllm"
    ]
    yield f"the P99 TTFT of `vllm` is {min(tails):.1f} to {max(tails):.1f} s (the paper: 4.9;"
    largest = max(abs(ttft / base[key] - 1) for key, ttft in changes)
    yield f"on `healthy` no system changes TTFT by more than {100 * largest:.1f} %:"


def preemption_with_equal_places() -> Rows:
    rows = {(row["rate"], row["system"]): row for row in stored("serving/preemption_640m.json")["summary"]}

    def figure(rate: float, system: str, name: str = "ls_ttft_ms_mean") -> float:
        return rows[rate, system][name]["median"]

    ours, order, vllm = "expert-level preemption", "iteration-level priority", "vLLM, priority"
    equal = "iteration-level LS first, 64 places"
    ttft, tokens = (figure(4, ours, name) / figure(4, equal, name) for name in ("ls_ttft_ms_mean", "tokens_per_s"))
    yield f"preemption has {ttft:.2f} of the TTFT of LS first between passes, and {tokens:.2f} of its tokens/s"
    at_one = [figure(1, system) for system in (ours, order, vllm)]
    yield f"preemption, priority and vLLM have {min(at_one):.0f} to {max(at_one):.0f} ms."


def preemption_below_saturation() -> Rows:
    by_system: dict[str, dict[int, Any]] = defaultdict(dict)
    for point in stored("serving/preemption_640m_below.json")["points"]:
        by_system[point["system"]][point["round"]] = point
    names = ("expert-level preemption", "iteration-level priority", "continuous, FCFS", "vLLM, priority")
    ours, order, fcfs, vllm = systems = [by_system[name] for name in names]
    assert {each["ls"]["num"] for system in systems for each in system.values()} == {10}

    def over(one: dict[int, Any], other: dict[int, Any], which: str = "ls", figure: str = "ttft_ms") -> list[str]:
        ratios = sorted(one[at][which][figure]["mean"] / other[at][which][figure]["mean"] for at in other)
        assert len(ratios) == 5
        return [f"{each:.2f}" for each in (median(ratios), ratios[0], ratios[-1])]

    means = (median(each["ls"]["ttft_ms"]["mean"] for each in system.values()) for system in systems)
    yield "{:.0f} ms with preemption, {:.0f} with iteration-level priority, {:.0f} with FCFS and {:.0f} with".format(
        *means
    )
    yield "priority has {} ({} to {}) of FCFS.".format(*over(order, fcfs))
    turnarounds = (*over(ours, order, "ls", "turnaround_ms"), *over(ours, order, "be", "turnaround_ms"))
    yield (
        "Preemption has {} of priority ({} to {}), at {} of the turnaround of LS ({} to {}) and {} of that of BE"
        " ({} to {})."
    ).format(*over(ours, order), *turnarounds)
    yield "it has {} ({} to {}), of which {} ({} to {}) is the engine".format(*over(ours, vllm), *over(fcfs, vllm))


# plan.md


def plan_estimates() -> Rows:
    modes = dict(stored("simulator/plan_estimates.json")["summary"])
    apart = modes.pop("async")
    least, most = (which(mode[name] for mode in modes.values()) for which, name in ((min, "min"), (max, "max")))
    medians = sorted(mode["median"] for mode in modes.values())
    runs = sum(mode["runs"] for mode in modes.values())
    yield f"Simulations are {least:.2f} to {most:.2f} times their estimates in lock-step ({runs}, medians of"
    yield f"{medians[0]:.2f} to {medians[-1]:.2f} in each mode)"
    yield f"and {apart['min']:.2f} to {apart['max']:.2f} times in `async`, whose busiest GPU has no pause"
    yield f"in the estimate ({apart['runs']})"
    [allowance] = {mode["allowance"] for mode in modes.values()}
    yield f"if {allowance} times its estimate ({apart['allowance']} times in `async`)"


def paced_plans() -> Rows:
    ways = {
        "replicas": "two replicas",
        "ep": "`ep`",
        "async": "`async`, attention and experts on both",
        "async_1_1": "`async`, attention on one, experts on the other",
    }
    check = stored("simulator/plan_check.json")
    assert check["wrong"] == []
    for row in check["ways"]:
        cells = []
        for name, error, digits in (("tokens_per_s", "error", 0), ("itl_ms", "itl_error", 1)):
            pair = ", ".join(f"{row[f'{side}_{name}']:,.{digits}f}" for side in ("predicted", "paced"))
            cells.append(f"{pair} ({100 * row[error]:+.1f} %)".replace("(-", "(\u2212"))
        yield f"| {ways[row['way']]} | {' | '.join(cells)} |"
    yield f"late by at most {100 * max(row['lateness'] for row in check['ways']):.1f} % of an item."


def planned_days(name: str, num_late: int) -> list[dict[str, Any]]:
    """Rows of a check of plans, whose objectives all held."""
    rows: list[dict[str, Any]] = stored(f"simulator/{name}.json")["rows"]
    assert len(rows) == 6
    assert all(row["objective_is_held"] for row in rows)
    assert sum(not row["client_is_valid"] for row in rows) == num_late
    return rows


def days_of(rows: list[dict[str, Any]], digits: int) -> Rows:
    for load in dict.fromkeys(row["load"] for row in rows):
        runs = [row for row in rows if row["load"] == load]
        [engines] = {row["num_engines"] for row in runs}
        [objective] = {row["max_ttft_ms"] for row in runs}
        ttft, itl = (
            (runs[0]["predicted"][name], *sorted(row["measured"][name] for row in runs))
            for name in ("ttft_mean_ms", "tpot_mean_ms")
        )
        yield (
            f"| {load} | {engines} | {objective:,.0f}, {ttft[0]:,.{digits}f}, {ttft[1]:,.{digits}f} to"
            f" {ttft[2]:,.{digits}f} | {itl[0]:.1f}, {itl[1]:.1f} to {itl[2]:.1f} |"
        )


def paced_days() -> Rows:
    rows = planned_days("plan_day_check", 3)
    yield from days_of(rows, 0)
    most = {name: max(abs(row["errors"][name]) for row in rows) for name in ("tpot_mean_ms", "tokens_per_s")}
    yield f"ITL is within {math.ceil(100 * most['tpot_mean_ms'])} % of the paced one"
    yield f"throughput within {math.ceil(100 * most['tokens_per_s'])} %"
    yield f"TTFT up to {-100 * min(row['errors']['ttft_mean_ms'] for row in rows):.0f} % too short"


def vllm_days() -> Rows:
    rows = planned_days("plan_day_check_vllm", 0)
    yield from days_of(rows, 1)
    for name, words in (("ttft_mean_ms", "TTFT"), ("tpot_mean_ms", "ITL"), ("tokens_per_s", "throughput")):
        errors = [100 * row["errors"][name] for row in rows]
        yield f"{words} from {min(errors):+.0f} to {max(errors):+.0f} %".replace("-", "\u2212")
    assert max(abs(row["errors"]["hit_ratio"]) for row in rows) < 0.001


# shadow.md


def shadow_before_vllm() -> Rows:
    within, changed, outside = [], [], 0
    for name in ("shadow_vllm", "shadow_vllm_busy"):
        result = stored(f"routing/{name}.json")
        dilation = float(re.findall(r"--dilation ([\d.]+)", result["conditions"]["command"])[0])
        for row in result["rows"]:
            rate = SHADOW_LOADS[row["load"]].rate * DILATION / dilation
            hits, ttft, ratio = row["hit_ratio"], row["predicted"]["ttft_ms"], row["ttft_ratio"]
            assert row["before"]["num_tries"] == row["after"]["num_tries"] == 1
            change = ratio["measured"] - 1
            yield (
                f"| {row['load']}, {rate:.1f}/s | {row['before']['hit_ratio']:.1%} | {hits['predicted']:.1%},"
                f" {hits['measured']:.1%} | {ttft['measured']:.0f} | {ttft['predicted']:.0f},"
                f" {row['after']['ttft_of_engines_ms']:.0f} | {ttft['change']:+.1%} ±{ttft['half_width']:.1%},"
                f" {change:+.1%} | {ratio['error']:+.1%} |"
            )
            outside += abs(change - ttft["change"]) > ttft["half_width"]
            within.append(abs(ratio["error"]) <= 0.15)
            if row["load"] != "all different":
                changed.append(within[-1])
    yield f"{sum(within)} of {len(within)} rows are within"
    assert (sum(changed), len(changed), outside) == (4, 6, 5)


TABLES: dict[str, tuple[Callable[[], Rows], ...]] = {
    "README.md": (gains_in_readme, demo_preemption, preemption_below),
    "docs/bench.md": (
        engines, async_measured, async_paced, migration, drift, copies, real_routing, next_windows, lasting,
    ),
    "docs/modes.md": (map_of_modes, gains_of_modes),
    "docs/plan.md": (plan_estimates, paced_plans, paced_days, vllm_days),
    "docs/placement.md": (sources, drift_in_short),
    "docs/policies.md": (session_pauses, unlike_engines, step_groups, overload),
    "docs/route.md": (several_routers,),
    "docs/simulator.md": (simulator_speed, recorded_vllm, own_server),
    "docs/repro.md": (qllm_shares, gimbal_waits),
    "docs/shadow.md": (shadow_before_vllm,),
    "docs/flow.md": (preemption_with_equal_places, preemption_below_saturation),
}  # fmt: skip


@pytest.mark.parametrize(
    ("page", "rows"),
    [(page, rows) for page, tables in TABLES.items() for rows in tables],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_a_table_has_the_stored_figures(page, rows):
    text = (ROOT / page).read_text()
    expected = list(rows())
    assert expected
    assert [row for row in expected if row not in text] == []
