"""Run every attack of this folder on an older checkout and on this one, and store both in one file.

    git worktree add ../older COMMIT
    python bench/robustness/strangers/before_and_after.py --older ../older/src --folder RUNS \
        --json bench/results/robustness/strangers.json

Each run is stored in RUNS as ATTACK.before.json or ATTACK.after.json, and a run that is there already is not repeated.
An attack that an older checkout does not survive has no result there; the file says after how many seconds it ended.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from frame import make_parser, save
from tqdm import tqdm

from moestro.config.run_record import run_record

HERE = Path(__file__).parent
THIS = HERE.parents[2] / "src"
ATTACKS = (
    "poison", "gzip_bomb", "grammars", "heavy_requests", "kv_events", "any_json", "raw_http", "hung_engine",
    "worker_and_standby", "loops", "lying_checkpoint", "record", "kv_publisher", "shares",
)  # fmt: skip
LIMIT_S = 1200.0


def figures_of(attack: str, source: Path, stored: Path) -> dict[str, object]:
    """Return the figures of an attack on `source`, which are read from `stored` if they are there."""
    command = [sys.executable, HERE / f"{attack}.py", "--source", source, "--json", stored]
    if not stored.exists():
        began = time.monotonic()
        with stored.with_suffix(".log").open("wb") as log:
            try:
                end = subprocess.run(command, stdout=log, stderr=log, timeout=LIMIT_S, check=False)
                how = f"ended with status {end.returncode}"
            except subprocess.TimeoutExpired:
                how = "was ended"
        if not stored.exists():
            return {"failure": f"the attack {how} after {time.monotonic() - began:.0f} s"}
    return json.loads(stored.read_text())


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--older", type=Path, required=True, help="src folder of the older checkout")
    parser.add_argument("--folder", type=Path, required=True, help="folder of the runs, which a later call continues")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    conditions = run_record("measured")
    sources = {"before": options.older.resolve(), "after": THIS}
    figures = {
        attack: {
            when: figures_of(attack, source, options.folder / f"{attack}.{when}.json")
            for when, source in sources.items()
        }
        for attack in tqdm(ATTACKS, unit="attack")
    }
    save(options.json, conditions, figures)


if __name__ == "__main__":
    main()
