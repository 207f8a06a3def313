"""A reader of a record tests guesses of prompts, and a disk that was full leaves a record that has ended.

Two strangers. One is another user of the machine who opens the file of `--record`, of `moestro serve` and of
`moestro route`, and tests a guess of a prompt with what stands in it. The other one fills the disk, and frees it.

What must hold: only the owner can open the file, and its content confirms no guess. While the disk is full,
requests go on and lost lines are counted. Once there is room, the record goes on: every line in it is whole, the gap
is marked, and later requests are in it. The log has one line for the begin of the gap and one for its end.

The limit on file sizes of the running process (RLIMIT_FSIZE) stands for the disk.
"""

from __future__ import annotations

import asyncio
import base64
import json
import resource
import stat
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
from frame import Neighbours, Place, run
from shared.server import Server

from moestro.core.hashing import HASH_BYTES, hash_blocks, hash_key, hash_text

PROMPT = "My diagnosis is secret. " * 60
GUESSES = (PROMPT, "Something else. " * 60)
DEMO = Path(__file__).parents[3] / "src" / "moestro" / "assets" / "demo"
MODEL = "moestro-demo"
PADDING = 200_000  # bytes, so that logs stay below the limit
ROOM = 500  # bytes left on the disk: less than an entry of a second


def hashes_in(path: Path) -> Iterable[tuple[bytes, bytes]]:
    """Yield the key and the packed block hashes of each request of a record."""
    for line in path.read_bytes().splitlines():
        if line.startswith(b'{"type":"Submitted"'):
            request = json.loads(line)["request"]
            yield (base64.b64decode(request.get(name, "")) for name in ("hash_key", "block_hashes"))


def names_of(guess: str, key: bytes) -> list[bytes]:
    """Return the names that blocks of a guess could have, by text and by tokens, under `key`."""
    from moestro.text.tokenizer import Tokenizer  # noqa: PLC0415 - it takes seconds to load

    tokens = Tokenizer(DEMO).encode(guess, add_special_tokens=True)
    ids = np.array(tokens, np.int32)
    packed = hash_text(key, guess.encode(), 256) + hash_text(key, guess.encode(), 64) + hash_blocks(key, ids, 16)
    return [packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES)]


def confirmed(path: Path) -> list[bool]:
    """Return which guesses the content of a record confirms, by the keys in it and by those that anyone can make."""
    found = list(map(tuple, hashes_in(path)))
    public = [hash_key(model) for model in (MODEL, "", "m")]
    keys = {*public, *(key for key, _ in found if key)}
    held = {packed[at : at + HASH_BYTES] for _, packed in found for at in range(0, len(packed), HASH_BYTES)}
    return [any(not held.isdisjoint(names_of(guess, key)) for key in keys) for guess in GUESSES]


def size_of(path: Path) -> int:
    """Return the bytes of a file."""
    return path.stat().st_size


def mode_of(path: Path) -> int:
    """Return the permissions of a file."""
    return stat.S_IMODE(path.stat().st_mode)


async def full_disk(server: Server, path: Path, body: dict[str, object]) -> dict[str, object]:
    """Fill the disk while clients send requests, and free it. Return what they and the record saw."""
    assert server.process is not None
    free = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (size_of(path) + ROOM, free[1]))
    beside = Neighbours(server.url, body=body)
    await beside.for_(4)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, free)
    size = size_of(path)
    after = Neighbours(server.url, body=body)
    await after.for_(3)
    await asyncio.sleep(2.5)
    metrics = server.get("/metrics").decode().splitlines()
    lost = [line.rpartition(" ")[2] for line in metrics if "record_lines_lost_total" in line and line[0] != "#"]
    return {
        "while_full": beside.figures(),
        "afterwards": after.figures(),
        "lines_lost_metric": lost[0] if lost else None,
        "bytes_recorded_afterwards": size_of(path) - size,
    }


def state_of(path: Path) -> dict[str, object]:
    """Return what is in a record, line by line."""
    whole, torn, gaps = 0, 0, []
    for line in filter(None, path.read_bytes().splitlines()):
        try:
            entry = json.loads(line)
            whole += 1
        except ValueError:
            torn += 1
            continue
        if entry.get("type") == "Gap":
            gaps.append(entry["num_lost"])
    return {"lines": whole, "torn_lines": torn, "gaps": gaps}


async def one(place: Place, name: str, server: Server, path: Path) -> dict[str, object]:
    """Attack one product's record."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4}
    await Neighbours(server.url, body=body).for_(2)
    await asyncio.sleep(1.5)
    guesses = await asyncio.to_thread(confirmed, path)
    figures = await full_disk(server, path, body)
    mode = mode_of(path)
    return {
        "mode": f"{mode:04o}",
        "others_can_read": bool(mode & 0o077),
        "guess_confirmed": dict(zip(("right", "wrong"), guesses, strict=True)),
        **figures,
        **state_of(path),
        "log_lines": sum("--record" in line for line in place.log(name).splitlines()),
    }


async def attack(place: Place) -> dict[str, object]:
    """Attack the records of both products."""
    paths = {name: place.directory / f"{name}.jsonl" for name in ("serve", "route")}
    for path in paths.values():
        path.write_bytes(b"\n" * PADDING)
        path.chmod(0o644)
    with (
        place.serving("--device", "cpu", "--record", str(paths["serve"])) as server,
        place.routing(server, flags=("--record", str(paths["route"]))) as router,
    ):
        return {
            "route": await one(place, "route", router, paths["route"]),
            "serve": await one(place, "serve", server, paths["serve"]),
        }


if __name__ == "__main__":
    run(attack, __doc__)
