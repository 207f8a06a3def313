"""Requests for completions of the demo model, whose answers can be compared to the character."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

TOKENS = 200
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.0, "seed": 2, "presence_penalty": 0.5},
)
PROMPTS = ("import", "def f(x):", "class A:")


def bodies(prompts: tuple[str, ...] = PROMPTS) -> list[dict[str, Any]]:
    """Return the bodies of requests of `TOKENS` tokens: each prompt, greedy and sampled with fixed seeds."""
    return [
        {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, **sampling}
        for prompt in prompts
        for sampling in SAMPLING
    ]


@dataclass
class Answer:
    """The answer to one request: its end, its text, and its tokens by the server's count.

    Attributes:
        chunks: of a stream, time.monotonic() of each chunk with text, and tokens of the answer up to it.
    """

    end: str = "LOST: a stream that ends without an end"
    text: str = ""
    num_tokens: int = 0
    chunks: list[tuple[float, int]] = field(default_factory=list)

    def longest_gap_s(self, since: float, until: float = float("inf")) -> float:
        """Return the longest gap between two chunks that contains `since` or lies in [since, until]; 0 if none does.

        A gap that begins in the interval and ends after it is left out, because it may belong to what came at `until`.
        """
        gaps = itertools.pairwise(at for at, _ in self.chunks)
        found = (after - before for before, after in gaps if since < after and (after <= until or before <= since))
        return max(found, default=0.0)


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any], *, stream: bool) -> Answer:
    """Send one request, and read its answer to the end."""
    answer = Answer()
    usage = {"include_usage": True, "continuous_usage_stats": True}
    options = {"stream": True, "stream_options": usage} if stream else {}
    try:
        async with session.post(f"{url}/v1/completions", json=body | options) as response:
            if response.status != 200:
                answer.end = f"refused with {response.status}"
            elif stream:
                await _read(response, answer)
            else:
                _take(answer, await response.json())
                answer.end = "answered whole"
    except TimeoutError:
        answer.end = "LOST: it hangs"
    except aiohttp.ClientError:
        answer.end = "cut off after it had begun" if answer.chunks else "not connected"
    return answer


async def _read(response: aiohttp.ClientResponse, answer: Answer) -> None:
    async for line in response.content:
        if line.startswith(b'data: {"error"'):
            answer.end = "error event after it had begun" if answer.chunks else "LOST: an error before it had begun"
            return
        if line.strip() == b"data: [DONE]":
            answer.end = "answered whole"
        elif line.startswith(b"data: "):
            chunk = json.loads(line[6:])
            _take(answer, chunk)
            if chunk["choices"]:  # the last chunk has the usage alone
                answer.chunks.append((time.monotonic(), answer.num_tokens))


def _take(answer: Answer, chunk: dict[str, Any]) -> None:
    answer.text += "".join(choice["text"] for choice in chunk["choices"])
    answer.num_tokens = (chunk.get("usage") or {}).get("completion_tokens", answer.num_tokens)


def judge(answer: Answer, expected: set[str] | None) -> str:
    """Name the end of a request, for counts.

    Args:
        answer: answer to judge.
        expected: undisturbed texts of the request. None means that the text may differ.
    """
    if answer.end != "answered whole":
        return answer.end
    if answer.num_tokens != TOKENS:
        return f"LOST or DOUBLED: {answer.num_tokens} tokens of {TOKENS}"
    if expected is not None and answer.text not in expected:
        return "DIFFERS from all undisturbed answers"
    return answer.end


def session(patience_s: float) -> aiohttp.ClientSession:
    """Return a session with any number of connections. A request that takes `patience_s` counts as hanging."""
    timeout = aiohttp.ClientTimeout(total=patience_s)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
