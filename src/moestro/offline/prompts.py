"""Forms of prompts that `LLM.generate` takes, and the parameters of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moestro.errors import RequestError
from moestro.offline.sampling import OfflineSamplingParams

# A text, token ids, or a dictionary with `prompt` or `prompt_token_ids`.
Prompt = str | Sequence[int] | Mapping[str, Any]
Prompts = Prompt | Sequence[Prompt]
Params = OfflineSamplingParams | Sequence[OfflineSamplingParams] | None


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """One prompt: a text or token ids, and its parameters.

    Attributes:
        shown: Text of token ids, if it is known.
    """

    content: str | list[int]
    params: OfflineSamplingParams
    shown: str | None = None

    @property
    def text(self) -> str | None:
        """Text of the prompt, if it is known."""
        return self.content if isinstance(self.content, str) else self.shown


def given_prompts(prompts: Prompts, params: Params) -> list[GivenPrompt]:
    """Return all prompts with their parameters.

    Raises:
        RequestError: A prompt has none of the forms, or the numbers of prompts and of parameters differ.
    """
    is_one = isinstance(prompts, str | Mapping) or (bool(prompts) and isinstance(prompts[0], int))
    contents = [_content(each) for each in ([prompts] if is_one else prompts)]
    return [GivenPrompt(*pair) for pair in zip(contents, params_of_each(params, len(contents)), strict=True)]


def params_of_each(params: Params, count: int) -> list[OfflineSamplingParams]:
    """Return the parameters of each of `count` prompts; RequestError says that a list has another length."""
    if params is None or isinstance(params, OfflineSamplingParams):
        return [params or OfflineSamplingParams()] * count
    if len(params) != count:
        text = f"{count} prompts need as many sampling_params, or one for all; got {len(params)}"
        raise RequestError(text, param="sampling_params", code="invalid_value")
    return list(params)


def _content(prompt: object) -> str | list[int]:
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence) and all(isinstance(each, int) for each in prompt):
        return list(prompt)
    text = (
        f"a prompt is a text, token ids, or a dictionary with prompt or prompt_token_ids; got {type(prompt).__name__}"
    )
    raise RequestError(text, param="prompts", code="invalid_type")
