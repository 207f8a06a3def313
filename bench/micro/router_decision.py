"""Measures one routing decision, in microseconds, with 128-block prompts and 16, 256 and 4,096 engines.

    python bench/micro/router_decision.py [--engines 16] [--sweep] [--json bench/results/micro/router_decision.json]

Budgets (docs/architecture.md): 50 at 16 engines, 100 at 4,096. A decision is `Router.submit`: the look-up in the prefix
index, the policy, and all updates of state. `first_token` and `ended` are listed separately. So are `submit` with an
index that KV events fill, with the compiled passes over engines and by NumPy's code alone, and the cost of an event for
each block. The lower bound is one dictionary look-up for each block of the prompt, which any index of single blocks
needs.

The traffic consists of conversations behind eight system prompts of 16 blocks. A conversation has 20 to 90 blocks of
its own, and each request fills the rest of its 128 blocks with new ones. Four requests are in flight on each engine, at
most 8,192 in all. Caches have 8,192 blocks. Each figure is the median over the requests of a run; there are REPEATS
runs, in which the policies take turns.

--sweep measures the look-up with KV events in both of its forms, which fills the hits of the engines as a list or as an
array, for numbers of engines around the bound between them (`core.views.SHORT`); the forms take turns.

--json merges: sizes that were not run keep their rows.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from moestro.config.run_record import run_record
from moestro.core.hashing import HASH_BYTES, split_hashes
from moestro.core.request import Request, SamplingParams
from moestro.routing import prefix_index
from moestro.routing.kernel.passes import route_kernel
from moestro.routing.registry import policy_from
from moestro.routing.router import Router
from moestro.routing.settings import EngineSpec, RouterSettings

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save

POLICIES = (
    "round_robin", "least_loaded", "vllm-0.27", "gimbal-v1", "dynamo", "miss_ratio", "preble", "cache_aware",
    "lmetric", "moestro",
)  # fmt: skip
BUDGETS_US = {16: 50, 4096: 100}
NUM_BLOCKS, BLOCK_SIZE, CACHE_BLOCKS, REPEATS = 128, 16, 8192, 5
NUM_WARM, NUM_TIMED = 3000, 2000
SWEPT = (8, 16, 32, 64, 128, 256)
STEP_NS = 1_000_000


def prompts(num_engines: int, seed: int) -> Iterator[bytes]:
    """Yield the packed block hashes of one prompt after another."""
    rng = random.Random(seed)
    systems = [rng.randbytes(16 * HASH_BYTES) for _ in range(8)]
    sessions = [rng.choice(systems) + rng.randbytes(rng.randint(20, 90) * HASH_BYTES) for _ in range(8 * num_engines)]
    while True:
        known = rng.choice(sessions)
        yield known + rng.randbytes(NUM_BLOCKS * HASH_BYTES - len(known))


def request(number: int, hashes: bytes, now_ns: int) -> Request:
    return Request(
        request_id=f"r{number}",
        num_prompt_tokens=NUM_BLOCKS * BLOCK_SIZE + 3,
        sampling=SamplingParams(max_tokens=10),
        arrival_ns=now_ns,
        block_hashes=hashes,
        user=f"user {number % 1000}",
    )


class Traffic:
    """A router under load.

    Args:
        policy: routing policy.
        num_engines: number of engines.
        seed: random seed of the prompts.
        events: whether engines publish KV events for every block.
    """

    def __init__(self, policy: str, num_engines: int, seed: int, *, events: bool = False) -> None:
        self.router = Router(policy_from(policy), RouterSettings(block_size=BLOCK_SIZE, index_bytes=4 << 30))
        self.prompts, self.rng = prompts(num_engines, seed), random.Random(seed)
        self.events, self.num_engines = events, num_engines
        self.live: list[str] = []
        self.cached: list[dict[bytes, None]] = [{} for _ in range(num_engines)]  # blocks, least recently used first
        self.num_sent = 0
        self.spent: dict[str, list[int]] = {
            name: [] for name in ("submit", "first_token", "ended", "stored", "removed")
        }
        for _ in range(num_engines):
            engine = self.router.add_engine(EngineSpec(num_blocks=CACHE_BLOCKS))
            self.router.set_routable(engine, routable=True)
            if events:
                self.router.kv_cleared(engine, 0)

    def send(self) -> None:
        """Submit one request, and end one that is in flight."""
        self.num_sent += 1
        now_ns = self.num_sent * STEP_NS
        new = request(self.num_sent, next(self.prompts), now_ns)
        router, spent = self.router, self.spent
        begin = time.perf_counter_ns()
        decision = router.submit(new, now_ns)
        spent["submit"].append(time.perf_counter_ns() - begin)
        if self.events:
            self.say(decision.engine, new.block_hashes, now_ns)
        begin = time.perf_counter_ns()
        router.first_token(new.request_id, now_ns)
        spent["first_token"].append(time.perf_counter_ns() - begin)
        self.live.append(new.request_id)
        if len(self.live) > min(4 * self.num_engines, 8192):
            at = self.rng.randrange(len(self.live))
            self.live[at], self.live[-1] = self.live[-1], self.live[at]
            begin = time.perf_counter_ns()
            router.ended(self.live.pop(), now_ns, 100)
            spent["ended"].append(time.perf_counter_ns() - begin)

    def say(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """Publish that the engine computes the prompt, and evicts the least recently used blocks beyond its cache."""
        begin = time.perf_counter_ns()
        self.router.kv_stored(engine, hashes, now_ns)
        self.spent["stored"].append((time.perf_counter_ns() - begin) // NUM_BLOCKS)
        cached = self.cached[engine]
        for block in reversed(split_hashes(hashes)):
            cached.pop(block, None)
            cached[block] = None
        gone = list(itertools.islice(cached, max(len(cached) - CACHE_BLOCKS, 0)))
        if gone:
            for block in gone:
                del cached[block]
            begin = time.perf_counter_ns()
            self.router.kv_removed(engine, b"".join(gone), now_ns)
            self.spent["removed"].append((time.perf_counter_ns() - begin) // len(gone))

    def look_up_us(self, num_prompts: int) -> float:
        """Measure the median microseconds of the look-up of a new prompt, which is not sent."""
        index, spent = self.router._index, []
        for hashes in itertools.islice(self.prompts, num_prompts):
            begin = time.perf_counter_ns()
            index.match(hashes, BLOCK_SIZE)
            spent.append(time.perf_counter_ns() - begin)
        return statistics.median(spent) / 1e3

    def run(self, num_requests: int) -> dict[str, float]:
        """Measure the median microseconds of each call."""
        for spent in self.spent.values():
            spent.clear()
        for _ in range(num_requests):
            self.send()
        return {name: statistics.median(spent) / 1e3 for name, spent in self.spent.items() if spent}


def dictionary_us(num_engines: int, seed: int) -> float:
    """Measure the median microseconds of a dictionary look-up for each block of a prompt, over as many prompts."""
    source, holders = prompts(num_engines, seed), dict[bytes, int]()
    for _ in range(NUM_WARM):
        holders.update(dict.fromkeys(split_hashes(next(source)), 1))
    spent = []
    for _ in range(NUM_TIMED):
        hashes = next(source)
        begin = time.perf_counter_ns()
        for block in split_hashes(hashes):
            holders.get(block)
        spent.append(time.perf_counter_ns() - begin)
    return statistics.median(spent) / 1e3


def spread(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def rows_of(num_engines: int) -> list[dict[str, object]]:
    """Measure one row for each policy, and for two of them one with events, also by NumPy's code alone."""
    cases = [(policy, False, True) for policy in POLICIES]
    cases += [(policy, True, compiled) for policy in ("lmetric", "moestro") for compiled in (True, False)]
    times: dict[tuple[str, bool, bool], list[dict[str, float]]] = {case: [] for case in cases}
    index_bytes = dict.fromkeys(cases, 0)
    bounds = []
    for repeat in range(REPEATS):
        bounds.append(dictionary_us(num_engines, repeat))
        for case in cases:
            policy, events, compiled = case
            traffic = Traffic(policy, num_engines, repeat, events=events)
            with contextlib.nullcontext() if compiled else route_kernel.left_out():
                traffic.run(max(NUM_WARM, min(5 * num_engines, 9000)))
                times[case].append(traffic.run(NUM_TIMED))
            index_bytes[case] = traffic.router.index_bytes
            del traffic
            gc.collect()
    rows: list[dict[str, object]] = []
    for (policy, events, compiled), runs in times.items():
        row: dict[str, object] = {"engines": num_engines, "policy": policy, "kv_events": events, "compiled": compiled}
        row["index_bytes"] = index_bytes[policy, events, compiled]
        for name in runs[0]:
            unit = "us_per_block" if name in ("stored", "removed") else "us"
            row[f"{name}_{unit}"] = spread([run[name] for run in runs])
        row["submit_over_dictionary"] = spread([run["submit"] / bound for run, bound in zip(runs, bounds, strict=True)])
        if num_engines in BUDGETS_US:
            budget = BUDGETS_US[num_engines]
            row |= {"budget_us": budget, "submit_over_budget": spread([run["submit"] / budget for run in runs])}
        rows.append(row)
        print(json.dumps(row), flush=True)
    rows.append({"engines": num_engines, "one_look_up_a_block_us": spread(bounds)})
    print(json.dumps(rows[-1]), flush=True)
    return rows


