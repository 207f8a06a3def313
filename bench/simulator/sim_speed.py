"""Measures the speed of the simulator in CPU-seconds, beside Dynamo's replay if given, and for a million requests.

    python bench/simulator/sim_speed.py --traces TRACES --json bench/results/simulator/sim_speed.json
    python bench/simulator/sim_speed.py --traces TRACES --dynamo PYTHON --json bench/results/simulator/sim_speed.json
    python bench/simulator/sim_speed.py --million --json bench/results/simulator/sim_speed.json

The first command measures ours, the second Dynamo's as well, the third a million requests. Each part of the file holds
the command, commit and machine load of its measurement; the other parts stay as they are.

TRACES is a folder with mooncake_conversation.jsonl.zst. PYTHON is an interpreter with `ai-dynamo-runtime==1.6.1` (their
Rust replay: the same kind of simulation, with its own router and a modelled engine). Both sides read the trace, make
the requests and simulate. Ours prices steps of Qwen3-30B-A3B on an H200; theirs has its default timing model. Blocks
have the same size on both sides, and every request is answered. Both sides are counted in a running process with
everything imported; the CPU time of a whole process of theirs, and of ours, stands beside it.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import zstandard

from moestro.config.run_record import run_record
from moestro.sim.scenario import make_scenario, run
from moestro.sim.settings import PolicySettings, SimEngineSettings, SimSettings, WorkloadSettings

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, package_version

REPEATS = 5
TRACE = "mooncake_conversation.jsonl.zst"
MOONCAKE = "Mooncake conversation, 16 engines"
# Pairs of our policy and theirs: `dynamo` is their formula in our router.
PAIRS = {
    "one engine, 1024/256": "one engine, 1024/256",
    f"{MOONCAKE}, round_robin": f"{MOONCAKE}, round_robin",
    f"{MOONCAKE}, dynamo": f"{MOONCAKE}, kv_router",
}
ONE_ENGINE = {"num_requests": 4000, "prompt_tokens": 1024, "output_tokens": 256, "rate": 4.0, "arrivals": "constant"}
SIXTEEN = SimEngineSettings(count=16, gpu="h200", block_size=512, max_num_batched_tokens=8192)
MILLION = {"num_requests": 1_000_000, "prompt_tokens": 512, "output_tokens": 32, "rate": 200.0}


def cases(traces: Path) -> dict[str, SimSettings]:
    """Return the simulations by name."""
    replayed = WorkloadSettings(trace=str((traces / TRACE).absolute()))
    one = SimEngineSettings(gpu="h200", block_size=64, max_num_batched_tokens=8192)
    found = {
        "one engine, 1024/256": SimSettings(
            workload=WorkloadSettings(**ONE_ENGINE), engines=one, policies=(PolicySettings(route="round_robin"),)
        )
    }
    for route in ("round_robin", "dynamo", "lmetric"):
        name = f"{MOONCAKE}, {route}"
        found[name] = SimSettings(workload=replayed, engines=SIXTEEN, policies=(PolicySettings(route=route),))
    return found


def simulate(settings: SimSettings) -> dict[str, float]:
    """Run one simulation of ours; return CPU-seconds from reading the workload to the last answer, and its figures."""
    began = time.process_time()
    scenario = make_scenario(settings, Path())
    results = run(scenario, settings.policies[0])
    cpu_s = time.process_time() - began
    assert results.is_answered.all(), "a request was not answered"
    hit_ratio = float(results.num_hit_tokens.sum() / results.num_prompt_tokens.sum())
    return {"cpu_s": cpu_s, "num_requests": len(results), "hit_ratio": hit_ratio}


# Runs in a process of its own: one simulation of ours, whose settings are JSON on stdin.
OUR_RUN = """
import sys
from pathlib import Path
import msgspec
from moestro.sim.scenario import make_scenario, run
from moestro.sim.settings import SimSettings
settings = msgspec.json.decode(sys.stdin.buffer.read(), type=SimSettings)
run(make_scenario(settings, Path()), settings.policies[0])
"""


def ours(settings: SimSettings) -> dict:
    """Measure five runs of ours, and five processes of one run each."""
    runs = [simulate(settings) for _ in range(REPEATS)]
    found = spread([each["cpu_s"] for each in runs], runs[0]["num_requests"]) | {"hit_ratio": runs[0]["hit_ratio"]}
    # An installed package has its bytecode, so what keeps a checkout from writing it does not count.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    text, processes = msgspec.json.encode(settings), []
    for _ in range(REPEATS):
        before = children_cpu_s()
        subprocess.run([sys.executable, "-c", OUR_RUN], check=True, input=text, env=env)
        processes.append(children_cpu_s() - before)
    return found | {"whole_process_cpu_s": statistics.median(processes)}


def spread(seconds: list[float], num_requests: float) -> dict:
    """Summarise CPU-seconds of repeats, and requests per CPU-second of the median."""
    middle = statistics.median(seconds)
    return {
        "cpu_s": {"min": min(seconds), "median": middle, "max": max(seconds)},
        "requests_per_cpu_s": num_requests / middle,
        "num_requests": num_requests,
    }


# Runs in their interpreter: a call of the replay, given as JSON on stdin; prints what it took.
THEIR_RUN = """
import json, sys, time
from dynamo import _core
call = json.load(sys.stdin)
began = time.process_time()
result = getattr(_core, call["name"])(*call["arguments"], **call["options"])
cpu_s = time.process_time() - began
print(json.dumps({"cpu_s": cpu_s, "num_requests": result.summary["completed_requests"]}))
"""


def dynamo(python: str, name: str, arguments: list[object], num_requests: int, **options: object) -> dict:
    """Measure five runs of a function of Dynamo's replay."""
    call = json.dumps({"name": name, "arguments": arguments, "options": options})
    calls, processes = [], []
    for _ in range(REPEATS):
        before = children_cpu_s()
        command = [python, "-c", THEIR_RUN]
        answer = subprocess.run(
            command, check=True, input=call, capture_output=True, text=True, env=os.environ | {"DYN_LOG": "error"}
        )
        processes.append(children_cpu_s() - before)
        run = json.loads(answer.stdout)
        assert run["num_requests"] == num_requests, "it left some out"
        calls.append(run["cpu_s"])
    return spread(calls, num_requests) | {"whole_process_cpu_s": statistics.median(processes)}


