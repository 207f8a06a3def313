"""Grammars of each kind, what they allow, and the ones that do not compile."""

from __future__ import annotations

import json

import numpy as np
import pytest

from moestro.core.request import Grammar
from moestro.grammar.compiler import MAX_JSON_SPACES, GrammarCompiler, GrammarError, VocabularySource
from moestro.grammar.host import MaskJob
from moestro.grammar.host_process import MatcherTable


@pytest.fixture(scope="module")
def compiler(demo_dir):
    return GrammarCompiler(VocabularySource(demo_dir, 4096, (0, 2)))


@pytest.fixture(scope="module")
def accepts(compiler, tokenizer):
    """Whether a text is a complete one of a grammar."""

    def ask(kind: str, grammar: str, text: str) -> bool:
        matcher = compiler.compile(Grammar(kind, grammar))
        ids = tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return ask


SCHEMA = json.dumps({"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]})
EBNF = 'root ::= "a" | "b" root'
LARK = 'start: "a" | "b" start'


@pytest.mark.parametrize(
    ("kind", "grammar", "good", "bad"),
    [
        ("json_object", "", ['{"q": [1, null]}', "{}"], ["[]", "1", '{"q"}', ""]),
        ("json_schema", SCHEMA, ['{"a": "x"}', '{\n  "a": "y"\n}'], ['{"a": "z"}', "{}", '{"a": "x"']),
        ("regex", r"[a-f]{2}\d?", ["ab", "cd1"], ["abc", "a", "ab12"]),
        ("regex", "^(yes|no)$", ["yes", "no"], ["ye", "yesno"]),
        ("choice", '["red", "a \\"b\\" é", "red wine"]', ["red", 'a "b" é', "red wine"], ["blue", "red ", "re"]),
        ("lark", EBNF, ["a", "bba"], ["ab", "b", ""]),
        ("lark", LARK, ["a", "bba"], ["ab", "b", ""]),
    ],
)
def test_a_grammar_allows_its_texts_and_no_others(accepts, kind, grammar, good, bad):
    assert [text for text in good if not accepts(kind, grammar, text)] == []
    assert [text for text in bad if accepts(kind, grammar, text)] == []


def test_an_end_token_that_tokenizer_json_lacks_ends_a_text(demo_dir, tokenizer):
    num_known = tokenizer.backend.get_vocab_size()
    ends = (2, num_known + 3)
    matcher = GrammarCompiler(VocabularySource(demo_dir, num_known + 100, ends)).compile(Grammar("choice", '["red"]'))
    assert matcher.try_consume_tokens(tokenizer.encode("red", add_special_tokens=False)) > 0
    words = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    assert np.flatnonzero(np.unpackbits(words, bitorder="little")).tolist() == list(ends)


def test_an_end_token_with_a_text_is_allowed_where_a_text_is_complete_alone(demo_dir, tokenizer):
    (end,), (letter,) = (tokenizer.encode(each, add_special_tokens=False) for each in "!a")
    table = MatcherTable(GrammarCompiler(VocabularySource(demo_dir, 4096, (end,))))
    for text, wanted in (("", {letter}), ("aa", {end, letter})):
        ids = np.array([letter] * len(text), np.int32)
        answer = table.answer(MaskJob(len(text), ids.tobytes(), Grammar("regex", "[a!]{2,3}")))
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(answer.words, np.uint8), bitorder="little"))
        assert set(allowed.tolist()) & {end, letter} == wanted


def test_spaces_in_json_are_bounded_and_a_schema_may_say_otherwise(accepts):
    assert accepts("json_object", "", "{" + " " * MAX_JSON_SPACES + "}")
    assert not accepts("json_object", "", "{" + " " * (MAX_JSON_SPACES + 1) + "}")
    compact = json.dumps({"type": "object", "x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None}})
    assert accepts("json_schema", compact, '{"a":[1,2]}')
    assert not accepts("json_schema", compact, '{"a": [1,2]}')


@pytest.mark.parametrize(
    ("kind", "grammar", "cause"),
    [
        ("json_schema", "{", "EOF"),
        ("json_schema", '{"type": "nothing"}', "nothing"),
        ("json_schema", '{"$ref": "#/nowhere"}', "nowhere"),
        ("json_schema", '{"$ref": "http://example.com/schema"}', "example.com"),
        ("json_schema", '{"dependentRequired": {"a": ["b"]}}', "dependentRequired"),
        ("json_schema", '{"type": "string", "minLength": 3, "maxLength": 1}', "Unsatisfiable"),
        ("json_schema", '{"items":' * 5000 + "1" + "}" * 5000, "recursion"),
        ("regex", "(a", "unclosed"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "(" * 5000 + "a" + ")" * 5000, "nest"),
        ("lark", "start: nothing", "nothing"),
        ("lark", "start: " + "(" * 5000 + '"a"' + ")" * 5000, "nested"),
        ("lark", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "recursion"),
        ("lark", "root ::= (", "GBNF"),
    ],
)
def test_what_does_not_compile_says_why(compiler, kind, grammar, cause):
    with pytest.raises(GrammarError, match=f"(?i){cause}") as caught:
        compiler.compile(Grammar(kind, grammar))
    assert len(str(caught.value)) <= 500
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("vocab_size", "num_tokens"), [(4200, 4200), (4096, 4096), (4000, 4096)])
def test_masks_cover_the_tokens_of_the_model_and_of_the_tokenizer(demo_dir, vocab_size, num_tokens):
    assert GrammarCompiler(VocabularySource(demo_dir, vocab_size, (0, 2))).num_tokens == num_tokens


def test_a_tokenizer_that_cannot_be_read_is_an_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(GrammarError, match="tokenizer"):
        GrammarCompiler(VocabularySource(tmp_path, 10, ()))
    with pytest.raises(GrammarError, match="tokenizer"):
        GrammarCompiler(VocabularySource(tmp_path / "none", 10, ()))


def test_a_kind_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="kind of a grammar"):
        Grammar("xml", "")
