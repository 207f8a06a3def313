"""Compares the simulator with our own server on this machine: same requests, same times, measured and simulated.

    # 20 minutes
    python bench/simulator/sim_fidelity.py --json bench/results/simulator/sim_fidelity.json
    # A part: DIR keeps what is measured
    python bench/simulator/sim_fidelity.py --work DIR --seeds 0

For each seed, `moestro calibrate` measures a new table of the demo model with that seed's random tokens. `moestro sim`
finds the saturation with this table; the offered rate is LOAD times it. For each policy a new `moestro serve --record`
then starts, and `moestro bench` sends Poisson arrivals with lengths of that seed. `moestro sim` gets the arrival times
and lengths that the client reports, with the table of the seed. Answers are sampled, as in the steps of the table,
because the demo model repeats itself when greedy, and its steps then take up to a fifth less time. Nothing is fitted
to these runs.

The rank runs alone on one core; the API server and the client share the other core. `moestro calibrate` runs on the
rank's core. Both cores stay busy all the time, so the other core slows a step equally in calibration and in serving.
The machine should be idle otherwise.

Each run is stored with possible causes of a miss:

* `step_time_ratio`: CPU-seconds of the rank over the simulated time in which the engine is busy. Above 1, steps took
  longer than the table says; near saturation TTFT errs by a multiple of that.
* `drift`, of a seed: the table measured after its runs over the one before.
* `api_ms`: TTFT of single requests on the idle server, less the simulated one. The simulator leaves out the API server
  and the client, so this is added to each simulated TTFT; `ttft_error_without_api` is the error without it.
* `late_ms`: how late the client sent a request, mean; its TTFT includes it.
* `others_share`, `steal_share`: CPU time of other processes, and of other machines on this host, over a core's time.
"""

from __future__ import annotations

import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save
from shared.server import MOESTRO, awake_cores, moestro

PORT = 8193
RANK_CORE, OTHER_CORE = 0, 1
SEEDS, NUM_REQUESTS = range(5), 300
# Of the saturation under the first policy: queues form, and no policy is overloaded. At 0.6, TTFT of two runs of one
# load differed by 39 %, because steps took 7 % longer in the second.
LOAD = 0.5
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 1024, "max_model_len": 2048}
POLICIES = ("decode_first", "prefill_first", "run_to_completion")  # policies with clearly different figures
LONG_SHARE, SHORT_PROMPTS, LONG_PROMPTS, ANSWERS = 0.25, (16, 128), (300, 700), (8, 49)
NUM_WARMUPS = 24  # requests of the load's lengths, so that long prompts have come before, too
NUM_ALONE, ALONE_PROMPT, ALONE_ANSWER = 32, 64, 2  # requests one after the other on the idle server
DRIFT_ROUNDS = 2  # of the table after the runs of a seed
ENOUGH_BLOCKS = LIMITS["max_num_seqs"] * LIMITS["max_model_len"] // 16  # no sequence is preempted
WANTED_ERROR = 0.15  # the goal: mean TTFT and mean TPOT of each policy within this
FIGURES = tuple((name, what) for name in ("ttft_ms", "tpot_ms") for what in ("mean", "p50", "p99"))


@dataclass(frozen=True)
class Usage:
    """CPU-seconds so far: of the rank, of everything that this bench runs, of all processes, and stolen by the host."""

    at_s: float
    rank_s: float
    mine_s: float
    all_s: float
    stolen_s: float

    @classmethod
    def now(cls, rank: psutil.Process, mine: list[psutil.Process]) -> Usage:
        everybody = psutil.cpu_times()
        stolen = getattr(everybody, "steal", 0.0)
        idle = everybody.idle + getattr(everybody, "iowait", 0.0)
        twice = getattr(everybody, "guest", 0.0) + getattr(everybody, "guest_nice", 0.0)  # in user and nice, too
        own = psutil.Process().cpu_times()
        used = [sum(process.cpu_times()[:2]) for process in mine]
        mine_s = sum(used) + own.user + own.system + own.children_user + own.children_system
        rank_s = sum(rank.cpu_times()[:2])
        return cls(time.monotonic(), rank_s, mine_s, sum(everybody) - idle - stolen - twice, stolen)

    def until(self, later: Usage) -> dict[str, float]:
        """Return the figures of the time between."""
        span_s = later.at_s - self.at_s
        others_s = (later.all_s - self.all_s) - (later.mine_s - self.mine_s)
        return {
            "rank_cpu_s": later.rank_s - self.rank_s,
            "others_share": others_s / span_s,
            "steal_share": (later.stolen_s - self.stolen_s) / span_s,
        }


