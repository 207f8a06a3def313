"""Fixtures for all tests: the demo model, its tokenizer, and one running server of each kind."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, settings
from support import triton_interpreter
from support.cpu_seconds import CpuSeconds
from support.forker import Forker
from support.forker_process import read_on_import
from support.freed_memory import FreedMemory
from support.running import EXACT, FAKE, REAL, Running, free_port
from support.short_demo import write_short_demo

import moestro

# Several test processes run at once: with a thread for each core in every one, they would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The key of records is made once for each user; tests leave no file at home.
os.environ["XDG_STATE_HOME"] = str(Path(tempfile.gettempdir()) / f"moestro-tests-{os.getuid()}")
# torch may import Triton in any test, and kernels run in the mode that it had then.
triton_interpreter.interpret_without_gpu()
# pytest-xdist sets a width of 80, which a console that is made then keeps.
os.environ.pop("COLUMNS", None)

# Each run draws the same histories, however busy the machine is; --hypothesis-profile=explore draws others.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", settings.get_profile("busy"))
settings.register_profile("repeatable", settings.get_profile("busy"), derandomize=True)
# The counts of the laws before they were cut to those that find the planted faults (`support/examples.py`).
settings.register_profile("thorough", settings.get_profile("repeatable"))
settings.load_profile("repeatable")

# With other values the forker refuses a program.
READ_ON_IMPORT = read_on_import(os.environ)

# What the imports of all tests create stays: the collector would look through a million objects again and again.
gc.disable()
# Simulations allocate many objects that live long: Python's own thresholds take up to a sixth of their time.
SELDOM = (10_000, 20, 20)
FREED = FreedMemory()


def pytest_configure(config: pytest.Config) -> None:
    if not sys.platform.startswith("linux"):
        return
    pids: tuple[int, ...] = ()
    if not hasattr(config, "workerinput"):  # a worker of pytest-xdist uses the forker of the process that started it
        forker = Forker()
        config.add_cleanup(forker.end)
        pids = forker.pids
    config.pluginmanager.register(CpuSeconds(pids))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """At the end of a file, restore variables that tests or libraries have set, for which the forker would refuse."""
    yield
    if nextitem is None or nextitem.path != item.path:
        restore_variables()
        FREED.give_back()


def restore_variables() -> None:
    for name in read_on_import(os.environ).keys() - READ_ON_IMPORT.keys():
        del os.environ[name]
    os.environ.update(READ_ON_IMPORT)


def pytest_collection_finish() -> None:
    restore_variables()  # Ray sets one when it is imported
    gc.freeze()
    gc.set_threshold(*SELDOM)
    gc.enable()


# The embedded demo model; the variable names another while that one is being trained.
DEMO = os.environ.get("MOESTRO_TEST_DEMO")
NAME = "moestro-demo"


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    return Path(DEMO or Path(moestro.__file__).parent / "assets" / "demo")


@pytest.fixture(scope="session")
def tokenizer(demo_dir: Path):
    from moestro.text.tokenizer import Tokenizer  # noqa: PLC0415 it loads transformers, which takes seconds

    return Tokenizer(demo_dir)


@pytest.fixture(scope="session")
def openai() -> ModuleType:
    return import_module("openai")  # only where a test needs it: it takes half a second


@pytest.fixture(scope="session")
def anthropic() -> ModuleType:
    return pytest.importorskip("anthropic")  # a dependency of development alone


@pytest.fixture
def claude(anthropic: ModuleType, place: Running) -> Iterator[Any]:
    """Anthropic's client of the server or router that the file's fixture `place` names."""
    with anthropic.Anthropic(base_url=place.url, api_key="x", max_retries=0) as client:
        yield client


@pytest.fixture
def openai_client(openai: ModuleType, place: Running) -> Iterator[Any]:
    """OpenAI's client of the server or router that the file's fixture `place` names."""
    with openai.OpenAI(base_url=f"{place.url}/v1", api_key="x", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session", autouse=True)
def grammars() -> Iterator[None]:
    """The directories and processes of plain grammars, which end with the session."""
    yield
    if (used := sys.modules.get("support.plain_grammar")) is not None:
        for backend in used.BACKENDS:
            backend.close()
        used.DIRECTORIES.cleanup()


@pytest.fixture(scope="session")
def real_command() -> tuple[str, ...]:
    """`moestro serve` with no model named: the embedded one."""
    return (*REAL, *((DEMO, "--served-model-name", NAME) if DEMO else ()), "--kv-cache-memory-bytes", "100000000")


@pytest.fixture(scope="session")
def fake_command(demo_dir: Path) -> tuple[str, ...]:
    """The same front door before fake ranks, which read what to do from `priority`."""
    return (*FAKE, str(demo_dir), "--served-model-name", NAME, "--scheduling-policy", "priority")


@pytest.fixture(scope="session")
def short_demo(demo_dir: Path, tmp_path_factory) -> Path:
    """Two layers of the embedded model."""
    return write_short_demo(tmp_path_factory.mktemp("short"), demo_dir)


@pytest.fixture(scope="session")
def short_command(short_demo: Path) -> tuple[str, ...]:
    """`moestro serve` with two layers of the embedded model, for tests that compare servers of the same network."""
    return (*REAL, str(short_demo), "--served-model-name", NAME, "--kv-cache-memory-bytes", "100000000")


@pytest.fixture(scope="session")
def server(real_command, tmp_path_factory) -> Iterator[Running]:
    yield from exact_server(real_command, tmp_path_factory.mktemp("real"))


@pytest.fixture(scope="session")
def short_server(short_command, tmp_path_factory) -> Iterator[Running]:
    """One engine with the network of `short_command`, in fused mode."""
    yield from exact_server(short_command, tmp_path_factory.mktemp("short-server"))


def exact_server(command: Sequence[str], directory: Path) -> Iterator[Running]:
    running = Running((*command, *EXACT), directory, admin_port=free_port())
    yield running
    processes = running.processes()
    try:
        assert running.stop() == 0
        assert running.left_behind() == []
        assert psutil.wait_procs(processes, timeout=30)[1] == [], "they end with the server, or a moment later"
    finally:
        running.kill()


@pytest.fixture(scope="session")
def fake(fake_command, tmp_path_factory) -> Iterator[Running]:
    running = Running(fake_command, tmp_path_factory.mktemp("fake"), admin_port=free_port())
    yield running
    running.kill()
