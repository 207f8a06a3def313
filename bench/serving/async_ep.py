"""Compares expert parallelism with asynchronous workers: measured on this machine, paced as eight GPUs, and simulated.

    python bench/serving/async_ep.py --work /tmp/bench --json bench/results/serving/async_ep.json \\
        --png bench/results/serving/async_ep_queues.png

*Measured*: the demo model as one engine, as `ep` on two engines, and as `async` on 1+1, 2+2 and two colocated workers.
All servers run from the start, and each round sends the same requests to each of them in turn. The workers share the
cores of this machine, so the figures compare costs and show no speed-up.

*Paced*: Mixtral 8x7B on eight A100, as `async` 4+4 and as `ep` 8, under uniform and skewed gates, at two dilations. The
prompts share a long beginning, which each engine has in its prefix cache: attention then takes about as long as
experts. A run in which the ends of items or messages were taken in late by more than 5 % of an item is invalid.

*Simulated*: the same systems on virtual time (`async_ep_sim.py`). The host's time for an item comes from runs of their
own with another seed, which are not compared.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from moestro.config.run_record import run_record
from moestro.cost.model import AMOE_RATE
from moestro.cost.settings import overridden_popularity
from moestro.workload.progress import progress

sys.path.insert(0, str(Path(__file__).parents[1]))
from serving.async_ep_figures import (
    compared,
    forecast_host,
    host_of,
    measured_figures,
    measured_summary,
    paced_figures,
)
from serving.async_ep_load import Load
from serving.async_ep_servers import System, measure, serving
from serving.async_ep_sim import Case, HostTimes, simulate
from serving.async_ep_tables import print_tables
from shared.results import make_parser, save

PORT = 8460
Row = dict[str, object]

DEMO = ("--kv-cache-memory-bytes", str(128 << 20), "--max-model-len", "1024")
MEASURED = (
    System("fused", "fused", DEMO, 1),
    System("ep 2", "ep", (*DEMO, "--engines", "2"), 2),
    System("async 1+1", "async", (*DEMO, "--attention", "1", "--experts", "1"), 1),
    System("async 2+2", "async", (*DEMO, "--attention", "2", "--experts", "2"), 2),
    System("async 2 colocated", "async", (*DEMO, "--attention", "2", "--experts", "0"), 2),
)
MEASURED_LOAD = Load(num_requests=24, num_users=16, num_shared=32, num_own=32, outputs=(16, 32), num_warm=2, seed=1)

GPU, NETWORK, LINK, POLICY, ROUTE = "a100", "mixtral-8x7b", "nvswitch-a100", "priority", "least_loaded"
NUM_SEQS, NUM_BATCHED_TOKENS = 64, 2048
GATES = {"uniform": "uniform", "skewed": f"exponential:{AMOE_RATE}"}
WORKERS = {"async": (8, 4), "ep": (8, 0)}  # workers, and those of them with experts alone
PACED_LOAD = Load(num_requests=176, num_users=160, num_shared=4000, num_own=32, outputs=(3, 6), num_warm=8, seed=1)
HOST_LOAD = replace(PACED_LOAD, seed=99)  # its runs give the host's times and nothing else


def paced_system(mode: str, gate: str, dilation: float) -> System:
    """Make the command of one paced system."""
    flags = (*paced_flags(mode, dilation), "--gate-override", GATES[gate])
    return System(f"{mode} {gate} x{dilation:g}", mode, flags, num_engines_of(mode))


def num_engines_of(mode: str) -> int:
    """Return the engines of a paced system."""
    num_workers, num_expert_workers = WORKERS[mode]
    return num_workers - num_expert_workers


def paced_flags(mode: str, dilation: float, num_seqs: int = NUM_SEQS) -> list[str]:
    """Return the flags of a paced system, without a gate. `num_seqs`: sequences in a step of an engine."""
    num_engines, (_, num_expert_workers) = num_engines_of(mode), WORKERS[mode]
    flags = [NETWORK, "--device", f"paced:{GPU}", "--paced-arithmetic", "none", "--paced-link", LINK]
    flags += ["--pace-dilation", f"{dilation:g}", "--route-policy", ROUTE]
    flags += ["--max-num-seqs", str(num_seqs), "--max-num-batched-tokens", str(NUM_BATCHED_TOKENS)]
    if mode == "ep":
        flags += ["--engines", str(num_engines)]
    else:
        flags += ["--attention", str(num_engines), "--experts", str(num_expert_workers)]
        flags += ["--attention-step-policy", POLICY, "--expert-step-policy", POLICY]
    return flags


def paced_case(mode: str, gate: str, host: HostTimes, dilation: float) -> Case:
    """Make the same system for the simulator."""
    num_workers, num_expert_workers = WORKERS[mode]
    return Case(
        mode=mode,
        num_workers=num_workers,
        num_expert_workers=num_expert_workers,
        gpu=GPU,
        network=NETWORK,
        link=LINK,
        gate=overridden_popularity(GATES[gate], seed=0),
        policy=POLICY,
        route=ROUTE,
        num_seqs=NUM_SEQS,
        num_batched_tokens=NUM_BATCHED_TOKENS,
        host=host,
        dilation=dilation,
    )


def measure_demo(work: Path, num_rounds: int, advance: Callable[[], None]) -> list[Row]:
    """Measure all systems of the demo model in turn, `num_rounds` times."""
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(serving(system, PORT + 2 * number, work)) for number, system in enumerate(MEASURED)
        ]
        for number in range(num_rounds + 1):
            for server in servers:
                if not number:  # a short round warms the processes up
                    measure(server, replace(MEASURED_LOAD, num_requests=8, seed=0))
                else:
                    found = measure(server, replace(MEASURED_LOAD, seed=number))
                    rows.append({"round": number, "system": server.system.name, **measured_figures(found)})
                advance()
    return rows


def measure_paced(work: Path, mode: str, gate: str, dilation: float, load: Load) -> Row:
    """Run a load on one paced system."""
    system = paced_system(mode, gate, dilation)
    with serving(system, PORT, work) as running, running.server.engines_first():
        found = measure(running, replace(load, num_warm=system.num_engines))
    return {"mode": mode, "gate": gate, "dilation": dilation, **paced_figures(found, mode, dilation)}


def simulate_paced(paced: list[Row], host: HostTimes, load: Load, advance: Callable[[], None]) -> list[Row]:
    """Simulate each paced run, and each system with a host that is not divided by a dilation."""
    rows: list[Row] = []
    for row in paced:
        case = paced_case(row["mode"], row["gate"], host, row["dilation"])
        warm = replace(load, num_warm=case.num_workers - case.num_expert_workers)
        found = simulate(case, warm, row["sent_ms"])
        rows.append({"mode": row["mode"], "gate": row["gate"], "dilation": row["dilation"], **found})
        advance()
    return rows


def make_arguments() -> object:
    parser = make_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of the servers' logs")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds; 0 leaves the part out")
    parser.add_argument("--dilations", type=float, nargs="*", default=[32, 64], help="none leaves the paced part out")
    parser.add_argument("--modes", nargs="*", default=list(WORKERS), choices=list(WORKERS))
    parser.add_argument("--gates", nargs="*", default=list(GATES), choices=list(GATES))
    parser.add_argument("--requests", type=int, default=PACED_LOAD.num_requests, help="requests of a paced run")
    parser.add_argument(
        "--outputs",
        type=int,
        nargs=2,
        default=PACED_LOAD.outputs,
        metavar=("LEAST", "MOST"),
        help="tokens of a paced answer; longer ones vary less",
    )
    parser.add_argument("--png", type=Path, help="draw the queues of layers here")
    return parser.parse_args()


def main() -> None:
    args = make_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end too
    conditions = run_record(
        "measured", note="the rows of `paced` are paced, those of `simulated` and `forecast` are so"
    )
    args.work.mkdir(parents=True, exist_ok=True)
    first = (args.dilations or [1])[0]
    load = replace(PACED_LOAD, num_requests=args.requests, outputs=tuple(args.outputs))
    systems = [(m, g, d) for g in args.gates for d in args.dilations for m in args.modes]
    hosts = args.modes if args.dilations else []
    total = len(MEASURED) * (args.rounds + 1) * (args.rounds > 0)
    total += len(hosts) + 2 * len(systems) + len(hosts) * len(args.gates)
    with progress("async_ep", total) as advance:
        rows = measure_demo(args.work, args.rounds, advance) if args.rounds else []
        alone = []
        for mode in hosts:
            alone.append(measure_paced(args.work, mode, "uniform", first, HOST_LOAD))
            advance()
        paced = []
        for mode, gate, dilation in systems:
            paced.append(measure_paced(args.work, mode, gate, dilation, load))
            advance()
        host = host_of(alone)
        simulated = simulate_paced(paced, host, load, advance)
        whole = [{**row, "dilation": 1.0} for row in paced if row["dilation"] == first]
        forecast = simulate_paced(whole, forecast_host(alone), load, advance)
    found = {
        "measured": {"load": MEASURED_LOAD.__dict__, "summary": measured_summary(rows), "rows": rows},
        "paced": {"load": load.__dict__, "flags": {m: paced_system(m, "skewed", first).flags for m in hosts}},
        "host": {"runs": alone, "for_simulation": host.__dict__, "for_forecast": forecast_host(alone).__dict__},
        "compared": compared(paced, simulated),
        "forecast": [{k: v for k, v in row.items() if k != "queues"} for row in forecast],
    }
    if args.png:
        from serving.async_ep_picture import draw  # noqa: PLC0415 - only where a picture is requested

        draw(args.png, paced, simulated, first)
    for row in (*alone, *paced, *simulated):
        row.pop("queues", None)
    found |= {"paced_rows": paced, "simulated_rows": simulated}
    print_tables(found)
    save(args.json, conditions, found)


if __name__ == "__main__":
    main()
