"""Compares routing policies before two real vLLM servers under load, and the order that the simulator predicts.

    python bench/routing/vllm_loads.py --vllm /path/to/venv/bin/vllm [--rounds 5] \\
        [--json bench/results/routing/vllm_loads.json]
    python bench/routing/vllm_loads.py --vllm ... --rounds 1 --shares 0.3 --seconds 20 --run-seconds 5     # a short try

In this order:

1. `moestro calibrate --server` probes both servers at once, as they share the cores; the first one's files count.
2. `moestro bench` sends the requests of a trace all at once through `lmetric`: the rate of the answers is the capacity.
3. In each round and at each share of the capacity, the policies take turns, in another order each time. A policy has
   its own `moestro route` with the servers' KV events; the servers' caches are emptied before. All policies of a round
   get the same sessions, whose turns come at the same times whether the servers are busy or not.
4. `moestro sim` runs the same traces under the same policies, from the files of calibrate and nothing else.

The prompts of a session begin alike, as do those of an application. Server, routers and client share the cores, so that
figures are of this machine; what is compared are policies of one round. With --work, a stopped run goes on there.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import shared.vllm
import vllm_pair
from accuracy.run import figures, run
from shared.results import make_parser, save, spread

CAPACITY_POLICY = "lmetric"
POLICIES = ("round_robin", "vllm-0.27", "cache_aware", CAPACITY_POLICY, "moestro")
SHARES = (0.5, 0.8, 1.0)
CALIBRATION_SEED, CAPACITY_SEED, FIRST_SEED = 0, 100, 101
VOCABULARY = 4096
HASHED = 16  # tokens of a block in the trace's form
NUM_APPS, APP_TOKENS = 4, 128  # applications, and the tokens with which all their sessions begin
FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS = (128, 384), (64, 192), (8, 40)  # least and most
NUM_TURNS, PAUSE_S = (1, 5), 4.0  # of a session; the mean pause between turns
ENGINES = range(2)
# Time between reads of a server's /metrics, that of vLLM's coordinator, so that vLLM's balancer has figures as fresh.
FIGURES_S = 0.1
SIGNALS = f"""[signals]
kv_events_delay_ms = 1
channels = [
  {{figures = ["kv_usage", "num_waiting", "num_running"], channel = "polled", period_ms = {1e3 * FIGURES_S:g}}},
]
"""


def write_sessions(path: Path, seed: int, rate: float, num_requests: int) -> None:
    """Write a trace of sessions whose turns come at `rate` a second.

    The answers of earlier turns are left out of the prompts, because a trace cannot name the blocks of a text that a
    server has still to write.
    """
    rng, turns = np.random.default_rng([seed, num_requests]), []
    mean_turns = sum(NUM_TURNS) / 2
    at_s, session = 0.0, 0
    while len(turns) < 2 * num_requests:  # sessions of a window twice as long, so that its first half has all turns
        at_s += rng.exponential(mean_turns / rate)
        app, turn_s, length = int(rng.integers(NUM_APPS)), at_s, APP_TOKENS + int(rng.integers(*FIRST_TOKENS))
        for _ in range(int(rng.integers(NUM_TURNS[0], NUM_TURNS[1], endpoint=True))):
            turns.append((turn_s, session, app, length, int(rng.integers(*ANSWER_TOKENS))))
            turn_s += rng.exponential(PAUSE_S)
            length += int(rng.integers(*TURN_TOKENS))
        session += 1
    lines = []
    for row, (turn_s, number, app, length, answer) in enumerate(sorted(turns)[:num_requests]):
        common = [1_000_000 + 1000 * app + at for at in range(APP_TOKENS // HASHED)]
        own = [10_000_000 + 1000 * number + at for at in range(-(-length // HASHED) - len(common))]
        line = {"chat_id": row, "parent_chat_id": -1, "timestamp": round(turn_s, 6)}
        line |= {"input_length": length, "output_length": answer, "hash_ids": common + own}
        lines.append(json.dumps(line) + "\n")
    path.write_text("".join(lines))


def send(url: str, trace: Path, out: Path, seed: int, *more: str) -> None:
    """Send the requests of a trace, and write the report."""
    source = ["--dataset-name", "trace", "--dataset-path", str(trace), "--vocab-size", str(VOCABULARY)]
    run("bench", "--base-url", url, *source, "--seed", str(seed), "--temperature", "1", "--json", str(out), *more)


def report_of(out: Path) -> dict:
    """The report of a run, none of whose requests may have failed."""
    report: dict = json.loads(out.read_text())["report"]
    assert not report["failures"], report["failures"]
    return report


def calibrate(servers: Sequence[str], work: Path, seconds: float) -> None:
    """Probe the servers at once, and write engine.json and engine.toml of the first."""
    bounds = ["--seconds", str(seconds), "--max-concurrency", "64", "--max-prompt-tokens", "900"]
    with ThreadPoolExecutor(len(servers)) as pool:
        probes = [
            pool.submit(
                run, "calibrate", "--server", url, *bounds, "--seed", str(CALIBRATION_SEED), "--out",
                str(work / ("engine.json" if at == 0 else f"engine_{at}.json")),
            )
            for at, url in enumerate(servers)
        ]  # fmt: skip
        for probe in probes:
            probe.result()


@contextlib.contextmanager
def routed(policy: str, work: Path) -> Iterator[str]:
    """Empty the servers' caches, and start a router with one policy. Yields its address."""
    vllm_pair.empty_caches()
    with vllm_pair.router(0, policy, work, "--metrics-interval", f"{FIGURES_S}") as router:
        time.sleep(2.0)  # until it has subscribed to the events
        yield router.url


