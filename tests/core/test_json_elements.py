"""A JSON text is measured before it is decoded."""

from __future__ import annotations

import json
import random

import pytest

from moestro.core import clients
from moestro.core.clients import (
    MAX_DEPTH,
    MAX_ELEMENTS,
    count_elements,
    has_many_elements,
    is_too_deep,
    may_have_many_elements,
)

FAR = 1 << 40


def elements(value: object) -> int:
    """The commas and opening brackets that `value` is written with."""
    if isinstance(value, dict):
        return 1 + max(0, len(value) - 1) + sum(elements(item) for item in value.values())
    if isinstance(value, list):
        return 1 + max(0, len(value) - 1) + sum(elements(item) for item in value)
    return 0


def test_law_the_count_is_that_of_the_decoded_value_wherever_a_block_ends(monkeypatch):
    rng = random.Random(0)
    strings = ["", "a,b", "[{", '"', "\\", '\\"', '\\\\",[', "é,\n", "\\" * 9, '"' * 5, "😀[,"]

    def value(depth: int = 0):
        if depth < 4 and rng.random() < 0.6:
            items = [value(depth + 1) for _ in range(rng.randrange(5))]
            return items if rng.random() < 0.5 else {f"{rng.choice(strings)}{i}": item for i, item in enumerate(items)}
        return rng.choice([*strings, 1, -2.5, None, True])

    for _ in range(2000):
        whole = value()
        text = json.dumps(whole, ensure_ascii=rng.random() < 0.5).encode()
        monkeypatch.setattr(clients, "SCAN_BYTES", rng.choice([1, 2, 3, 5, 7, 64, 1 << 20]))
        if clients.SCAN_BYTES == 1 and b"\\" in text:
            monkeypatch.setattr(clients, "SCAN_BYTES", 2)
        assert count_elements(text, FAR) == elements(whole)


def test_the_count_ends_where_it_is_enough():
    assert 100 <= count_elements(b"[" + b"1," * (8 << 20), 100) <= 2 * clients.SCAN_BYTES
    assert count_elements(b'["",' * (4 << 20), 100) >= 100


@pytest.mark.parametrize("text", [b"", b'"', b"\\", b"\\" * 10, b'"\\', b'"""', b"\xff,", b"}]"])
def test_what_is_no_json_has_some_count(text):
    assert count_elements(text, FAR) <= len(text)


def test_commas_in_strings_are_no_elements():
    assert not has_many_elements(json.dumps({"prompt": ',[{"' * MAX_ELEMENTS}).encode())
    assert has_many_elements(json.dumps([0] * (MAX_ELEMENTS + 1)).encode())
    assert not has_many_elements(json.dumps([0] * (MAX_ELEMENTS - 1)).encode())


@pytest.mark.parametrize("mark", [b",", b"[", b"{"])
def test_a_text_with_few_marks_has_few_elements_wherever_its_marks_are(mark):
    few = b" " * MAX_ELEMENTS + mark * MAX_ELEMENTS
    assert not may_have_many_elements(few)
    assert may_have_many_elements(few + b"}" * (3 << 16) + mark)
    assert not may_have_many_elements(b"]:}" * MAX_ELEMENTS)


def depth(value: object) -> int:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if items is None else 1 + max(map(depth, items), default=0)


def test_law_the_depth_is_that_of_the_decoded_value_wherever_a_block_ends(monkeypatch):
    rng = random.Random(0)

    def value(levels: int):
        if levels == 0:
            return rng.choice(["[" * 9, '"{', "\\", 1])
        items = [value(rng.randrange(levels)) for _ in range(rng.randrange(3))]
        items.insert(rng.randrange(len(items) + 1), value(levels - 1))
        return items if rng.random() < 0.5 else {f"[{i}": item for i, item in enumerate(items)}

    monkeypatch.setattr(clients, "MAX_DEPTH", 4)
    for levels in [*range(9)] * 50:
        whole = value(levels)
        text = json.dumps(whole).encode()
        monkeypatch.setattr(clients, "SCAN_BYTES", rng.choice([2, 3, 5, 7, 64, 1 << 20]))
        assert is_too_deep(text) == (depth(whole) > 4), text


@pytest.mark.parametrize("text", [b"[" * 5000, b'{"a":' * 300, b"[" * 257 + b"]" * 257])
def test_a_text_of_more_levels_than_allowed_is_too_deep(text):
    assert is_too_deep(text)


def test_many_brackets_side_by_side_are_not_deep():
    assert not is_too_deep(json.dumps([{"a": [1]}] * 10_000).encode())
    assert not is_too_deep(json.dumps("[" * 10_000).encode())
    assert not is_too_deep(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
