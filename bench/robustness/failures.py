"""Kills and stops workers of `async` and `ep` mode under load, and compares every answer with a calm server's.

    # Starts the servers itself; about twelve minutes for each hundred kills of expert workers
    python bench/robustness/failures.py [--kills 100] [--seed 0] [--pause 0.5 10] [--ways NAME ...] \\
        [--json bench/results/robustness/failures.json] [--plot bench/results/robustness/failures.png]

Five ways, with the demo model in float32:

* expert_worker: `--mode async --attention 2 --experts 2`, whose expert workers get SIGKILL or SIGSTOP by the seed.
* expert_worker_two_copies: the same with `--expert-copies 2`.
* expert_worker_two_phase: expert_worker with `--inline-limit 0`, so that kills come while tensors are under way.
* home: the same group, whose workers with attention are killed. Each is an engine, and its requests move. A stopped
  one keeps its streams until `--engine-timeout` (10 s); new requests go around it at once.
* ep: `--mode ep --engines 2`, whose two ranks restart together.

Four users send greedy and sampled streams one after the other. A kill comes at a random moment after the group is
whole again.

A calm `fused` server says what each answer must be. A greedy answer may differ only where the calm server's two best
tokens are within 1e-5 of each other (a near-tie); each such case is printed with the gap. The margin of a sampled token
is unknown, so sampled answers that differ are counted apart. Both together may be 1 in 10,000 tokens at most.

The script prints, for each way: answers lost, doubled and differing; for each signal, the longest gap between tokens of
any stream around each kill, beside that of windows without kills; the time until a stopped process is dead, and until
the group is whole; tokens per second before and under kills.

The cost without faults cannot be measured as a difference, because failure detection cannot be turned off. Instead the
script measures what the idle group takes: the share of a core of each process, which includes the signs of life, and
its memory, which includes the process on standby.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from failures_picture import draw_failures
from failures_report import Calm, Kill, Run, broken_promises, report

from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.completions import PROMPTS, ask, bodies, session
from shared.results import make_parser, save
from shared.server import Server, free_port, moestro

USERS, PATIENCE_S = 4, 300
LONG = "class Stack:\n    def push(self, item):\n        self.items.append(item)\n" * 8
BODIES = bodies((*PROMPTS, LONG))
AFTER_LAST_S = 3.0
WHOLE_AGAIN_S = 180  # the longest delay of a restart is 60 s, and a busy machine loads slowly
IDLE_S, SETTLED_PERCENT, SETTLES_S = 5.0, 2.0, 60.0
# The delay of an engine's restart doubles with each of its ends, up to 60 s; as long, requests wait for an engine.
ENGINE_KILLS = 4
BEGUN = 20  # tokens of an engine, after which one of its streams has begun
ASYNC = ("--mode", "async", "--attention", "2", "--experts", "2")


@dataclass(frozen=True, slots=True)
class Way:
    """A server, and the processes in it that are killed.

    Attributes:
        victims: beginning of the processes' names.
        is_engine: whether a victim is an engine, whose requests move.
    """

    flags: tuple[str, ...]
    victims: str
    is_engine: bool


WAYS = {
    "expert_worker": Way(ASYNC, "experts-", is_engine=False),
    "expert_worker_two_copies": Way((*ASYNC, "--expert-copies", "2"), "experts-", is_engine=False),
    "expert_worker_two_phase": Way((*ASYNC, "--inline-limit", "0"), "experts-", is_engine=False),
    "home": Way(ASYNC, "attention-", is_engine=True),
    "ep": Way(("--mode", "ep", "--engines", "2"), "", is_engine=True),
}


def start(*flags: str) -> contextlib.AbstractContextManager[Server]:
    return moestro(free_port(), "--dtype", "float32", "--log-level", "error", *flags, OMP_NUM_THREADS="1")


def is_dead(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


async def ask_calm_server() -> list[Calm]:
    """Return the answers of a server of one engine in `fused` mode, one request at a time."""
    with start() as server:
        async with session(PATIENCE_S) as client:
            found = []
            for body in BODIES:
                scored = {} if body["temperature"] else {"logprobs": 2}
                async with client.post(f"{server.url}/v1/completions", json=body | scored) as answer:
                    found.append(Calm.of((await answer.json())["choices"][0]))
            return found


@dataclass(slots=True)
class Disturbance:
    """Kills workers of one server by a seed.

    Attributes:
        whole: names of all workers of the whole group.
        kills: the kills so far.
    """

    server: Server
    way: Way
    rng: random.Random
    whole: frozenset[str] = frozenset()
    kills: list[Kill] = field(default_factory=list)

    def kill(self) -> None:
        """Kill or stop one worker, and wait until the group is whole again."""
        before = self.server.workers()
        self.whole = self.whole or frozenset(before)
        name = self.rng.choice([name for name in sorted(before) if name.startswith(self.way.victims)])
        number = self.rng.choice([signal.SIGKILL, signal.SIGSTOP])
        if self.way.is_engine:
            self._wait_for_streams(int(name.rpartition("-")[2]))
        victim, at = before[name], time.monotonic()
        victim.send_signal(number)
        while not is_dead(victim):
            self._check(at, f"{name} is not dead after {number.name}")
            time.sleep(0.005)
        dead_at = time.monotonic()
        while not self._is_whole(victim):
            self._check(at, f"the group is not whole after {number.name} of {name}")
            time.sleep(0.1)
        self.kills.append(Kill(at, number.name, name, dead_at - at, time.monotonic() - at))
        took = f"dead {dead_at - at:.2f} s, whole {self.kills[-1].whole_s:.2f} s"
        print(f"{len(self.kills)}: {number.name} of {name}: {took}", flush=True)

    def _wait_for_streams(self, engine: int) -> None:
        """Wait until streams of an engine have begun; those that moved after the last kill run on the other one.

        A gap is between two tokens, so a stream that waits for its first one shows none.
        """
        began, num_before = time.monotonic(), self._num_tokens(engine)
        while self._num_tokens(engine) < num_before + BEGUN or not self._is_running(engine):
            self._check(began, f"engine {engine} gets no requests")
            time.sleep(0.1)

    def _num_tokens(self, engine: int) -> float:
        return self.server.samples("moestro:generation_tokens_total")[engine]

    def _is_running(self, engine: int) -> bool:
        return bool(self.server.load()["engines"][engine]["num_running"])

    def _is_whole(self, victim: psutil.Process) -> bool:
        now = self.server.workers()
        if victim in now.values() or now.keys() != self.whole:
            return False
        with contextlib.suppress(OSError):  # the API server is busy
            return self.server.all_ready() and all(self.server.samples("moestro:worker_serving"))
        return False

    def _check(self, since: float, complaint: str) -> None:
        assert self.server.process is not None
        assert self.server.process.poll() is None, f"{complaint}: the server ended"
        assert time.monotonic() < since + WHOLE_AGAIN_S, complaint


@dataclass(frozen=True, slots=True)
class Schedule:
    """When kills come.

    Attributes:
        calm_s: time of load before the kills, in seconds.
        pause_s: bounds of the random time from a whole group to the next kill, in seconds.
    """

    seed: int
    num_kills: int
    calm_s: float
    pause_s: tuple[float, float]


async def run_way(way: Way, schedule: Schedule) -> Run:
    """Start a server, and kill its workers under load."""
    seed, calm_s = schedule.seed, schedule.calm_s
    rng, sent, stop = random.Random(seed), [], asyncio.Event()

    async def use(user: int) -> None:
        rng = random.Random(f"{seed} {user}")
        async with session(PATIENCE_S) as client:
            while not stop.is_set():
                which = rng.randrange(len(BODIES))
                body = BODIES[which] | {"cache_salt": str(rng.random())}  # so that every prompt is computed
                sent.append((which, await ask(client, server.url, body, stream=True)))

    with start(*way.flags) as server:
        disturbance = Disturbance(server, way, rng)
        async with asyncio.TaskGroup() as users:
            began = time.monotonic()
            for user in range(USERS):
                users.create_task(use(user))
            await asyncio.sleep(calm_s)
            for _ in range(schedule.num_kills):
                await asyncio.sleep(rng.uniform(*schedule.pause_s))
                await asyncio.to_thread(disturbance.kill)
            await asyncio.sleep(AFTER_LAST_S)
            ended = time.monotonic()
            stop.set()
        server.wait_until_idle()
        counters = {
            name: int(sum(server.samples(f"moestro:{name}")))
            for name in (
                "requests_moved_total",
                "streams_resumed_total",
                "worker_restarts_total",
                "worker_doubts_total",
            )
        }
        return Run(began, began + calm_s, ended, disturbance.kills, sent, counters, idle_costs(server))


def idle_costs(server: Server) -> dict[str, dict[str, float]]:
    """Return the share of a core and the memory of each process of an idle server."""
    assert server.process is not None
    front = psutil.Process(server.process.pid)
    deadline = time.monotonic() + SETTLES_S
    while True:
        names = {process: name for name, process in server.workers().items()} | {front: "API server"}
        standby = [each for each in server.engines() if each not in names and each.cmdline()[-1:] == ["standby"]]
        names |= dict.fromkeys(standby, "standby")
        before = {process: sum(process.cpu_times()[:2]) for process in names}
        time.sleep(IDLE_S)
        shares = {each: 100 * (sum(each.cpu_times()[:2]) - before[each]) / IDLE_S for each in names}
        # The last answers may still end.
        if all(share < SETTLED_PERCENT for share in shares.values()) or time.monotonic() > deadline:
            break
    return {
        name: {"cpu_percent": round(shares[each], 2), "pss_mb": round(each.memory_full_info().pss / 1e6)}
        for each, name in names.items()
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=100, help=f"of expert workers; of engines at most {ENGINE_KILLS}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="draw the throughput around the kills here")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    pause = "bounds of the random time from a whole group to the next kill, in seconds"
    parser.add_argument("--pause", type=float, nargs=2, default=(0.5, 10.0), help=pause)
    parser.add_argument("--calm", type=float, default=15.0, help="seconds of load before the first kill")
    args = parser.parse_args()
    conditions = run_record("measured")
    calm = asyncio.run(ask_calm_server())
    result: dict[str, Any] = {}
    for name in args.ways:
        print(f"--- {name}", flush=True)
        way = WAYS[name]
        num_kills = min(args.kills, ENGINE_KILLS) if way.is_engine else args.kills
        schedule = Schedule(args.seed, num_kills, args.calm, tuple(args.pause))
        result[name] = report(asyncio.run(run_way(way, schedule)), calm)
        print(json.dumps({key: value for key, value in result[name].items() if key not in ("series", "around")}))
    if args.plot:
        draw_failures(result, args.plot)
    setting = {"users": USERS, "bodies": len(BODIES), "seed": args.seed, "pause_s": args.pause, "calm_s": args.calm}
    save(args.json, conditions, {"setting": setting, "ways": result})
    sys.exit("\n".join(broken_promises(result)) or 0)


if __name__ == "__main__":
    main()