def measured_capacity(work: Path, num_requests: int) -> float:
    """Requests a second that both servers answer when all wait at once."""
    trace = work / "capacity.jsonl"
    write_sessions(trace, CAPACITY_SEED, 1.0, num_requests)
    out = work / "capacity.json"
    if not out.exists():
        with routed(CAPACITY_POLICY, work) as url:
            send(url, trace, out, CAPACITY_SEED, "--request-rate", "inf")
    report = report_of(out)
    return float(report["num_ok"] / report["duration_s"])


def predicted(work: Path, name: str) -> dict[str, dict[str, float]]:
    """By policy, figures of the simulation of a trace by the files of calibrate."""
    engines = f"{(work / 'engine.toml').read_text()}count = {len(ENGINES)}\n"
    policies = "".join(f'[[policies]]\nroute = "{policy}"\n' for policy in POLICIES)
    (work / f"{name}.toml").write_text(f'[workload]\ntrace = "{name}.jsonl"\n{SIGNALS}{engines}{policies}')
    run("sim", str(work / f"{name}.toml"), "--json", str(work / f"{name}.sim.json"))
    outcomes = json.loads((work / f"{name}.sim.json").read_text())["outcomes"]
    return {policy: figures(each["report"]) for policy, each in zip(POLICIES, outcomes, strict=True)}


def measure_round(work: Path, number: int, share: float, rate: float, num_requests: int) -> list[dict]:
    """Measure all policies on the sessions of a round, and simulate them."""
    name, seed = f"{share:g}-{number}", FIRST_SEED + number
    write_sessions(work / f"{name}.jsonl", seed, rate, num_requests)
    foretold, found = predicted(work, name), {}
    for policy in (*POLICIES[number % len(POLICIES) :], *POLICIES[: number % len(POLICIES)]):
        out = work / f"{name}-{policy}.json"
        if not out.exists():
            with routed(policy, work) as url:
                send(url, work / f"{name}.jsonl", out, seed, "--num-warmups", "0")
        found[policy] = figures(report_of(out))
        shown = {key: f"{value:.3g} ({foretold[policy][key]:.3g})" for key, value in found[policy].items()}
        print(f"round {number}, {share:.0%}, {policy}, measured (simulated): {shown}", flush=True)
    return [
        {"share": share, "round": number, "policy": policy, "measured": found[policy], "simulated": foretold[policy]}
        for policy in POLICIES
    ]


