"""The lists of engines, sans-IO, and their file form."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from moestro.errors import ConfigError
from moestro.gateway.discovery.lists import (
    SOURCES,
    ChangeKind,
    EngineEntry,
    EngineLists,
    KeepRules,
    parse_file,
    selected,
)
from moestro.gateway.settings import EngineUrl

A, B = "a=http://h:1", "b=http://h:2"


def entry(text: str, **fields) -> EngineEntry:
    return EngineEntry(url=EngineUrl.parse(text), **fields)


def kinds(changes) -> list[tuple[str, str]]:
    return [(str(change.kind), change.entry.name) for change in changes]


def test_engines_come_leave_and_return():
    lists = EngineLists(KeepRules(keep_ns=100))
    assert kinds(lists.replace("file", [entry(A), entry(B)], 0)) == [("add", "a"), ("add", "b")]
    assert kinds(lists.replace("file", [entry(A), entry(B)], 1)) == []
    assert kinds(lists.replace("file", [entry(A)], 2)) == [("leave", "b")]
    assert kinds(lists.replace("file", [entry(A), entry(B)], 3)) == [("return", "b")]
    assert kinds(lists.replace("file", [entry(A)], 4)) == [("leave", "b")]
    assert kinds(lists.expire(103)) == []
    assert kinds(lists.expire(104)) == [("remove", "b")]
    assert kinds(lists.replace("file", [entry(B)], 105)) == [("leave", "a"), ("add", "b")]


def test_entry_that_changes_in_place_is_updated_and_one_that_moves_is_replaced():
    lists = EngineLists()
    lists.replace("file", [entry(A)], 0)
    assert kinds(lists.replace("file", [entry(f"{A},speed=2")], 0)) == [("update", "a")]
    assert kinds(lists.replace("file", [entry("a=http://h:9")], 0)) == [("remove", "a"), ("add", "a")]


def test_absent_engine_makes_room_for_another_of_its_address_or_name():
    lists = EngineLists()
    lists.replace("file", [entry(A)], 0)
    lists.replace("file", [], 0)
    assert kinds(lists.replace("file", [entry("c=http://h:1")], 0)) == [("remove", "a"), ("add", "c")]
    assert kinds(lists.replace("file", [entry("c=http://h:3")], 0)) == [("remove", "c"), ("add", "c")]


def test_two_engines_exchange_their_addresses():
    lists = EngineLists()
    lists.replace("file", [entry(A), entry(B)], 0)
    changes = kinds(lists.replace("file", [entry("a=http://h:2"), entry("b=http://h:1")], 0))
    assert changes == [("remove", "a"), ("remove", "b"), ("add", "a"), ("add", "b")]


def test_number_of_absent_engines_is_bounded():
    lists = EngineLists(KeepRules(max_kept=2))
    lists.replace("file", [entry(f"e{n}=http://h:{n}") for n in range(1, 5)], 0)
    assert kinds(lists.replace("file", [], 0))[-2:] == [("remove", "e1"), ("remove", "e2")]
    assert lists.num_absent == 2


def test_removal_by_the_operator_holds_until_he_adds_the_engine_again():
    lists, removed = EngineLists(), {"a"}
    lists.removed = lambda: removed
    assert kinds(lists.replace("file", [entry(A), entry(B)], 0)) == [("add", "b")], "it was removed before it is listed"
    assert lists.ignored == ("a=http://h:1 of file: the operator has removed it",)
    assert kinds(lists.replace("file", [entry(B)], 0)) == []
    assert kinds(lists.replace("file", [entry(A), entry(B)], 0)) == []
    removed.add("b")
    assert kinds(lists.remove("b", 0)) == [("remove", "b")]
    assert kinds(lists.replace("dns", [entry(B)], 0)) == []
    assert kinds(lists.add(entry(A), 0)) == [("add", "a")]
    removed.clear()
    assert kinds(lists.replace("file", [entry(A), entry(B)], 0)) == [("add", "b")]
    assert lists.remove("unknown", 0) == []


def test_operators_engine_hides_a_listed_one_and_cannot_be_added_twice():
    lists = EngineLists()
    lists.add(entry(A), 0)
    with pytest.raises(ConfigError, match="a=http://h:1 exists already"):
        lists.add(entry("c=http://h:1"), 0)
    assert kinds(lists.replace("file", [entry("a=http://h:5"), entry("c=http://h:1")], 0)) == []
    assert len(lists.ignored) == 2
    lists.removed = lambda: {"a"}
    assert kinds(lists.remove("a", 0)) == [("remove", "a"), ("add", "c")]


def test_engine_that_two_sources_list_stays_until_both_forget_it():
    lists = EngineLists()
    assert kinds(lists.replace("dns", [entry(A)], 0)) == [("add", "a")]
    assert kinds(lists.replace("file", [entry(A)], 0)) == []
    assert lists.ignored == ()
    assert kinds(lists.replace("dns", [], 0)) == []
    assert kinds(lists.replace("file", [], 0)) == [("leave", "a")]


@pytest.mark.parametrize("seed", range(20))
def test_applied_changes_always_give_the_listed_engines(seed):
    """Whatever the lists do, the changes are possible in their order, and end with the engines that are wanted."""
    rng, lists, now_ns = random.Random(seed), EngineLists(KeepRules(keep_ns=30, max_kept=3)), 0
    removed: set[str] = set()
    lists.removed = lambda: removed
    present: dict[str, EngineEntry] = {}
    absent: dict[str, EngineEntry] = {}
    for _ in range(300):
        now_ns += rng.randrange(10)
        entries = {f"{name}": entry(f"{name}=http://h:{rng.randrange(1, 6)}") for name in rng.sample("abcdef", 3)}
        places = {each.place: each for each in entries.values()}
        match rng.randrange(4):
            case 0:
                changes = lists.expire(now_ns)
            case 1:
                removed.add(name := rng.choice("abcdef"))
                changes = lists.remove(name, now_ns)
            case 2 if absent:
                changes = lists.lost(rng.choice(sorted(absent)))
            case _:
                removed -= {rng.choice("abcdef")}
                changes = lists.replace(rng.choice(SOURCES), list(places.values()), now_ns)
        for kind, each in changes:
            if kind is ChangeKind.ADD:
                used = {known.place for known in (*present.values(), *absent.values())}
                assert each.name not in present | absent
                assert each.place not in used
                present[each.name] = each
            elif kind is ChangeKind.LEAVE:
                absent[each.name] = present.pop(each.name)
            elif kind is ChangeKind.RETURN:
                assert absent.pop(each.name).place == each.place
                present[each.name] = each
            elif kind is ChangeKind.UPDATE:
                present[each.name] = each
            else:
                assert (present.pop(each.name, None) or absent.pop(each.name, None)) is not None
        assert len(absent) <= 3
        assert present == lists._wanted()


def test_file_forms():
    yaml = b"- http://a:1\n- {url: https://b:2/v1, name: b, model: m, labels: {pool: x}, dp_ranks: auto, speed: 2,"
    yaml += b" group: g}\n"
    json = b'{"url": "http://a:1"}\n\n{"url": "https://b:2", "name": "b"}\n'
    for text in (yaml, json, b"engines:\n" + yaml):
        found = parse_file(text, Path()).entries
        assert [each.url.url for each in found] == ["http://a:1", "https://b:2"]
        assert [each.name for each in found] == ["a:1", "b"]
    [first, second] = parse_file(yaml, Path()).entries
    assert (second.model, second.labels, second.dp_ranks) == ("m", {"pool": "x"}, "auto")
    assert (second.url.traits.spec.speed, second.url.traits.group) == (2.0, "g")
    assert selected([first, second], {"pool": "x"}) == (second,)
    assert parse_file(b"[]", Path()).entries == ()


def test_file_of_a_key_is_read_and_never_shown(tmp_path):
    (tmp_path / "k").write_text("sk-secret\n")
    found = parse_file(b"- {url: http://a:1, api_key_file: k}", tmp_path)
    assert found.entries[0].api_key == "sk-secret"
    assert "sk-secret" not in repr(found)
    assert found.key_files == (tmp_path / "k",)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (b"", "no list of engines"),
        (b"- url: [", "not YAML in line 1"),
        (b"- {urx: 1}", "unknown field `urx`"),
        (b'{"url": "http://a', "not YAML"),
        (b"- http://a:1\n- http://a:1", "twice"),
        (b"- a=http://h:1\n- b=http://h:1", "twice"),
        (b"- ftp://a:1", "engine 1 ftp://a:1: give http://HOST:PORT"),
        (b"- {url: http://a:1, speed: 0}", "speed=0.0: give a number from 0.01 to 100"),
        (b"- {url: http://a:1, speed: .nan}", "speed=nan: give a number"),
        (b"- {url: http://a:1, dp_ranks: some}", "engine 1: dp_ranks some: give auto"),
        (b"- {url: http://a:1, api_key_file: none}", "api_key_file /nonexistent/none: No such file"),
        (b"\xff\xff", "neither YAML nor lines of JSON"),
        (b"a: &a [*a]", "no list"),
        (b"[" * 5_000, "YAML"),
        (b"#" * 600_000, "write lines of JSON"),
        (b"just text", "no list"),
    ],
)
def test_wrong_file_has_a_clear_error(text, error):
    with pytest.raises(ConfigError) as found:
        parse_file(text, Path("/nonexistent"))
    assert error in str(found.value)
