"""ShareGPT's conversations: a JSON array, `[{"conversations": [{"from": "human", "value": ...}, ...]}, ...]`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from moestro.errors import ConfigError
from moestro.workload.files import open_lines
from moestro.workload.rows import Rows
from moestro.workload.sessions import Sessions, grown

_USERS = {"human", "user"}
_ANSWERS = {"gpt", "chatgpt", "bing", "bard", "assistant"}
_CHARACTERS = 4  # characters of English text in a token, roughly


class _Message(msgspec.Struct):
    who: str = msgspec.field(name="from")
    text: str = msgspec.field(name="value")


class _Conversation(msgspec.Struct):
    conversations: list[_Message]


def estimated_tokens(text: str) -> int:
    """Estimate the tokens of `text` without a tokenizer: one for four characters."""
    return max(1, -(-len(text) // _CHARACTERS))


def first_turns(path: Path, document: str, limit: int | None = None) -> Rows:
    """First message of each conversation as a prompt; conversations that do not begin with a user are left out.

    The answer's length is estimated from its text. `vllm bench` uses the same two messages of each conversation.

    Raises:
        ConfigError: the file has another form, or holds no answered question.
    """
    prompts: list[str] = []
    lengths: list[int] = []
    num_left_out = 0
    for messages in _conversations(path, document):
        roles = [message.who for message in messages[:2]]
        if len(roles) < 2 or roles[0] not in _USERS or roles[1] not in _ANSWERS or not messages[0].text:
            num_left_out += 1
            continue
        prompts.append(messages[0].text)
        lengths.append(estimated_tokens(messages[1].text))
        if len(prompts) == limit:
            break
    if not prompts:
        raise ConfigError(f"{path} holds no conversation that begins with a question and its answer")
    return Rows(
        num_prompt_tokens=np.zeros(len(prompts), np.int64),
        num_output_tokens=np.array(lengths, np.int64),
        texts=tuple(prompts),
        num_left_out=num_left_out,
    )


def read_conversations(
    path: Path, think_ns: int, count_tokens: Callable[[str], int] = estimated_tokens, limit: int | None = None
) -> Sessions:
    """Conversations turn by turn, one user each, all starting at 0. `Sessions.starting` gives them start times.

    Everything said before the first answer, or between two answers, is the input of the turn that follows. Messages
    after the last answer are left out.

    Args:
        think_ns: time from the end of an answer to the next question, because the file has no times.
        count_tokens: function from a text to its tokens; the default estimates.
        limit: number of conversations to read, counting those with an answer; None means all.

    Raises:
        ConfigError: the file has another form, or holds no answer.
    """
    inputs: list[int] = []
    outputs: list[int] = []
    first = [0]
    with open_lines(path) as lines:
        document = lines.read()
    for messages in _conversations(path, document):
        for num_input, num_output in _turns(messages, count_tokens):
            inputs.append(num_input)
            outputs.append(num_output)
        if len(inputs) > first[-1]:
            first.append(len(inputs))
        if len(first) - 1 == limit:
            break
    if not inputs:
        raise ConfigError(f"{path} holds no answered question")
    return grown(np.array(first, np.int64), np.array(inputs, np.int64), np.array(outputs, np.int64), think_ns)


def _turns(messages: list[_Message], count_tokens: Callable[[str], int]) -> Iterator[tuple[int, int]]:
    pending = 0
    has_question = False
    for message in messages:
        num_tokens = count_tokens(message.text) if message.text else 0
        if message.who in _ANSWERS and has_question and pending and num_tokens:
            yield pending, num_tokens
            pending, has_question = 0, False
        else:
            pending += num_tokens
            has_question |= message.who in _USERS


def _conversations(path: Path, document: str) -> Iterator[list[_Message]]:
    try:
        for each in msgspec.json.decode(document, type=list[_Conversation]):
            yield each.conversations
    except msgspec.DecodeError as error:
        raise ConfigError(
            f'{path}: expected a JSON array of {{"conversations": [{{"from": "human", "value": "..."}}]}}: {error}'
        ) from None
