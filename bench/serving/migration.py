"""Measures what moves of experts cost a group in mode `ep` that serves: steps with moves and without, and the answers.

    OMP_NUM_THREADS=1 python bench/serving/migration.py --rounds 5 --json bench/results/serving/migration.json
    python bench/serving/migration.py --quick

Two servers of the demo model have two engines each. In each round both serve the same streams, one server after the
other, and the next round begins with the other one. An operator's client moves the experts of one of them without a
rest: to a random placement, back to the first one, to the next random one. The gap between two tokens of a stream is a
step of its group, with the server's and the client's time. The answers are greedy and in float32, and those of the two
servers are compared. --bytes-per-step are the bytes of weights that an engine sends or takes in between two steps at
most; by default one expert, the least.

A step of the group has 22 exchanges between its engines, so its time depends on how soon each of them gets a core: five
rounds take two minutes on two idle cores, and several times as long where other processes compute.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import numpy as np

from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save, spread
from shared.server import Server, moestro

PORT, VOCAB, SEED = 8260, 4096, 3
STILL, MOVING = "experts stay", "experts move"
EP = ("--mode", "ep", "--engines", "2", "--dtype", "float32", "--route-policy", "round_robin")
COUNTED_S = 3.0  # after which the server has counted the bytes of the last migration
WARM_UP_TOKENS = 8
RETRY_S = 0.01  # after a refusal, because the migration before runs still


@dataclass(frozen=True, kw_only=True)
class Load:
    """Streams of one round.

    Attributes:
        prompts: Token ids of each stream's prompt.
        num_output: Tokens of each answer.
        num_users: Streams at once.
    """

    prompts: list[list[int]]
    num_output: int
    num_users: int


@dataclass(slots=True)
class Served:
    """Measurements of one server in one round: gaps between tokens (s), answers by stream, and the duration (s)."""

    gaps_s: list[float] = field(default_factory=list)
    answers: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0


def make_load(args: argparse.Namespace, number: int) -> Load:
    """Draw the streams of a round; prompts of different rounds share nothing, so no prefix cache helps."""
    rng = np.random.default_rng([SEED, number])
    prompts = [rng.integers(3, VOCAB, rng.integers(8, 64)).tolist() for _ in range(args.streams)]
    return Load(prompts=prompts, num_output=args.output_len, num_users=args.users)


async def serve(server: Server, load: Load) -> Served:
    """Send all streams, so many at once, and read them to their ends."""
    served, numbers = Served(), iter(range(len(load.prompts)))
    began = time.perf_counter()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        await asyncio.gather(*(_user(session, server, load, numbers, served) for _ in range(load.num_users)))
    served.seconds = time.perf_counter() - began
    return served


async def _user(
    session: aiohttp.ClientSession, server: Server, load: Load, numbers: itertools.count, served: Served
) -> None:
    for number in numbers:
        body = {"prompt": load.prompts[number], "max_tokens": load.num_output, "temperature": 0, "ignore_eos": True}
        text, last = [], None
        async with session.post(f"{server.url}/v1/completions", json=body | {"stream": True}) as answer:
            assert answer.status == 200, await answer.text()
            async for event in _events(answer):
                now = time.perf_counter()
                if last is not None:
                    served.gaps_s.append(now - last)
                last = now
                text.append(event["choices"][0]["text"])
        served.answers[number] = "".join(text)


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[dict]:
    """Events of a stream that bring tokens."""
    async for line in answer.content:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            assert "error" not in event, event
            if event["choices"]:
                yield event


# --- the operator ---------------------------------------------------------------------------------------------------


async def move_without_rest(port: int) -> None:
    """Begin the next migration whenever one has ended, until cancelled."""
    rng = np.random.default_rng(SEED)
    url = f"http://127.0.0.1:{port}/admin/placement"
    async with aiohttp.ClientSession() as session:
        shown = await placement(port)
        first = np.tile(np.arange(shown["num_experts"]), (shown["num_layers"], 1))
        for number in itertools.count():
            slots = first if number % 2 else rng.permuted(first, axis=1)
            body = json.dumps({"physical_to_logical_map": slots.tolist()})
            while True:
                async with session.post(f"{url}/apply", data=body) as answer:
                    if answer.status != 409:
                        assert answer.status in {200, 202}, await answer.text()
                        break
                await asyncio.sleep(RETRY_S)


async def placement(port: int) -> dict:
    """Return the operator's view of the placement."""
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/admin/placement") as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def come_to_rest(port: int) -> dict:
    """Wait until no experts move, and return the operator's view."""
    while True:
        shown = await placement(port)
        if not shown["progress"]["is_running"]:
            return shown
        await asyncio.sleep(RETRY_S)


