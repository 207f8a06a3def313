"""The simulator against our own server on this machine: the same requests at the same times, measured and simulated.

    # A quarter of an hour
    python bench/simulator/sim_fidelity.py --json bench/results/simulator/sim_fidelity.json
    # A part: DIR keeps what is measured
    python bench/simulator/sim_fidelity.py --work DIR --seeds 0

`moestro calibrate` measures the demo model on random tokens of its own. Then, for each seed and policy, `moestro serve
--record` is started anew, `moestro bench` sends Poisson arrivals of lengths drawn with that seed, and `moestro sim`
gets the very arrival times and lengths that the client reports, with the calibrated table. Nothing is fitted to these
runs. The rank has a core of its own, as it has a GPU in life; the API server and the client share the other.

All of it wants a machine that is idle otherwise. What others took of its cores meanwhile is stored with each run.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save
from shared.server import MOESTRO, moestro

PORT = 8193
SEEDS, NUM_REQUESTS, RATE = range(5), 176, 5.5  # about 60 % of what decode_first can bear
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 1024, "max_model_len": 2048}
POLICIES = ("decode_first", "prefill_first", "run_to_completion")  # whose figures lie well apart
LONG_SHARE, SHORT_PROMPTS, LONG_PROMPTS, ANSWERS = 0.25, (16, 128), (300, 700), (8, 49)
FIGURES = tuple((name, what) for name in ("ttft_ms", "tpot_ms") for what in ("mean", "p50", "p99"))


def run_moestro(core: int, *arguments: str) -> None:
    """`moestro` on one core; its output is shown if it fails."""
    command = [MOESTRO, *arguments]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


def flags(limits: dict[str, int]) -> list[str]:
    return [word for name, value in limits.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def write_lengths(path: Path, seed: int) -> None:
    """Mostly short prompts, some long ones: what sets policies apart."""
    rng = np.random.default_rng([seed, 1])
    is_long = rng.random(NUM_REQUESTS) < LONG_SHARE
    prompts = np.where(is_long, rng.integers(*LONG_PROMPTS, NUM_REQUESTS), rng.integers(*SHORT_PROMPTS, NUM_REQUESTS))
    answers = rng.integers(*ANSWERS, NUM_REQUESTS)
    lines = ({"input_length": int(i), "output_length": int(o)} for i, o in zip(prompts, answers, strict=True))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def measure(work: Path, policy: str, seed: int) -> None:
    """One run before a new server: what the client saw, and the server's record, in `work`."""
    lengths, out = work / f"lengths-{seed}.jsonl", work / f"{policy}-{seed}.json"
    write_lengths(lengths, seed)
    told = [*flags(LIMITS), "--batch-policy", policy, "--record", str(work / f"{policy}-{seed}.record.jsonl")]
    with moestro(PORT, *told, "--log-level", "warning", OMP_NUM_THREADS="1") as server:
        front = psutil.Process(server.process.pid)
        (rank,) = server.engines()
        pin(rank, 0)
        pin(front, 1)
        load = ["--request-rate", str(RATE), "--arrivals", "poisson", "--seed", str(seed), "--num-warmups", "12"]
        data = ["--dataset-name", "trace", "--dataset-path", str(lengths), "--base-url", server.url]
        began, others = time.monotonic(), others_s([front, rank])
        run_moestro(1, "bench", *data, *load, "--save-detailed", "--json", str(out))
        share = (others_s([front, rank]) - others) / (time.monotonic() - began)
    out.write_text(json.dumps(json.loads(out.read_text()) | {"others_share": share}))
    print(f"{policy}, seed {seed}: others took {share:.1%} of a core", flush=True)


def others_s(mine: list[psutil.Process]) -> float:
    """CPU-seconds of all processes but `mine` and the children of this one that have ended."""
    everybody = psutil.cpu_times()
    busy = sum(everybody) - everybody.idle - everybody.iowait - everybody.guest - everybody.guest_nice
    ours = [*(process.cpu_times() for process in mine), psutil.Process().cpu_times()]
    return busy - sum(times.user + times.system for times in ours) - ours[-1].children_user - ours[-1].children_system


def pin(process: psutil.Process, core: int) -> None:
    """All of its threads."""
    for thread in process.threads():
        os.sched_setaffinity(thread.id, {core})


