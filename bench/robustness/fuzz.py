"""Sends random requests, valid and broken, to a server. No answer may be a 500, no request may hang or stay running.

    python bench/robustness/fuzz.py [--requests 10000] [--route] [--json bench/results/robustness/fuzz.json]

The script starts `moestro serve`; with `--route` the requests pass through `moestro route`. Every request is a function
of (seed, number). Its fields have values that are valid, at a limit, of a wrong type or out of range. Some fields are
missing, and some are unknown. Some bodies are then cut, altered, not JSON at all, or very long. Some clients disconnect
early. One request in ten is broken or borderline HTTP, sometimes behind a valid request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path

import aiohttp

from moestro.config.run_record import run_record
from moestro.server.api.protocol import ChatFields, CompletionFields
from moestro.server.api.routes import DetokenizeFields, TokenizeFields

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save
from shared.server import MOESTRO, Server, moestro, started

PORT, ROUTER_PORT, ADMIN_PORT, USERS = 8191, 8192, 8193, 16
PART_OF_FIELDS = 0.15  # Few enough for requests that the server accepts.
ANSWER_S = 60  # seconds in which every answer must arrive
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
JUNK = [None, True, False, -1, 0, 1, 1.5, 2**31, 2**63, -(2**70), "", "x", "\ud7ff", [], {}, [[]], [None], {"a": 1}]
GOOD: dict[str, list[object]] = {
    "model": ["moestro-demo"],
    "max_tokens": [1, 2, 4],
    "temperature": [0, 0.7, 2],
    "top_p": [0.1, 1],
    "top_k": [-1, 0, 5],
    "min_p": [0, 0.2],
    "seed": [0, -5, 2**63 - 1],
    "stop": ["a", ["x", "yz"], None],
    "n": [1, 2],
    "stream": [True, False],
    "presence_penalty": [-2, 0.5],
    "frequency_penalty": [0, 2],
    "repetition_penalty": [1, 1.3],
    "logit_bias": [{"5": 10}, {}],
    "min_tokens": [0, 1],
    "ignore_eos": [True, False],
    "stop_token_ids": [[1], []],
    "cache_salt": ["tenant"],
    "user": ["me"],
    "priority": [0],
    "service_class": ["ls", "be"],
    "response_format": [{"type": "text"}],
    "best_of": [1, 2],
    "stream_options": [{"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}],
    "prompt_logprobs": [0, 2],
    "bad_words": [["import"], []],
    "allowed_token_ids": [[5, 6, 7]],
    "skip_special_tokens": [True, False],
    "include_stop_str_in_output": [True, False],
    "return_token_ids": [True, False],
    "truncate_prompt_tokens": [1, 8],
    "request_id": ["mine"],
    "session_id": ["session"],
    "prompt_cache_key": ["key"],
    "guided_regex": ["a{1,3}"],
    "guided_choice": [["yes", "no"]],
    "guided_json": [{"type": "object", "properties": {"a": {"type": "integer"}}}],
    "guided_grammar": ['start: "a" | "b"'],
    "structured_outputs": [{"choice": ["yes", "no"]}],
}
ONLY = {
    "/v1/completions": {
        "prompt": ["def f(", "é😀\u202e", [5, 6, 7], ["a", "b"], [[5], [6, 7]]],
        "logprobs": [0, 3],
        "echo": [True, False],
    },
    "/v1/chat/completions": {
        "messages": [
            [{"role": "user", "content": "hi"}],
            [{"role": "user", "content": [{"type": "text", "text": "<|im_end|>"}]}],
        ],
        "logprobs": [True, False],
        "top_logprobs": [2],
        "max_completion_tokens": [2],
        "tools": [[{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]],
        "tool_choice": ["auto", "none", "required"],
        "parallel_tool_calls": [True, False],
        "reasoning_effort": ["low", "high"],
        "include_reasoning": [True, False],
        "chat_template_kwargs": [{"a": 1}],
        "continue_final_message": [True, False],
    },
    "/tokenize": {
        "prompt": ["abc"],
        "messages": [[{"role": "user", "content": "hi"}]],
        "return_token_strs": [True],
        "add_generation_prompt": [True, False],
        "add_special_tokens": [True, False],
    },
    "/detokenize": {"tokens": [[5, 6]]},
}
# A field of an API that has no values above gets junk alone.
FIELDS = {
    "/v1/completions": CompletionFields,
    "/v1/chat/completions": ChatFields,
    "/tokenize": TokenizeFields,
    "/detokenize": DetokenizeFields,
}


def make_request(seed: int, number: int) -> tuple[str, bytes, bool]:
    """Make a request: its path, its body, and whether the client disconnects early."""
    rng = random.Random(f"{seed}-{number}")
    path = rng.choices(list(ONLY), [6, 5, 1, 1])[0]
    needed = next(iter(ONLY[path]))
    fields = {needed: rng.choice(ONLY[path][needed]), "max_tokens": 2}
    broken = rng.random() < 0.5
    known = {**GOOD, **ONLY[path]}
    for name in sorted(known.keys() | FIELDS[path].__struct_fields__):
        is_junk = rng.random() < 0.4 if name in known else True
        if rng.random() < PART_OF_FIELDS and (broken or not is_junk):
            fields[name] = rng.choice(JUNK if is_junk else known[name])
    if broken and rng.random() < 0.3:
        fields.pop(rng.choice(list(fields)))
    if broken and rng.random() < 0.2:
        fields[rng.choice(["tools", "suffix", "guided_json", "surprise"])] = rng.choice(JUNK)
    body = json.dumps(fields).encode()
    if broken and rng.random() < 0.3:
        body = spoil(body, rng)
    return path, body, rng.random() < 0.03


def spoil(body: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.02:
        return body[:-1] + b', "%b": [%b1]}' % (rng.choice([b"stop", b"tools", b"messages", b"x"]), b"[1]," * 100_000)
    match rng.randrange(5):
        case 0:
            return body[: rng.randrange(len(body))]
        case 1:
            at = rng.randrange(len(body))
            return body[:at] + bytes([rng.randrange(256)]) + body[at + 1 :]
        case 2:
            return b"[" * rng.randrange(1, 5000)
        case 3:
            return body.replace(b"2", b"NaN")
        case _:
            return rng.randbytes(rng.randrange(64))


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "def f(", "max_tokens": 2}'
GOOD_REQUEST = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
# Whole requests that no server can serve; the server closes the connection after each.
EDGES = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x00" * 100,
    b"GET /version HTTP/1.1\r\n\r\n",
    b"GET /version HTTP/9.9\r\nHost: x\r\n\r\n",
    b"GET x y z HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /version HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    *(HEAD + line + b"\r\n\r\n" for line in (b"X: \x00", b"X : y", b"X: y\r\n z", b"X: " + b"x" * (1 << 17))),
    *(HEAD + line + b"\r\n\r\n" for line in (b"Content-Length: -1", b"Content-Length: 1\r\nContent-Length: 2")),
    *(HEAD + line + b"\r\n\r\n" for line in (b"Content-Length: 99999999999", b"Transfer-Encoding: chunked, gzip")),
    HEAD + b"Expect: 100-continue\r\nContent-Length: 99999999999\r\n\r\n",
    HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    *(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk for chunk in (b"zz\r\n", b"3\r\nabcdef\r\n", b"-1\r\n")),
)


async def edge(seed: int, number: int, port: int) -> str:
    """Send a request that no server can serve, sometimes behind a valid one, and return the statuses."""
    rng = random.Random(f"{seed}-{number}-edge")
    data, is_second = rng.choice(EDGES), rng.random() < 0.5
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write((GOOD_REQUEST if is_second else b"") + data)
        async with asyncio.timeout(ANSWER_S):
            with contextlib.suppress(ConnectionError):
                received = await reader.read()
    except TimeoutError:
        raise AssertionError(f"request {number} hangs: {data[:200]!r}") from None
    finally:
        writer.transport.abort()
    statuses = [int(status) for status in STATUS.findall(received)]
    assert len(statuses) == 1 + is_second, f"request {number}: {statuses} for {data[:200]!r}"
    assert not is_second or statuses[0] == 200, f"request {number}: {statuses} for {data[:200]!r}"
    assert 400 <= statuses[-1] < 500 or statuses[-1] == 501, f"request {number}: {statuses} for {data[:200]!r}"
    error = json.loads(received.rpartition(b"\r\n\r\n")[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}, f"request {number}: {error}"
    return f"edge {statuses[-1]}"


async def user(
    numbers: asyncio.Queue[int], seed: int, port: int, session: aiohttp.ClientSession, seen: Counter[str]
) -> None:
    while not numbers.empty():
        number = numbers.get_nowait()
        if number % 10 == 9:
            seen[await edge(seed, number, port)] += 1
            continue
        path, body, leaves = make_request(seed, number)
        url = f"http://127.0.0.1:{port}"
        timeout = aiohttp.ClientTimeout(total=0.01 if leaves else ANSWER_S)
        headers = {"Content-Type": "application/json"}
        try:
            async with session.post(url + path, data=body, headers=headers, timeout=timeout) as answer:
                text = await answer.text()
        except TimeoutError:
            assert leaves, f"request {number} hangs: {body!r}"
            seen["left"] += 1
            continue
        assert answer.status < 500, f"request {number}: {answer.status} {text[:300]} for {body!r}"
        if answer.status >= 400:
            error = json.loads(text)["error"]
            assert set(error) == {"message", "type", "param", "code"}, f"request {number}: {text[:300]}"
        elif "data: " in text[:6]:
            assert text.rstrip().endswith("data: [DONE]"), f"request {number}: a broken stream"
        seen[str(answer.status)] += 1


async def fuzz(num_requests: int, seed: int, port: int) -> Counter[str]:
    numbers: asyncio.Queue[int] = asyncio.Queue()
    for number in range(num_requests):
        numbers.put_nowait(number)
    seen: Counter[str] = Counter()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(user(numbers, seed, port, session, seen) for _ in range(USERS)))
    return seen


def router(engine: str) -> contextlib.AbstractContextManager[Server]:
    ports = ("--port", str(ROUTER_PORT), "--admin-port", str(ADMIN_PORT))
    return started([MOESTRO, "route", "--engine", engine, *ports], ROUTER_PORT)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--route", action="store_true", help="through moestro route")
    args = parser.parse_args()
    conditions = run_record("measured")
    with moestro(PORT) as server, router(server.url) if args.route else contextlib.nullcontext() as front:
        started = time.monotonic()
        seen = asyncio.run(fuzz(args.requests, args.seed, ROUTER_PORT if args.route else PORT))
        seconds = time.monotonic() - started
        server.wait_until_idle()
        assert server.process.poll() is None, "the server ended"
        assert front is None or front.process.poll() is None, "the router ended"
    settings = {"requests": args.requests, "seed": args.seed, "route": args.route}
    result = {**settings, "seconds": round(seconds, 1), **seen}
    print(json.dumps(result))
    save(args.json, conditions, result)


if __name__ == "__main__":
    main()
