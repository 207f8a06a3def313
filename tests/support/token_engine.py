"""An engine with token ids in its streams, whose tokens are bytes: characters begin and end anywhere in them.

Its next token is a function of all tokens before, so that a continuation is right where it begins at the right token.
Chunks have the forms of vLLM ("vllm") and of Moestro ("moestro").
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CHAT = "/v1/chat/completions"
END_ID = 0
TEXTS = ("€", "ä", "日", "😀", " the", "a", " b", "c ", "\n", '"', "\\", "}", "{", "data:")
# Whole texts, and pieces of characters alone or behind a text.
VOCABULARY = (
    b"",
    *(text.encode() for text in TEXTS),
    *(bytes([each]) for each in sorted({byte for text in TEXTS[:4] for byte in text.encode()})),
    "x€".encode()[:2],
    "y😀".encode()[:3],
)
CONTEXT = 512


def next_id(before: list[int]) -> int:
    """The greedy token behind `before`: mostly whole texts, often a character in pieces."""
    spelt = b"".join(VOCABULARY[each] for each in before[-4:])
    for text in TEXTS[:4]:
        for num in range(len(text.encode()) - 1, 0, -1):
            if spelt.endswith(text.encode()[:num]):  # Continue a character.
                return VOCABULARY.index(text.encode()[num : num + 1])
    draw = zlib.crc32(repr(before[-40:]).encode() + bytes([len(before) % 251]))
    return END_ID if draw % 97 == 0 else 1 + draw % (len(VOCABULARY) - 1)


@dataclass
class TokenEngine:
    """Answers requests with the events of a stream.

    Attributes:
        form: Whose chunks it imitates.
        name: Makes its ids and times unlike those of others.
        groups: Returns how many tokens the next chunk has.
        has_ids: Whether it knows `return_token_ids`.
        bodies: Bodies that it got.
    """

    form: str = "vllm"
    name: str = "one"
    groups: Callable[[], int] = lambda: 1
    has_ids: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, path: str, raw: bytes) -> list[bytes]:
        """All events of the stream."""
        body = json.loads(raw)
        self.bodies.append(body)
        is_chat = path == CHAT
        prompt = self.prompt_ids(body, is_chat=is_chat)
        limit = body.get("max_completion_tokens", body.get("max_tokens"))
        limit = limit if limit is not None else CONTEXT - len(prompt) if is_chat else 16
        assert 1 <= limit <= CONTEXT - len(prompt), "a server refuses this"
        writer = _Writer(self, body, prompt, is_chat=is_chat)
        return writer.events(self.tokens(prompt, limit, body.get("min_tokens", 0)))

    def tokens(self, prompt: list[int], limit: int, least: int) -> tuple[list[int], str]:
        """The greedy answer, and why it ends."""
        ids = list(prompt)
        while len(ids) < len(prompt) + limit:
            token_id = next_id(ids)
            if token_id == END_ID and len(ids) - len(prompt) < least:
                token_id = 5
            ids.append(token_id)
            if token_id == END_ID:
                return ids[len(prompt) :], "stop"
        return ids[len(prompt) :], "length"

    def prompt_ids(self, body: dict[str, Any], *, is_chat: bool) -> list[int]:
        if is_chat:
            text = json.dumps(body["messages"])
        elif isinstance(body["prompt"], list):
            return body["prompt"]
        else:
            text = body["prompt"]
        return [1 + ord(char) % (len(VOCABULARY) - 1) for char in text]


class _Writer:
    """Writes the chunks of one answer."""

    def __init__(self, engine: TokenEngine, body: dict[str, Any], prompt: list[int], *, is_chat: bool) -> None:
        self.engine, self.body, self.prompt, self.is_chat = engine, body, prompt, is_chat
        self.has_ids = bool(body.get("return_token_ids")) and engine.has_ids
        self.options = body.get("stream_options") or {}
        self.num_tokens = 0
        number = len(engine.bodies)
        self.heading = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{engine.name}-{number}",
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": 1000 + number,
            "model": body.get("model", "m"),
        }

    def events(self, answer: tuple[list[int], str]) -> list[bytes]:
        ids, reason = answer
        made = [self._role()] if self.is_chat else []
        shown, held, at = "", b"", 0
        while at < len(ids):
            num = min(self.engine.groups(), len(ids) - at)
            new, at = ids[at : at + num], at + num
            text = ""
            for token_id in new:
                held += VOCABULARY[token_id]
                spelt = held.decode("utf-8", "replace")
                if not spelt.endswith("\ufffd") or len(held) > 8:
                    text, held = text + spelt, b""
            is_last = at == len(ids)
            if is_last:
                text += held.decode("utf-8", "replace")
            shown += text
            self.num_tokens = at
            made.append(self._chunk(text, new, reason if is_last else None, is_first=at == num))
        if self.options.get("include_usage"):
            made.append(self._event([], {"usage": self._usage()}))
        return [*made, b"data: [DONE]\n\n"]

    def _usage(self) -> dict[str, Any]:
        prompt, num = len(self.prompt), self.num_tokens
        counts = {"prompt_tokens": prompt, "completion_tokens": num, "total_tokens": prompt + num}
        return counts | {"prompt_tokens_details": {"cached_tokens": 0}}

    def _event(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        chunk = self.heading | {"choices": choices}
        if choices and self.options.get("continuous_usage_stats"):
            chunk["usage"] = self._usage()
        chunk |= more
        return b"data: " + json.dumps(chunk, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"

    def _role(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        more = {"prompt_token_ids": self.prompt if self.has_ids else None} if self.engine.form == "vllm" else {}
        if self.engine.form == "moestro":
            delta["reasoning"] = None
            more = {"prompt_token_ids": self.prompt} if self.has_ids else {}
        return self._event([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}], more)

    def _chunk(self, text: str, new: list[int], reason: str | None, *, is_first: bool) -> bytes:
        choice: dict[str, Any] = {"index": 0}
        if self.is_chat:
            choice["delta"] = {} if reason and not text else {"content": text}
            if self.engine.form == "moestro":
                choice["delta"]["reasoning"] = None
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": reason, "stop_reason": None}
        if not self.is_chat:
            choice["prompt_token_ids"] = self.prompt if self.has_ids and is_first else None
        choice["token_ids"] = new if self.has_ids else None
        return self._event([choice], {})


def random_groups(seed: int, most: int) -> Callable[[], int]:
    """Sizes of chunks up to `most` tokens, half of them single."""
    rng = random.Random(seed)
    return lambda: 1 if rng.random() < 0.5 else rng.randint(1, most)
