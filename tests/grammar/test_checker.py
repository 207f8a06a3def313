"""The check of clients' grammars: within bounds of processes, time and memory, and never twice."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moestro.core.request import Grammar
from moestro.grammar import host as host_module
from moestro.grammar.compiler import VocabularySource
from moestro.grammar.host import BOUNDS, CHECK, MAX_CHECKS, MAX_TRIES, TRY, GrammarChecker, GrammarVerdict

MINUTES = '{"type": "integer", "multipleOf": 9999991}'


@pytest.fixture
def checker(demo_dir):
    checker = GrammarChecker(VocabularySource(demo_dir, 4096, (0, 2)))
    yield checker
    checker.close()


def host_pid(checker: GrammarChecker) -> int:
    return checker._host._process.pid


def forks(checker: GrammarChecker) -> list[int]:
    pid = host_pid(checker)
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_good_grammars_pass_and_others_say_why(checker):
    assert checker.check(Grammar("json_object"), CHECK).error is None
    assert "unclosed" in checker.check(Grammar("regex", "(a"), CHECK).error
    assert checker.check(Grammar("regex", r"[^\s\S]"), CHECK).error == "no text matches it"
    assert checker.check(Grammar("json_schema", '{"$ref": "#"}'), CHECK).error == "no text matches it"
    assert checker.check(Grammar("json_object"), CHECK).error is None


def test_a_grammar_that_takes_minutes_is_ended_and_the_next_one_is_checked(checker):
    slow = Grammar("json_schema", MINUTES)
    began = time.monotonic()
    assert checker.check(slow, TRY) is None
    assert checker.known(slow) is None, "a try that was too short says nothing"
    verdict = checker.check(slow, CHECK)
    assert verdict == GrammarVerdict(f"it takes more than {BOUNDS[CHECK].cpu_s:g} s or 1024 MiB to compile")
    assert checker.known(slow) == verdict
    assert checker.check(Grammar("regex", "a"), CHECK).error is None
    assert time.monotonic() - began < 60 * BOUNDS[CHECK].cpu_s


def test_a_host_that_was_killed_is_replaced(checker):
    assert checker.check(Grammar("regex", "a"), CHECK).error is None
    first = host_pid(checker)
    os.kill(first, signal.SIGKILL)
    assert checker.check(Grammar("regex", "b"), CHECK).error is None
    assert host_pid(checker) != first


def test_verdicts_are_bounded_and_hold_no_text(checker, monkeypatch):
    monkeypatch.setattr(host_module, "MAX_VERDICTS", 3)
    for i in range(6):
        checker.check(Grammar("regex", f"a{i}"), CHECK)
    known = [checker.known(Grammar("regex", f"a{i}")) is not None for i in range(6)]
    assert known == [False] * 3 + [True] * 3
    assert {len(name) for name in checker._verdicts} == {16}


def test_slow_checks_start_no_more_processes_and_stop_no_try(checker):
    most, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            most.append(len(forks(checker)))

    checker.check(Grammar("regex", "a"), TRY)
    with ThreadPoolExecutor(14) as pool:
        watching = pool.submit(watch)
        slow = [pool.submit(checker.check, Grammar("json_schema", MINUTES + " " * i), CHECK) for i in range(2)]
        tries = [pool.submit(checker.check, Grammar("regex", f"b{i}"), TRY) for i in range(8)]
        assert all(each.result() in (None, GrammarVerdict(None, is_light=True)) for each in tries)
        assert not all(each.done() for each in slow), "tries do not wait for slow checks"
        assert all(each.result().error for each in slow)
        ended.set()
        watching.result()
    assert 1 <= max(most) <= 2 * (MAX_TRIES + MAX_CHECKS), "each may be ending while the next begins"


def test_no_process_outlives_the_checker(demo_dir):
    checker = GrammarChecker(VocabularySource(demo_dir, 4096, (0, 2)))
    checker.check(Grammar("regex", "a"), CHECK)
    process = checker._host._process
    checker.close()
    assert process.poll() is not None


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="the kernel does not group processes by session")
def test_checks_yield_to_other_sessions(checker):
    """nice(1) acts within a session alone, and the processes of checks have their own."""
    checker.check(Grammar("regex", "a"), CHECK)
    assert Path(f"/proc/{host_pid(checker)}/autogroup").read_text().endswith(f"nice {BOUNDS[TRY].niceness}\n")
