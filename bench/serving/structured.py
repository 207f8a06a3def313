"""Asks the demo model for answers under JSON schemas, checks all of them, and measures what a grammar costs per token.

    python bench/serving/structured.py --answers 1000 --rounds 9 --json bench/results/serving/structured.json

Answers: `--answers` requests under bounded schemas, sampled at temperature 1 with fixed seeds, `USERS` at once. Each
has to end by itself (`finish_reason` "stop") and to be valid by `jsonschema`. Half of the schemas allow whitespace.

Overhead: answers of exactly `TOKENS` tokens, without a grammar, under a regular expression and under a JSON schema that
does not end before, in turn in each round, by 1 and by 8 users. The time per token is that between the first and the
last chunk of a stream; CPU time is that of the engine's process, which other load on the machine hardly changes.
Ratios are taken in each round.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import psutil
from rich.progress import track

from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.completions import Answer, ask
from shared.results import make_parser, save, spread
from shared.server import Server, moestro

PORT, USERS, TOKENS = 8191, 8, 400
LIMIT = 1500  # tokens; an answer that reaches it has not ended by itself
PROMPTS = ("def f(x):", "import os\n", "class Stack:", "# a record\n", "x = {")
COMPACT = {"x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None}}


def _object(**properties: object) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


PERSON = _object(
    name={"type": "string", "maxLength": 16},
    age={"type": "integer", "minimum": 0, "maximum": 120},
    email={"type": "string", "pattern": "^[a-z]{2,8}@[a-z]{2,8}\\.(org|com)$"},
)
ORDER = _object(
    id={"type": "string", "pattern": "^[A-F0-9]{8}$"},
    lines={
        "type": "array",
        "minItems": 1,
        "maxItems": 3,
        "items": _object(
            item={"enum": ["tea", "coffee", "cake"]},
            price={"type": "number", "minimum": 0, "maximum": 99, "multipleOf": 0.5},
            note={"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 10}]},
        ),
    },
    paid={"type": "boolean"},
)
TREE = _object(root={"$ref": "#/$defs/node0"}) | {
    "$defs": {
        f"node{depth}": _object(
            value={"type": "integer", "minimum": -9, "maximum": 9},
            left={"type": "null"} if depth == 2 else {"$ref": f"#/$defs/node{depth + 1}"},
        )
        for depth in range(3)
    }
}
SCHEMAS = [schema | extra for schema in (PERSON, ORDER, TREE) for extra in ({}, COMPACT)]

ENDLESS = {"type": "array", "minItems": 500, "items": PERSON} | COMPACT
GRAMMARS: dict[str, dict[str, Any]] = {
    "none": {},
    "regex": {"guided_regex": "([a-z]{1,9} ){500}"},
    "json_schema": {"guided_json": ENDLESS},
}


async def check_answers(url: str, num: int) -> dict[str, Any]:
    """Ask for `num` answers, and count those that do not end by themselves and those that are not valid."""
    lengths, faults = [], []

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        schema = SCHEMAS[number % len(SCHEMAS)]
        body = {
            "prompt": PROMPTS[number % len(PROMPTS)],
            "max_tokens": LIMIT,
            "temperature": 1.0,
            "seed": number,
            "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        }
        async with session.post(f"{url}/v1/completions", json=body) as response:
            answer = await response.json()
        if response.status != 200:
            faults.append({"number": number, "fault": answer["error"]["message"]})
            return
        (choice,) = answer["choices"]
        lengths.append(answer["usage"]["completion_tokens"])
        fault = _fault_of(choice, schema)
        if fault:
            faults.append({"number": number, "fault": fault})

    began = time.monotonic()
    await _closed(url, USERS, (lambda session, number=number: one(session, number) for number in range(num)))
    return {
        "num_answers": num,
        "num_schemas": len(SCHEMAS),
        "num_valid_and_ended": num - len(faults),
        "faults": faults[:10],
        "tokens_per_answer": spread([float(length) for length in lengths]),
        "seconds": round(time.monotonic() - began, 1),
    }


def _fault_of(choice: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return what is wrong with an answer; "" means nothing."""
    if choice["finish_reason"] != "stop":
        return f"finish_reason {choice['finish_reason']}"
    try:
        jsonschema.validate(json.loads(choice["text"]), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return ""


async def _closed(
    url: str, users: int, requests: Iterable[Callable[[aiohttp.ClientSession], Awaitable[object]]]
) -> None:
    """Send requests, `users` at once."""
    waiting = iter(requests)

    async def user(session: aiohttp.ClientSession) -> None:
        for request in waiting:
            await request(session)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
        await asyncio.gather(*(user(session) for _ in range(users)))


async def time_tokens(server: Server, users: int, fields: dict[str, Any], first_seed: int) -> dict[str, float]:
    """Ask for one answer of `TOKENS` tokens by each user. Return times per token, in microseconds."""
    (engine,) = server.engines()
    answers: list[Answer] = []

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        body = {"prompt": PROMPTS[number % len(PROMPTS)] + f" # {first_seed + number}", "max_tokens": TOKENS}
        body |= {"temperature": 1.0, "seed": first_seed + number, "ignore_eos": True} | fields
        answers.append(await ask(session, server.url, body, stream=True))

    before = _cpu_s(engine)
    await _closed(server.url, users, (lambda session, number=number: one(session, number) for number in range(users)))
    assert all(answer.num_tokens == TOKENS for answer in answers), [(each.end, each.num_tokens) for each in answers]
    gaps = [
        (answer.chunks[-1][0] - answer.chunks[0][0]) / (answer.chunks[-1][1] - answer.chunks[0][1])
        for answer in answers
    ]
    cpu_s = (_cpu_s(engine) - before) / (users * TOKENS)
    return {"tpot_us": 1e6 * statistics.mean(gaps), "engine_cpu_us_per_token": 1e6 * cpu_s}


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def measure_overhead(server: Server, rounds: int) -> list[dict[str, Any]]:
    """Run all grammars in turn in each round, by 1 and by `USERS` users."""
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    cases = list(itertools.product(GRAMMARS, (1, USERS)))
    for number in track(range(-1, rounds), "rounds"):  # round -1 warms up
        for name, users in cases:
            figures = asyncio.run(time_tokens(server, users, GRAMMARS[name], 1000 * (number + 1)))
            if number >= 0:
                found.setdefault((name, users), []).append(figures)
    return [_row(name, users, found[name, users], found["none", users]) for name, users in cases]


def _row(name: str, users: int, runs: list[dict[str, float]], base: list[dict[str, float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"grammar": name, "users": users}
    for figure in ("tpot_us", "engine_cpu_us_per_token"):
        row[figure] = spread([run[figure] for run in runs])
        row[f"{figure}_ratio"] = spread([run[figure] / plain[figure] for run, plain in zip(runs, base, strict=True)])
        row[f"{figure}_added"] = spread([run[figure] - plain[figure] for run, plain in zip(runs, base, strict=True)])
    return row


def main() -> None:
    """Run the bench."""
    parser: argparse.ArgumentParser = make_parser(__doc__)
    parser.add_argument("--answers", type=int, default=1000, help="answers that are checked")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of the measurement of time per token")
    options = parser.parse_args()
    conditions = run_record("measured")
    with moestro(PORT) as server:
        answers = asyncio.run(check_answers(server.url, options.answers))
        overhead = measure_overhead(server, options.rounds) if options.rounds else []
    figures = {"answers": answers, "overhead": overhead}
    save(options.json, conditions, figures)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