def simulate(work: Path, seed: int) -> dict[str, dict]:
    """The report of each policy, from arrivals and lengths as the client had them."""
    found = {}
    for policy in POLICIES:
        told = json.loads((work / f"{policy}-{seed}.json").read_text())["requests"]
        name = f"{policy}-{seed}"
        columns = zip(told["arrival_ms"], told["input_tokens"], told["output_tokens"], strict=True)
        lines = ({"arrival_time": ms / 1e3, "input_toks": i, "output_toks": o} for ms, i, o in columns)
        (work / f"{name}.arrivals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        header = json.loads((work / f"{name}.record.jsonl").open().readline())
        (work / f"{name}.toml").write_text(scenario(f"{name}.arrivals.jsonl", policy, header["num_blocks"]))
        run_moestro(0, "sim", str(work / f"{name}.toml"), "--json", str(work / f"{name}.sim.json"))
        found[policy] = json.loads((work / f"{name}.sim.json").read_text())["outcomes"][0]["report"]
    return found


def scenario(trace: str, policy: str, num_blocks: int) -> str:
    limits = "".join(f"{name} = {value}\n" for name, value in LIMITS.items())
    return (
        f'[workload]\ntrace = "{trace}"\n'
        f'[engines]\ntable = "table.json"\nnum_blocks = {num_blocks}\n{limits}'
        f'[[policies]]\nbatch_policy = "{policy}"\n'
    )


def compare(measured: dict, simulated: dict) -> dict[str, dict[str, float]]:
    """Each figure of both, and the simulation's error."""
    found = {}
    for name, what in FIGURES:
        real, priced = measured[name][what], simulated[name][what]
        found[f"{name} {what}"] = {"measured": real, "simulated": priced, "error": priced / real - 1}
    return found


def over_seeds(runs: list[dict]) -> dict[str, dict[str, float]]:
    """The errors of each figure: mean, least, most; and of the mean over seeds of both."""
    found = {}
    for name in runs[0]:
        errors = [run[name]["error"] for run in runs]
        real, priced = (statistics.mean(run[name][side] for run in runs) for side in ("measured", "simulated"))
        pooled = {"measured": real, "simulated": priced, "error": priced / real - 1}
        found[name] = {**pooled, "least_error": min(errors), "largest_error": max(errors)}
    return found


def ranking(compared: dict[str, dict], figure: str, side: str) -> list[str]:
    return sorted(compared, key=lambda policy: compared[policy][figure][side])


def result_of(work: Path) -> dict:
    """What all complete seeds in `work` say."""
    seeds = [s for s in SEEDS if all((work / f"{policy}-{s}.json").exists() for policy in POLICIES)]
    runs = {}
    for seed in seeds:
        told = {policy: json.loads((work / f"{policy}-{seed}.json").read_text()) for policy in POLICIES}
        reports = {policy: run["report"] for policy, run in told.items()}
        failed = {policy: report["failures"] for policy, report in reports.items() if report["failures"]}
        assert not failed, failed
        priced = simulate(work, seed)
        runs[seed] = {policy: compare(reports[policy], priced[policy]) for policy in POLICIES}
        runs[seed] |= {"others_share": {policy: run["others_share"] for policy, run in told.items()}}
        runs[seed] |= {"client_is_valid": {policy: report["is_valid"] for policy, report in reports.items()}}
    table = json.loads((work / "table.json").read_text())
    return {
        "pinning": "the rank has a core of its own, the API server and the client share the other",
        "load": {"requests": NUM_REQUESTS, "requests_per_s": RATE, "arrivals": "poisson", "seeds": seeds},
        "limits": LIMITS,
        "table": {"host": table["host"], "checked": [table["about"][key] for key in ("mean_error", "largest_error")]},
        "same_ranking": {
            figure: [
                ranking(p := policies_of(run), figure, "measured") == ranking(p, figure, "simulated")
                for run in runs.values()
            ]
            for figure in ("ttft_ms mean", "tpot_ms mean")
        },
        "over_seeds": {policy: over_seeds([run[policy] for run in runs.values()]) for policy in POLICIES},
        "runs": runs,
    }


def policies_of(run: dict) -> dict[str, dict]:
    return {policy: run[policy] for policy in POLICIES}


def show(result: dict) -> None:
    for policy, figures in result["over_seeds"].items():
        for name, row in figures.items():
            print(
                f"{policy:18s} {name:13s} measured {row['measured']:8.2f} simulated {row['simulated']:8.2f}"
                f" {row['error']:+7.1%} ({row['least_error']:+.1%} to {row['largest_error']:+.1%})"
            )
    for figure, same in result["same_ranking"].items():
        print(f"ranking by {figure}: the same in {sum(same)} of {len(same)} seeds")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--work", type=Path, help="keep runs here, and go on from those that are there")
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS), help="measure these, where missing")
    args = parser.parse_args()
    conditions = run_record("measured and simulated")
    with tempfile.TemporaryDirectory() as directory:
        work = args.work or Path(directory)
        work.mkdir(exist_ok=True)
        if not (work / "table.json").exists():
            run_moestro(0, "calibrate", *flags(LIMITS), "--out", str(work / "table.json"))
        for seed in args.seeds:
            for policy in POLICIES:
                if not (work / f"{policy}-{seed}.json").exists():
                    measure(work, policy, seed)
        result = result_of(work)
    show(result)
    save(args.json, conditions, result)


if __name__ == "__main__":
    main()
