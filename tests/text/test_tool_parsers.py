"""Parsers of tool calls: recorded answers of each format, at every split, and broken ones."""

from __future__ import annotations

import random

import pytest
from support.model_outputs import ANSWERS, BROKEN, TOOLS, Parsed

from moestro.text.parsing.answer_parser import AnswerParser, merged
from moestro.text.parsing.output_parser import TOOL_PARSERS

CASES = [(name, *case) for table in (ANSWERS, BROKEN) for name, cases in table.items() for case in cases]
IDS = [f"{name}-{i}" for i, (name, *_) in enumerate(CASES)]


def parsed(name: str, pieces: list[str]) -> Parsed:
    parser = AnswerParser(None, TOOL_PARSERS.make(name)(TOOLS))
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    whole = merged(parts)
    return Parsed(whole.content, whole.reasoning, tuple((call.name, call.arguments) for call in whole.calls))


def test_every_format_has_recorded_answers_and_broken_ones():
    assert set(TOOL_PARSERS.names()) == {*ANSWERS, "openai"}
    assert TOOL_PARSERS.make("openai") is TOOL_PARSERS.make("gpt-oss")
    assert set(BROKEN) == set(ANSWERS)


@pytest.mark.parametrize(("name", "text", "expected"), CASES, ids=IDS)
def test_an_answer_gives_the_same_however_it_is_split(name, text, expected):
    assert parsed(name, [text]) == expected
    assert parsed(name, list(text)) == expected
    for at in range(len(text)):
        assert parsed(name, [text[:at], text[at:]]) == expected, at


@pytest.mark.parametrize("name", TOOL_PARSERS.names())
def test_garbage_of_the_formats_own_pieces_never_raises_and_gives_the_same_however_it_is_split(name):
    rng = random.Random(7)
    tool_parser = TOOL_PARSERS.make(name)
    bits = [
        *tool_parser.MARKERS,
        *tool_parser.STARTS,
        *' \n{}[]":,;xé日\\',
        '"name"',
        '"arguments"',
        "ping",
        "<",
        "to=functions.ping",
    ]
    for _ in range(300):
        text = "".join(rng.choices(bits, k=rng.randrange(1, 25)))
        whole = parsed(name, [text])
        cut = sorted(rng.sample(range(len(text) + 1), min(4, len(text))))
        pieces = [text[a:b] for a, b in zip([0, *cut], [*cut, len(text)], strict=True)]
        assert parsed(name, pieces) == whole == parsed(name, list(text)), text


@pytest.mark.parametrize("name", TOOL_PARSERS.names())
def test_text_without_markers_passes_at_once(name):
    parser = AnswerParser(None, TOOL_PARSERS.make(name)(TOOLS))
    shown = [merged(parser.feed(word)).content for word in ("Hello", " wor", "ld. 1")]
    assert shown == ["Hello", " wor", "ld. 1"]


def test_arguments_are_streamed_before_the_call_ends():
    parser = AnswerParser(None, TOOL_PARSERS.make("hermes")(TOOLS))
    assert parser.feed('<tool_call>{"name": "ping"')[0].name == "ping"
    assert [part.arguments for part in parser.feed(', "arguments": {"a": "lo')] == ['{"a": "lo']
    parser = AnswerParser(None, TOOL_PARSERS.make("qwen3_coder")(TOOLS))
    parser.feed("<tool_call>\n<function=write_file>\n<parameter=text>\nfirst ")
    assert "".join(part.arguments for part in parser.feed("line\nsecond")) == "line\\nsecond"


@pytest.mark.parametrize("name", TOOL_PARSERS.names())
def test_a_long_answer_takes_a_time_that_grows_with_its_length_alone(name):
    """Counts what the input scans: a parser that looks at its whole text for each piece would look a million times."""
    tool_parser = TOOL_PARSERS.make(name)
    starts = {
        "hermes": '<tool_call>{"name": "ping", "arguments": {"a": "',
        "qwen3_coder": "<function=get_weather><parameter=place>",
        "glm45": "<tool_call>ping<arg_key>a</arg_key><arg_value>",
        "llama3_json": '{"parameters": {"a": "',
        "pythonic": "[ping(a='",
    }
    parser = AnswerParser(None, tool_parser(TOOLS))
    parser.feed(starts.get(name, tool_parser.STARTS[0]))
    for _ in range(2000):
        parser.feed("x<y ")
        assert len(parser._calls._input._text) < 400


def test_ids_differ_and_have_the_form_that_templates_accept():
    for name, num_chars in (("hermes", 29), ("mistral", 9)):
        text = {"hermes": ANSWERS["hermes"][1][0], "mistral": ANSWERS["mistral"][2][0]}[name]
        parser = AnswerParser(None, TOOL_PARSERS.make(name)(TOOLS))
        ids = [call.id for call in merged(parser.feed(text) + parser.finish()).calls]
        assert len(set(ids)) == 2
        assert all(len(each) == num_chars and each.replace("_", "").isalnum() for each in ids)
    parser = AnswerParser(None, TOOL_PARSERS.make("mistral")(TOOLS))
    assert merged(parser.feed(ANSWERS["mistral"][3][0])).calls[0].id == "VvvODy9mT"


def test_calls_after_the_first_are_dropped_where_one_is_wanted():
    parser = AnswerParser(None, TOOL_PARSERS.make("hermes")(TOOLS), is_parallel=False)
    calls = merged(parser.feed(ANSWERS["hermes"][1][0]) + parser.finish()).calls
    assert [call.name for call in calls] == ["get_weather"]
    assert parser.finish_reason("stop") == "tool_calls"
    assert parser.finish_reason("length") == "length"
