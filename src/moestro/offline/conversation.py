"""A chat with one server: its messages, and streamed answers with their times."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from moestro.offline.api_client import ApiClient


@dataclass(frozen=True, slots=True)
class ShownText:
    """New text of an answer. Reasoning precedes the content, and is not sent back to the model."""

    text: str
    is_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """Length and times of an answer.

    Attributes:
        num_tokens: Generated tokens, as the server counts them.
        first_s: Seconds from the request to the first text.
        rest_s: Seconds from the first text to the last.
        finish_reason: Reason for the end; "length" means that the answer is cut off.
    """

    num_tokens: int
    first_s: float
    rest_s: float
    finish_reason: str | None

    def __str__(self) -> str:
        rate = (
            f", then {(self.num_tokens - 1) / self.rest_s:.1f} tokens/s" if self.num_tokens > 1 and self.rest_s else ""
        )
        cut = ", cut off at max_tokens or at the end of the context" if self.finish_reason == "length" else ""
        return f"{self.num_tokens} tokens, the first after {self.first_s:.2f} s{rate}{cut}"


class _StreamedDelta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _StreamedChoice(msgspec.Struct):
    delta: _StreamedDelta
    finish_reason: str | None = None


class _StreamedUsage(msgspec.Struct):
    completion_tokens: int


class _StreamedChunk(msgspec.Struct):
    choices: list[_StreamedChoice]
    usage: _StreamedUsage | None = None


_decode = msgspec.json.Decoder(_StreamedChunk).decode


@dataclass(slots=True)
class Conversation:
    """The messages of a chat, and how the model answers.

    Attributes:
        fields: Further fields of each request: model, temperature, max_tokens and others.
        system: Text of the system message; empty means none.
        turns: Messages of user and assistant, in order.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)

    def reset(self) -> None:
        """Forget all messages but the system's."""
        self.turns.clear()

    async def answer(self, client: ApiClient, text: str, show: Callable[[ShownText], None]) -> AnswerTimes:
        """Add `text` and the model's answer to the chat; `show` receives the answer as it arrives.

        A cancelled answer stays as far as it was shown. After an error the chat is as before.

        Raises:
            RequestError: The server refuses the chat, for instance because it is longer than the context.
            UnreachableServerError: There is no answer, or it breaks off.
        """
        num_before, reply = len(self.turns), []
        self.turns.append({"role": "user", "content": text})
        first_s, last_s, num_tokens, reason = 0.0, 0.0, 0, None
        sent_s = time.monotonic()
        try:
            async for data in client.stream("/v1/chat/completions", self._body()):
                chunk = _decode(data)
                num_tokens = num_tokens if chunk.usage is None else chunk.usage.completion_tokens
                for choice in chunk.choices:
                    reason = choice.finish_reason or reason
                    for each in _texts(choice.delta):
                        last_s = time.monotonic()
                        first_s = first_s or last_s
                        show(each)
                        reply += [] if each.is_reasoning else [each.text]
        except Exception:
            del self.turns[num_before:]
            raise
        finally:
            if len(self.turns) > num_before:
                self.turns.append({"role": "assistant", "content": "".join(reply)})
        return AnswerTimes(num_tokens, max(0.0, first_s - sent_s), last_s - first_s, reason)

    def _body(self) -> bytes:
        system = [{"role": "system", "content": self.system}] if self.system else []
        streaming = {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode(self.fields | streaming | {"messages": system + self.turns})


def _texts(delta: _StreamedDelta) -> list[ShownText]:
    reasoning = delta.reasoning_content or delta.reasoning
    found = [ShownText(reasoning, is_reasoning=True)] if reasoning else []
    return [*found, ShownText(delta.content)] if delta.content else found
