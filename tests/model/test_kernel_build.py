"""Which CPU kernels a network gets: the best instruction set, by the choice of the settings; without any, torch's."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from parity import drive, tiny
from support import own_kernels

from moestro.errors import ConfigError
from moestro.model.device import open_device
from moestro.model.kernels import kernel_choice
from moestro.model.kernels.library import KernelBuild, usable_sets
from moestro.native.compiler import CPU_KERNELS, CompilerError


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)


def test_each_machine_gets_the_best_set_whose_instructions_it_has(monkeypatch):
    sets = {each.name: each for each in CPU_KERNELS.built_sets()}
    if len(sets) == 1:
        pytest.skip("one set serves this kind of machine")
    for last in range(1, len(sets) + 1):  # a CPU that has the first ones
        names = list(sets)[:last]
        monkeypatch.setattr(
            "moestro.model.kernels.library._IS_USABLE",
            {each: lambda each=each, names=names: each.name in names for each in sets.values()},
        )
        assert usable_sets()[-1] is sets[names[-1]]
        assert [each.name for each in usable_sets()] == names


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


def test_a_slow_compiler_lets_the_network_serve_first(directory, own_cache, monkeypatch, caplog):
    library = own_kernels.kernels()
    may_end = threading.Event()

    def find(self):
        may_end.wait(300)
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
    assert device.network._awaited.wait(300) is library
    with caplog.at_level("INFO", "moestro.model.network"):
        drive.run(device, units)
    assert any("The prefix cache begins anew" in each.message for each in caplog.records)
    assert device.network.is_batch_invariant
    assert torch.isfinite(device.pools.find(0)[0]).all()


def test_a_compiler_that_fails_after_the_start_is_a_warning(directory, own_cache, monkeypatch, caplog):
    may_end = threading.Event()

    def find(self):
        may_end.wait(300)
        raise CompilerError("c++ failed")

    monkeypatch.setattr(KernelBuild, "_find", find)
    monkeypatch.setattr(kernel_choice, "_PATIENCE_S", 0.01)
    device, _ = open_device(settings(directory, "auto"))
    build = device.network._awaited
    may_end.set()
    build.wait(300)
    for _ in range(2):
        drive.run(device, drive.make_units([(0, [7, 8])], np.zeros((1, 1))))
    warnings = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert warnings == ["CPU kernels: torch's stay, which are slower than Moestro's own: c++ failed."]
