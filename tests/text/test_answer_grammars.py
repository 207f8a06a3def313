"""Grammars of forced calls and of answers after reasoning: what llguidance accepts is what the parsers read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.model_outputs import PARIS, PING, TOOLS, WEATHER, harmony

from moestro.core.request import Grammar
from moestro.grammar.compiler import GrammarCompiler, VocabularySource
from moestro.text.chats.chat_format import ChatEnd, ChatFormat, ToolUse, chat_format
from moestro.text.parsing.answer_grammars import after_thought, thought_rules
from moestro.text.parsing.answer_parser import merged
from moestro.text.parsing.output_parser import ToolSpec
from moestro.text.settings import ChatSettings

llguidance = pytest.importorskip("llguidance")

REQUIRED = ToolUse(choice="required", tools=TOOLS)
NEW, OPEN = ChatEnd(prompt="<|im_start|>assistant\n"), ChatEnd(prompt="assistant\n<think>\n")
WEATHER_CALL = '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}'


def test_tags_may_be_special_tokens(vocabulary):
    for is_open, before in ((True, "Hm. {<|end|>\n"), (False, "<|start|>Hm.<|end|>"), (False, "")):
        rules = thought_rules("<|start|>", "<|end|>", is_open=is_open, is_special=True)
        assert accepts(vocabulary, after_thought(Grammar("json_object"), rules), before + "{}")


@pytest.fixture(scope="module")
def vocabulary(demo_dir: Path, tmp_path_factory):
    """The demo's vocabulary, and harmony's special tokens."""
    tokenizer = json.loads((demo_dir / "tokenizer.json").read_text())
    first = 1 + max(tokenizer["model"]["vocab"].values())
    for i, word in enumerate(("start", "channel", "message", "end", "call", "return", "constrain")):
        token = {"id": first + i, "content": f"<|{word}|>", "special": True}
        rest = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append(token | rest)
    return llguidance.LLTokenizer(json.dumps(tokenizer), eos_token=[2])


def accepts(vocabulary, grammar: Grammar, text: str) -> bool:
    """Whether `text` is complete in the language of `grammar`."""
    matcher = llguidance.LLMatcher(vocabulary, llguidance.grammar_from(grammar.kind, grammar.text))
    assert not matcher.get_error(), matcher.get_error()
    tokens = vocabulary.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def calls_of(answers, text: str) -> list[tuple[str, object]]:
    parser = answers.parser()
    parts = [part for char in text for part in parser.feed(char)] + parser.finish()
    return [(call.name, json.loads(call.arguments)) for call in merged(parts).calls]


def test_required_calls_are_a_list_in_which_each_follows_its_tool(vocabulary):
    answers = ChatFormat().answers(REQUIRED, NEW)
    two = f'[{WEATHER_CALL}, {{"name": "ping", "parameters": {{}}}}]'
    assert accepts(vocabulary, answers.grammar, two)
    assert calls_of(answers, two) == [("get_weather", {"city": "Paris", "days": 3}), ("ping", {})]
    for wrong in ("[]", "Hi", WEATHER_CALL, '[{"name": "other", "parameters": {}}]', two.replace("3", '"3"')):
        assert not accepts(vocabulary, answers.grammar, wrong), wrong
    alone = ChatFormat().answers(ToolUse(choice="required", tools=TOOLS, is_parallel=False), NEW)
    assert accepts(vocabulary, alone.grammar, f"[{WEATHER_CALL}]")
    assert not accepts(vocabulary, alone.grammar, two)


def test_a_named_tool_is_its_arguments_alone(vocabulary):
    answers = ChatFormat().answers(ToolUse(choice="named", tools=(WEATHER,)), NEW)
    assert accepts(vocabulary, answers.grammar, PARIS[1])
    assert calls_of(answers, PARIS[1]) == [("get_weather", {"city": "Paris", "days": 3})]
    assert answers.parser().finish_reason("stop") == "stop"
    nothing = ChatFormat().answers(ToolUse(choice="named", tools=(PING,)), NEW)
    assert accepts(vocabulary, nothing.grammar, "{}")
    assert not accepts(vocabulary, nothing.grammar, '{"a": 1}')


def test_engines_allow_no_spaces_but_pythons_in_the_arguments_of_a_named_tool(vocabulary, demo_dir):
    grammar = ChatFormat().answers(ToolUse(choice="named", tools=(WEATHER,)), NEW).grammar
    matcher = GrammarCompiler(VocabularySource(demo_dir, 4096, (2,))).compile(grammar)
    for text in (PARIS[1].replace("{", "{ "), PARIS[1].replace(",", ",\n"), PARIS[1].replace(":", " :")):
        tokens = vocabulary.tokenize_str(text)
        assert matcher.deep_copy().try_consume_tokens(tokens) < len(tokens), text
    tokens = vocabulary.tokenize_str(PARIS[1])
    assert matcher.try_consume_tokens(tokens) == len(tokens)


def test_names_are_quoted_in_grammars(vocabulary):
    odd = ToolSpec('a"b\\c/日{}', {"type": "object", "properties": {"::=": {"const": 1}}, "required": ["::="]})
    answers = ChatFormat().answers(ToolUse(choice="required", tools=(odd,)), NEW)
    text = f'[{{"name": {json.dumps(odd.name)}, "parameters": {{"::=": 1}}}}]'
    assert accepts(vocabulary, answers.grammar, text)
    assert calls_of(answers, text) == [(odd.name, {"::=": 1})]


def test_reasoning_precedes_forced_calls(vocabulary):
    form = chat_format(ChatSettings(reasoning_parser="qwen3"))
    opened, new = form.answers(REQUIRED, OPEN), form.answers(REQUIRED, NEW)
    text = f'Which "city"? [\n</think>\n\n[{WEATHER_CALL}]'
    assert accepts(vocabulary, opened.grammar, text)
    assert calls_of(opened, text)[0][0] == "get_weather"
    assert not accepts(vocabulary, opened.grammar, f"[{WEATHER_CALL}]")
    assert accepts(vocabulary, new.grammar, f"<think>{text}")
    assert accepts(vocabulary, new.grammar, f"[{WEATHER_CALL}]")
    named = form.answers(ToolUse(choice="named", tools=(PING,)), OPEN)
    assert accepts(vocabulary, named.grammar, "Hm.</think>\n{}")


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (
            Grammar("json_schema", '{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}'),
            '{"a": 1}',
            "{}",
        ),
        (Grammar("json_object"), "{}", "[]"),
        (Grammar("regex", r"a/b\/[0-9]+"), "a/b/12", "a/b"),
        (Grammar("choice", '["yes \\"y\\"", "no"]'), 'yes "y"', "maybe"),
        (Grammar("lark", 'start: "x" tail\ntail: "y"'), "xy", "x"),
    ],
)
def test_reasoning_precedes_every_kind_of_grammar(vocabulary, grammar, right, wrong):
    assert after_thought(grammar, "") is grammar
    opened, new = (thought_rules("<think>", "</think>", is_open=is_open, is_special=False) for is_open in (True, False))
    for thought, before in (
        (opened, "Hm {\n</think>\n"),
        (new, ""),
        (new, "<think>x</think>"),
    ):
        whole = after_thought(grammar, thought)
        assert accepts(vocabulary, whole, before + right)
        assert not accepts(vocabulary, whole, before + wrong)


def test_gpt_oss_is_forced_in_its_own_format(vocabulary):
    form = chat_format(ChatSettings(tool_call_parser="gpt-oss"))
    answers = form.answers(REQUIRED, NEW)
    call = harmony("commentary to=functions.get_weather <|constrain|>json", PARIS[1], "")
    analysed = f"{harmony('analysis', 'Hm. {')}<|start|>assistant{call}"
    for text in (call, analysed):
        assert accepts(vocabulary, answers.grammar, text)
        assert calls_of(answers, text) == [("get_weather", {"city": "Paris", "days": 3})]
    assert not accepts(vocabulary, answers.grammar, harmony("final", "Hi.", ""))
    limited = form.answers(ToolUse(), NEW, Grammar("choice", '["yes", "no"]'))
    assert accepts(
        vocabulary, limited.grammar, f"{harmony('analysis', 'Hm.')}<|start|>assistant{harmony('final', 'yes', '')}"
    )
    assert not accepts(vocabulary, limited.grammar, "yes")
