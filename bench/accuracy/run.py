"""Calibrates servers from outside, predicts loads that they have not seen, and measures those loads.

    python bench/accuracy/run.py moestro_paced moestro_cpu [--work DIR] [--seconds 120]
    python bench/accuracy/run.py vllm_cpu --vllm /path/to/venv/bin/vllm

For each system, in this order:

1. `moestro calibrate --server` probes one engine of it.
2. `moestro sim` predicts each load of `loads.py` from the files that calibrate wrote, and from nothing else.
3. `moestro bench` sends the same requests at the same times to a server with that load's policy and engines.

Measure on a machine without other jobs. With MOESTRO_BENCH_FIRST, clients and servers get real-time priority where the
user may give it, so that they do not wait for other jobs.

The results, bench/results/accuracy/SYSTEM.json, hold the files of calibrate, each prediction with the digest of its
table, and each measurement. docs/accuracy.md shows them. With --work, parts that are there are kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from datetime import UTC, datetime
from pathlib import Path

from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
from accuracy.loads import FITTED_NAME, FITTED_SEED, JUDGED_SEEDS, LOADS, HeldOutLoad, write_trace
from accuracy.systems import SYSTEMS, go_first, running
from shared.models import ROOT
from shared.results import save
from shared.server import MOESTRO

RESULTS = ROOT / "bench" / "results" / "accuracy"
VOCABULARY = 4096


def run(*arguments: str) -> None:
    """Run `moestro`, and show its output if it fails."""
    done = subprocess.run(
        [MOESTRO, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=go_first,
    )
    assert done.returncode == 0, f"moestro {' '.join(arguments)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def calibrate(work: Path, system: str, vllm: str | None, seconds: float) -> None:
    """Write engine.json and engine.toml, unless they are there."""
    if (work / "engine.toml").exists():
        return
    bounds = ["--seconds", str(seconds), "--max-concurrency", "32", "--max-prompt-tokens", "900"]
    with running(system, None, vllm, work / "calibrate.log") as server:
        run(
            "calibrate", "--server", server.url, *bounds, "--seed", str(FITTED_SEED), "--out", str(work / "engine.json")
        )


def simulate(work: Path, name: str, load: HeldOutLoad, workload: str) -> dict:
    """Return the report of a simulation by the files of calibrate."""
    lines = [f"[workload]\n{workload}", (work / "engine.toml").read_text() + f"count = {load.count}"]
    policy = f'batch_policy = "{load.policy}"\n' if load.policy else ""
    lines.append(f'[[policies]]\nroute = "round_robin"\n{policy}')
    (work / f"{name}.toml").write_text("\n".join(lines))
    run("sim", str(work / f"{name}.toml"), "--json", str(work / f"{name}.sim.json"))
    return json.loads((work / f"{name}.sim.json").read_text())


def predicted_rate(work: Path, title: str, load: HeldOutLoad) -> float:
    """Requests a second that are the load's share of what the simulated engines bear."""
    name = f"rate of {title}"
    write_trace(work / f"{name}.jsonl", load, max(JUDGED_SEEDS) + 1, 1.0)
    workload = f'trace = "{name}.jsonl"\narrivals = "poisson"\nload = {load.share}'
    return simulate(work, name, load, workload)["saturation"]["rate"]


def figures(report: dict) -> dict[str, float]:
    """The figures that are judged."""
    return {
        "ttft_mean_ms": report["ttft_ms"]["mean"],
        "ttft_p99_ms": report["ttft_ms"]["p99"],
        "tpot_mean_ms": report["tpot_ms"]["mean"],
        "tokens_per_s": report["output_tokens_per_s"],
        "hit_ratio": report["cached_share"],
    }


def judge(work: Path, system: str, title: str, vllm: str | None) -> list[dict]:
    """Predict and measure one load with each seed."""
    load, rows = LOADS[title], []
    if (work / f"{title}.rows.json").exists():
        return json.loads((work / f"{title}.rows.json").read_text())
    rate = predicted_rate(work, title, load)
    digest = hashlib.sha256((work / "engine.json").read_bytes()).hexdigest()
    for seed in JUDGED_SEEDS:  # all predictions come before the first measurement
        name = f"{title}-{seed}"
        write_trace(work / f"{name}.jsonl", load, seed, rate)
        report = simulate(work, name, load, f'trace = "{name}.jsonl"')["outcomes"][0]["report"]
        rows.append({"load": title, "seed": seed, "rate": rate, "table": digest, "predicted": figures(report)})
    with running(system, load, vllm, work / f"{title}.log") as server:
        for row in rows:
            name = f"{title}-{row['seed']}"
            row["started_at"] = now()
            trace = ["--dataset-name", "trace", "--dataset-path", str(work / f"{name}.jsonl")]
            seeds = ["--seed", str(row["seed"]), "--vocab-size", str(VOCABULARY), "--temperature", "1"]
            out = work / f"{name}.json"
            run("bench", "--base-url", server.url, *trace, *seeds, "--num-warmups", "4", "--json", str(out))
            report = json.loads(out.read_text())["report"]
            assert not report["failures"], report["failures"]
            row["measured"], row["client_is_valid"] = figures(report), report["is_valid"]
            shown = {key: f"{row['predicted'][key]:.3g}/{value:.3g}" for key, value in row["measured"].items()}
            print(f"{system}, {name}, {rate:.2f} requests/s, predicted/measured: {shown}", flush=True)
    (work / f"{title}.rows.json").write_text(json.dumps(rows))
    return rows


def measure(work: Path, system: str, args: argparse.Namespace) -> None:
    """Calibrate and judge one system, and store the result."""
    work.mkdir(parents=True, exist_ok=True)
    conditions = run_record(f"{SYSTEMS[system].kind} and simulated", note=args.note)
    calibrate(work, system, args.vllm, args.seconds)
    chosen = [
        title
        for title, load in LOADS.items()
        if title in args.loads and (SYSTEMS[system].has_choices or (load.policy is None and load.count == 1))
    ]
    rows = [row for title in chosen for row in judge(work, system, title, args.vllm)]
    table = json.loads((work / "engine.json").read_text())
    RESULTS.mkdir(parents=True, exist_ok=True)
    save(
        RESULTS / f"{system}.json",
        conditions,
        {
            "system": SYSTEMS[system].title,
            "flags": SYSTEMS[system].flags,
            "fitted_on": {"name": FITTED_NAME, "seed": FITTED_SEED, "started_at": table["about"]["started_at"]},
            "table_digest": hashlib.sha256((work / "engine.json").read_bytes()).hexdigest(),
            "estimates": table["about"]["estimates"],
            "errors_on_other_sizes": table["about"]["errors_on_other_sizes"],
            "notes": table["about"]["notes"],
            "engines": tomllib.loads((work / "engine.toml").read_text())["engines"],
            "description": (work / "engine.toml").read_text(),
            "rows": rows,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", nargs="+", choices=SYSTEMS)
    parser.add_argument("--loads", nargs="*", choices=LOADS, default=list(LOADS), help="judge these alone")
    parser.add_argument("--work", type=Path, help="keep parts here, and go on from those that are there")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each calibration")
    parser.add_argument("--vllm", help="the command `vllm` of an environment with vllm-cpu")
    parser.add_argument("--note", default="", help="remark about the machine")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        for system in args.systems:
            measure((args.work or Path(directory)) / system, system, args)


if __name__ == "__main__":
    main()
