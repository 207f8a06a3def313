"""The clients of `soak.py`: honest ones, whose answers are compared with an undisturbed server's, and bad ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
from disconnects import leave_early
from fuzz import make_request

sys.path.insert(0, str(Path(__file__).with_name("strangers")))
from grammars import late_repeats, literals, repeats
from gzip_bomb import bodies
from nasty_json import nasty_body

HANGS_S = 180.0
KEY = "soak-key"
_PROMPTS = (
    "def read_file(path):\n",
    "import os\n\nclass Reader:\n",
    "# Ünïcödé: 漢字 🎻\nx = '",
    "for i in range(10):\n    ",
)
_EXPLAINING = {503, 429}


@dataclass(frozen=True, slots=True)
class Case:
    """One request, and the promise for it when its engine dies.

    Attributes:
        name: kind of the request, for the report.
        resumes: whether its answer must be complete and unchanged after the loss of one engine.
    """

    name: str
    path: str
    body: dict[str, object]
    resumes: bool = True


def cases() -> Iterator[Case]:
    """Yield every kind of request, with fixed seeds."""
    for number, prompt in enumerate(_PROMPTS):
        base = {"prompt": prompt, "max_tokens": 48, "ignore_eos": True, "temperature": 0}
        sampled = {**base, "temperature": 0.8, "seed": number, "presence_penalty": 0.3}
        chat = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 40, "temperature": 0}
        usage = {"stream_options": {"include_usage": True}}
        yield Case("greedy stream", "/v1/completions", {**base, "stream": True, **usage})
        yield Case("seeded stream", "/v1/completions", {**sampled, "stream": True})
        yield Case("chat stream", "/v1/chat/completions", {**chat, "stream": True})
        yield Case("best-effort stream", "/v1/completions", {**base, "stream": True, "service_class": "be"})
        yield Case("long best-effort", "/v1/completions", {**base, "prompt": prompt * 60, "service_class": "be"})
        yield Case("whole", "/v1/completions", base)
        yield Case("three choices", "/v1/completions", {**sampled, "n": 3})
        yield Case("log probabilities", "/v1/completions", {**base, "logprobs": 2, "max_tokens": 16})
        streamed = {**base, "logprobs": 2, "stream": True}
        yield Case("stream with log probabilities", "/v1/completions", streamed, resumes=False)
        yield Case("stream of two choices", "/v1/completions", {**sampled, "n": 2, "stream": True}, resumes=False)


@dataclass(slots=True)
class Answer:
    """The end of a request.

    Attributes:
        end: "answered", "refused 503", "error event", "cut off", "not connected" or "HANGS".
        text: text of each choice, with its finish reason.
    """

    end: str
    text: dict[int, str] = field(default_factory=dict)
    detail: str = ""


async def ask(session: aiohttp.ClientSession, url: str, case: Case) -> Answer:
    """Send one request and read its answer to the end."""
    headers = {"Authorization": f"Bearer {KEY}"}
    try:
        async with session.post(url + case.path, json=case.body, headers=headers) as answer:
            if answer.status != 200:
                return Answer(f"refused {answer.status}", detail=(await answer.text())[:300])
            if case.body.get("stream"):
                return await _read_stream(answer)
            found: dict[int, str] = {}
            _collect(found, await answer.json())
            return Answer("answered", found)
    except TimeoutError:
        return Answer("HANGS")
    except aiohttp.ClientConnectorError as error:
        return Answer("not connected", detail=str(error))
    except aiohttp.ClientError as error:
        return Answer("cut off", detail=repr(error))


async def _read_stream(answer: aiohttp.ClientResponse) -> Answer:
    found: dict[int, str] = {}
    try:
        async for line in answer.content:
            if line.startswith(b'data: {"error"'):
                return Answer("error event", found, line.decode()[:300])
            if line.strip() == b"data: [DONE]":
                return Answer("answered", found)
            if line.startswith(b"data: "):
                _collect(found, json.loads(line[6:]))
    except aiohttp.ClientError as error:
        return Answer("cut off", found, repr(error))
    return Answer("cut off", found, "a stream that ends without [DONE]")


def _collect(found: dict[int, str], chunk: dict) -> None:
    for choice in chunk.get("choices", ()):
        shown = choice.get("text")
        if shown is None:
            shown = choice.get("delta", choice.get("message")).get("content") or ""
        ended = f"<{choice['finish_reason']}>" if choice.get("finish_reason") else ""
        found[choice["index"]] = found.get(choice["index"], "") + shown + ended


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The end of a request that was not answered, to be compared with the faults.

    Attributes:
        target: server that received the request.
        how: end, as in `Answer`.
        began: time.monotonic() at which the request was sent.
        resumes: promise, as in `Case`.
    """

    target: str
    how: str
    began: float
    resumes: bool = False