def summary(rows: list[dict], share: float) -> dict[str, object]:
    """By policy, figures over those of round robin; and both orders by the mean TTFT over the rounds."""
    table: dict[str, object] = {}
    for kind in ("measured", "simulated"):
        runs = {policy: [row[kind] for row in rows if (row["share"], row["policy"]) == (share, policy)]
                for policy in POLICIES}  # fmt: skip
        base = runs[POLICIES[0]]
        table[kind] = {
            policy: {figure: spread([one[figure] for one in run]) for figure in run[0]}
            | {
                f"{figure}_over_round_robin": spread([a[figure] / b[figure] for a, b in zip(run, base, strict=True)])
                for figure in ("ttft_mean_ms", "tpot_mean_ms")
            }
            for policy, run in runs.items()
        }
        means = {policy: statistics.fmean(one["ttft_mean_ms"] for one in run) for policy, run in runs.items()}
        table[f"{kind}_order"] = sorted(means, key=lambda policy: means[policy])
    first, second = (list(table[f"{kind}_order"]) for kind in ("measured", "simulated"))  # type: ignore[call-overload]
    table["pairs_in_equal_order"] = f"{num_equal_pairs(first, second)} of {len(first) * (len(first) - 1) // 2}"
    return table


def num_equal_pairs(first: Sequence[str], second: Sequence[str]) -> int:
    """Pairs of policies that stand in the same order in both lists."""
    place = {policy: at for at, policy in enumerate(second)}
    return sum(place[one] < place[other] for at, one in enumerate(first) for other in first[at + 1 :])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--vllm", required=True, help="the vllm command")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES), help="of the capacity")
    parser.add_argument("--seconds", type=float, default=120.0, help="of the calibration")
    parser.add_argument("--run-seconds", type=float, default=25.0, help="over which the requests of a run arrive")
    parser.add_argument("--num-requests", type=int, default=600, help="of the run that finds the capacity")
    parser.add_argument("--work", type=Path, help="keep traces, reports and logs here")
    parser.add_argument("--note", default="", help="remark about the machine")
    given = parser.parse_args()
    conditions = run_record("measured and simulated", note=given.note)
    with contextlib.ExitStack() as stack:
        work = given.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        servers = [stack.enter_context(vllm_pair.vllm(given.vllm, at, work)) for at in ENGINES]
        if not (work / "engine.toml").exists():
            calibrate([server.url for server in servers], work, given.seconds)
        capacity = measured_capacity(work, given.num_requests)
        print(f"capacity: {capacity:.2f} requests/s", flush=True)
        rows = [
            row
            for number in range(given.rounds)
            for share in given.shares
            for row in measure_round(work, number, share, share * capacity, round(share * capacity * given.run_seconds))
        ]
        description = (work / "engine.toml").read_text()
    summaries = {f"{share:g}": summary(rows, share) for share in given.shares}
    for share, found in summaries.items():
        orders = {kind: " < ".join(found[f"{kind}_order"]) for kind in ("measured", "simulated")}  # type: ignore[arg-type]
        print(f"{share}: {orders}, {found['pairs_in_equal_order']} pairs in equal order")
    save(
        given.json,
        conditions,
        {
            "model": "the demo model, bfloat16, vLLM 0.32 on the CPU, one thread a server",
            "workload": {
                "run_seconds": given.run_seconds, "num_apps": NUM_APPS, "app_tokens": APP_TOKENS,
                "first_tokens": FIRST_TOKENS, "turn_tokens": TURN_TOKENS, "answer_tokens": ANSWER_TOKENS,
                "num_turns": NUM_TURNS, "pause_s": PAUSE_S, "block_size": shared.vllm.BLOCK_SIZE,
                "blocks_a_server": vllm_pair.NUM_BLOCKS,
            },
            "capacity_requests_per_s": round(capacity, 3),
            "description": description,
            "by_share": summaries,
            "rows": rows,
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
