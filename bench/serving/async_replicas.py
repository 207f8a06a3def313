"""Compares asynchronous workers with and without copies of hot experts, paced as eight GPUs.

    python bench/serving/async_replicas.py --work /tmp/replicas --json bench/results/serving/async_replicas.json
    python bench/serving/async_replicas.py --work /tmp/replicas --quick

Paced: Mixtral 8x7B on eight A100 as `async` 4+4 with the flags of `async_ep.py`, under two gates, because the work of a
worker is that of all layers:

    same        the same hot experts in all layers (Zipf 0.6), both of them on the first worker at the start
    permuted    others in each layer, which the seed of the round draws (exponential): a worker's work is nearly even

Each run starts a new server. A load like the measured one, of another seed and with short prompts, counts the experts;
then the operator lets a policy plan and the server moves; and then the same requests measure each system:

    in_order    experts in order, a quarter of them on each worker
    eplb        a further slot in each layer of each worker, filled by `eplb`: copies of the hottest experts
    moestro     the same slots, filled by `moestro`

Attention workers choose among copies by queue and distance. Gains are against `in_order` of the same gate and round. A
run in which ends of items or messages were taken in late by more than 5 % of an item is invalid.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

from moestro.config.run_record import run_record
from moestro.workload.progress import progress

sys.path.insert(0, str(Path(__file__).parents[1]))
from serving.async_ep import GATES, NUM_SEQS, PACED_LOAD, PORT, WORKERS, num_engines_of, paced_flags
from serving.async_ep_figures import paced_figures
from serving.async_ep_load import Load
from serving.async_ep_servers import Running, System, measure, serving
from shared.results import make_parser, save, spread

IN_ORDER = "in_order"
GATE_FLAGS = {"same": (), "permuted": ("--gate-override", GATES["skewed"])}
POLICIES = {IN_ORDER: None, "eplb": "eplb", "moestro": "moestro"}
NUM_EXPERT_WORKERS = WORKERS["async"][1]
COUNT_SEED = 1000  # added to the seed of the load that is counted, so that no plan has seen what it is judged by
COUNTED_SHARED = 64  # tokens at the beginning of its prompts: experts do not depend on the context, but its time does
_LOOK_S, _LONGEST_MOVE_S = 0.2, 300.0
Row = dict[str, object]


def system_of(name: str, gate: str, dilation: float, seed: int, num_users: int) -> System:
    """Make the command of a system, whose engines hold the requests of all users at once."""
    slots = () if POLICIES[name] is None else ("--num-redundant-experts", str(NUM_EXPERT_WORKERS))
    num_seqs = max(-(-num_users // num_engines_of("async")), NUM_SEQS)
    flags = (*paced_flags("async", dilation, num_seqs), *GATE_FLAGS[gate], "--seed", str(seed), *slots)
    return System(f"{name} {gate} {seed}", "async", flags, num_engines_of("async"))


def ask(running: Running, path: str, method: str = "GET") -> dict:
    """Return the answer of an operator's request."""
    url = f"http://127.0.0.1:{running.admin_port}/admin/placement{path}"
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=60) as answer:
        return json.load(answer)


def place(running: Running, policy: str) -> Row:
    """Let a policy plan, move, and return what has moved."""
    plan = ask(running, f"/plan?policy={policy}", "POST")
    began = time.monotonic()
    ask(running, "/apply", "POST")
    while (shown := ask(running, ""))["progress"]["is_running"]:
        assert time.monotonic() - began < _LONGEST_MOVE_S, f"the migration stands still: {shown['stall']}"
        time.sleep(_LOOK_S)
    assert not shown["progress"]["error"], shown["progress"]
    balance = {when: plan[when]["balance_of_sums"] for when in ("before", "after")}
    return {"num_moves": plan["num_moves"], "predicted_balance": balance, "moved_s": time.monotonic() - began}


