"""Stop strings: whatever the pieces, the answer is the one of a plain search."""

from __future__ import annotations

import random

import pytest

from moestro.text.parsing.answer_parser import AnswerParser, StopFinder
from moestro.text.parsing.output_parser import REASONING_PARSERS, TOOL_PARSERS, ContentText, ToolSpec


def run(pieces: list[str], stops: list[str], num_unseen: int = 0) -> tuple[str, str | None]:
    """`num_unseen`: the first pieces, in which no stop is looked for."""
    finder = StopFinder(stops)
    shown = "".join([finder.push(piece, look=i >= num_unseen) for i, piece in enumerate(pieces)])
    return shown + finder.flush(), finder.found


def oracle(text: str, stops: list[str], after: int = 0) -> tuple[str, str | None]:
    """Look after every character: the first stop complete behind `after`, the longest of those that end there."""
    places = [(end, end - len(stop), stop) for stop in stops for end in range(after + 1, len(text) + 1)]
    ends = [place for place in places if place[1] >= 0 and text[place[1] : place[0]] == place[2]]
    if not ends:
        return text, None
    _, start, stop = min(ends)
    return text[:start], stop


def test_a_stop_across_pieces_is_found_and_cut():
    assert run(["to be", " con", "tin", "ued"], [" continu"]) == ("to be", " continu")


def test_only_what_may_begin_a_stop_is_held_back():
    finder = StopFinder(["END"])
    assert [finder.push(piece) for piece in ("xE", "N", "x", "E")] == ["x", "", "ENx", ""]
    assert finder.flush() == "E"


def test_where_no_stop_is_looked_for_one_may_begin_but_not_end():
    assert run(["a.b", "c."], ["."], num_unseen=1) == ("a.bc", ".")
    assert run(["aEN", "D."], ["END"], num_unseen=1) == ("a", "END")
    assert run(["xab", "q"], ["ab", "xabz"], num_unseen=1) == ("xabq", None)


def test_without_stops_text_goes_through():
    assert run(["a", "b"], []) == ("ab", None)


def test_nothing_comes_after_a_stop():
    finder = StopFinder(["."])
    assert finder.push("one. two") == "one"
    assert finder.push("three") == ""
    assert finder.flush() == ""


def test_law_any_split_gives_the_oracles_answer():
    rng = random.Random(0)
    for _ in range(20_000):
        text = "".join(rng.choices("abc", k=rng.randrange(24)))
        stops = ["".join(rng.choices("abc", k=rng.randrange(1, 6))) for _ in range(rng.randrange(4))]
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(8)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        unseen = rng.randrange(len(pieces) + 1) if rng.random() < 0.5 else 0
        after = len("".join(pieces[:unseen]))
        assert run(pieces, stops, unseen) == oracle(text, stops, after), (pieces, stops, unseen)


class CountedText(str):
    """A stop string that counts its characters as they are looked at."""

    num_looked = 0

    def __getitem__(self, at):
        found = super().__getitem__(at)
        CountedText.num_looked += len(found)
        return found


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("a" * 512 + "b" + "a" * 511, "a"),
        ("ab" * 511 + "aa", "ab"),
        ("a" * 1023 + "b", "a"),
        ("b" + "a" * 1023, "a"),
    ],
)
def test_the_cost_of_a_character_is_bounded_whatever_the_stop(stop, text):
    """The stops almost complete again and again; a search of all beginnings looks at half a million characters."""

    def cost(num_pieces: int) -> int:
        finder = StopFinder([CountedText(stop)])
        CountedText.num_looked = 0
        for _ in range(num_pieces):
            finder.push(text)
        return CountedText.num_looked

    assert cost(4000) <= 5 * 4000 * len(text)
    assert cost(8000) <= 2.2 * cost(4000)


# --- behind parsers, which hold text back


def pieces_of(parser: AnswerParser, pieces: list[str], num_early: int) -> tuple[str, int]:
    """The content of an answer whose first pieces hold no stop, and the number of pieces that it took."""
    content = ""
    for i, piece in enumerate(pieces):
        parts = parser.feed(piece, may_stop=i >= num_early)
        content += "".join(part.text for part in parts if isinstance(part, ContentText))
        if parser._stops.found is not None:
            return content, i + 1
    parts = parser.finish()
    return content + "".join(part.text for part in parts if isinstance(part, ContentText)), len(pieces)


def parser_with(stops: list[str], *, reasons: bool = False) -> AnswerParser:
    reasoning = REASONING_PARSERS.make("qwen3")("x") if reasons else None
    return AnswerParser(reasoning, TOOL_PARSERS.make("hermes")([ToolSpec("f", {})]), StopFinder(stops))


@pytest.mark.parametrize("reasons", [False, True])
@pytest.mark.parametrize(
    ("pieces", "num_early", "stop", "content", "num_taken"),
    [
        # The parser holds "<tool" back until the next piece; all of it is early.
        (["a <tool", "x b", " c"], 1, "<tool", "a <toolx b c", 3),
        (["a <tool", "x b", " c"], 0, "<tool", "a ", 2),
        (["a <tool", "x b", " c"], 1, "<toolx", "a ", 2),
        (["a <tool", "x b", " c"], 1, "b", "a <toolx ", 2),
        (["a <too", "l", "x"], 2, "<tool", "a <toolx", 3),
        (["a <too", "l", "x"], 1, "<tool", "a ", 3),
        (["a <tool", "x", "<tool", "y"], 1, "<tool", "a <toolx", 4),
        (["a <tool"], 1, "<tool", "a <tool", 1),
        # White space that may precede a call ends the answer with its own token.
        (["a", "\n\n", "b"], 0, "\n\n", "a", 2),
        (["a", " \n", "\n", "b"], 0, "\n\n", "a ", 3),
        (["a", ".", "\n", "b"], 0, ".\n", "a", 3),
        (["a", "\n\n", "b"], 2, "\n\n", "a\n\nb", 3),
        (["a", "\n", "\n", "b"], 2, "\n\n", "a", 3),
        (["a", "\n\n", "\n", "b"], 2, "\n", "a\n\n", 3),
    ],
)
def test_a_stop_behind_a_parser_ends_where_the_text_has_it(reasons, pieces, num_early, stop, content, num_taken):
    assert pieces_of(parser_with([stop], reasons=reasons), pieces, num_early) == (content, num_taken)


def test_law_a_parser_that_finds_nothing_changes_no_stop():
    """Text without markers has its stops where the finder alone has them, whatever parts a parser holds back."""
    rng = random.Random(5)
    for _ in range(3000):
        pieces = ["".join(rng.choices("ab \n<t", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 8))]
        pieces[0] = "a" + pieces[0]  # White space at the start may precede a call.
        stops = ["".join(rng.choices("ab \n<t", k=rng.randint(1, 3))) for _ in range(rng.randint(1, 2))]
        num_early = rng.randint(0, len(pieces))
        plain = StopFinder(stops)
        text = "".join(plain.push(piece, look=i >= num_early) for i, piece in enumerate(pieces)) + plain.flush()
        parser = parser_with(stops, reasons=rng.random() < 0.5)
        assert (pieces_of(parser, pieces, num_early)[0], parser._stops.found) == (text, plain.found), (pieces, stops)
