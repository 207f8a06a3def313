"""Starts what `moestro plan` prints for three loads, sends each at its times, and compares with the prediction.

    python bench/simulator/plan_day_check.py moestro_paced [--work DIR] [--seconds 300] \\
        [--json bench/results/simulator/plan_day_check.json]
    python bench/simulator/plan_day_check.py vllm_cpu --vllm /path/to/venv/bin/vllm

1. `moestro calibrate --server` probes one engine of a system of bench/accuracy.
2. `moestro plan ENGINE.toml --find fewest-gpus` reads each load, whose rate has a peak, and answers with a number of
   engines and their commands. Nothing else is known to it.
3. The commands are started as they are printed, but for the ports, and `moestro bench` sends the same requests at the
   same times.

The mean rate of a load is a share of what one engine bears, by the same files, so that one or two paced engines are
needed. Engines of vLLM need a core each, so their loads are such that one is enough. A row whose client was late says
so. With --work, parts that are there are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
from accuracy.loads import HeldOutLoad, write_trace
from accuracy.run import VOCABULARY, calibrate, figures, predicted_rate, run
from accuracy.systems import SYSTEMS, model_of
from shared.results import make_parser, save
from shared.server import MOESTRO, Server, free_port

SEED = 201  # of no probe, and of no load of the accuracy page
PEAK = 1.5  # rate of the middle third over the mean
MOST_ENGINES = 8
FIGURES = ("ttft_mean_ms", "ttft_p99_ms", "tpot_mean_ms", "tokens_per_s", "hit_ratio")


@dataclass(frozen=True, kw_only=True)
class PlannedLoad:
    """A load, and the objective of its plan.

    Attributes:
        load: its requests; `share` is that of one engine's saturation.
        share_of_one: the share where the machine has cores for one engine alone.
        most_steps: objective of the mean TTFT, in decode steps of one sequence.
    """

    load: HeldOutLoad
    share_of_one: float
    most_steps: float


MIXED = PlannedLoad(load=HeldOutLoad(differs_by="rate", share=0.6), share_of_one=0.5, most_steps=20)
SHARED = PlannedLoad(
    load=HeldOutLoad(differs_by="mix", share=1.3, prompts=(128, 256), num_groups=4), share_of_one=0.4, most_steps=30
)
LONG = PlannedLoad(
    load=HeldOutLoad(differs_by="mix", share=2.2, prompts=(200, 500), answers=(4, 24)), share_of_one=0.5, most_steps=40
)


def planned_loads(system: str) -> dict[str, PlannedLoad]:
    """The loads of a system by title."""
    loads = {"mixed": MIXED, "shared prompts": SHARED, "long prompts": LONG}
    if SYSTEMS[system].is_vllm:
        loads = {name: replace(each, load=replace(each.load, share=each.share_of_one)) for name, each in loads.items()}
    return {f"{name}, {each.load.share}": each for name, each in loads.items()}


def write_day(path: Path, load: HeldOutLoad, rate: float) -> None:
    """Write the load's trace with a peak in its middle third: times where the integral of the rate is as before."""
    write_trace(path, load, SEED, rate)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    times = np.array([row["timestamp"] for row in rows])
    end = times[-1]
    side = (1 - PEAK / 3) / (2 / 3)  # rate of the other thirds
    passed = np.array([0, side / 3, side / 3 + PEAK / 3, 1]) * end
    for row, time in zip(rows, np.interp(times, passed, np.array([0, 1, 2, 3]) * end / 3), strict=True):
        row["timestamp"] = round(float(time), 6)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def step_ms(work: Path) -> float:
    """A decode step of one sequence, by calibrate's estimates."""
    estimates = json.loads((work / "engine.json").read_text())["about"]["estimates"]
    value = {each["name"]: each["value"] for each in estimates}
    return value["step"] + value["row"] / 1e3


def make_plan(work: Path, system: str, title: str) -> dict:
    """Ask for the fewest engines; returns the plan."""
    planned, out = planned_loads(system)[title], work / f"plan of {title}"
    if not (out / "plan.json").exists():
        rate = predicted_rate(work, title, planned.load)
        write_day(work / f"{title}.jsonl", planned.load, rate)
        server = ["--for", "moestro"]
        if SYSTEMS[system].is_vllm:
            server = ["--for", "vllm", "--serve-model", str(model_of(system, work))]
        run(
            "plan", str(work / "engine.toml"), *server, "--dataset-path", str(work / f"{title}.jsonl"),
            "--num-gpus", str(MOST_ENGINES), "--max-ttft", f"{planned.most_steps * step_ms(work):.0f}",
            "--max-itl", "1e6", "--window", "60", "--time", "3600",
            "--server-flags", " ".join(SYSTEMS[system].unplanned), "--out", str(out),
        )  # fmt: skip
    return json.loads((out / "plan.json").read_text())


