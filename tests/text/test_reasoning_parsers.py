"""Parsers of reasoning: what the prompt opened or closed, tags of the model, and calls after or within it."""

from __future__ import annotations

import pytest
from support.model_outputs import PARIS, TOOLS, Parsed, harmony, hermes

from moestro.text.parsing.answer_parser import AnswerParser, merged
from moestro.text.parsing.output_parser import REASONING_PARSERS, TOOL_PARSERS

OPEN, CLOSED = "<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"
NEW = "say <think> and </think><|im_end|>\n<|im_start|>assistant\n"
CALL = hermes(*PARIS)

# Parser, end of the prompt, text that the answer continues, answer, what a client gets.
CASES = [
    ("qwen3", NEW, None, "<think>\nHm.\n</think>\n\nHi.", Parsed("Hi.", "Hm.")),
    ("qwen3", NEW, None, "\n<think>Hm", Parsed("", "Hm")),
    ("qwen3", NEW, None, "Hi, <think> is a tag.</think>", Parsed("Hi, <think> is a tag.</think>")),
    ("qwen3", NEW, None, "<thin", Parsed("<thin")),
    ("qwen3", OPEN, None, "Hm.\n</think>\n\nHi.\n", Parsed("Hi.\n", "Hm.")),
    ("qwen3", OPEN, None, "Hm. 日é🙂 </thi", Parsed("", "Hm. 日é🙂 </thi")),
    ("qwen3", CLOSED, None, "Hi.", Parsed("Hi.")),
    ("qwen3", CLOSED, None, "<think>No</think>", Parsed("<think>No</think>")),
    ("qwen3", OPEN, None, f"Hm.</think>\n\nI look.\n{CALL}", Parsed("I look.", "Hm.", (PARIS,))),
    ("qwen3", OPEN, None, f"Hm.\n{CALL}", Parsed("", "Hm.", (PARIS,))),
    ("qwen3", OPEN, None, f"Like {CALL}, no.</think>Hi.", Parsed("Hi.", f"Like {CALL}, no.")),
    ("qwen3", OPEN, None, f"A <tool_call> tag.\n{CALL}", Parsed("", "A <tool_call> tag.", (PARIS,))),
    ("qwen3", OPEN, None, "A <tool_call> tag.</think>Hi.", Parsed("Hi.", "A <tool_call> tag.")),
    ("qwen3", OPEN, None, f"{hermes('pong', '{}')} no.", Parsed("", f"{hermes('pong', '{}')} no.")),
    ("glm45", NEW, None, f"\n<think>Hm.</think>\n{CALL}", Parsed("", "Hm.", (PARIS,))),
    ("deepseek_r1", NEW, None, "Hm.\n</think>\n\nHi.", Parsed("Hi.", "Hm.")),
    ("deepseek_r1", NEW, None, "<think>\nHm.\n</think>Hi.", Parsed("Hi.", "Hm.")),
    ("deepseek_r1", NEW, None, f"Hm, {CALL}", Parsed("", f"Hm, {CALL}")),
    ("qwen3", "any", "<think>Hm, ", "yes.</think>Hi.", Parsed("Hi.", "yes.")),
    ("deepseek_r1", "any", "<think>Hm</think>He", "llo.", Parsed("llo.")),
    ("deepseek_r1", "any", "He", "llo.", Parsed("llo.")),
    (
        "gpt-oss", NEW, None,
        f"{harmony('analysis', 'Hm.')}<|start|>assistant{harmony('final', 'Hi.', '')}",
        Parsed("Hi.", "Hm."),
    ),
]  # fmt: skip


def parsed(name, prompt, continued, pieces) -> Parsed:
    tool_parser = TOOL_PARSERS.make("hermes")
    reasoning = REASONING_PARSERS.make(name)(prompt, continued, lambda: tool_parser(TOOLS))
    parser = AnswerParser(reasoning, tool_parser(TOOLS))
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    whole = merged(parts)
    return Parsed(whole.content, whole.reasoning, tuple((call.name, call.arguments) for call in whole.calls))


@pytest.mark.parametrize(("name", "prompt", "continued", "text", "expected"), CASES)
def test_reasoning_is_parted_from_the_answer_however_it_is_split(name, prompt, continued, text, expected):
    assert parsed(name, prompt, continued, [text]) == expected
    assert parsed(name, prompt, continued, list(text)) == expected
    for at in range(len(text)):
        assert parsed(name, prompt, continued, [text[:at], text[at:]]) == expected, at


def test_hidden_reasoning_is_dropped_and_still_counted():
    parser = AnswerParser(REASONING_PARSERS.make("qwen3")(OPEN), None, shows_reasoning=False)
    assert parser.is_reasoning is False  # Nothing has come yet.
    assert parser.feed("Hm") == []
    assert parser.is_reasoning
    assert merged(parser.feed("</think>Hi") + parser.finish()).content == "Hi"
    assert not parser.is_reasoning
