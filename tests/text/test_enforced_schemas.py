"""What a grammar enforces of clients' JSON schemas, compared with the grammar library and with a validator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.core.request import Grammar
from moestro.grammar.compiler import GrammarCompiler, GrammarError, VocabularySource
from moestro.text.parsing.answer_grammars import ENFORCED_FORMATS, enforced_arguments, enforced_schema

pytest.importorskip("llguidance")

CASES = Path(__file__).parents[3] / "shared" / "cases" / "13_formats_that_are_annotations.json"
FORMATS = """
    date-time time date duration email idn-email hostname idn-hostname ipv4 ipv6 uri uri-reference iri iri-reference
    uuid uri-template json-pointer relative-json-pointer regex password binary byte int32 int64 float double decimal
    color base64url ulid cidrv4 jwt phone
""".split()  # noqa: SIM905 one word after the other
STRING, INTEGER = {"type": "string"}, {"type": "integer"}
KIND_A = {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]}
KIND_B = {"type": "object", "properties": {"k": {"enum": ["b", "c"]}}, "required": ["k"]}


@pytest.fixture(scope="module")
def compiler(demo_dir: Path) -> GrammarCompiler:
    return GrammarCompiler(VocabularySource(demo_dir, 4096, (0,)))


def compiles(compiler: GrammarCompiler, schema: dict[str, Any]) -> bool:
    try:
        compiler.compile(Grammar("json_schema", json.dumps(schema)))
    except GrammarError:
        return False
    return True


def test_the_enforced_formats_are_those_of_the_library(compiler):
    known = {name for name in FORMATS if compiles(compiler, {"type": "string", "format": name})}
    assert known == ENFORCED_FORMATS


@pytest.mark.parametrize("name", FORMATS)
def test_no_format_is_refused_or_named(compiler, name):
    found = enforced_schema({"type": "array", "items": {"type": "string", "format": name}})
    assert compiles(compiler, found.schema)
    assert found.left_out == ()


@pytest.mark.skipif(not CASES.exists(), reason="the cases are not part of the repository")
def test_recorded_formats_are_annotations(compiler):
    for schema in json.loads(CASES.read_text()):
        assert compiles(compiler, enforced_schema(schema).schema)


@pytest.mark.parametrize(
    ("schema", "left_out"),
    [
        ({"type": "array", "uniqueItems": True}, ["uniqueItems"]),
        ({"properties": {"a": {"not": STRING}}}, ["properties.a.not"]),
        ({"$defs": {"a": {"propertyNames": {"pattern": "^a"}}}}, ["$defs.a.propertyNames"]),
        ({"items": [STRING, {"contains": STRING, "minContains": 2}]}, ["items[1].contains"]),
        ({"anyOf": [{"if": STRING, "then": STRING, "else": STRING}]}, ["anyOf[0].if"]),
        ({"dependentRequired": {"a": ["b"]}, "unevaluatedProperties": False}, None),
        ({"dependencies": {"a": ["b"]}, "dependentSchemas": {"a": STRING}}, None),
        ({"additionalProperties": {"pattern": "^(?!x)"}}, ["additionalProperties.pattern"]),
        ({"pattern": r"(a)\1"}, ["pattern"]),
        ({"pattern": r"\bword\b"}, ["pattern"]),
        ({"patternProperties": {"^(?=x)": STRING, "^a": STRING}}, ["patternProperties.^(?=x)"]),
        ({"$ref": "https://example.org/schema.json"}, ["$ref"]),
        ({"$dynamicRef": "#a", "$dynamicAnchor": "a"}, ["$dynamicRef"]),
        ({"oneOf": [STRING, {"type": "string", "minLength": 3}]}, ["oneOf"]),
        ({"oneOf": [INTEGER, {"type": "number"}]}, ["oneOf"]),
        ({"oneOf": [{"const": 1}, {"const": 1.0}]}, ["oneOf"]),
        ({"anyOf": [STRING, INTEGER], "oneOf": [STRING, {"minLength": 3}]}, ["oneOf"]),
        # Disjoint members of oneOf are enforced as they are.
        ({"oneOf": [STRING, INTEGER, {"type": "null"}]}, []),
        ({"oneOf": [{"const": 1}, {"const": 2}, {"enum": [3, "x"]}]}, []),
        ({"oneOf": [KIND_A, KIND_B]}, []),
        ({"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "$defs": {"A": KIND_A, "B": KIND_B}}, []),
        # Values that limit nothing have no name.
        ({"uniqueItems": False, "propertyNames": STRING, "unevaluatedProperties": True, "if": STRING}, []),
        ({"contains": STRING, "minContains": 0, "maxItems": 2, "type": "array"}, []),
        ({"pattern": r"^[a\]\b]+\\b[(?=]$"}, []),
    ],
)
def test_keywords_without_a_grammar_are_named_and_the_rest_compiles(compiler, schema, left_out):
    found = enforced_schema(schema)
    expected = sorted(schema) if left_out is None else left_out
    assert sorted(found.left_out) == expected
    has_class_escape = r"\b]" in str(schema)  # The library has no such escape; the reading of classes is tested.
    assert has_class_escape or compiles(compiler, found.schema)


@pytest.mark.parametrize(
    "parameters",
    [
        None, {}, {"type": "object"}, {"type": ["object", "null"]}, {"properties": {"a": STRING}}, {"type": "string"},
        {"type": "array", "items": STRING}, {"anyOf": [{"type": "null"}, KIND_A]}, {"oneOf": [KIND_A, KIND_B]},
        {"$ref": "#/$defs/A", "$defs": {"A": KIND_A}}, {"description": "x"}, {"not": STRING}, {"format": "password"},
    ],
)  # fmt: skip
def test_arguments_are_an_object_whatever_the_schema_says(compiler, parameters):
    found = enforced_arguments(parameters)
    assert found.schema["type"] == "object"
    matcher = compiler.compile(Grammar("json_schema", json.dumps(found.schema)))
    allowed = matcher.compute_logit_bias()
    first = {text for text in '{["1tn-' if allowed[compiler._tokenizer.tokenize_str(text)[-1]]}
    assert first == {"{"}


def test_a_type_that_is_no_object_is_named():
    assert enforced_arguments({"type": "string", "not": {}}).left_out == ("type", "not")
    assert enforced_arguments({"type": ["null", "object"]}).left_out == ()


def test_comparisons_of_many_members_are_bounded():
    members = [{"const": i} for i in range(5000)]
    assert enforced_schema({"oneOf": members}).left_out == ("oneOf",)
    wide = {"type": "object", "required": [str(i) for i in range(40)]}
    wide["properties"] = {str(i): {"$ref": "#"} for i in range(40)}
    assert enforced_schema(wide | {"oneOf": [{"$ref": "#/$defs/w"}] * 2, "$defs": {"w": wide}}).left_out == ("oneOf",)


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    words = st.sampled_from(["a", "b"])
    leaf = st.one_of(
        st.sampled_from([{"type": "string"}, {"type": "integer"}, {"type": "null"}, {"type": "object"}, {}]),
        st.builds(lambda v: {"const": v}, st.sampled_from([1, 2, "a", None])),
        st.builds(lambda v: {"enum": v}, st.lists(st.sampled_from([1, 2, "a", "b"]), min_size=1, unique=True)),
        st.builds(lambda v: {"minLength": v}, st.integers(0, 3)),
    )

    def thing(properties: dict[str, Any], required: list[str], is_closed: bool) -> dict[str, Any]:
        closed = {"additionalProperties": False} if is_closed else {}
        return {"type": "object", "properties": properties, "required": required} | closed

    def deeper(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        return st.one_of(
            st.builds(lambda v: {"oneOf": v}, st.lists(inner, min_size=1, max_size=3)),
            st.builds(lambda v: {"not": v}, inner),
            st.builds(thing, st.dictionaries(words, inner, max_size=2), st.lists(words, unique=True), st.booleans()),
            st.builds(lambda i, u: {"type": "array", "items": i, "uniqueItems": u}, inner, st.booleans()),
        )

    return st.recursive(leaf, deeper, max_leaves=6)


VALUES = st.recursive(
    st.sampled_from([None, 1, 2, "a", "b", "abc"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2)
    ),
    max_leaves=5,
)


@given(schemas(), VALUES)
def test_a_reduced_schema_takes_every_value_of_the_first_and_no_other_unless_it_names_a_keyword(schema, value):
    found = enforced_schema(schema)
    before, after = (jsonschema.Draft202012Validator(each).is_valid(value) for each in (schema, found.schema))
    assert after or not before
    assert found.left_out or after == before
