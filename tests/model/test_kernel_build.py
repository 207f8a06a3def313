"""Kernels come from the wheel, from the cache or from a compiler; without any, torch's serve."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from parity import drive, tiny
from support import own_kernels

from moestro.errors import ConfigError
from moestro.model.device import open_device
from moestro.model.kernels import compiler, kernel_choice
from moestro.model.kernels.compiler import is_whole, library_name
from moestro.model.kernels.kernel_build import KernelBuild, cache_folder, choose_instruction_set, usable_sets

NO_FOLDER = Path("/nonexistent")


@pytest.fixture
def compiled(tmp_path):
    """A folder with the kernels of this machine."""
    folder = tmp_path / "compiled"
    folder.mkdir()
    shutil.copy(own_kernels.kernels().path, folder)
    return folder


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)


@pytest.fixture
def counted(monkeypatch):
    """Compilations, which copy the kernels that are there."""
    made = []
    source = own_kernels.kernels().path

    def compile_kernels(chosen, folder):
        made.append(chosen)
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / library_name(chosen)
        shutil.copy(source, f"{target}.new")
        Path(f"{target}.new").replace(target)
        return target

    monkeypatch.setattr("moestro.model.kernels.kernel_build.compile_kernels", compile_kernels)
    return made


def build(prebuilt: Path = NO_FOLDER, cache: Path = NO_FOLDER) -> KernelBuild:
    made = KernelBuild(prebuilt=prebuilt, cache=cache)
    made.wait(60)
    assert made.is_over
    return made


def test_the_wheel_s_kernels_come_first(compiled, no_compiler):
    found = build(prebuilt=compiled)
    assert found.library is not None
    assert found.library.path.parent == compiled


def test_without_a_compiler_there_are_none_and_the_reason_is_given(no_compiler, tmp_path):
    found = build(cache=tmp_path)
    assert found.library is None
    assert found.failure == "no C++ compiler was found"


def test_a_cache_serves_without_a_compiler(compiled, no_compiler):
    assert build(cache=compiled).library is not None


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_cache_entry_is_compiled_again(damage, compiled, counted):
    path = compiled / library_name(choose_instruction_set())
    content = path.read_bytes()
    damaged = {"cut": content[:5000], "empty": b"", "changed": content[:3000] + b"\0" * 64 + content[3064:]}[damage]
    path.unlink()  # not in place: this process has loaded a copy of it
    path.write_bytes(damaged)
    assert not is_whole(path)
    assert build(cache=compiled).library is not None
    assert len(counted) == 1
    assert is_whole(path)


def test_builds_that_begin_together_compile_once(tmp_path, counted):
    builds = [KernelBuild(prebuilt=NO_FOLDER, cache=tmp_path) for _ in range(4)]
    assert all(each.wait(60) is not None for each in builds)
    assert len(counted) == 1


def test_a_folder_that_cannot_be_written_leaves_torch_s_kernels(tmp_path, counted):
    (tmp_path / "file").write_text("in the way")
    found = build(cache=tmp_path / "file" / "kernels")
    assert found.library is None
    assert found.failure


def test_a_compiler_that_fails_is_quoted_and_leaves_no_file(tmp_path, monkeypatch):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'internal error 42' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    cache = tmp_path / "cache"
    found = build(cache=cache)
    assert "internal error 42" in found.failure
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_the_name_of_an_entry_changes_with_sources_and_flags(tmp_path, monkeypatch):
    chosen = choose_instruction_set()
    before = library_name(chosen)
    assert library_name(chosen) == before
    assert len({library_name(each) for each in compiler.built_sets()}) == len(compiler.built_sets())
    shutil.copytree(compiler.SOURCES, tmp_path / "source")
    monkeypatch.setattr(compiler, "SOURCES", tmp_path / "source")
    assert library_name(chosen) == before
    with (tmp_path / "source" / "linear.cpp").open("a") as file:
        file.write("\n")
    assert library_name(chosen) != before


def test_each_machine_gets_the_best_set_whose_instructions_it_has(monkeypatch):
    sets = {each.name: each for each in compiler.built_sets()}
    if len(sets) == 1:
        pytest.skip("one set serves this kind of machine")
    for last in range(1, len(sets) + 1):  # a CPU that has the first ones
        names = list(sets)[:last]
        monkeypatch.setattr(
            "moestro.model.kernels.kernel_build._IS_USABLE",
            {each: lambda each=each, names=names: each.name in names for each in sets.values()},
        )
        assert choose_instruction_set() is sets[names[-1]]
        assert [each.name for each in usable_sets()] == names


def test_the_cache_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "moestro" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path(os.path.expanduser("~/.cache/moestro/kernels"))  # noqa: PTH111


def settings(directory: Path, kernels: str, dtype: str = "bfloat16"):
    return tiny.settings_of(directory, dtype=dtype, kernels=kernels)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return own_kernels.save_checkpoint(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe")


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    """An empty cache, and no kernels in the package."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_own_waits_and_makes_an_exact_network(directory):
    own_kernels.kernels()
    device, info = open_device(settings(directory, "own"))
    assert info.is_exact
    assert any("Moestro's own" in note for note in info.notes)
    assert device.network.is_batch_invariant


def test_own_without_a_compiler_is_refused(directory, own_cache, no_compiler):
    with pytest.raises(ConfigError, match="no C\\+\\+ compiler was found"):
        open_device(settings(directory, "own"))


def test_auto_without_a_compiler_serves_by_torch_and_says_so(directory, own_cache, no_compiler):
    device, info = open_device(settings(directory, "auto"))
    assert not info.is_exact
    assert any("torch's" in note and "no C++ compiler" in note for note in info.notes)
    drive.run(device, drive.make_units([(0, [7, 8])], np.zeros((1, 1))))


def test_eager_searches_nothing(directory, monkeypatch):
    monkeypatch.setattr(kernel_choice, "KernelBuild", None)
    _, info = open_device(settings(directory, "eager"))
    assert not info.is_exact
    assert any("--kernels eager" in note for note in info.notes)


def test_float32_stays_exact_on_torch_s_kernels(directory, monkeypatch):
    monkeypatch.setattr(kernel_choice, "KernelBuild", None)
    device, info = open_device(settings(directory, "auto", "float32"))
    assert info.is_exact
    assert not any("kernels" in note for note in info.notes)
    assert device.network.exchange is None
    _, info = open_device(settings(directory, "own", "float32"))
    assert any("torch computes all" in note for note in info.notes)


def test_a_slow_compiler_lets_the_network_serve_first(directory, own_cache, monkeypatch):
    library = own_kernels.kernels()
    may_end = threading.Event()

    def find(self):
        may_end.wait(60)
        return library

    monkeypatch.setattr(KernelBuild, "_find", find)
    monkeypatch.setattr(kernel_choice, "_PATIENCE_S", 0.01)
    device, info = open_device(settings(directory, "auto"))
    assert not info.is_exact
    assert any("are being compiled" in note for note in info.notes)
    units = drive.make_units([(0, [7, 8])], np.zeros((1, 1)))
    drive.run(device, units)
    assert device.network.exchange is None
    may_end.set()
    assert device.network._awaited.wait(60) is library
    drive.run(device, units)
    assert device.network.is_batch_invariant
    assert torch.isfinite(device.pools.find(0)[0]).all()