@contextlib.contextmanager
def started_as_printed(commands: list[str], args: argparse.Namespace, log: Path) -> Iterator[Server]:
    """Start the commands of a plan on free ports; yields the last one, which is the router if there is one."""
    ports = {port: str(free_port()) for port in re.findall(r"--port (\d+)", " ".join(commands))}
    programs = [Path(MOESTRO).parent, *([Path(args.vllm).parent] if args.vllm else [])]
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([*map(str, programs), os.environ["PATH"]]),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    processes = []
    try:
        for number, command in enumerate(commands):
            line = re.sub(r"(--port |127\.0\.0\.1:)(\d+)", lambda found: found[1] + ports[found[2]], command)
            with (log.parent / f"{log.name}.{number}").open("w") as out:
                processes.append(subprocess.Popen(f"exec {line}", shell=True, stdout=out, stderr=out, env=environment))
            server = Server(processes[-1], f"http://127.0.0.1:{re.search(r'--port (.*)', line)[1]}")
            server.wait_until_healthy(600)
        yield server
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(60)


def check(work: Path, system: str, title: str, number: int, args: argparse.Namespace) -> dict:
    """Plan one load, start what is printed, and measure it for the given time."""
    plan = make_plan(work, system, title)
    best, stored = plan["servers"][0], work / f"{title}.measured{number}.json"
    assert best["holds"], f"{MOST_ENGINES} engines do not hold the objectives of {title}"
    if not stored.exists():
        with started_as_printed(plan["commands"], args, work / f"{title}.log") as server:
            trace = ["--dataset-name", "trace", "--dataset-path", str(work / f"{title}.jsonl")]
            seeds = ["--seed", str(SEED), "--vocab-size", str(VOCABULARY), "--temperature", "1"]
            run("bench", "--base-url", server.url, *trace, *seeds, "--num-warmups", "4", "--json", str(stored))
    report, predicted = json.loads(stored.read_text())["report"], best["figures"]
    assert not report["failures"], report["failures"]
    measured = figures(report)
    found = {
        "ttft_mean_ms": predicted["ttft_ms"],
        "ttft_p99_ms": predicted["ttft_p99_ms"],
        "tpot_mean_ms": predicted["itl_ms"],
        "tokens_per_s": predicted["tokens_per_s"],
        "hit_ratio": predicted["hit_ratio"],
    }
    errors = {name: found[name] - measured[name] for name in FIGURES if name == "hit_ratio"}
    errors |= {name: found[name] / measured[name] - 1 for name in FIGURES if name != "hit_ratio"}
    print(f"{title}: {best['num_servers']} engines; errors {errors}", flush=True)
    return {
        "load": title,
        "run": number,
        "num_engines": best["num_servers"],
        "load_held": best["load_held"],
        "load_broken": best["load_broken"],
        "max_ttft_ms": plan["settings"]["objectives"]["max_ttft"],
        "commands": plan["commands"],
        "predicted": found,
        "measured": measured,
        "errors": errors,
        "objective_is_held": measured["ttft_mean_ms"] <= plan["settings"]["objectives"]["max_ttft"],
        "client_is_valid": report["is_valid"],
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--work", type=Path, help="keep parts here, and go on from those that are there")
    parser.add_argument("--seconds", type=float, default=300.0, help="of the calibration")
    parser.add_argument("--runs", type=int, default=2, help="measurements of each load")
    parser.add_argument("--vllm", help="the command `vllm` of an environment with vllm-cpu")
    parser.add_argument("--note", default="", help="remark about the machine")
    args = parser.parse_args()
    conditions = run_record(f"{SYSTEMS[args.system].kind} and simulated", note=args.note)
    with tempfile.TemporaryDirectory() as directory:
        work = args.work or Path(directory)
        work.mkdir(parents=True, exist_ok=True)
        calibrate(work, args.system, args.vllm, args.seconds)
        rows = [
            check(work, args.system, title, number, args)
            for title in planned_loads(args.system)
            for number in range(args.runs)
        ]
        description = (work / "engine.toml").read_text()
    save(args.json, conditions, {"system": SYSTEMS[args.system].title, "description": description, "rows": rows})


if __name__ == "__main__":
    main()