def children_cpu_s() -> float:
    """Return the CPU time of all ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def peer(python: str, traces: Path) -> dict[str, dict]:
    """Measure Dynamo on the same workloads."""
    found = {
        "one engine, 1024/256": dynamo(
            python, "run_mocker_synthetic_trace_replay", [1024, 256, 4000], 4000, arrival_interval_ms=250.0
        )
    }
    with tempfile.TemporaryDirectory() as directory:
        plain = Path(directory) / "trace.jsonl"
        with (traces / TRACE).open("rb") as packed, plain.open("wb") as unpacked:
            zstandard.ZstdDecompressor().copy_stream(packed, unpacked)
        num_requests = len(plain.read_text().splitlines())
        for mode in ("round_robin", "kv_router"):
            found[f"{MOONCAKE}, {mode}"] = dynamo(
                python,
                "run_mocker_trace_replay",
                [[str(plain)]],
                num_requests,
                num_workers=16,
                trace_block_size=512,
                router_mode=mode,
            )
    return found


def ratios(own: dict[str, dict], theirs: dict[str, dict]) -> dict[str, float]:
    """Return the peer's median CPU-seconds over ours, of runs and of whole processes; above 1, ours is faster."""
    found = {name: theirs[other]["cpu_s"]["median"] / own[name]["cpu_s"]["median"] for name, other in PAIRS.items()}
    whole = "whole_process_cpu_s"
    return found | {f"{name}, whole process": theirs[other][whole] / own[name][whole] for name, other in PAIRS.items()}


def million() -> dict[str, object]:
    """Simulate a million requests in a separate process; return its CPU-seconds and peak memory."""
    settings = SimSettings(
        workload=WorkloadSettings(**MILLION), engines=SimEngineSettings(count=16, gpu="h200", block_size=64)
    )
    result = simulate(settings)
    return result | {"peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--dynamo", help="an interpreter that has it")
    parser.add_argument("--million", action="store_true", help="only that")
    args = parser.parse_args()
    if not args.million and args.traces is None:
        parser.error("--traces names the folder with the trace; or --million")
    conditions = msgspec.to_builtins(run_record("measured"))
    if args.million:
        found = {"a million requests": million() | {"conditions": conditions}}
    else:
        own = {name: ours(settings) for name, settings in cases(args.traces).items()}
        found = {"moestro": own | {"conditions": conditions}}
        if args.dynamo:
            conditions = msgspec.to_builtins(run_record("measured"))
            theirs = peer(args.dynamo, args.traces)
            found[f"dynamo {package_version(args.dynamo, 'ai-dynamo-runtime')}"] = theirs | {"conditions": conditions}
            found["dynamo's CPU-seconds over ours"] = ratios(own, theirs)
    print(json.dumps(found, indent=1))
    if args.json:
        earlier = json.loads(args.json.read_text()) if args.json.exists() else {}
        args.json.write_text(json.dumps(earlier | {"repeats": REPEATS} | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
