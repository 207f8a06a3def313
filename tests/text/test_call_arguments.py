"""The arguments of a call are a JSON object in every format, whatever the model writes, streamed and whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.model_outputs import deepseek, glm, harmony, hermes, qwen

from moestro.text.json_text import MAX_ARGUMENT_DEPTH, ObjectText
from moestro.text.parsing.answer_parser import AnswerParser, merged
from moestro.text.parsing.output_parser import TOOL_PARSERS, ToolSpec

TOOLS = (ToolSpec("f", {}),)
TYPED = ToolSpec("f", {"type": "object", "properties": {"s": {"type": "string"}, "v": {}}})


def spelt(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_json_calls(arguments: str) -> str:
    return f'{{"name": "f", "arguments": {arguments}}}'


# Format -> text of a call of `f` with arguments as the model writes them.
JSON_FORMATS = {
    "hermes": lambda text: hermes("f", text),
    "llama3_json": as_json_calls,
    "granite": lambda text: f"<|tool_call|>[{as_json_calls(text)}]",
    "mistral": lambda text: f"[TOOL_CALLS]f[ARGS]{text}",
    "deepseek_v3": lambda text: deepseek(("f", text)),
    "deepseek_v31": lambda text: deepseek(("f", text), version="v31"),
    "gpt-oss": lambda text: harmony("commentary to=functions.f <|constrain|>json", text, "<|call|>"),
}
TAG_FORMATS = {"qwen3_coder": qwen, "glm45": glm}

letters = st.text(st.characters(codec="utf-8"), max_size=12)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | letters,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(letters, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(letters, values, max_size=4)


def pieces_of(data: st.DataObject, text: str) -> list[str]:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def call_in(name: str, pieces: list[str], tools=TOOLS) -> dict[str, Any]:
    parser = AnswerParser(None, TOOL_PARSERS.make(name)(tools))
    whole = merged([part for piece in pieces for part in parser.feed(piece)] + parser.finish())
    assert parser.finish_reason("stop") == "tool_calls", whole
    assert (whole.content.strip(), len(whole.calls)) == ("", 1)
    return object_of(whole.calls[0].arguments)


def object_of(text: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        assert len(found) == len(pairs), "a key came twice"
        return found

    value = json.loads(text, object_pairs_hook=unique)
    assert isinstance(value, dict)
    text.encode()
    return value


def test_the_formats_of_this_test_are_all_formats():
    assert {*JSON_FORMATS, *TAG_FORMATS, "pythonic", "openai"} == set(TOOL_PARSERS.names())


@pytest.mark.parametrize("name", JSON_FORMATS)
@given(arguments=objects, escapes=st.booleans(), data=st.data())
def test_arguments_arrive_as_the_model_wrote_them(name, arguments, escapes, data):
    text = JSON_FORMATS[name](json.dumps(arguments, ensure_ascii=escapes))
    if "<\uff5c" in json.dumps(arguments, ensure_ascii=False):
        return  # DeepSeek's tokens cannot be spelt in its arguments.
    assert call_in(name, pieces_of(data, text)) == arguments == call_in(name, [text])


@pytest.mark.parametrize("name", JSON_FORMATS)
@given(inner=letters, data=st.data())
def test_control_characters_and_repeated_keys_are_mended(name, inner, data):
    raw = inner.replace("\\", "").replace('"', "").replace("<", "")
    text = JSON_FORMATS[name](f'{{"a": "{raw}\n\t", "b": [{{"x": 1, "x": [2]}}], "a": {{"c": "d"}}, "e": 2}}')
    wanted = {"a": f"{raw}\n\t", "b": [{"x": 1}], "e": 2}
    assert call_in(name, pieces_of(data, text)) == wanted == call_in(name, [text])


@pytest.mark.parametrize("name", TAG_FORMATS)
@given(text=letters, value=values, data=st.data())
def test_tagged_arguments_are_an_object(name, text, value, data):
    if any(mark in each for mark in "<" for each in (text, spelt(value))):
        return
    written = TAG_FORMATS[name]("f", s=text, v=spelt(value))
    found = call_in(name, pieces_of(data, written), (TYPED,))
    assert found == call_in(name, [written], (TYPED,))
    assert found == {"s": text, "v": value} or isinstance(found["v"], str)


@given(arguments=st.dictionaries(st.sampled_from("abcde"), values, max_size=4), data=st.data())
def test_python_literals_become_json(arguments, data):
    inner = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    text = f"[f({inner})]"
    assert call_in("pythonic", pieces_of(data, text)) == arguments == call_in("pythonic", [text])


@pytest.mark.parametrize("name", [*JSON_FORMATS, *TAG_FORMATS, "pythonic"])
def test_a_call_without_arguments_has_an_empty_object(name):
    if name in TAG_FORMATS:
        texts = [TAG_FORMATS[name]("f")]
    elif name == "pythonic":
        texts = ["[f()]"]
    else:
        texts = [JSON_FORMATS[name](each) for each in ("{}", "null", '"{}"', '"x"', "[1]", "")]
        if name in ("hermes", "llama3_json", "granite"):
            texts[-1] = texts[-1].replace(', "arguments": ', "")
    for text in texts:
        assert call_in(name, [text]) == {} == call_in(name, list(text)), text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('{"a": 1', '{"a": 1}'),
        ('{"a": {"b": ["c', '{"a": {"b": ["c"]}}'),
        ('{"a": ', "{}"),
        ('{"a": 1,}', '{"a": 1}'),
        ('{"a": True, "b": Paris, "c": 01}', '{"a": true, "b": "Paris", "c": "01"}'),
        ('{"a": "\\x \\\' \\ud800 \\ud83d\\ude00 \\u12"}', '{"a": "\\\\x \' \\ufffd \\ud83d\\ude00 \\\\u12"}'),
        ('{"a": 1} and more', '{"a": 1}'),
        ('"{\\"a\\": 1}"', '{"a": 1}'),
        ("{'a': 1}", "{}"),
        ('{"a": ' * 400, None),
    ],
)
def test_broken_arguments_are_mended(text, shown):
    for pieces in ([text], list(text)):
        writer = ObjectText()
        made = "".join(map(writer.feed, pieces)) + writer.close()
        assert made == shown or (shown is None and object_of(made) and made.count("{") == MAX_ARGUMENT_DEPTH)


@given(pieces=st.lists(st.sampled_from([*'{}[]:,"\\u\n', '"a"', '"b": ', "12", "True", "d83d", "x"]), max_size=30))
def test_any_text_gives_an_object_whose_beginning_is_never_taken_back(pieces):
    writer, whole = ObjectText(), ObjectText()
    made = "".join(map(writer.feed, pieces)) + writer.close()
    object_of(made)
    assert whole.feed("".join(pieces)) + whole.close() == made
