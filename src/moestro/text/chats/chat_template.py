"""Chat templates: the messages and variables that they read, and the child processes that render them.

A template may loop for ever or exhaust memory, so it runs in no process that serves others. The API server keeps the
child processes warm. Each renders one chat at a time.
"""

from __future__ import annotations

import logging
import signal
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Any

import msgspec

from moestro.errors import DrainingError, RequestError, shown
from moestro.text.child_process import MessageProcess
from moestro.text.json_text import decoded

logger = logging.getLogger(__name__)

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # In rising order.
DEFAULT_EFFORT = "medium"  # Many clients always send it, so it requests nothing where a template knows no efforts.
# Variables of a template that an effort sets.
EFFORT_VARIABLE, THINKING_VARIABLE = "reasoning_effort", "enable_thinking"

# (effort) -> None. Raises RequestError if the template refuses the effort.
Trial = Callable[[str], None]


def taken_efforts(trial: Trial) -> tuple[str, ...]:
    """Return the efforts that a chat template takes, in rising order.

    Templates state their efforts only by refusing others, so each effort is tried. A template that refuses all of them
    refuses the trial's messages for another reason, so it counts as one that takes all.

    Args:
        trial: Renders a short chat with an effort.
    """
    taken = []
    for effort in EFFORTS:
        try:
            trial(effort)
        except RequestError:
            continue
        taken.append(effort)
    return tuple(taken) or EFFORTS


def nearest_effort(wanted: str, taken: Sequence[str]) -> str | None:
    """Return the effort of `taken` that is nearest to `wanted`; of two the higher one. None if `taken` is empty."""
    return min(
        taken,
        key=lambda effort: (abs(EFFORTS.index(effort) - EFFORTS.index(wanted)), -EFFORTS.index(effort)),
        default=None,
    )


