"""The parsers against canitoolcall, a suite of answers from models' templates and from the tests of other engines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from moestro.text.chats.chat_format import ChatEnd, ChatFormat, ToolUse
from moestro.text.parsing.answer_parser import AnswerParser, merged
from moestro.text.parsing.output_parser import REASONING_PARSERS, TOOL_PARSERS, ToolSpec

SUITE = find_spec("canitoolcall")
pytestmark = pytest.mark.skipif(SUITE is None, reason="canitoolcall is not installed")
# Family of the suite -> the parsers of calls and of reasoning.
PARSERS = {
    "deepseek": ("deepseek_v3", None),
    "glm": ("glm45", "glm45"),
    "gpt-oss": ("gpt-oss", "gpt-oss"),
    "llama": ("llama3_json", None),
    "mistral": ("mistral", "mistral"),
    "qwen3-hermes": ("hermes", "qwen3"),
    "qwen3-xml": ("qwen3_coder", "qwen3"),
}
# Answers that are read in another way, and why.
DIFFERENT = {
    "qwen3-hermes/truncated-second-parallel-call": "a stream has sent the beginning of a cut call already",
    "glm/glm47-missing-last-close-arg-value": "a value may hold the end tag of the call",
    "gpt-oss/llamacpp-builtin-python-recipient": "a message to no tool of the request is content, not lost",
    "gpt-oss/harmony-marker-in-reasoning": "markers that are spelt in ordinary tokens look the same in text",
    "mistral/vllm-v11-think-text": "the tags are those of tokenizer v13",
}
OTHER_FORMATS = ("x-deepseek-v32", "x-deepseek-v4", "x-deepseek-v41")


def answers() -> Iterator[tuple[dict[str, Any], str]]:
    """Answers of the suite in formats that have a parser here, each with the end of its prompt."""
    if SUITE is None or SUITE.origin is None:
        return
    for family in PARSERS:
        directory = Path(SUITE.origin).parent / "_data" / "fixtures" / family
        models = json.loads((directory / "family.json").read_text())["reference_models"]
        prompts = {model["repo"]: model.get("default_generation_prompt", "") for model in models}
        for file in sorted(directory.glob("*.jsonl")):
            for answer in map(json.loads, file.read_text().splitlines()):
                if not any(tag in answer["tags"] for tag in OTHER_FORMATS):
                    yield answer, answer.get("generation_prompt") or prompts.get(answer["models"][0], "")


def read(answer: dict[str, Any], prompt: str, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    calls, reasoning = PARSERS[answer["family"]]
    if "x-deepseek-v31" in answer["tags"]:
        calls = "deepseek_v31"
    if "x-llama-pythonic" in answer["tags"]:
        calls = "pythonic"
    form = ChatFormat(
        calls=TOOL_PARSERS.make(calls), reasoning=reasoning and REASONING_PARSERS.make(reasoning), allows_auto=True
    )
    given = [tool["function"] for tool in answer["tools"]]
    tools = tuple(ToolSpec(tool["name"], tool.get("parameters") or {}) for tool in given)
    made = form.answers(ToolUse(choice="auto", tools=tools) if tools else ToolUse(), ChatEnd(prompt=prompt))
    parser = AnswerParser(None, None) if made is None else made.parser()
    whole = merged([part for piece in pieces for part in parser.feed(piece)] + parser.finish())
    return whole.content.strip(), whole.reasoning.strip(), [(call.name, call.arguments) for call in whole.calls]


@pytest.mark.parametrize(("answer", "prompt"), [pytest.param(*each, id=each[0]["id"]) for each in answers()])
def test_answers_are_read_as_the_suite_expects_whole_and_streamed(answer, prompt):
    text = answer["raw_output"]
    content, reasoning, calls = read(answer, prompt, [text])
    assert read(answer, prompt, list(text)) == (content, reasoning, calls)
    if (expected := answer.get("expected")) is None or answer["id"] in DIFFERENT:
        return  # A cut answer: the suite accepts several readings.
    assert content == (expected["content"] or "").strip()
    assert reasoning == (expected["reasoning_content"] or "").strip()
    wanted = [(call["name"], call["arguments"]) for call in expected["tool_calls"]]
    assert [(name, json.loads(arguments)) for name, arguments in calls] == wanted


def test_the_suite_has_the_answers_that_differ():
    assert DIFFERENT.keys() <= {answer["id"] for answer, _ in answers()}