def sweep() -> list[dict[str, object]]:
    """Measure the median microseconds of a look-up by lists and by arrays."""
    rows: list[dict[str, object]] = []
    for num_engines in SWEPT:
        spent: dict[str, list[float]] = {"lists": [], "arrays": []}
        for repeat in range(REPEATS):
            traffic = Traffic("moestro", num_engines, repeat, events=True)
            traffic.run(NUM_WARM)
            for form, found in spent.items():
                with mock.patch.object(prefix_index, "SHORT", 0 if form == "arrays" else num_engines):
                    found.append(traffic.look_up_us(NUM_TIMED))
        rows.append({"engines": num_engines, **{f"look_up_{form}_us": spread(runs) for form, runs in spent.items()}})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--sweep", action="store_true", help="compare the two forms of the look-up")
    parser.add_argument("--engines", type=int, nargs="*", default=[16, 256, 4096])
    args = parser.parse_args()
    if route_kernel.search().wait(300) is None:
        raise SystemExit("the routing kernel is not there: a C++ compiler is needed")
    conditions = run_record("measured")
    rows = [row for num_engines in args.engines for row in rows_of(num_engines)]
    old = json.loads(args.json.read_text()) if args.json and args.json.exists() else {"rows": []}
    rows += [row for row in old["rows"] if row["engines"] not in args.engines]
    rows.sort(key=lambda row: row["engines"])  # type: ignore[arg-type, return-value]
    swept = sweep() if args.sweep else old.get("sweep", [])
    save(args.json, conditions, {"repeats": REPEATS, "rows": rows, "sweep": swept})


if __name__ == "__main__":
    main()
