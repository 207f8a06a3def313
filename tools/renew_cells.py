"""Make the runs of some routing policies in the stored result of LMetric anew, where only theirs have changed.

    python tools/renew_cells.py --traces DIR --systems vllm-0.26,vllm-0.27 --loads chat,coder --write
    python tools/renew_cells.py --traces DIR --loads chat --write     # what the age of figures costs, alone

Rates and tuned parameters stay those of the stored run; `tools/judge_claims.py` then judges the claims. The result
names what was made anew. Without --write the differences are printed alone; code that has not changed makes none.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from moestro.config.run_record import run_record
from moestro.repro.lmetric.experiment import LmetricExperiment, LmetricPlan
from moestro.repro.lmetric.findings import FIGURES, LmetricFindings
from moestro.repro.results import Reproduced

RESULT = Path(__file__).parents[1] / "bench" / "results" / "repro" / "lmetric.json"


def main() -> None:
    """Renew the runs that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--systems", default="", help="none: the sweep of the figures' age alone, on chats")
    parser.add_argument("--loads", required=True)
    parser.add_argument("--num-requests", type=int, default=LmetricPlan().num_requests)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
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
