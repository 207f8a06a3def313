"""Plants known faults in copies of the package, and tells whether the tests catch each of them.

    python tools/mutants.py [--jobs 2] [--only WORD] [--json bench/results/robustness/mutants.json [--resume]]
    python tools/mutants.py --check     # only whether the list still fits the sources

tests/mutants.toml has the faults: a text that occurs once in a file of src/moestro, what takes its place, and the tests
that should fail. Each fault gets a copy of the package of its own, which PYTHONPATH names, so the checkout is never
changed. Tests that have caught a fault have to pass without any. The exit status is 1 if a fault survives.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
import tomllib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import cache_from_source
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "bench"))
from shared.results import make_parser, save  # noqa: E402 (its folder lies beside this one)

for library in ("cyclopts", "hypothesis", "numpy", "psutil"):  # loaded once for all tests
    import_module(library)

from moestro.config.run_record import run_record  # noqa: E402
from moestro.workload.progress import progress  # noqa: E402

PACKAGE, TESTS = ROOT / "src" / "moestro", ROOT / "tests"
LIST = TESTS / "mutants.toml"
LIMIT_S = 600  # a fault may make a loop endless
PATIENCE_S = 60  # of a test that waits for what a fault prevents; without the fault it has to pass with this patience
# pytest's exit status
PASSED, FAILED = 0, 1
ALREADY_IMPORTED = "ignore::pytest.PytestAssertRewriteWarning"
FAILURE = re.compile(r"^FAILED tests/(.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        area: the table of the list that has it.
        fault: a sentence that names it.
        file: file of src/moestro.
        text: text that occurs once in the file.
        becomes: what takes its place.
        tests: files of tests/, or tests of them as pytest names them.
    """

    area: str
    fault: str
    file: str
    text: str
    becomes: str
    tests: tuple[str, ...]

    def applied_to(self, source: str) -> str:
        """Return the source with the fault.

        Raises:
            ValueError: the text does not occur exactly once.
        """
        if (count := source.count(self.text)) != 1:
            raise ValueError(f"occurs {count} times")
        return source.replace(self.text, self.becomes)

    def described(self) -> dict[str, str]:
        return {"area": self.area, "fault": self.fault, "file": self.file}


@dataclass(frozen=True)
class Outcome:
    """What tests made of a fault.

    Attributes:
        outcome: `caught`, `survived`, or `broken` where the tests did not run to an end.
        caught_by: the first test that failed.
    """

    outcome: str
    caught_by: str


def read_list(path: Path) -> list[Mutant]:
    tables = tomllib.loads(path.read_text())
    return [
        Mutant(area=area, **{**entry, "tests": tuple(entry["tests"])})
        for area, entries in tables.items()
        for entry in entries
    ]


def problems_of(mutant: Mutant) -> Iterable[str]:
    """Say why an entry of the list does not fit the sources."""
    file = PACKAGE / mutant.file
    if not file.is_file():
        yield "there is no such file"
        return
    try:
        changed = mutant.applied_to(file.read_text())
        compile(changed, mutant.file, "exec")
    except (ValueError, SyntaxError) as error:
        yield f"{mutant.text!r}: {error}"
    if mutant.text == mutant.becomes:
        yield f"{mutant.text!r} becomes itself"
    for each in mutant.tests:
        name, _, test = each.partition("::")
        path = TESTS / name
        if not path.is_file() or (test and f"def {test.partition('[')[0]}(" not in path.read_text()):
            yield f"there is no test {each}"


