"""Judge the claims of the stored runs of papers by today's rules.

    python tools/judge_claims.py            # write the verdicts
    python tools/judge_claims.py --check    # exit status 1 if one is out of date

A change of a rule needs no new run: the findings stay, and the claims are made of them again. The verdicts are written
into `bench/results/repro/PAPER.json` and, for quick runs, into the package.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from moestro.repro.papers import Paper, papers
from moestro.repro.results import Claim, Reproduced

RESULTS = Path(__file__).parents[1] / "bench" / "results" / "repro"
_KEPT = ("source", "paper", "ours", "holds")  # fields of a claim that the package keeps


def judged(paper: Paper) -> dict[Path, bytes]:
    """The files of a paper with its claims, as they should be now."""
    experiment, path = paper.experiment(paper.settings()), RESULTS / f"{paper.name}.json"
    stored = msgspec.json.decode(path.read_bytes(), type=Reproduced[experiment.findings_type])
    claims = experiment.claims(stored.findings)
    return {
        path: _lines(msgspec.structs.replace(stored, claims=claims)),
        paper.claims_path: _lines([_kept(claim) for claim in claims]),
    }


def _kept(claim: Claim) -> dict[str, str | bool | None]:
    return {name: getattr(claim, name) for name in _KEPT}


def _lines(what: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(what), indent=1) + b"\n"


def main() -> int:
    """Write or check the claims of all papers; returns the exit status."""
    files = {path: text for paper in papers() for path, text in judged(paper).items()}
    outdated = [path for path, text in files.items() if not path.exists() or path.read_bytes() != text]
    if "--check" not in sys.argv[1:]:
        for path in outdated:
            path.write_bytes(files[path])
        return 0
    for path in outdated:
        print(f"{path.relative_to(RESULTS.parents[2])} is out of date; run: python tools/judge_claims.py")
    return int(bool(outdated))


if __name__ == "__main__":
    sys.exit(main())