@dataclass(slots=True)
class Findings:
    """Ends of all requests, and those that no fault explains.

    Attributes:
        ends: ends of honest requests, by kind and end.
        unexplained: honest requests whose end no fault explains, and bad ones that were answered wrongly.
    """

    ends: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)
    unexplained: list[dict[str, object]] = field(default_factory=list)

    def blame(self, **what: object) -> None:
        """Record an unexplained event."""
        self.unexplained.append({"at": time.strftime("%H:%M:%S"), **what})
        print("UNEXPLAINED", json.dumps(self.unexplained[-1]), flush=True)


@dataclass(slots=True)
class Clients:
    """Runs clients until `stop` is set.

    Attributes:
        targets: URL of each server, by name.
        expected: answers of an undisturbed server, by case.
        is_explained: whether a fault explains an end.
    """

    targets: dict[str, str]
    expected: dict[int, dict[int, str]]
    is_explained: Callable[[End], bool]
    findings: Findings
    stop: asyncio.Event

    async def honest(self, seed: int) -> None:
        """Run one user who sends a request, checks its answer, and repeats."""
        rng, all_cases = random.Random(f"honest-{seed}"), list(cases())
        timeout = aiohttp.ClientTimeout(total=HANGS_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)) as session:
            while not self.stop.is_set():
                number, target = rng.randrange(len(all_cases)), rng.choice(list(self.targets))
                case, began = all_cases[number], time.monotonic()
                answer = await ask(session, self.targets[target], case)
                self._judge(number, case, target, answer, began)
                await asyncio.sleep(rng.expovariate(2.0))

    def _judge(self, number: int, case: Case, target: str, answer: Answer, began: float) -> None:
        self.findings.ends[f"{case.name}: {answer.end}"] += 1
        where = {"case": case.name, "target": target, "seconds": round(time.monotonic() - began, 1)}
        if answer.end == "answered":
            if answer.text != self.expected[number]:
                self.findings.blame(**where, end="DIFFERS", got=answer.text, expected=self.expected[number])
        elif not self.is_explained(End(target=target, how=answer.end, began=began, resumes=case.resumes)):
            self.findings.blame(**where, end=answer.end, detail=answer.detail)

    async def broken_bodies(self, seed: int) -> None:
        """Run one client that sends the requests of `fuzz.py`."""
        number = 0

        def make() -> tuple[str, str, dict[str, str], bytes]:
            nonlocal number
            number += 1
            path, body, _ = make_request(seed, number)
            return "broken body", path, {}, body

        await self._post_forever(seed, make, pause_s=0.2)

    async def strangers(self, seed: int) -> None:
        """Run one client that sends packed bombs, any JSON, and grammars that cost seconds."""
        rng = random.Random(f"strangers-{seed}")
        packed = list(bodies().items())

        def make() -> tuple[str, str, dict[str, str], bytes]:
            match rng.randrange(3):
                case 0:
                    name, (coding, body) = rng.choice(packed)
                    return f"packed, {name}", "/v1/completions", {"Content-Encoding": coding}, body
                case 1:
                    path = rng.choice(("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"))
                    return "any JSON", path, {}, nasty_body(rng, path)
            fields = {"prompt": "x", "max_tokens": 4} | rng.choice((repeats, late_repeats, literals))(rng)
            return "grammar", "/v1/completions", {}, json.dumps(fields).encode()

        await self._post_forever(seed, make, pause_s=0.3)

    async def _post_forever(
        self, seed: int, make: Callable[[], tuple[str, str, dict[str, str], bytes]], pause_s: float
    ) -> None:
        """Send the requests (kind, path, headers, body) that `make` returns, one after the other."""
        rng = random.Random(f"targets-{seed}")
        timeout = aiohttp.ClientTimeout(total=HANGS_S)
        known = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)) as session:
            while not self.stop.is_set():
                target, (kind, path, headers, body) = rng.choice(list(self.targets)), make()
                began = time.monotonic()
                try:
                    async with session.post(self.targets[target] + path, data=body, headers=known | headers) as answer:
                        await answer.read()
                        end = f"refused {answer.status}" if answer.status >= 400 else "answered"
                except TimeoutError:
                    end = "HANGS"
                except aiohttp.ClientError as error:
                    end = "not connected" if isinstance(error, aiohttp.ClientConnectorError) else "cut off"
                if kind == "grammar" and end == "refused 503":
                    end = "answered"  # Too many new grammars at once are refused as overload.
                self._judge_bad(kind, target, end, began, body)
                await asyncio.sleep(pause_s)

    def _judge_bad(self, kind: str, target: str, end: str, began: float, sent: bytes) -> None:
        self.findings.bad[f"{kind}: {end}"] += 1
        is_fine = end in ("answered", "closed") or end.startswith(("refused 4", "refused 501"))
        if not is_fine and not self.is_explained(End(target=target, how=end, began=began)):
            self.findings.blame(kind=kind, target=target, end=end, sent=repr(sent[:200]))

    async def leavers(self, seed: int) -> None:
        """Run one client that disconnects at random moments."""
        rng = random.Random(f"leave-{seed}")
        while not self.stop.is_set():
            place = urlsplit(rng.choice(list(self.targets.values())))
            with contextlib.suppress(OSError):
                self.findings.bad[await leave_early(place.hostname or "", place.port or 80, rng)] += 1
            await asyncio.sleep(0.1)

    async def garbage(self, seed: int) -> None:
        """Run one client that sends broken HTTP."""
        rng = random.Random(f"garbage-{seed}")
        while not self.stop.is_set():
            target, (kind, data) = rng.choice(list(self.targets)), rng.choice(list(GARBAGE.items()))
            began = time.monotonic()
            end = await _send_raw(self.targets[target], data)
            self._judge_bad(kind, target, end, began, data)
            await asyncio.sleep(0.3)


