"""Compares placement policies of a running group whose real routing drifts: moved bytes, and balance.

    OMP_NUM_THREADS=1 python bench/serving/drift.py --routing DIR --work /tmp/drift \\
        --json bench/results/serving/drift.json
    python bench/serving/drift.py --routing DIR --work /tmp/drift --quick

Measured on a server in mode `ep` whose gates follow recorded choices of GPT-OSS-20B (`bench/shared/routed_model.py`,
--routing is the folder of the record). In each round, the prompts come from one benchmark after the other, in an order
that the seed draws; the first benchmark of a round differs from the last one of the round before. Each policy runs on
a separate server, which keeps its placement from round to round, and all servers get the same prompts.

Plans and the window of the load come 150 times as often as by default, so that a domain lasts for several plans. `eplb`
follows every plan, as in vLLM; `moestro` those that pay within the default horizon. Both figures are of the visits of
each interval between two looks, by the placement that served them, so plans do not see the visits by which they are
judged. Balance is the mean over the largest visits of an engine, both summed over layers and intervals (vLLM's
definition). The step is priced by the traffic model, as on H100 with NVSwitch, because all engines of the bench share
the cores of one machine. With the default sizes a full step has 256 visits to the mean expert of a layer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np

from moestro.config.run_record import run_record
from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import ExpertTable
from moestro.cost.gpus import gpu_named
from moestro.cost.settings import link_within, read_network
from moestro.placement.contract import PlacePrices, even_devices, place_prices
from moestro.placement.score import score

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save, spread
from shared.routed_model import RoutedModel, make_routed_model
from shared.server import Server, moestro

PORT, SEED = 8290, 5
DOMAINS = ("gpqa_main", "sorry_bench_base", "mmlu_validation")
INTERVAL, HALF_LIFE = 20, 7  # steps: 3000 and 1000 of vLLM, divided by 150
POLICIES = {
    "none": (),
    "eplb": ("--placement-policy", "eplb", "--placement-payback-horizon", "0"),
    "moestro": ("--placement-policy", "moestro"),
}
LOOK_S = 1.0  # between two looks at the counts
PROMPT_TOKENS = 256


@dataclass(slots=True)
class Visits:
    """Visits to engines between looks, summed over layers and looks.

    Attributes:
        mean, largest: Visits of the mean engine, and of the busiest one of each layer and interval.
        steps, priced_s: Steps, and the seconds that the traffic model gives for all of them.
    """

    mean: float = 0.0
    largest: float = 0.0
    steps: int = 0
    priced_s: float = 0.0

    @property
    def balance(self) -> float:
        """Mean over largest."""
        return self.mean / self.largest if self.largest else 1.0

    @property
    def step_us(self) -> float:
        """Mean priced step."""
        return 1e6 * self.priced_s / max(self.steps, 1)

    def add(self, load: ExpertLoad, num_steps: int, table: ExpertTable, prices: PlacePrices) -> None:
        """Take in an interval: its load a step, steps, and the placement that served them."""
        devices = even_devices(len(table.logical_of), table.logical_of.shape[2])
        found = score(load, table, devices, prices)
        self.mean += num_steps * float(found.tokens.mean(axis=1).sum())
        self.largest += num_steps * float(found.tokens.max(axis=1).sum())
        self.steps += num_steps
        self.priced_s += num_steps * found.step_s


@dataclass(slots=True)
class Round:
    """Figures of one round: visits, bytes that moved, and migrations that ended."""

    visits: Visits = field(default_factory=Visits)
    moved_bytes: int = 0
    num_migrations: int = 0


class Looks:
    """Looks at the counts and the placement of a server.

    Args:
        prices: Prices of steps.
    """

    def __init__(self, session: aiohttp.ClientSession, port: int, prices: PlacePrices) -> None:
        self._session, self._url, self._prices = session, f"http://127.0.0.1:{port}/admin", prices
        self._counts: np.ndarray | None = None
        self._num_steps = 0

    async def get(self, path: str) -> dict:
        """Return the answer of an operator's request."""
        async with self._session.get(f"{self._url}/{path}") as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def look(self, visits: Visits) -> None:
        """Add the visits since the last look, by the placement that serves now."""
        placed, shown = await self.get("placement?arrays=true"), await self.get("experts?arrays=true")
        counts = np.array(shown["arrays"]["counts"], float)
        num_steps = max(engine["num_steps"] for engine in shown["engines"])
        if self._counts is not None and num_steps > self._num_steps:
            tokens, activated = (counts - self._counts) / (num_steps - self._num_steps), shown["arrays"]["activated"]
            load = ExpertLoad(tokens, np.zeros(tokens.shape[1:]), np.array(activated), num_steps)
            visits.add(load, num_steps - self._num_steps, table_of(placed), self._prices)
        self._counts, self._num_steps = counts, num_steps

    async def every_second(self, visits: Visits) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look(visits)


def table_of(placed: dict) -> ExpertTable:
    """Return the table of an answer of GET /admin/placement?arrays=true."""
    logical_of, shares = np.array(placed["table"], np.int32), np.array(placed["shares"])  # [layers, engines, slots]
    num_engines = logical_of.shape[1]
    return ExpertTable(
        placed["table_version"],
        logical_of.swapaxes(0, 1),
        placed["num_experts"],
        np.ones(num_engines, np.bool_),
        shares.swapaxes(0, 1),
    )