def calls_for_templates(calls: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls with their arguments as objects, which chat templates expect; clients send them as text.

    Text that is no JSON object becomes an empty one, as in vLLM: a model wrote it in an earlier turn, and a refusal
    would end the whole conversation.
    """
    return [_with_object(call) for call in calls]


def as_system_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the role `system` in place of `developer`, for templates that do not know the latter.

    Messages that then follow each other as `system` become one, because many templates take only one.
    """
    made: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "developer":
            made.append(message)
        elif made and made[-1]["role"] == "system":
            made[-1] = made[-1] | {"content": f"{made[-1]['content']}\n\n{message['content']}"}
        else:
            made.append(message | {"role": "system"})
    return made


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    value = decoded(arguments) if isinstance(arguments, str) else arguments
    return {**call, "function": {**function, "arguments": value if isinstance(value, dict) else {}}}


def template_variables(effort: str | None, given: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of a chat template. As in vLLM, an effort also turns thinking on or off.

    Args:
        effort: Effort of reasoning; None leaves it to the template.
        given: Variables of the request, which override all others.
        defaults: Variables of the operator.
    """
    if effort is None:
        return defaults | given
    return defaults | {EFFORT_VARIABLE: effort, THINKING_VARIABLE: effort != "none"} | given


# Messages between the API server and the processes that render chat templates, and the limits of a rendering.

TIME_LIMIT_S = 5.0  # for one rendering; an ordinary chat takes less than a millisecond
MEMORY_LIMIT_BYTES = 1 << 30  # address space of a rendering process beyond that of an idle one
TEXT_LIMIT_BYTES = 64 << 20  # for a rendered chat; twice the largest body of a request


class RenderJob(msgspec.Struct, frozen=True):
    """One chat to render."""

    template: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]  # by name; the special tokens among them, which templates insert


class Rendered(msgspec.Struct, frozen=True, tag=True):
    """The prompt."""

    text: str


class TemplateRefused(msgspec.Struct, frozen=True, tag=True):
    """The template raised an error."""

    message: str


class LimitExceeded(msgspec.Struct, frozen=True, tag=True):
    """The template exceeded a limit. `limit`: the limit and its unit."""

    limit: str


RenderAnswer = Rendered | TemplateRefused | LimitExceeded


# Rendering, as the API server sees it.

_COMMAND = (sys.executable, "-m", "moestro.text.chats.template_worker")
_encode = msgspec.json.Encoder().encode  # of what clients wrote: msgpack has no integers beyond 64 bits
_decode_answer = msgspec.msgpack.Decoder(RenderAnswer).decode


class TemplateLimitError(RequestError):
    """Rendering these messages exceeds the template's limit of time, memory or text.

    The template is at fault, and the status is a 400 nevertheless. Clients and routers repeat a request after a 5xx and
    count the failure against the engine, and here each repetition would end in the same way.

    Args:
        limit: the exceeded limit.
    """

    def __init__(self, limit: str) -> None:
        super().__init__(
            f"The model's chat template takes more than {limit} for these messages. Send fewer or other messages, or"
            " send the prompt as text to /v1/completions. The operator can correct the template.",
            param="messages",
            code="chat_template_limit",
        )


class Renderers:
    """Renders chats in several processes. Safe to call from several threads.

    The number of processes is the largest number of chats rendered at once. None outlives this object.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._idle: list[MessageProcess] = []
        self._busy: set[MessageProcess] = set()
        self._end = weakref.finalize(self, _end_all, self._idle, self._busy)

    def warm(self) -> None:
        """Start a process before the first chat arrives, because a start takes half a second."""
        with self._lock:
            if not self._idle:
                self._idle.append(MessageProcess(_COMMAND))

    def render(self, job: RenderJob) -> str:
        """Return the prompt that the job's template makes of its messages.

        Raises:
            TemplateLimitError: the template takes too much time, memory or text.
            RequestError: the template refuses these messages.
            DrainingError: the server is shutting down.
        """
        renderer = self._take()
        try:
            answer = _answer_of(renderer.exchange(_encode(job)))
            if isinstance(answer, LimitExceeded):
                renderer.close()  # its remaining memory must not reach another chat
        finally:
            self._give_back(renderer)
        match answer:
            case Rendered(text):
                return text
            case TemplateRefused(message):
                text = f"The model's chat template refuses these messages: {shown(message)}"
                raise RequestError(text, param="messages")
            case LimitExceeded(limit):
                logger.warning("the chat template takes more than %s for a client's messages", limit)
                raise TemplateLimitError(limit)

    def close(self) -> None:
        """End all processes. A chat in progress is refused."""
        with self._lock:
            self._end()

    def _take(self) -> MessageProcess:
        """Take an idle renderer, or start one if all are busy."""
        with self._lock:
            if not self._end.alive:
                raise DrainingError
            while self._idle and not self._idle[-1].is_alive:  # something outside of the server ended it
                self._idle.pop().close()
            renderer = self._idle.pop() if self._idle else MessageProcess(_COMMAND)
            self._busy.add(renderer)
            return renderer

    def _give_back(self, renderer: MessageProcess) -> None:
        """Return a renderer. A dead one is replaced at once, so that the next chat finds a warm one."""
        with self._lock:
            self._busy.remove(renderer)
            is_open = self._end.alive
            if is_open and renderer.is_alive:
                self._idle.append(renderer)
                return
            renderer.close()
            if is_open:
                self._idle.append(MessageProcess(_COMMAND))


def _answer_of(message: bytes | int) -> RenderAnswer:
    """Decode an answer. Of a process that died, the answer names the exceeded limit."""
    if isinstance(message, bytes):
        answer: RenderAnswer = _decode_answer(message)
        return answer
    if message == -signal.SIGALRM:
        return LimitExceeded(f"{TIME_LIMIT_S:g} s")
    return LimitExceeded(f"the rendering process can bear (status {message})")


def _end_all(idle: list[MessageProcess], busy: set[MessageProcess]) -> None:
    for renderer in idle:
        renderer.close()
    for renderer in busy:
        renderer.kill()  # the thread that waits for it closes it
