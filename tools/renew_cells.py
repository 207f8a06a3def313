"""Renew a part of a paper's stored result: runs of some policies of LMetric, or loads that a later run has made.

    python tools/renew_cells.py --traces DIR --systems vllm-0.26,vllm-0.27 --loads chat,coder --write
    python tools/renew_cells.py --traces DIR --loads chat --write     # what the age of figures costs, alone
    python tools/renew_cells.py --paper gimbal --parts DIR --write    # loads of `moestro repro gimbal --out DIR`
    python tools/renew_cells.py --paper amoe --jobs 2 --write         # rates that AMoE's plan has and the result lacks

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
from moestro.repro.amoe.loads import AmoeCell, AmoeFindings
from moestro.repro.amoe.paper import WHOLE
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
    parser.add_argument("--jobs", type=int, default=1, help="processes of --paper amoe")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if (given.paper is None) == (given.loads is None):
        parser.error("give --traces and --loads, or --paper")
    if given.paper is None:
        renew(given)
        return
    if given.parts is None:
        if given.paper != "amoe":
            parser.error("--paper needs --parts, but for amoe")
        add_rates(given.jobs, write=given.write)
        return
    path, result = join(given.paper, given.parts)
    if given.write:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def add_rates(num_jobs: int, *, write: bool) -> None:
    """Run AMoE's loads at the rates that the stored result lacks."""
    path, experiment = RESULTS / "amoe.json", AmoeExperiment(WHOLE)
    conditions = run_record("simulated")
    stored = msgspec.json.decode(path.read_bytes(), type=Reproduced[AmoeFindings])
    renewed, findings = dict(stored.renewed), stored.findings
    with ProcessPoolExecutor(num_jobs) as pool:
        for load, cells in pool.map(partial(new_cells, experiment, findings), experiment.loads):
            if cells:
                renewed[f"{load}: {', '.join(sorted({f'{cell.rate:g}/s' for cell in cells}))}"] = conditions
                findings.cells += cells
    loads = findings.loads
    findings.cells.sort(key=lambda cell: loads.index(cell.load))
    if write:
        result = msgspec.structs.replace(stored, renewed=renewed, findings=findings)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def new_cells(experiment: AmoeExperiment, findings: AmoeFindings, load: str) -> tuple[str, list[AmoeCell]]:
    """Run a load at the rates that `findings` lack."""
    num_before = len(findings.cells)
    experiment.serve_rates(load, findings, lambda what: print(what, flush=True))
    return load, findings.cells[num_before:]


def join(name: str, directory: Path) -> tuple[Path, Reproduced[Any]]:
    """Put the loads in `directory` into the stored result of a paper, in place of those that it has."""
    [paper] = [each for each in papers() if each.name == name]
    kind, path = paper.experiment(paper.settings()).findings_type, RESULTS / f"{name}.json"
    stored = msgspec.json.decode(path.read_bytes(), type=Reproduced[kind])
    findings, parts = stored.findings, dict(stored.parts)
    for file in sorted(directory.glob(f"{name}.*.json")):
        load, part = file.name.split(".")[1], msgspec.json.decode(file.read_bytes(), type=LoadPart)
        print(f"{load}: {'in place of' if load in parts else 'beside'} the stored loads", flush=True)
        parts[load] = part.conditions
        findings = merged([without(findings, load), msgspec.json.decode(part.findings, type=kind)])
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
            renewed = stored.renewed | {f"{load}: {system}": conditions for system in [*systems, "ages of figures"]}
            result = msgspec.structs.replace(stored, renewed=renewed)
            RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


if __name__ == "__main__":
    main()
