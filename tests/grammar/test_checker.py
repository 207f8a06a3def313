"""The check of clients' grammars: within bounds of time and memory, and never twice."""

from __future__ import annotations

import os
import signal
import time

import pytest

from moestro.core.grammar import Grammar
from moestro.grammar import checker as checker_module
from moestro.grammar.check_job import TIME_LIMIT_S
from moestro.grammar.checker import GrammarChecker


@pytest.fixture
def checker(demo_dir):
    checker = GrammarChecker(str(demo_dir), 4096, (0, 2))
    yield checker
    checker.close()


def pid_of(checker: GrammarChecker) -> int:
    (idle,) = checker._idle
    return idle._process.pid


def test_good_grammars_pass_and_others_say_why(checker):
    assert checker.check(Grammar("json_object")) is None
    assert "unclosed" in checker.check(Grammar("regex", "(a"))
    assert checker.check(Grammar("regex", r"[^\s\S]")) == "no text matches it"
    assert checker.check(Grammar("json_schema", '{"$ref": "#"}')) == "no text matches it"
    assert checker.check(Grammar("json_object")) is None


def test_a_grammar_that_takes_minutes_is_ended_and_the_next_one_is_checked(checker):
    began = time.monotonic()
    error = checker.check(Grammar("json_schema", '{"type": "integer", "multipleOf": 9999991}'))
    assert error == f"it takes more than {TIME_LIMIT_S:g} s to compile"
    assert checker.check(Grammar("regex", "a")) is None
    assert time.monotonic() - began < 20 * TIME_LIMIT_S
    began = time.process_time()
    assert checker.check(Grammar("json_schema", '{"type": "integer", "multipleOf": 9999991}')) == error
    assert time.process_time() - began < TIME_LIMIT_S / 2, "the result was not remembered"


def test_a_process_that_was_killed_is_replaced(checker):
    assert checker.check(Grammar("regex", "a")) is None
    os.kill(pid_of(checker), signal.SIGKILL)
    assert checker.check(Grammar("regex", "b")) is None


def test_results_are_bounded(checker, monkeypatch):
    monkeypatch.setattr(checker_module, "MAX_VERDICTS", 3)
    for i in range(6):
        checker.check(Grammar("regex", f"a{i}"))
    assert [checker.is_known(Grammar("regex", f"a{i}")) for i in range(6)] == [False] * 3 + [True] * 3
    monkeypatch.setattr(checker_module, "MAX_VERDICT_BYTES", 10)
    checker.check(Grammar("regex", "b" * 9))
    assert not checker.is_known(Grammar("regex", "a5"))


def test_no_process_outlives_the_checker(demo_dir):
    checker = GrammarChecker(str(demo_dir), 4096, (0, 2))
    checker.check(Grammar("regex", "a"))
    process = checker._idle[0]
    checker.close()
    assert not process.is_alive
