"""ShareGPT's conversations: a JSON array, `[{"conversations": [{"from": "human", "value": ...}, ...]}, ...]`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from moestro.errors import ConfigError
from moestro.workload.rows import Rows

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


def _conversations(path: Path, document: str) -> Iterator[list[_Message]]:
    try:
        for each in msgspec.json.decode(document, type=list[_Conversation]):
            yield each.conversations
    except msgspec.DecodeError as error:
        raise ConfigError(
            f'{path}: expected a JSON array of {{"conversations": [{{"from": "human", "value": "..."}}]}}: {error}'
        ) from None