def order_of(number: int) -> list[str]:
    """Return the benchmarks of a round in its order; it does not begin with the last one of the round before."""
    orders = [list(each) for each in itertools.permutations(DOMAINS)]
    order = orders[np.random.default_rng([SEED, 0]).integers(len(orders))]
    for each in range(1, number + 1):
        others = [other for other in orders if other[0] != order[-1]]
        order = others[np.random.default_rng([SEED, each]).integers(len(others))]
    return order


async def send(session: aiohttp.ClientSession, url: str, prompts: np.ndarray, num_users: int) -> None:
    """Send all prompts, so many at once. An answer has one token: the load is that of prompts."""
    left = iter(prompts.tolist())

    async def user() -> None:
        for prompt in left:
            body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()

    await asyncio.gather(*(user() for _ in range(num_users)))


@contextlib.asynccontextmanager
async def looking(looks: Looks, visits: Visits) -> AsyncIterator[None]:
    """Look at the counts inside the block, and for the last time at its end."""
    task = asyncio.create_task(looks.every_second(visits))
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await looks.look(visits)


async def serve_round(looks: Looks, server: Server, model: RoutedModel, args: argparse.Namespace, number: int) -> Round:
    """Serve one round of all benchmarks."""
    found, before = Round(), await looks.get("placement")
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        await looks.look(Visits())  # What came before is not of this round.
        async with looking(looks, found.visits):
            for at, domain in enumerate(order_of(number)):
                rng = np.random.default_rng([SEED, number, at])
                prompts = rng.choice(model.tokens[domain], (args.requests, PROMPT_TOKENS))
                await send(session, server.url, prompts, args.users)
    after = await looks.get("placement")
    found.moved_bytes = after["moved_bytes"] - before["moved_bytes"]
    found.num_migrations = sum(after["migrations"].values()) - sum(before["migrations"].values())
    return found


async def serve_all(server: Server, model: RoutedModel, args: argparse.Namespace) -> list[Round]:
    """Serve all rounds on one server."""
    async with aiohttp.ClientSession() as session:
        gpu = gpu_named("h100")
        link = link_within(None, gpu)
        looks = Looks(session, PORT + 1, place_prices(read_network(str(model.directory)), gpu, link, link))
        warm_up = np.random.default_rng(SEED).choice(model.tokens[DOMAINS[0]], (args.users, PROMPT_TOKENS))
        await send(session, server.url, warm_up, args.users)
        return [await serve_round(looks, server, model, args, number) for number in range(args.rounds)]


def flags_of(policy: str, model: RoutedModel, args: argparse.Namespace) -> tuple[str, ...]:
    """Return the flags of a policy's server."""
    tokens = PROMPT_TOKENS * args.users // args.engines  # All users' prompts are one step of the group.
    return (
        str(model.directory), "--load-format", "dummy", "--gate-override", model.gate, "--mode", "ep",
        "--engines", str(args.engines), "--num-redundant-experts", str(args.redundant),
        "--max-num-batched-tokens", str(tokens), "--no-enable-prefix-caching", "--route-policy", "round_robin",
        "--kv-cache-memory-bytes", str(64 << 20), "--max-model-len", str(2 * PROMPT_TOKENS),
        "--admin-port", str(PORT + 1),
        "--placement-interval", str(INTERVAL), "--expert-load-half-life", str(HALF_LIFE), "--log-level", "info",
        *POLICIES[policy],
    )  # fmt: skip


def figures(rounds: list[Round], num_steps: int, seconds: float) -> dict[str, object]:
    """Return the spread of each figure over the rounds."""
    return {
        "balance": spread([each.visits.balance for each in rounds]),
        "priced_step_us": spread([each.visits.step_us for each in rounds]),
        "moved_mb": spread([each.moved_bytes / 1e6 for each in rounds]),
        "migrations": spread([float(each.num_migrations) for each in rounds]),
        "by_round": [
            [round(each.visits.balance, 4), round(each.visits.step_us, 4), each.moved_bytes] for each in rounds
        ],
        "num_steps": num_steps,
        "seconds": round(seconds, 1),
    }


def measure(policy: str, model: RoutedModel, args: argparse.Namespace) -> dict[str, object]:
    """Run all rounds under one policy."""
    log = args.work / f"{policy}.log"
    with moestro(PORT, *flags_of(policy, model, args), log=log, OMP_NUM_THREADS="1") as server:
        began = time.perf_counter()
        rounds = asyncio.run(serve_all(server, model, args))
        seconds = time.perf_counter() - began
        num_steps = int(max(server.samples("moestro:group_steps_total")))
    return figures(rounds, num_steps, seconds)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--routing", type=Path, required=True, help="folder of the recorded choices")
    parser.add_argument("--work", type=Path, required=True, help="folder of the network and the servers' logs")
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=400, help="prompts of a benchmark in a round")
    parser.add_argument("--users", type=int, default=8, help="prompts at once")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--redundant", type=int, default=8, help="slots of a layer beyond one for each expert")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="one short round of each policy")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.requests = 1, 200
    conditions = run_record("measured")
    args.work.mkdir(parents=True, exist_ok=True)
    model = make_routed_model(args.work / "model", args.routing, DOMAINS, args.layers)
    result: dict[str, object] = {}
    for policy in args.policies:
        result[policy] = measure(policy, model, args)
        print(policy, json.dumps(result[policy]), flush=True)
    names = ("rounds", "requests", "users", "engines", "redundant", "layers")
    save(args.json, conditions, result | {"settings": {name: getattr(args, name) for name in names}})


if __name__ == "__main__":
    main()
