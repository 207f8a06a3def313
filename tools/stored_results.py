"""Lists the stored results that are older than the code that they measure.

    python tools/stored_results.py

A result stores the commit of the package that each of its runs measured. It is older than its code if a folder that it
measures has changed since one of them, or if a commit is unknown. The list follows from the history and is stored
nowhere: every commit changes it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
# Rooms of src/moestro that results measure, by the beginning of the result's path; the longest beginning counts.
MEASURES: dict[str, tuple[str, ...]] = {
    "accuracy/": ("calibrate/probing", "cost", "engine", "sim", "worker"),
    "kernels/": ("model/cuda",),
    "micro/": ("model",),
    "micro/expert_window": ("flow", "worker"),
    "micro/flow_overhead": ("flow",),
    "micro/grammar": ("grammar",),
    "micro/group_exchange": ("model", "wire"),
    "micro/group_items": ("flow", "worker"),
    "micro/link": ("wire",),
    "micro/load_report": ("wire", "gateway", "routing"),
    "micro/plan_time": ("placement",),
    "micro/pricing": ("cost",),
    "micro/request_record": ("workload", "server"),
    "micro/router_decision": ("routing",),
    "micro/scheduler": ("engine",),
    "micro/step_parts": ("engine", "model", "server", "wire", "worker"),
    "micro/step_policies": ("flow",),
    "repro/amoe": ("cost", "engine", "flow", "sim", "repro/amoe"),
    "repro/gimbal": ("cost", "engine", "placement", "routing", "sim", "repro/gimbal"),
    "repro/lmetric": ("cost", "engine", "routing", "sim", "repro/lmetric"),
    "repro/modes": ("cost", "engine", "flow", "sim", "repro/modes"),
    "repro/qllm": ("cost", "engine", "flow", "sim", "repro/qllm"),
    "robustness/": ("engine", "gateway", "server", "web", "worker"),
    "robustness/mutants": ("",),
    "routing/": ("gateway", "routing"),
    "routing/vllm_loads": ("calibrate/probing", "cost", "engine", "gateway", "routing", "sim"),
    "serving/": ("engine", "flow", "model", "server", "worker"),
    "simulator/": ("cost", "engine", "routing", "sim"),
    "simulator/placement": ("placement",),
    "simulator/source_placement": ("placement",),
    "simulator/workloads": ("workload",),
}
NO_COMMIT = ""


def results() -> list[str]:
    """The stored results, as paths below bench/results/."""
    return sorted(str(path.relative_to(RESULTS)) for path in RESULTS.rglob("*.json"))


def records(result: str) -> list[dict[str, Any]]:
    """The conditions of every run that a result is made of: of its parts and of what was renewed, or of the whole."""
    stored = json.loads((RESULTS / result).read_text())
    parts = [*stored.get("parts", {}).values(), *stored.get("renewed", {}).values()]
    whole = stored.get("conditions", stored)  # old results have some conditions at the top level
    nested = [each["conditions"] for each in stored.values() if isinstance(each, dict) and "conditions" in each]
    return parts or ([whole] if "commit" in whole else nested) or [whole]


def commit_of(record: dict[str, Any]) -> str:
    """The commit of the package that a run measured, or NO_COMMIT."""
    return (record.get("commit") or NO_COMMIT).removesuffix("-dirty")


def folders_of(result: str) -> list[str]:
    """The folders of the package that a result measures, as paths below the repository."""
    beginning = max((text for text in MEASURES if result.startswith(text)), key=len)
    return [f"src/moestro/{room}" for room in MEASURES[beginning]]


def _has_changed(commit: str, folders: list[str]) -> bool:
    """Whether the folders have changed since a commit, or that commit is unknown."""
    return commit == NO_COMMIT or _git("diff", "--quiet", commit, "--", *folders).returncode != 0


def has_history() -> bool:
    """Whether this is a clone with all commits, without which no age is known."""
    found = _git("rev-parse", "--is-shallow-repository")
    return found.returncode == 0 and found.stdout.strip() == "false"


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)


def older() -> dict[str, str]:
    """By result that is older than the code that it measures: how many of its runs are, and the day of the first."""
    found = {}
    for result in results():
        runs, folders = records(result), folders_of(result)
        commits = [commit_of(record) for record in runs]
        has_changed = {commit: _has_changed(commit, folders) for commit in set(commits)}
        if num := sum(has_changed[commit] for commit in commits):
            days = [record["started_at"][: len("2026-01-01")] for record in runs if record.get("started_at")]
            found[result] = f"{num} of {len(runs)} runs, {min(days, default='day unknown')}"
    return found


def results_table() -> str:
    """The stored results by folder, for docs/bench.md. It has nothing that a commit to code would change."""
    lines = ["| folder | results |", "|---|---|"]
    folders: dict[str, list[str]] = {}
    for result in results():
        folder, _, name = result.removesuffix(".json").rpartition("/")
        folders.setdefault(folder, []).append(f"[{name}](../bench/results/{result})")
    lines += [f"| `{folder}` | {', '.join(found)} |" for folder, found in folders.items()]
    return "\n".join(lines)


def main() -> int:
    """Print the list; returns the exit status."""
    if not has_history():
        print("the ages of results need git and a clone with all commits")
        return 1
    found = older()
    for result, runs in found.items():
        print(f"{result}: {runs}")
    print(f"{len(found)} of {len(results())} results are older than their code")
    return 0


if __name__ == "__main__":
    sys.exit(main())
