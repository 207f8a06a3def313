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
_CHARACTERS = 4  # of English text a token holds, about


class _Message(msgspec.Struct):
    who: str = msgspec.field(name="from")
    text: str = msgspec.field(name="value")


class _Conversation(msgspec.Struct):
    conversations: list[_Message]


def estimated_tokens(text: str) -> int:
    """About how many tokens `text` has, where no tokenizer is at hand: one for four characters."""
    return max(1, -(-len(text) // _CHARACTERS))


def first_turns(path: Path, document: str, limit: int | None = None) -> Rows:
    """What each conversation begins with, as prompts; conversations that do not begin with a user are left out.

    The answer's length is estimated from its text. `vllm bench` takes the same two messages of each.

    Raises:
        ConfigError: not of this form, or without a single answered question.
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