def run_moestro(core: int, *arguments: str) -> None:
    """Run `moestro` on one core, and show its output if it fails."""
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


def calibrate(path: Path, *more: str) -> None:
    """Measure a table on the rank's core, unless it was."""
    if not path.exists():
        run_moestro(RANK_CORE, "calibrate", *flags(LIMITS), *more, "--out", str(path))


def write_lengths(path: Path, seed: int) -> None:
    """Write mostly short prompts and some long ones, on which policies differ."""
    rng = np.random.default_rng([seed, 1])
    is_long = rng.random(NUM_REQUESTS) < LONG_SHARE
    prompts = np.where(is_long, rng.integers(*LONG_PROMPTS, NUM_REQUESTS), rng.integers(*SHORT_PROMPTS, NUM_REQUESTS))
    answers = rng.integers(*ANSWERS, NUM_REQUESTS)
    lines = ({"input_length": int(i), "output_length": int(o)} for i, o in zip(prompts, answers, strict=True))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def simulate(work: Path, name: str, workload: str, policy: str, table: str) -> dict:
    """Simulate one policy. The report of the run, with the requests in NAME.csv."""
    limits = "".join(f"{key} = {value}\n" for key, value in LIMITS.items())
    scenario = (
        f"[workload]\n{workload}\n[engines]\ntable = {json.dumps(table)}\nnum_blocks = {ENOUGH_BLOCKS}\n{limits}"
        f'[[policies]]\nbatch_policy = "{policy}"\n'
    )
    (work / f"{name}.toml").write_text(scenario)
    out, rows = work / f"{name}.sim.json", work / f"{name}.csv"
    run_moestro(OTHER_CORE, "sim", str(work / f"{name}.toml"), "--json", str(out), "--requests", str(rows))
    return json.loads(out.read_text())


def rate_of(work: Path, seed: int) -> float:
    """Requests a second that are LOAD of what the first policy bears, by the seed's table."""
    workload = f'trace = "lengths-{seed}.jsonl"\narrivals = "poisson"\nload = {LOAD}'
    return simulate(work, f"rate-{seed}", workload, POLICIES[0], f"table-{seed}.json")["saturation"]["rate"]


def measure(work: Path, policy: str, seed: int, rate: float, spinners: list[psutil.Process]) -> None:
    """Run one load on a new server; keep the client's figures and the server's record in `work`."""
    name = f"{policy}-{seed}"
    record = ["--record", str(work / f"{name}.record.jsonl")]
    serve_flags = [*flags(LIMITS), "--batch-policy", policy, "--kernels", "own", *record, "--log-level", "warning"]
    trace = ["--dataset-name", "trace", "--dataset-path", str(work / f"lengths-{seed}.jsonl")]
    alone = ["--random-input-len", str(ALONE_PROMPT), "--random-output-len", str(ALONE_ANSWER)]
    out, single = work / f"{name}.json", work / f"{name}.alone.json"
    with moestro(PORT, *serve_flags, OMP_NUM_THREADS="1") as server:
        front = psutil.Process(server.process.pid)
        (rank,) = server.engines()
        pin(rank, RANK_CORE)
        pin(front, OTHER_CORE)

        def bench(*arguments: str) -> None:
            always = ["--base-url", server.url, "--num-warmups", "0", "--temperature", "1"]  # as the table's steps
            run_moestro(OTHER_CORE, "bench", *always, *arguments)

        # Prompts of other seeds, so that the prefix cache has nothing for the run.
        bench(*trace, "--num-prompts", str(NUM_WARMUPS), "--max-concurrency", "4", "--seed", str(1000 + seed))
        one_by_one = ["--max-concurrency", "1", "--num-prompts", str(NUM_ALONE), "--seed", str(2000 + seed)]
        bench(*alone, *one_by_one, "--json", str(single))
        mine = [front, rank, *spinners]
        before = Usage.now(rank, mine)
        load = ["--request-rate", str(rate), "--arrivals", "poisson", "--seed", str(seed)]
        bench(*trace, *load, "--save-detailed", "--json", str(out))
        usage = before.until(Usage.now(rank, mine))
    out.write_text(json.dumps(json.loads(out.read_text()) | {"usage": usage}))
    shown = ", ".join(f"{key} {value:.3f}" for key, value in usage.items())
    print(f"{policy}, seed {seed}, {rate:.2f} requests/s: {shown}", flush=True)


