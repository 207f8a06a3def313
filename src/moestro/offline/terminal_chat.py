"""The chat of `moestro chat`, on a terminal or on pipes."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TextIO

import msgspec
from rich.console import Console

from moestro.errors import ConfigError, MoestroError, RequestError
from moestro.files.text_files import decoded
from moestro.offline.server import AnyServer, ApiClient, BackgroundLoop, UnreachableServerError

# A chat with one server: its messages, and streamed answers with their times.


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


HELP = """\
/reset        forget the chat, but not the system message
/system TEXT  set the system message and forget the chat; without TEXT, remove it
/exit         end, as Ctrl-D does
/help         show this
Ctrl-C ends an answer."""
# Control characters, with which an answer could command the terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class TerminalChat:
    """Reads messages, shows answers as they arrive, and obeys commands.

    Args:
        read: Function that returns the next line, with a prompt on a terminal; EOFError ends the chat.
        console: Where answers are shown. Times and errors are dim on a terminal.
    """

    def __init__(
        self, server: AnyServer, conversation: Conversation, read: Callable[[], str], console: Console
    ) -> None:
        self._server = server
        self._conversation = conversation
        self._read = read
        self._console = console
        self._loop = BackgroundLoop()
        self._shows_reasoning = False

    def run(self) -> None:
        """Chat until /exit or the end of the input.

        Raises:
            EngineDiedError: The server that was started for the chat has ended.
        """
        try:
            while (line := self._next_line()) is not None:
                if line.startswith("/"):
                    if not self._obey(line):
                        return
                elif line:
                    self._answer(line)
        finally:
            self._loop.close()

    def _next_line(self) -> str | None:
        """Return the next line; None at the end of the input."""
        while True:
            try:
                return self._read().strip()
            except EOFError:
                return None
            except KeyboardInterrupt:
                self._say("\n/exit or Ctrl-D ends the chat")

    def _obey(self, line: str) -> bool:
        """Carry out a command, and return whether the chat goes on."""
        name, _, rest = line.partition(" ")
        match name:
            case "/exit" | "/quit":
                return False
            case "/reset":
                self._conversation.reset()
                self._say("the chat is forgotten")
            case "/system":
                self._conversation.reset()
                self._conversation.system = rest.strip()
                self._say("the system message is set" if rest.strip() else "there is no system message")
            case "/help":
                self._say(HELP)
            case _:
                self._say(f"unknown command {name}: /help shows all")
        return True

    def _answer(self, text: str) -> None:
        self._shows_reasoning = False
        try:
            times = self._loop.run(self._stream(text))
        except KeyboardInterrupt:
            self._say("\ninterrupted")
        except MoestroError as error:
            self._server.raise_if_ended()
            self._say(f"error: {error}")
        else:
            self._say(f"\n[{times}]")

    async def _stream(self, text: str) -> AnswerTimes:
        async with self._server.client() as client:
            return await self._conversation.answer(client, text, self._show)

    def _show(self, new: ShownText) -> None:
        if self._shows_reasoning and not new.is_reasoning:
            self._console.out("\n")
        self._shows_reasoning = new.is_reasoning
        style = "dim" if new.is_reasoning else None
        self._console.out(_CONTROL.sub("", new.text), end="", style=style, highlight=False)
        self._console.file.flush()

    def _say(self, text: str) -> None:
        self._console.out(text, style="dim", highlight=False)


def first_model(server: AnyServer) -> str:
    """Return the name of the first model that the server lists.

    Raises:
        ConfigError: No server answers there, it needs a key, or it serves no model.
    """

    async def ask() -> str:
        async with server.client() as client:
            models = await client.models()
            return models[0].id if models else ""

    loop = BackgroundLoop()
    try:
        name = loop.run(ask())
    except (UnreachableServerError, RequestError) as error:
        raise ConfigError(f"--url {server.root}: {error}") from error
    finally:
        loop.close()
    if not name:
        raise ConfigError(f"{server.root} serves no model")
    return name


def line_reader() -> Callable[[], str]:
    """Return the function that reads a line of standard input; a terminal has a prompt and can edit the line.

    A pipe or a file may begin with a byte order mark, or be UTF-16, as programs of Windows write it.
    """
    if not sys.stdin.isatty():
        return _piped_line
    with contextlib.suppress(ImportError):  # Some builds of Python lack it.
        importlib.import_module("readline")  # `input` then edits lines, and has a history.
    return lambda: input(">>> ")


@cache
def _input() -> TextIO:
    # The unbuffered file, because a buffer around another waits until it is full, and a program may await an answer.
    return decoded(open(sys.stdin.fileno(), "rb", buffering=0, closefd=False))


def _piped_line() -> str:
    """Return the next line of standard input; EOFError at its end, ConfigError if it is no text."""
    try:
        line = _input().readline()
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is no text in UTF-8 or UTF-16: {error}") from None
    if not line:
        raise EOFError
    return line
