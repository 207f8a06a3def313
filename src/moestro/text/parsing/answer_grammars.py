"""Grammars of answers that must call a tool, and of answers in which reasoning precedes what a grammar limits.

They are written in llguidance's notation of Lark. The rule `thought` defines what precedes the answer itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from moestro.core.grammar import Grammar
from moestro.text.parsing.answer_parts import ToolSpec
from moestro.text.parsing.enforced_schemas import enforced_arguments
from moestro.text.parsing.harmony import CALL_HEAD, FINAL_HEAD, OPTIONAL_ANALYSIS

# The spacing of Python's JSON, which models have learnt; otherwise one may write spaces for ever.
_SPACING = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,  # The pattern of the compiler's defaults would allow other spaces.
    "item_separator": ", ",
    "key_separator": ": ",
}
_SPACES = r"[ \n\r\t]{0,64}"
HARMONY_THOUGHT = f"thought: {OPTIONAL_ANALYSIS} {FINAL_HEAD}\nANALYSIS: /(?s:.*)/\n"

_HEADER = "%llguidance {}"  # says which of Lark's dialects this is
_SLASH = re.compile(r"(\\.)|/", re.DOTALL)


def thought_rules(start: str, end: str, *, is_open: bool, is_special: bool) -> str:
    """Return the rule `thought` for reasoning between two tags.

    Args:
        is_open: Whether the reasoning has begun; otherwise the model may begin one, with the start tag.
        is_special: Whether the tags are special tokens, which no text of the grammar matches.
    """
    first = start if is_special else json.dumps(start)
    text = f"THOUGHT {end}" if is_special else "thought_text"
    suffix = "" if is_special else f"\nthought_text[suffix={json.dumps(end)}]: THOUGHT"
    body = f"{text} THOUGHT_GAP" if is_open else f"({first} {text} THOUGHT_GAP)?"
    return f"thought: {body}{suffix}\nTHOUGHT: /(?s:.*)/\nTHOUGHT_GAP: /\\n{{0,2}}/\n"


def required_calls(tools: Sequence[ToolSpec], *, is_parallel: bool, thought: str = "") -> Grammar:
    """Return the grammar of a list of calls; of a single one if not `is_parallel`.

    Args:
        thought: Rule `thought` and those that it needs. Empty means that nothing precedes the list.
    """
    more = '(", " call)*' if is_parallel else ""
    rules = [_HEADER, f'start: {"thought " if thought else ""}"[" call {more} "]"', _any_of("call", len(tools))]
    for i, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.name)}, "parameters": '
        rules.append(f'call_{i}: {json.dumps(head)} arguments_{i} "}}"\narguments_{i}: %json {_schema(tool)}')
    return Grammar("lark", "\n".join([*rules, thought]))


def named_call(tool: ToolSpec, thought: str = "") -> Grammar:
    """Return the grammar of the arguments of `tool`."""
    return after_thought(Grammar("json_schema", _schema(tool)), thought)


def harmony_call(tools: Sequence[ToolSpec]) -> Grammar:
    """Return the grammar of one call of any of `tools` in harmony, perhaps after an analysis."""
    rules = [_HEADER, f"start: {OPTIONAL_ANALYSIS} call\nANALYSIS: /(?s:.*)/", _any_of("call", len(tools))]
    for i, tool in enumerate(tools):
        rules.append(f"call_{i}: {CALL_HEAD.format(json.dumps(tool.name)[1:-1])} %json {_schema(tool)}")
    return Grammar("lark", "\n".join(rules))


def after_thought(grammar: Grammar, thought: str) -> Grammar:
    """Return the grammar of a thought and then a text of `grammar`.

    Args:
        thought: Rule `thought` and those that it needs. Empty means that the answer begins with the text.
    """
    if not thought:
        return grammar
    return Grammar("lark", f"{_HEADER}\nstart: thought answer\nanswer: {_as_rule(grammar)}\n{thought}")


def _as_rule(grammar: Grammar) -> str:
    """Return the body of a rule for `grammar`."""
    match grammar.kind:
        case "json_schema":
            return f"%json {_spaced(grammar.text)}"
        case "json_object":
            return "%json " + _spaced('{"type": "object"}')
        case "regex":
            return "/" + _SLASH.sub(lambda found: found[1] or r"\/", grammar.text).replace("\n", r"\n") + "/"
        case "choice":
            return " | ".join(json.dumps(each) for each in json.loads(grammar.text))
        case _:
            return f"%lark {{\n{grammar.text}\n}}"


def _any_of(name: str, count: int) -> str:
    return f"{name}: " + " | ".join(f"{name}_{i}" for i in range(count))


def _schema(tool: ToolSpec) -> str:
    return json.dumps(enforced_arguments(tool.parameters).schema | {"x-guidance": _SPACING})


def _spaced(schema: str) -> str:
    """Return a JSON schema in which the white space between elements is limited, if the client did not say how."""
    return json.dumps({"x-guidance": {"whitespace_pattern": _SPACES}} | json.loads(schema))