@dataclass
class TestRun:
    """Tests that run in a process forked from this one, which has loaded the libraries, with the package of a folder.

    Attributes:
        pid: number of the process.
        output: file of what pytest prints.
        ends_at: monotonic time at which an endless loop is stopped.
    """

    pid: int
    output: Path
    ends_at: float

    @classmethod
    def start(cls, package_parent: Path, tests: Iterable[str], output: Path, *options: str) -> TestRun:
        arguments = ["-q", "-p", "no:cacheprovider", "-W", ALREADY_IMPORTED, *options]
        pid = os.fork()
        if pid == 0:
            status = 3  # pytest's own for an internal error
            try:
                status = cls._run(package_parent, [*arguments, *(f"tests/{each}" for each in tests)], output)
            finally:
                os._exit(status)
        return cls(pid, output, time.monotonic() + LIMIT_S)

    @staticmethod
    def _run(package_parent: Path, arguments: list[str], output: Path) -> int:
        os.setsid()
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        # What fails here must not fail first in the next run of the suite, hence a folder of examples of its own.
        paths = [str(package_parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        os.environ |= {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "HYPOTHESIS_STORAGE_DIRECTORY": f"{output}.examples",
            "MOESTRO_TEST_PATIENCE": str(PATIENCE_S),
        }
        os.chdir(ROOT)
        sys.path.insert(0, str(package_parent))
        for name in [name for name in sys.modules if name.partition(".")[0] == "moestro"]:
            del sys.modules[name]
        status = int(pytest.main(arguments))
        sys.stdout.flush()
        return status

    def result(self) -> tuple[int, list[str]] | None:
        """Return pytest's exit status and the tests that failed. None means that they still run."""
        if time.monotonic() > self.ends_at:
            os.killpg(self.pid, signal.SIGKILL)
        pid, status = os.waitpid(self.pid, 0 if time.monotonic() > self.ends_at else os.WNOHANG)
        if pid == 0:
            return None
        return os.waitstatus_to_exitcode(status), FAILURE.findall(self.output.read_text())


@dataclass
class Trial:
    """A copy of the package that has one fault after another, and the tests of the present one.

    Attributes:
        copy: the copy of the package.
        mutant, run: the present fault, and its tests.
    """

    copy: Path
    mutant: Mutant | None = None
    run: TestRun | None = None

    def start(self, mutant: Mutant) -> None:
        """Plant a fault, and start its tests."""
        file = self.copy / mutant.file
        self._write(file, mutant.applied_to(file.read_text()))
        self.mutant = mutant
        self.run = TestRun.start(self.copy.parent, mutant.tests, self.copy.parent / "output", "-x")

    def take(self) -> tuple[Mutant, Outcome] | None:
        """Return the fault and its outcome, after which the copy has none. None means that there is no outcome yet."""
        if self.mutant is None or self.run is None or (result := self.run.result()) is None:
            return None
        mutant, (status, failed) = self.mutant, result
        self._write(self.copy / mutant.file, (PACKAGE / mutant.file).read_text())
        self.mutant = self.run = None
        if status == FAILED and failed:
            return mutant, Outcome("caught", failed[0])
        return mutant, Outcome("survived" if status == PASSED else "broken", "")

    @staticmethod
    def _write(file: Path, source: str) -> None:
        file.write_text(source)
        # Two faults of one file may have one size, and come within a second.
        Path(cache_from_source(str(file))).unlink(missing_ok=True)


def copy_package(to: Path) -> None:
    """Copy the package as it is now, with its bytecode. Assets, which no fault changes, are linked."""
    shutil.copytree(PACKAGE, to, ignore=shutil.ignore_patterns("assets"))
    (to / "assets").symlink_to(PACKAGE / "assets")


def try_all(mutants: list[Mutant], jobs: int, note: Callable[[Mutant, Outcome], None]) -> None:
    """Try every fault, and pass each outcome to `note` as it comes."""
    left = deque(mutants)
    if any(each.file.startswith("model/") for each in mutants):
        import_module("torch")
        import_module("transformers")
    with TemporaryDirectory() as folder, progress("faults", len(mutants)) as advance:
        trials = [Trial(Path(folder) / str(number) / "moestro") for number in range(min(jobs, len(mutants)))]
        for trial in trials:
            copy_package(trial.copy)
        while left or any(trial.mutant for trial in trials):
            for trial in trials:
                if (found := trial.take()) is not None:
                    note(*found)
                    advance()
                if trial.mutant is None and left:
                    trial.start(left.popleft())
            time.sleep(0.05)


def failures_without_faults(tests: list[str]) -> list[str]:
    """Return those of some tests that fail without any fault."""
    with TemporaryDirectory() as folder:
        run = TestRun.start(PACKAGE.parent, tests, Path(folder) / "output")
        while (result := run.result()) is None:
            time.sleep(0.05)
    return result[1]


def stored_table() -> str:
    """Return the stored results as Markdown. A file that has another name since then has its name of today."""
    stored = json.loads((ROOT / "bench" / "results" / "robustness" / "mutants.json").read_text())
    files = {each.fault: each.file for each in read_list(LIST)}
    rows = ["| area | fault | in | caught by |", "|---|---|---|---|"]
    for each in stored["mutants"]:
        test = each["caught_by"].partition("::")[2].partition("[")[0]
        rows.append(f"| {each['area']} | {each['fault']} | `{files.get(each['fault'], each['file'])}` | `{test}` |")
    return "\n".join(rows)


def caught_before(path: Path) -> dict[str, dict[str, object]]:
    """Return the caught faults of a stored run by their sentences."""
    stored = json.loads(path.read_text())["mutants"] if path.exists() else []
    return {row["fault"]: row for row in stored if row["outcome"] == "caught"}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--list", type=Path, default=LIST, help="another list of faults")
    parser.add_argument("--resume", action="store_true", help="keep what the file of --json says of caught faults")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs of tests at once")
    parser.add_argument("--only", default="", help="only faults whose area, file or sentence contains this")
    parser.add_argument("--check", action="store_true", help="run nothing; check that the list fits the sources")
    args = parser.parse_args()
    conditions = run_record("computed")
    every = read_list(args.list)
    mutants = [each for each in every if args.only in f"{each.area} {each.file} {each.fault}"]
    problems = [f"{each.area}: {each.fault} ({each.file}): {why}" for each in mutants for why in problems_of(each)]
    if problems or args.check:
        print("\n".join(problems) or f"{len(mutants)} faults fit the sources")
        return int(bool(problems))
    found = caught_before(args.json) if args.resume else {}

    def note(mutant: Mutant, outcome: Outcome) -> None:
        found[mutant.fault] = mutant.described() | asdict(outcome)
        rows = [found[each.fault] for each in every if each.fault in found]
        num_caught = sum(row["outcome"] == "caught" for row in rows)
        save(args.json, conditions, {"num_mutants": len(rows), "num_caught": num_caught, "mutants": rows})
        if outcome.outcome != "caught":
            print(f"{outcome.outcome}: {mutant.file}: {mutant.fault} ({' '.join(mutant.tests)})", flush=True)

    try_all([each for each in mutants if each.fault not in found], args.jobs, note)
    caught_by = [str(found[each.fault]["caught_by"]) for each in mutants if found[each.fault]["outcome"] == "caught"]
    print(f"{len(caught_by)} of {len(mutants)} faults are caught")
    # A test that fails anyway catches nothing.
    failed = failures_without_faults(sorted(set(caught_by))) if caught_by else []
    for test in failed:
        print(f"{test} fails without any fault")
    return int(len(caught_by) < len(mutants) or bool(failed))


if __name__ == "__main__":
    sys.exit(main())
