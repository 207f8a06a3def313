"""CPU seconds of test files with all their processes: a table at the end of a run, and the budgets of rooms.

Durations depend on the load of a machine, CPU seconds hardly do. `tests/cpu_seconds.toml` has the budgets, and the
files that take longest, which begin first. A room above its budget is a warning and fails nothing.
"""

from __future__ import annotations

import contextlib
import os
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PLAN = TESTS / "cpu_seconds.toml"
_PROCESSES = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
_LEAST_S = 5.0  # files below it are not listed
_COLLECTION = "(collection and imports)"


@dataclass
class Program:
    """A program that runs beside this process and not below it, with what it has used.

    Attributes:
        pid: Number of its process.
        used_s: CPU seconds of it and of its descendants, as far as they are known.
        has_ended: Whether `used_s` is final.
    """

    pid: int
    used_s: float = 0.0
    has_ended: bool = False

    def look(self) -> None:
        """Bring `used_s` up to date while the program runs."""
        if not self.has_ended:
            self.used_s = max(self.used_s, tree_s(self.pid))

    def end(self, used_s: float) -> None:
        """Note the end, with CPU seconds of the program and of the descendants that it waited for."""
        self.used_s, self.has_ended = max(self.used_s, used_s), True


PROGRAMS: list[Program] = []  # those that the forker has started for this process


def tree_s(pid: int, without: Collection[int] = ()) -> float:
    """CPU seconds of a process and of all its descendants, whether they run or it has waited for them.

    Args:
        pid: Number of the process. One that has ended has used nothing.
        without: Descendants that are left out, with all that they have started.
    """
    total, left = 0, [pid]
    while left:
        process = left.pop()
        try:
            fields = (_PROCESSES / str(process) / "stat").read_text().rpartition(") ")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        total += sum(map(int, fields[11:15]))
        left += [child for child in children_of(process) if child not in without]
    return total / _TICKS


def children_of(pid: int) -> list[int]:
    """Processes that a process has started and that have not ended; none of one that has ended.

    psutil reads the state of every process of the machine for it.
    """
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in (_PROCESSES / str(pid) / "task").iterdir():
            with contextlib.suppress(OSError):  # the thread has ended
                found += map(int, (thread / "children").read_text().split())
    return found


def room_of(file: str) -> str:
    """The room of a file of tests; a file beside the rooms is one of its own."""
    return file.partition("/")[0]


def over_budget(used: Mapping[str, float], budgets: Mapping[str, float]) -> list[str]:
    """A line for each room that has used more CPU seconds than it may."""
    by_room = _by_room(used)
    return [
        f"{room}: {by_room[room]:.0f} CPU seconds, {budget:.0f} are its budget"
        for room, budget in budgets.items()
        if by_room[room] > budget
    ]


def table(used: Mapping[str, float], budgets: Mapping[str, float]) -> Iterator[str]:
    """Lines of the table: rooms with their budgets, and the files that use most."""
    yield f"{sum(used.values()):8.0f}  in all"
    for room, seconds in _by_room(used).most_common():
        budget = f" of {budgets[room]:.0f}" if room in budgets else ""
        yield f"{seconds:8.1f}  {room}{budget}"
        files = Counter({file: value for file, value in used.items() if room_of(file) == room and file != room})
        yield from (f"{value:18.1f}  {file}" for file, value in files.most_common() if value >= _LEAST_S)


def longest_first(files: Mapping[str, float], name: str) -> float:
    """Key of a stable sort that puts the files of the plan first, the longest one in front."""
    return -files.get(name, 0.0)


class CpuSeconds:
    """Plugin of pytest. A worker of pytest-xdist counts its own files, and the process that started it adds them up.

    Args:
        forker_pids: The forker's processes, whose programs are counted by themselves; none if another process started
            them.
    """

    def __init__(self, forker_pids: Collection[int]) -> None:
        plan = tomllib.loads(PLAN.read_text())
        self._budgets, self._files = plan["rooms"], plan["files"]
        self._without = forker_pids
        self._used: Counter[str] = Counter()
        self._before_s = 0.0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: longest_first(self._files, _name(item)))

    def pytest_collection_finish(self) -> None:
        self._charge(_COLLECTION)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        result = yield
        if nextitem is None or nextitem.path != item.path:
            self._charge(_name(item))
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output["cpu_seconds"] = dict(self._used)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self._used.update(getattr(node, "workeroutput", {}).get("cpu_seconds", {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._without:
            self._used["(libraries of servers, and forks)"] += sum(map(_own_s, self._without))
        terminalreporter.section("CPU seconds")
        for line in table(self._used, self._budgets):
            terminalreporter.line(line)
        for line in over_budget(self._used, self._budgets):
            terminalreporter.line(f"WARNING: {line}", yellow=True)

    def _charge(self, name: str) -> None:
        for program in PROGRAMS:
            program.look()
        now_s = tree_s(os.getpid(), self._without) + sum(program.used_s for program in PROGRAMS)
        self._used[name] += now_s - self._before_s
        self._before_s = now_s


def _by_room(used: Mapping[str, float]) -> Counter[str]:
    by_room: Counter[str] = Counter()
    for file, seconds in used.items():
        by_room[room_of(file)] += seconds
    return by_room


def _name(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else item.path.name


def _own_s(pid: int) -> float:
    """CPU seconds of a process alone."""
    fields = (_PROCESSES / str(pid) / "stat").read_text().rpartition(") ")[2].split()
    return sum(map(int, fields[11:13])) / _TICKS
