"""Renew a part of a paper's stored result: runs of some policies of LMetric, or loads that a later run has made.

    python tools/renew_cells.py --traces DIR --systems vllm-0.26,vllm-0.27 --loads chat,coder --write
    python tools/renew_cells.py --traces DIR --loads chat --write     # what the age of figures costs, alone
    python tools/renew_cells.py --paper gimbal --parts DIR --write    # loads of `moestro repro gimbal --out DIR`
    python tools/renew_cells.py --paper amoe --jobs 2 --write         # rates that AMoE's plan has and the result lacks
    python tools/renew_cells.py --paper gimbal --lengths FILE --loads slow_random,scarce_random --write
                                                                      # runs that its plan has and the result lacks

Runs of policies keep the rates and tuned parameters of the stored run. The result names what was made anew. Without
--write the differences are printed alone; code that has not changed makes none. `tools/judge_claims.py` then judges the
claims.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from moestro.config.run_record import run_record
from moestro.repro.amoe.experiment import AmoeExperiment
from moestro.repro.amoe.loads import AmoeFindings
from moestro.repro.amoe.paper import WHOLE
from moestro.repro.gimbal.experiment import GimbalExperiment
from moestro.repro.gimbal.loads import GimbalFindings
from moestro.repro.gimbal.paper import whole as gimbal_parts
from moestro.repro.lmetric.experiment import LmetricExperiment, LmetricPlan
from moestro.repro.lmetric.findings import FIGURES, LmetricFindings
from moestro.repro.papers import papers
from moestro.repro.results import Findings, LoadPart, Reproduced, merged

RESULTS = Path(__file__).parents[1] / "bench" / "results" / "repro"
RESULT = RESULTS / "lmetric.json"


def main() -> None:
    """Renew what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--systems", default="", help="none: the sweep of the figures' age alone, on chats")
    parser.add_argument("--loads")
    parser.add_argument("--num-requests", type=int, default=LmetricPlan().num_requests)
    parser.add_argument("--paper", choices=[paper.name for paper in papers()])
    parser.add_argument("--parts", type=Path, help="folder of the loads of --paper")
    parser.add_argument("--lengths", type=Path, help="BurstGPT's, of --paper gimbal")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run what a result lacks")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if given.paper is None and given.loads is None:
        parser.error("give --traces and --loads, or --paper")
    if given.paper is None:
        renew(given)
        return
    if given.parts is None:
        if given.paper not in ("amoe", "gimbal"):
            parser.error("--paper needs --parts, but for amoe and gimbal")
        add_missing(given)
        return
    path, result = join(given.paper, given.parts)
    if given.write:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def add_missing(given: argparse.Namespace) -> None:
    """Run what a paper's plan has and its stored result lacks."""
    path, conditions = RESULTS / f"{given.paper}.json", run_record("simulated")
    experiment: AmoeExperiment | GimbalExperiment = AmoeExperiment(WHOLE)
    kind: type[AmoeFindings | GimbalFindings] = AmoeFindings
    if given.paper == "gimbal":
        experiment, kind = GimbalExperiment(gimbal_parts(given.num_requests), given.lengths), GimbalFindings
    stored = msgspec.json.decode(path.read_bytes(), type=Reproduced[kind])
    renewed, findings = dict(stored.renewed), stored.findings
    loads = given.loads.split(",") if given.loads else list(experiment.loads)
    with ProcessPoolExecutor(given.jobs) as pool:
        for load, cells in pool.map(partial(new_cells, experiment, findings), loads):
            if cells:
                what = sorted({f"{cell.rate:g}/s" if given.paper == "amoe" else cell.system for cell in cells})
                renewed[f"{load}: {', '.join(what)}"] = conditions
                findings.cells += cells
    found = findings.loads
    findings.cells.sort(key=lambda cell: found.index(cell.load))
    if given.write:
        result = msgspec.structs.replace(stored, renewed=renewed, findings=findings)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def new_cells(experiment: AmoeExperiment | GimbalExperiment, findings: Any, load: str) -> tuple[str, list[Any]]:
    """Run what a load has and `findings` lack."""
    num_before = len(findings.cells)
    run = experiment.serve_rates if isinstance(experiment, AmoeExperiment) else experiment.run_missing
    run(load, findings, lambda what: print(what, flush=True))
    return load, findings.cells[num_before:]


def join(name: str, directory: Path) -> tuple[Path, Reproduced[Any]]:
    """Put the loads in `directory` into the stored result of a paper, in place of those that it has."""
    [paper] = [each for each in papers() if each.name == name]
    experiment, path = paper.experiment(paper.settings()), RESULTS / f"{name}.json"
    kind, loads = experiment.findings_type, list(experiment.loads)
    stored = msgspec.json.decode(path.read_bytes(), type=Reproduced[kind])
    findings, parts = stored.findings, dict(stored.parts)
    for file in sorted(directory.glob(f"{name}.*.json")):
        load, part = file.name.split(".")[1], msgspec.json.decode(file.read_bytes(), type=LoadPart)
        print(f"{load}: {'in place of' if load in parts else 'beside'} the stored loads", flush=True)
        parts[load] = part.conditions
        findings = merged([without(findings, load), msgspec.json.decode(part.findings, type=kind)])
    findings.cells.sort(key=lambda cell: loads.index(cell.load) if cell.load in loads else len(loads))
    return path, msgspec.structs.replace(stored, parts=parts, findings=findings)


def without(findings: Findings[Any], load: str) -> Findings[Any]:
    """The findings without the runs of a load; what is stored by its name is replaced later."""
    lists = {field.name: getattr(findings, field.name) for field in msgspec.structs.fields(findings)}
    kept = {name: [run for run in runs if run.load != load] for name, runs in lists.items() if isinstance(runs, list)}
    return msgspec.structs.replace(findings, **kept)


def renew(given: argparse.Namespace) -> None:
    """Make the runs of some policies of LMetric anew."""
    systems, loads = [each for each in given.systems.split(",") if each], given.loads.split(",")
    conditions = run_record("simulated")
    experiment = LmetricExperiment(LmetricPlan(num_requests=given.num_requests), given.traces)
    for load in loads:
        stored = msgspec.json.decode(RESULT.read_bytes(), type=Reproduced[LmetricFindings])
        before = [cell for cell in stored.findings.cells if cell.load == load and cell.system in systems]
        experiment.renew(load, stored.findings, systems, lambda what: print(what, flush=True))
        after = [cell for cell in stored.findings.cells if cell.load == load and cell.system in systems]
        for old, new in zip(before, after, strict=True):
            changes = ", ".join(
                f"{name} {of(new.measured) / of(old.measured) - 1:+.1%}" for name, of in FIGURES.items()
            )
            print(f"{load} with {new.network} at {new.share:.0%}: {new.system}: {changes}", flush=True)
        if given.write:
            has_ages = any(aged.load == load for aged in stored.findings.ages)
            made = [*systems, *(["ages of figures"] if has_ages else [])]
            renewed = stored.renewed | {f"{load}: {what}": conditions for what in made}
            result = msgspec.structs.replace(stored, renewed=renewed)
            RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


if __name__ == "__main__":
    main()