def pin(process: psutil.Process, core: int) -> None:
    """Pin all threads of a process to a core."""
    for thread in process.threads():
        os.sched_setaffinity(thread.id, {core})


def measure_seed(work: Path, seed: int) -> None:
    """Measure the table, the rate, the runs and the drift of one seed, each where it is missing."""
    with awake_cores() as spinners:
        write_lengths(work / f"lengths-{seed}.jsonl", seed)
        calibrate(work / f"table-{seed}.json")
        rate = rate_of(work, seed)
        for policy in POLICIES:
            if not (work / f"{policy}-{seed}.json").exists():
                measure(work, policy, seed, rate, spinners)
        calibrate(work / f"after-{seed}.json", "--rounds", str(DRIFT_ROUNDS))


def drift(work: Path, seed: int) -> float:
    """The median ratio of a step's time after the runs of a seed to that before."""
    before, after = (json.loads((work / f"{name}-{seed}.json").read_text()) for name in ("table", "after"))
    kinds = ("prefill", "short_chunks", "decode")
    ratios = [b["ns"] / a["ns"] for kind in kinds for a, b in zip(before[kind], after[kind], strict=True)]
    return statistics.median(ratios)


def compare_run(work: Path, policy: str, seed: int) -> dict:
    """Compare one run with its simulation, and name the possible causes of a miss."""
    name, table = f"{policy}-{seed}", f"table-{seed}.json"
    serve_flags = json.loads((work / f"{name}.json").read_text())
    report, rows = serve_flags["report"], serve_flags["requests"]
    assert not report["failures"], report["failures"]
    assert not any(rows["cached_tokens"]), "the prefix cache had prompts of the load, and the simulator has none"
    columns = zip(rows["arrival_ms"], rows["input_tokens"], rows["output_tokens"], strict=True)
    lines = ({"arrival_time": ms / 1e3, "input_toks": i, "output_toks": o} for ms, i, o in columns)
    (work / f"{name}.arrivals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    simulated = simulate(work, name, f'trace = "{name}.arrivals.jsonl"', policy, table)
    alone = f"prompt_tokens = {ALONE_PROMPT}\noutput_tokens = {ALONE_ANSWER}\nnum_requests = 2\nrate = 0.1"
    priced = simulate(work, f"{name}.alone", alone + '\narrivals = "constant"', policy, table)
    measured_alone = json.loads((work / f"{name}.alone.json").read_text())["report"]["ttft_ms"]["p50"]
    api_ms = measured_alone - priced["outcomes"][0]["report"]["ttft_ms"]["p50"]
    figures = compare(report, simulated["outcomes"][0]["report"], api_ms)
    ttft = figures["ttft_ms mean"]
    return figures | {
        "causes": serve_flags["usage"]
        | {
            "step_time_ratio": serve_flags["usage"]["rank_cpu_s"] / busy_s(work / f"{name}.csv"),
            "api_ms": api_ms,
            "late_ms": statistics.mean(rows["late_ms"]),
            "client_is_valid": report["is_valid"],
            "ttft_error_without_api": (ttft["simulated"] - api_ms) / ttft["measured"] - 1,
        }
    }


def busy_s(requests: Path) -> float:
    """The simulated time in which the one engine is busy: while a request is in flight. Reads `--requests`."""
    with requests.open() as lines:
        spans = sorted(
            (float(row["arrival_s"]), float(row["arrival_s"]) + float(row["e2e_ms"]) / 1e3)
            for row in csv.DictReader(lines)
        )
    total, until = 0.0, 0.0
    for begin, end in spans:
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def compare(measured: dict, simulated: dict, api_ms: float) -> dict[str, dict[str, float]]:
    """Return each figure, measured and simulated, and the simulation's error; `api_ms` is a part of each TTFT."""
    found = {}
    for name, what in FIGURES:
        real, priced = measured[name][what], simulated[name][what] + (api_ms if name == "ttft_ms" else 0.0)
        found[f"{name} {what}"] = {"measured": real, "simulated": priced, "error": priced / real - 1}
    return found


def over_seeds(runs: list[dict]) -> dict[str, dict[str, float]]:
    """Summarise the errors of each figure over seeds, and compare the means over seeds."""
    found = {}
    for name in (f"{figure} {what}" for figure, what in FIGURES):
        errors = [run[name]["error"] for run in runs]
        real, priced = (statistics.mean(run[name][side] for run in runs) for side in ("measured", "simulated"))
        pooled = {"measured": real, "simulated": priced, "error": priced / real - 1}
        found[name] = {**pooled, "least_error": min(errors), "largest_error": max(errors)}
    return found


def ranking(compared: dict[str, dict], figure: str, side: str) -> list[str]:
    return sorted(compared, key=lambda policy: compared[policy][figure][side])


def result_of(work: Path) -> dict:
    """Summarise all complete seeds in `work`."""
    wanted = {s: [work / f"{name}-{s}.json" for name in ("table", *POLICIES, "after")] for s in SEEDS}
    seeds = [seed for seed, paths in wanted.items() if all(path.exists() for path in paths)]
    runs = {seed: {policy: compare_run(work, policy, seed) for policy in POLICIES} for seed in seeds}
    tables = {seed: json.loads((work / f"table-{seed}.json").read_text()) for seed in seeds}
    means = ("ttft_ms mean", "tpot_ms mean")
    return {
        "pinning": "the rank runs alone on one core, the API server and the client share the other; both stay busy",
        "load": {"requests": NUM_REQUESTS, "share_of_saturation": LOAD, "arrivals": "poisson", "seeds": seeds},
        "limits": LIMITS,
        "wanted_error": WANTED_ERROR,
        "tables": {
            seed: {
                "host": table["host"],
                "mean_error": table["about"]["mean_error"],
                "largest_error": table["about"]["largest_error"],
                "requests_per_s": json.loads((work / f"rate-{seed}.sim.json").read_text())["saturation"]["rate"],
                "drift": drift(work, seed),
            }
            for seed, table in tables.items()
        },
        "same_ranking": {
            figure: [ranking(run, figure, "measured") == ranking(run, figure, "simulated") for run in runs.values()]
            for figure in means
        },
        "within": {
            policy: {name: [abs(run[policy][name]["error"]) <= WANTED_ERROR for run in runs.values()] for name in means}
            for policy in POLICIES
        },
        "over_seeds": {policy: over_seeds([run[policy] for run in runs.values()]) for policy in POLICIES},
        "runs": runs,
    }


def show(serve_flags: dict) -> None:
    for policy, figures in serve_flags["over_seeds"].items():
        for name, row in figures.items():
            print(
                f"{policy:18s} {name:13s} measured {row['measured']:8.2f} simulated {row['simulated']:8.2f}"
                f" {row['error']:+7.1%} ({row['least_error']:+.1%} to {row['largest_error']:+.1%})"
            )
    for seed, run in serve_flags["runs"].items():
        print(f"seed {seed}: drift {serve_flags['tables'][seed]['drift']:.3f}")
        for policy, found in run.items():
            causes = ", ".join(f"{key} {value:.3f}" for key, value in found["causes"].items())
            print(f"  {policy:18s} TTFT mean {found['ttft_ms mean']['error']:+.1%}; {causes}")
    for figure, same in serve_flags["same_ranking"].items():
        print(f"ranking by {figure}: the same in {sum(same)} of {len(same)} seeds")
    for policy, by_figure in serve_flags["within"].items():
        counts = ", ".join(f"{name} in {sum(each)} of {len(each)} seeds" for name, each in by_figure.items())
        print(f"{policy} within {WANTED_ERROR:.0%}: {counts}")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--work", type=Path, help="keep runs here, and go on from those that are there")
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS), help="measure these, where missing")
    args = parser.parse_args()
    conditions = run_record("measured and simulated")
    with tempfile.TemporaryDirectory() as directory:
        work = args.work or Path(directory)
        work.mkdir(exist_ok=True)
        for seed in args.seeds:
            measure_seed(work, seed)
        serve_flags = result_of(work)
    show(serve_flags)
    save(args.json, conditions, serve_flags)


if __name__ == "__main__":
    main()
