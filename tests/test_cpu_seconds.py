"""The table of CPU seconds at the end of a run counts every process of a test, and knows files and rooms that exist."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib

import pytest
from support.cpu_seconds import PLAN, TESTS, Program, longest_first, over_budget, table, tree_s
from support.forker import ForkedProgram
from support.running import run_command, wait_until

BURN = "import time\nwhile time.process_time() < 0.3: pass\n"
PLANNED = tomllib.loads(PLAN.read_text())


def test_a_process_and_all_its_descendants_are_counted():
    child = f"import subprocess, sys, time\nsubprocess.run([sys.executable, '-c', {BURN!r}])\n{BURN}input()"
    with subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE) as process:
        wait_until(lambda: tree_s(process.pid) >= 0.5)
        alone_s = tree_s(os.getpid(), without=[process.pid])
        assert tree_s(os.getpid()) >= alone_s + 0.5
        process.communicate(b"\n")
    assert tree_s(os.getpid(), without=[process.pid]) >= alone_s + 0.5, "it has been waited for"
    assert tree_s(process.pid) == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there is a forker on Linux alone")
@pytest.mark.parametrize("is_killed", [False, True])
def test_programs_of_the_forker_are_counted_also_when_they_are_killed(tmp_path, is_killed, monkeypatch):
    monkeypatch.setattr("support.forker.PROGRAMS", programs := list[Program]())
    script = tmp_path / "burn.py"
    script.write_text(BURN + ("time.sleep(1000)\n" if is_killed else ""))
    with (tmp_path / "log").open("wb") as log:
        program = ForkedProgram([sys.executable, str(script)], [log.fileno()] * 3, os.environ)
    if is_killed:
        wait_until(lambda: tree_s(program.pid) >= 0.25)
        program.kill()
    assert program.wait() == (-9 if is_killed else 0)
    (counted,) = programs
    assert counted.has_ended
    assert counted.used_s >= 0.2


def test_a_command_in_a_fork_has_streams_of_its_own_and_its_status(tmp_path):
    script = tmp_path / "echo.py"
    script.write_text("import sys; print(sys.stdin.read()); print('error', file=sys.stderr); sys.exit(3)")
    pids: list[int] = []
    done = run_command([sys.executable, script], stdin="é", started=pids.append)
    assert (done.returncode, done.stdout, done.stderr, len(pids)) == (3, "é\n", "error\n", 1)


def test_the_table_has_rooms_with_budgets_and_the_files_that_use_most():
    used = {"server/test_a.py": 30.0, "server/test_b.py": 1.0, "test_docs.py": 8.0, "web/test_c.py": 2.0}
    lines = [line.split() for line in table(used, {"server": 20, "web": 10})]
    assert lines == [
        ["41", "in", "all"],
        ["31.0", "server", "of", "20"],
        ["30.0", "server/test_a.py"],
        ["8.0", "test_docs.py"],
        ["2.0", "web", "of", "10"],
    ]
    assert over_budget(used, {"server": 20, "web": 10}) == ["server: 31 CPU seconds, 20 are its budget"]


def test_the_longest_files_begin_first_and_others_keep_their_order():
    names = ["a.py", "b.py", "c.py", "d.py"]
    assert sorted(names, key=lambda name: longest_first({"c.py": 20, "d.py": 30}, name)) == [
        "d.py",
        "c.py",
        "a.py",
        "b.py",
    ]


def test_rooms_and_files_of_the_plan_exist():
    assert [name for name in [*PLANNED["rooms"], *PLANNED["files"]] if not (TESTS / name).exists()] == []