async def _send_raw(url: str, data: bytes) -> str:
    """Send bytes and return the first status, or "closed" if the connection ends without one."""
    place = urlsplit(url)
    try:
        async with asyncio.timeout(HANGS_S):
            reader, writer = await asyncio.open_connection(place.hostname, place.port)
            with contextlib.closing(writer):
                writer.write(data)
                status = await reader.readline()
                return f"refused {int(status.split()[1])}" if status.startswith(b"HTTP/1.") else "closed"
    except TimeoutError:
        return "HANGS"
    except ConnectionRefusedError:
        return "not connected"
    except (OSError, ValueError, IndexError):
        return "closed"


def _post(path: bytes, *heads: bytes, body: bytes = b"") -> bytes:
    lines = (b"POST " + path + b" HTTP/1.1", b"Authorization: Bearer " + KEY.encode(), *heads)
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


_CHUNKED = (b"Host: x", b"Content-Type: application/json", b"Transfer-Encoding: chunked")
_COMPLETIONS = b"/v1/completions"
GARBAGE: dict[str, bytes] = {
    "a NUL in a header": _post(_COMPLETIONS, b"Host: x", b"X-A: a\0b", b"Content-Length: 0"),
    "two hosts": _post(_COMPLETIONS, b"Host: x", b"Host: y", b"Content-Length: 0"),
    "two keys": _post(_COMPLETIONS, b"Host: x", b"Authorization: Bearer z", b"Content-Length: 0"),
    "no host": _post(_COMPLETIONS, b"Content-Length: 0"),
    "gzip, chunked": _post(_COMPLETIONS, b"Host: x", b"Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n"),
    "length and chunks": _post(_COMPLETIONS, *_CHUNKED, b"Content-Length: 3", body=b"0\r\n\r\n"),
    "unknown Expect": _post(_COMPLETIONS, b"Host: x", b"Expect: the-unexpected", b"Content-Length: 2", body=b"{}"),
    "a huge length": _post(_COMPLETIONS, b"Host: x", b"Content-Length: 99999999999", b"Expect: 100-continue"),
    "a megabyte of trailers": _post(_COMPLETIONS, *_CHUNKED, body=b"2\r\n{}\r\n0\r\n" + b"X-T: y\r\n" * 130_000),
    "a megabyte of heads": _post(_COMPLETIONS, b"Host: x", *[b"X-H: y"] * 150_000),
    "a megabyte of chunk extension": _post(_COMPLETIONS, *_CHUNKED, body=b"2;" + b"e" * 1_000_000),
    "many logit biases": _post(
        _COMPLETIONS,
        b"Host: x",
        b"Content-Type: application/json",
        b"Content-Length: 2400030",
        body=b'{"prompt": "a", "logit_bias":{' + b'"1": 1.00000,' * 184_616,
    ),
    "an administrator's path, encoded": _post(b"/v1/%6coad_lora_adapter", b"Host: x", b"Content-Length: 0"),
    "an administrator's path, dotted": _post(b"/v1/x/../load_lora_adapter", b"Host: x", b"Content-Length: 0"),
    "no HTTP at all": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
}  # fmt: skip