async def serve_while_moving(server: Server, load: Load, port: int) -> Served:
    """Serve with experts that move all the time."""
    mover = asyncio.create_task(move_without_rest(port))
    try:
        served = await serve(server, load)
        assert not mover.done(), mover.exception()
    finally:
        mover.cancel()
        await asyncio.gather(mover, return_exceptions=True)
    await come_to_rest(port)
    return served


# --- figures --------------------------------------------------------------------------------------------------------


def figures(rounds: list[Served]) -> dict[str, object]:
    """Return percentiles of the gaps in each round, and the throughput."""
    by_round = [np.percentile(np.array(each.gaps_s) * 1e3, (50, 99, 100)) for each in rounds]
    names = ("gap_p50_ms", "gap_p99_ms", "gap_max_ms")
    found: dict[str, object] = {name: spread([float(row[at]) for row in by_round]) for at, name in enumerate(names)}
    return found | {"tokens_per_s": spread([(len(each.gaps_s) + len(each.answers)) / each.seconds for each in rounds])}


def show(result: dict) -> None:
    """Print the figures."""
    for name in (STILL, MOVING):
        print(f"{name}:")
        for figure, each in result[name].items():
            print(f"  {figure:14} {each['median']:10.2f}   ({each['min']:.2f} to {each['max']:.2f})")
    print(f"differing answers: {result['num_differing']} of {result['num_answers']}")
    print(f"moved: {result['num_moved_layers']} layers, {result['moved_bytes'] / 1e6:.1f} MB")


def measure(args: argparse.Namespace) -> dict[str, object]:
    """Run all rounds on both servers."""
    limit = ("--placement-max-bytes-per-step", str(args.bytes_per_step), "--admin-port", str(PORT + 2))
    one = {"OMP_NUM_THREADS": "1"}
    done: dict[str, list[Served]] = {STILL: [], MOVING: []}
    num_differing = 0
    with moestro(PORT, *EP, **one) as still, moestro(PORT + 1, *EP, *limit, **one) as moving:
        warm_up = replace(make_load(args, args.rounds), num_output=WARM_UP_TOKENS)
        asyncio.run(serve(still, warm_up))
        asyncio.run(serve(moving, warm_up))
        before = asyncio.run(placement(PORT + 2))
        for number in range(args.rounds):
            load = make_load(args, number)
            found = {}
            for name in (STILL, MOVING) if number % 2 == 0 else (MOVING, STILL):
                served = serve(still, load) if name == STILL else serve_while_moving(moving, load, PORT + 2)
                found[name] = asyncio.run(served)
                done[name].append(found[name])
            answers = [found[name].answers for name in done]
            num_differing += sum(answers[0][i] != answers[1][i] for i in range(len(load.prompts)))
        time.sleep(COUNTED_S)
        after = asyncio.run(placement(PORT + 2))
    return {name: figures(rounds) for name, rounds in done.items()} | {
        "num_answers": args.rounds * args.streams,
        "num_differing": num_differing,
        "num_moved_layers": after["table_version"] - before["table_version"],  # one version each
        "moved_bytes": after["moved_bytes"] - before["moved_bytes"],
        "settings": {name: getattr(args, name) for name in ("streams", "users", "output_len", "bytes_per_step")},
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16, help="streams of a round")
    parser.add_argument("--users", type=int, default=8, help="streams at once")
    parser.add_argument("--output-len", type=int, default=96, help="tokens of an answer")
    parser.add_argument("--bytes-per-step", type=int, default=1, help="of weights, for each engine")
    parser.add_argument("--quick", action="store_true", help="one short round")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.streams, args.output_len = 1, 8, 32
    conditions = run_record("measured")
    result = measure(args)
    show(result)
    save(args.json, conditions, result)


if __name__ == "__main__":
    main()
