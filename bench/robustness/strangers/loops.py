"""A request for a router that reaches itself, directly or by way of another router.

Three arrangements: a router whose only other engine is itself; two routers, each the other's engine; the same two
after their only real engine has left. A client sends `NUM_REQUESTS` requests to each. What must hold: every request
ends with 200 where a real engine is left, otherwise with 508 or 503; and no request becomes more than one request of
each router.

    python bench/robustness/strangers/loops.py [--source OTHER/src]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator

import aiohttp
from frame import Place, Server, run
from poison import engines

NUM_REQUESTS = 10
_ANSWER_S = 3.0
_ADMIN = re.compile(r"(http://127\.0\.0\.1:\d+)/admin/engines")


@contextlib.contextmanager
def router(place: Place, name: str, engine: Server) -> Iterator[tuple[Server, str]]:
    """Start a router before `engine`, and yield it with the address of its operators' port."""
    with place.routing(engine, flags=("--route-policy", "round_robin"), name=name) as server:
        while (found := _ADMIN.search(place.log(name))) is None:
            time.sleep(0.05)
        yield server, found[1]


def add(admin: str, name: str, url: str) -> None:
    """Add an engine to a router."""
    body = json.dumps({"url": f"{name}={url}"}).encode()
    request = urllib.request.Request(f"{admin}/admin/engines", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=10).close()


def remove(admin: str, name: str) -> None:
    """Remove an engine from a router."""
    request = urllib.request.Request(f"{admin}/admin/engines/{name}", method="DELETE")
    urllib.request.urlopen(request, timeout=10).close()


async def ends_of(url: str) -> Counter[str]:
    """Send the requests one after the other, and count how they end."""
    ends: Counter[str] = Counter()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_S)) as session:
        for number in range(NUM_REQUESTS):
            try:
                async with session.post(f"{url}/v1/completions", json={"prompt": f"fine {number}"}) as got:
                    await got.read()
                    ends[str(got.status)] += 1
            except (aiohttp.ClientError, TimeoutError) as error:
                ends[type(error).__name__] += 1
    return ends


def num_requests(server: Server) -> float:
    """Return the number of requests for engines that the router has counted."""
    lines = server.get("/metrics").decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("moestro:route_requests_total "))


async def through_two(place: Place, *, has_engine: bool) -> dict[str, object]:
    """Send requests to the first of two routers, each of which is an engine of the other."""
    name = "with" if has_engine else "without"
    with (
        engines(1) as [engine],
        router(place, f"{name}-first", engine) as (first, admin),
        router(place, f"{name}-second", first) as (second, _),
    ):
        add(admin, "second", second.url)
        await asyncio.sleep(1)
        if not has_engine:
            remove(admin, engine.url.removeprefix("http://"))
        ends = await ends_of(first.url)
        return {"ends": ends, "num_requests": [num_requests(each) for each in (first, second)]}


async def attack(place: Place) -> dict[str, object]:
    """Send requests into each arrangement."""
    with engines(1) as [engine], router(place, "alone", engine) as (alone, admin):
        add(admin, "itself", alone.url)
        await asyncio.sleep(1)
        directly = {"ends": await ends_of(alone.url), "num_requests": [num_requests(alone)]}
    return {
        "directly": directly,
        "by way of another": await through_two(place, has_engine=True),
        "without an engine": await through_two(place, has_engine=False),
    }


if __name__ == "__main__":
    run(attack, __doc__)
