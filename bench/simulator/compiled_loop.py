"""Compiles the simulator's inner loop by mypyc, and measures what that gains over the very same source.

    python bench/simulator/compiled_loop.py --tree TREE --build
    python bench/simulator/compiled_loop.py --tree TREE --json bench/results/simulator/compiled_loop.json

The first command copies the package to the folder TREE and compiles MODULES there, which takes a C compiler, mypy and
setuptools, and some minutes. The second simulates one engine in processes with and without TREE in turns, and compares
CPU-seconds and results. `sim.cluster` and `sim.signals` stay plain: mypyc drops the options of msgspec's structs, and
those of settings need theirs.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import msgspec

from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser

PACKAGE = Path(__file__).parents[2] / "src" / "moestro"
TURNS = 5
MODULES = (
    *("engine/admission", "engine/block_pool", "engine/decode_horizon", "engine/host_tier", "engine/lock_step"),
    *("engine/rank", "engine/scheduler", "engine/scheduler_state", "engine/sequences", "engine/steps"),
    *("engine/waiting", "cost/priced_device", "cost/roofline", "routing/in_flight", "sim/groups/group"),
    "workload/rows",
)
# What mypyc does not take as it stands: defaults that are no values of their field's type, and a return value.
CHANGES = {
    "engine/steps": (("msgspec.field(default_factory=list)", "[]"), ("msgspec.field(default_factory=dict)", "{}")),
    "cost/roofline": (("_NS * together_s\n", "_NS * together_s  # type: ignore\n"),),
}
NOT_READ = ("cyclopts", "rich", "torch", "transformers", "huggingface_hub", "ray", "threadpoolctl", "scipy", "triton")
CONFIG = f"""[mypy]
[mypy-{",".join(f"{name}.*" for name in NOT_READ)}]
follow_imports = skip
ignore_missing_imports = True
"""
BUILD = """
import sys
from mypyc.build import mypycify
from setuptools import setup
extensions = mypycify(["--config-file", "mypy.ini", *sys.argv[1:]], opt_level="1", group_name="moestro_sim")
setup(name="loop", ext_modules=extensions, script_args=["build_ext", "--inplace"], packages=[], py_modules=[])
"""
RUN = """
import json, time
from pathlib import Path
from moestro.engine import scheduler
from moestro.sim.scenario import make_scenario, run
from moestro.sim.settings import PolicySettings, SimEngineSettings, SimSettings, WorkloadSettings
load = {"num_requests": 4000, "prompt_tokens": 1024, "output_tokens": 256, "rate": 4.0, "arrivals": "constant"}
settings = SimSettings(
    workload=WorkloadSettings(**load),
    engines=SimEngineSettings(gpu="h200", block_size=64, max_num_batched_tokens=8192),
    policies=(PolicySettings(route="round_robin"),),
)
began = time.process_time()
results = run(make_scenario(settings, Path()), settings.policies[0])
cpu_s = time.process_time() - began
is_compiled = not scheduler.__file__.endswith(".py")
print(json.dumps({"cpu_s": cpu_s, "digest": results.digest(), "is_compiled": is_compiled}))
"""


def build(tree: Path) -> None:
    """Copy the package to `tree`, and compile the modules there."""
    shutil.copytree(PACKAGE, tree / "moestro", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (tree / "mypy.ini").write_text(CONFIG)
    for name, changes in CHANGES.items():
        path = tree / "moestro" / f"{name}.py"
        text = path.read_text()
        for old, new in changes:
            assert old in text, f"{path} has no {old!r}"
            text = text.replace(old, new)
        path.write_text(text)
    paths = [f"moestro/{name}.py" for name in MODULES]
    subprocess.run([sys.executable, "-c", BUILD, *paths], cwd=tree, check=True)


def simulate(source: Path, *, is_compiled: bool) -> dict:
    """Simulate in a process that imports the package from `source`."""
    env = os.environ | {"PYTHONPATH": str(source)}
    done = subprocess.run([sys.executable, "-c", RUN], check=True, env=env, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert found.pop("is_compiled") == is_compiled, f"{source} has the other form"
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tree", type=Path, required=True)
    parser.add_argument("--build", action="store_true")
    args = parser.parse_args()
    if args.build:
        build(args.tree.absolute())
        return
    conditions = msgspec.to_builtins(run_record("measured"))
    plain, compiled = [], []
    for _ in range(TURNS):
        plain.append(simulate(PACKAGE.parent, is_compiled=False))
        compiled.append(simulate(args.tree.absolute(), is_compiled=True))
    assert len({each["digest"] for each in (*plain, *compiled)}) == 1, "the results differ"
    ratios = [one["cpu_s"] / other["cpu_s"] for one, other in zip(plain, compiled, strict=True)]
    found = {
        "plain cpu_s": [each["cpu_s"] for each in plain],
        "compiled cpu_s": [each["cpu_s"] for each in compiled],
        "plain over compiled": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "conditions": conditions,
    }
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
