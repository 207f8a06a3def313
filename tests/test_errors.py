"""What errors repeat of what was sent."""

from __future__ import annotations

import pytest

from moestro.errors import shown, shown_literal

NESTED: list[object] = []
for _ in range(100_000):
    NESTED = [NESTED]
UNSPELLABLE = {"digits": 10**5000, "digits in a list": [10**5000], "levels": NESTED}


@pytest.mark.parametrize("value", UNSPELLABLE.values(), ids=UNSPELLABLE)
@pytest.mark.parametrize("show", [shown, shown_literal])
def test_a_value_that_python_cannot_spell_is_described(show, value):
    assert show(value).startswith("a value with too many ")


@pytest.mark.parametrize("show", [shown, shown_literal])
def test_what_is_shown_is_short_and_printable(show):
    text = show("a\x1b\ud800" * 10_000)
    assert len(text) < 1000
    assert text.isprintable()


def test_a_literal_has_its_quotes():
    assert (shown("1"), shown_literal("1"), shown_literal(1)) == ("1", "'1'", "1")
