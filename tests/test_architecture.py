"""The import table of docs/architecture.md, held: who may import whom, what may load torch, how large a file may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "moestro"

LEVELS = {"routing", "engine", "flow", "placement"}
# Room -> the rooms it may import.
MAY_IMPORT = {
    "errors": set(),
    "core": set(),
    "native": set(),
    "files": set(),
    "wire": {"core"},
    "text": {"core", "files"},
    "grammar": {"core", "text"},
    "cost": {"core", "files", "native"},
    "workload": {"core", "files"},
    "flow": {"core"},
    "engine": {"core", "flow"},
    "routing": {"core", "files", "native", "wire", "cost"},
    "placement": {"core", "native", "cost", "wire"},
    "model": {"core", "files", "native"},
    "config": {"core", "files"},
    "web": {"core", "files"},
    "sim": {"core", "files", "wire", "cost", "workload", "config", *LEVELS},
    "repro": {"sim", "core", "wire", "cost", "workload", "config", *LEVELS},
    "planner": {"sim", "core", "wire", "cost", "workload", "config", *LEVELS},
    "worker": {"core", "wire", "text", "grammar", "model", "cost", "config", *LEVELS},
    "server": {"core", "files", "wire", "routing", "placement", "cost", "text", "grammar", "web", "workload", "config"},
    "gateway": {"core", "files", "wire", "routing", "engine", "text", "web", "workload", "config"},
    "loadgen": {"core", "workload", "cost", "web", "config"},
    "offline": {"core", "files", "web", "workload", "loadgen"},
    # It times a rank, with the main loop and the messages of a server's, in its own process; and running servers, as
    # `moestro bench` sends requests and the router reads figures.
    "calibrate": {
        *("core", "wire", "workload", "cost", "web", "config", "engine", "model", "worker"),
        *("loadgen", "routing"),
    },
}
MAY_IMPORT["cli"] = set(MAY_IMPORT)
# `config` composes the settings modules of these rooms, and imports nothing else of them. A room that may import
# `config` may import these modules too: they load neither torch nor anything with effects.
SETTINGS_OF = {*LEVELS, "model", "cost", "text", "web"}
EFFECTS = {
    "grammar",
    "text",
    "worker",
    "server",
    "gateway",
    "loadgen",
    "offline",
    "calibrate",
    "web",
}  # sockets, processes and the wall clock
ONLY_IN = {"torch": {"model"}, "transformers": {"model", "text"}} | dict.fromkeys(
    ("aiohttp", "socket", "asyncio"), EFFECTS
)
ONLY_IN["zmq"] = ONLY_IN["socket"] = EFFECTS | {"wire"}  # what the sockets at both ends of a wire have in common
ONLY_IN["ray"] = {"server"}
ONLY_IN["opentelemetry"] = {"web"}
ONLY_IN["hpack"] = ONLY_IN["google"] = {"gateway"}
BANNED_NAMES = {"utils", "helpers", "common", "misc", "manager"}
# config stamps a run's record with the time of its start; planner ends its search in time; model times the copy of a
# block of KV at its start
READS_CLOCK = {*EFFECTS, "config", "planner", "model"}
# Rooms whose words are clock-free: time enters as an integer argument.
WALL_CLOCK = {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "now", "utcnow"}


def files() -> list[Path]:
    return sorted(file for file in SOURCE.rglob("*.py") if not file.name.endswith("_pb2.py"))


def room_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


@cache
def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of the file's syntax tree; parsed once, because every law reads them."""
    return list(ast.walk(ast.parse("\n".join(lines(path)))))


@cache
def imports(path: Path) -> list[str]:
    found: list[str] = []
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return found


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_file_imports_only_the_rooms_that_the_table_allows(path):
    room = room_of(path)
    if room == "__init__":
        return
    for name in imports(path):
        top, *rest = name.split(".")
        if top == "moestro" and rest[0] not in {room, "errors", "__version__"}:
            may_have_settings = "config" in {room, *MAY_IMPORT[room]}
            is_settings = may_have_settings and (
                rest[0] in SETTINGS_OF and any(part.endswith("settings") for part in rest[1:3])
            )
            assert is_settings or rest[0] in MAY_IMPORT[room], f"{room} may not import {rest[0]}"
        if top in ONLY_IN:
            assert room in ONLY_IN[top], f"{top} belongs to {ONLY_IN[top]}"


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_file_keeps_the_house_rules(path):
    assert len(lines(path)) <= 800
    assert path.stem not in BANNED_NAMES
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 60, f"{node.name} is longer than 60 lines"
        if isinstance(node, ast.Name | ast.Attribute):
            assert (node.id if isinstance(node, ast.Name) else node.attr) != "TYPE_CHECKING"
        if isinstance(node, ast.Attribute) and room_of(path) not in READS_CLOCK and node.attr in WALL_CLOCK:
            assert not (isinstance(node.value, ast.Name) and node.value.id in {"time", "datetime"}), "wall clock"


def test_every_room_of_the_table_exists():
    assert {room_of(path) for path in files()} - {"__init__"} == set(MAY_IMPORT)


def test_median_sizes():
    lengths = sorted(len(lines(path)) for path in files())
    functions = sorted(
        node.end_lineno - node.lineno + 1
        for path in files()
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    assert lengths[len(lengths) // 2] <= 300
    assert functions[len(functions) // 2] <= 12


ROOMS_WITHOUT_TORCH = sorted(set(MAY_IMPORT) - {"model"})


@pytest.fixture(scope="module")
def rooms_that_load_torch() -> set[str]:
    """The rooms behind whose import torch is loaded, found in one process that imports one after another."""
    code = f"""
import importlib, sys
for room in {ROOMS_WITHOUT_TORCH}:
    was_loaded = "torch" in sys.modules
    importlib.import_module("moestro." + room)
    if "torch" in sys.modules and not was_loaded:
        print(room)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("room", ROOMS_WITHOUT_TORCH)
def test_no_room_but_model_loads_torch(room, rooms_that_load_torch):
    assert room not in rooms_that_load_torch


def test_a_simulation_loads_neither_a_command_line_nor_a_server_nor_live_placement():
    code = """
import sys
from moestro.sim import verb
from moestro.sim.settings import PolicySettings, SimEngineSettings
PolicySettings(), SimEngineSettings()
heavy = {"cyclopts", "moestro.config.serve_settings", "moestro.placement.live", "moestro.placement.search"}
print(*heavy & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


def test_nothing_unpickles_or_evaluates():
    banned = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
    for path in files():
        assert not {name.split(".")[0] for name in imports(path)} & banned, path
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec"}, path


def test_a_class_name_means_one_thing():
    places: dict[str, list[str]] = {}
    for path in files():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