def run(name: str, gate: str, load: Load, args: argparse.Namespace, seed: int) -> Row:
    """Serve one round on one system."""
    policy, warm = POLICIES[name], replace(load, num_warm=num_engines_of("async"), seed=seed)
    row: Row = {"system": name, "gate": gate, "seed": seed}
    with (
        serving(system_of(name, gate, args.dilation, seed, load.num_users), PORT, args.work) as running,
        running.server.engines_first(),
    ):
        if policy is not None:
            like_it = replace(warm, num_shared=COUNTED_SHARED, num_requests=load.num_users, seed=COUNT_SEED + seed)
            measure(running, like_it)
            row["placed"] = place(running, policy)
        found = measure(running, warm)
    figures = paced_figures(found, "async", args.dilation)
    for left_out in ("queues", "sent_ms", "host", "item_ms"):
        figures.pop(left_out)
    busy = [each["item_ns"] for worker, each in found["workers"].items() if worker.startswith("expert worker")]
    # The counts of a worker that was restarted begin anew, so that it seems to have worked for less than nothing.
    is_valid = figures["is_valid"] and min(busy) > 0
    return row | figures | {"is_valid": is_valid, "expert_balance": sum(busy) / len(busy) / max(busy)}


def summary(rows: list[Row]) -> dict[str, Row]:
    """Return the spread of each system's figures, and its gains round by round."""
    base = {(row["gate"], row["seed"]): row["tokens_per_s"] for row in rows if row["system"] == IN_ORDER}
    found: dict[str, Row] = {}
    for gate, name in dict.fromkeys((row["gate"], row["system"]) for row in rows):
        own = [row for row in rows if (row["gate"], row["system"]) == (gate, name)]
        before = [base.get((gate, row["seed"])) for row in own]
        gains = [row["tokens_per_s"] / other for row, other in zip(own, before, strict=True) if other]
        found[f"{gate}, {name}"] = {
            "tokens_per_s": spread([row["tokens_per_s"] for row in own]),
            "itl_mean_ms": spread([row["itl_ms"]["mean"] for row in own]),
            "itl_p99_ms": spread([row["itl_ms"]["p99"] for row in own]),
            "expert_balance": spread([row["expert_balance"] for row in own]),
            "throughput_over_in_order": spread(gains) if gains else None,
            "num_invalid": sum(not row["is_valid"] for row in own),
        }
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of the servers' logs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gates", nargs="*", default=list(GATE_FLAGS), choices=list(GATE_FLAGS))
    parser.add_argument("--systems", nargs="*", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--dilation", type=float, default=96.0, help="factor on modelled durations")
    parser.add_argument("--requests", type=int, default=PACED_LOAD.num_requests)
    parser.add_argument("--users", type=int, default=PACED_LOAD.num_users, help="requests at once")
    parser.add_argument("--own", type=int, default=PACED_LOAD.num_own, help="tokens of a prompt that no other has")
    parser.add_argument("--outputs", type=int, nargs=2, default=PACED_LOAD.outputs, metavar=("LEAST", "MOST"))
    parser.add_argument("--quick", action="store_true", help="one short round")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.requests, args.users = 1, 32, 24
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end too
    conditions = run_record("paced")
    args.work.mkdir(parents=True, exist_ok=True)
    load = replace(
        PACED_LOAD,
        num_requests=args.requests,
        num_users=args.users,
        num_own=args.own,
        outputs=tuple(args.outputs),
    )
    rows: list[Row] = []
    cases = list(itertools.product(range(1, args.rounds + 1), args.gates, args.systems))
    with progress("async_replicas", len(cases)) as advance:
        for seed, gate, name in cases:
            rows.append(run(name, gate, load, args, seed))
            advance()
    found = summary(rows)
    for name, figures in found.items():
        print(name, json.dumps(figures))
    save(args.json, conditions, {"dilation": args.dilation, "load": load.__dict__, "summary": found, "rows": rows})


if __name__ == "__main__":
    main()
