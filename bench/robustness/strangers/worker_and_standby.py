"""An expert worker of `moestro serve --mode async` dies or stops together with a process on standby.

Four users stream answers. In each round one worker with experts, the only one that has them, and one process on standby
get SIGKILL at once, or SIGSTOP. What must hold: every answer is whole, and in float32 a greedy one is the calm server's
(but for near-ties, which other batches than the calm ones decide); no stream stands still for more than 2 s on a quiet
machine. The last two rounds take all processes on standby, which costs the load of the libraries once.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import Counter

import psutil
from frame import Place, Server, run
from shared.completions import Answer, ask, bodies, judge, session

ROUNDS, USERS, PATIENCE_S, PAUSE_S = 5, 4, 600.0, 2.0
WHOLE_S = 90.0
FLAGS = ("--mode", "async", "--attention", "2", "--experts", "2", "--dtype", "float32")
GREEDY = [body for body in bodies() if not body["temperature"]]


def standbys(server: Server) -> list[psutil.Process]:
    """Return the processes on standby, the oldest first."""
    found = [each for each in psutil.Process(server.process.pid).children() if each.cmdline()[-1:] == ["standby"]]
    return sorted(found, key=lambda each: each.create_time())


def is_whole(server: Server, victims: list[psutil.Process]) -> bool:
    """Return whether the victims are gone, and all workers and a process on standby are there again."""
    if any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in victims):
        return False
    with contextlib.suppress(OSError, psutil.Error):
        return all(server.samples("moestro:worker_serving")) and bool(standbys(server))
    return False


async def strike(server: Server, turn: int, number: int, *, takes_all: bool) -> tuple[float, float]:
    """Signal a worker and one process on standby, or all of them. Return when, and when the group was whole again."""
    waiting = standbys(server)
    chosen = waiting if takes_all else [waiting[turn % len(waiting)]]
    victims = [server.workers()[f"experts-{turn % 2}"], *chosen]
    at = time.monotonic()
    for victim in victims:
        victim.send_signal(number)
    while not await asyncio.to_thread(is_whole, server, victims[:1]):
        assert time.monotonic() < at + WHOLE_S, "the group is not whole again"
        await asyncio.sleep(0.1)
    return at, time.monotonic()


async def attack(place: Place) -> dict[str, object]:
    """Strike, and measure the longest gap between tokens around each blow."""
    answers: list[tuple[int, Answer]] = []
    blows: dict[str, list[tuple[float, float]]] = {"SIGKILL": [], "SIGSTOP": [], "SIGKILL of all standbys": []}
    with place.serving(*FLAGS) as server:
        async with session(PATIENCE_S) as client:
            calm = [await ask(client, server.url, body, stream=True) for body in GREEDY]
            stop = asyncio.Event()

            async def use(user: int) -> None:
                count = user
                while not stop.is_set():
                    which, count = count % len(GREEDY), count + 1
                    answers.append((which, await ask(client, server.url, GREEDY[which], stream=True)))

            async with asyncio.TaskGroup() as users:
                for user in range(USERS):
                    users.create_task(use(user))
                for kind, found in blows.items():
                    is_last = kind not in ("SIGKILL", "SIGSTOP")
                    number = signal.SIGKILL if is_last else signal.Signals[kind]
                    for turn in range(2 if is_last else ROUNDS):
                        await asyncio.sleep(PAUSE_S)
                        found.append(await strike(server, turn, number, takes_all=is_last))
                await asyncio.sleep(PAUSE_S)
                stop.set()
    return {
        "answers": Counter(judge(answer, {calm[which].text}) for which, answer in answers),
        "longest_gap_s": {kind: [_gap_s(answers, at, until) for at, until in found] for kind, found in blows.items()},
        "whole_again_s": {kind: [round(until - at, 2) for at, until in found] for kind, found in blows.items()},
    }


def _gap_s(answers: list[tuple[int, Answer]], at: float, until: float) -> float:
    return round(max(answer.longest_gap_s(at, until + PAUSE_S) for _, answer in answers), 3)


if __name__ == "__main__":
    run(attack, __doc__)
