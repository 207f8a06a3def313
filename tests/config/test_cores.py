"""Cores of engines: parts of what the server may use, one for each process of this machine that computes."""

from __future__ import annotations

import pytest

from moestro.config import cores
from moestro.config.cores import share_of_cores, thread_environment
from moestro.config.serve_settings import LauncherSettings, ProcessSettings, ServeSettings
from moestro.cost.settings import PacedSettings
from moestro.flow.settings import GroupOptions, SteppingSettings
from moestro.server.processes import launch_specs
from moestro.server.processes.launch_specs import cores_of


@pytest.mark.parametrize("num_cores", [1, 2, 7, 64])
@pytest.mark.parametrize("num_processes", [1, 2, 3, 7])
def test_shares_are_neighbours_of_like_size_and_each_core_has_one_process(num_cores, num_processes):
    usable = [2 * core for core in range(num_cores)]
    shares = [share_of_cores(usable, number, num_processes) for number in range(num_processes)]
    if num_cores < num_processes:
        assert shares == [()] * num_processes
        return
    assert [core for share in shares for core in share] == usable
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    """A container whose cpuset has four cores."""
    monkeypatch.setattr(launch_specs, "usable_cores", lambda: (4, 5, 6, 7))


def test_engines_share_the_cores_that_the_server_may_use():
    settings = ServeSettings(processes=ProcessSettings(engines=2))
    assert [cores_of(settings, rank) for rank in range(2)] == [(4, 5), (6, 7)]
    assert cores_of(ServeSettings(), 0) == ()
    assert cores_of(ServeSettings(processes=ProcessSettings(engines=5)), 0) == ()


def test_workers_of_a_group_share_them_too_and_added_ones_run_anywhere():
    settings = ServeSettings(stepping=SteppingSettings(mode="async"), group=GroupOptions(attention=2, experts=2))
    assert [cores_of(settings, rank) for rank in range(5)] == [(4,), (5,), (6,), (7,), ()]


@pytest.mark.parametrize(
    "settings",
    [
        ServeSettings(processes=ProcessSettings(engines=2, bind_cores=False)),
        ServeSettings(processes=ProcessSettings(engines=2), launching=LauncherSettings(launcher="ray")),
        ServeSettings(processes=ProcessSettings(engines=2), pacing=PacedSettings(device="paced:h20")),
    ],
)
def test_the_operator_other_machines_and_paced_devices_bind_nothing(settings):
    assert cores_of(settings, 0) == ()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "10000"}),
        ({"OMP_NUM_THREADS": ""}, {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "10000"}),
        ({"OMP_NUM_THREADS": "7", "GOMP_SPINCOUNT": "9"}, {}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_NUM_THREADS": "2"}),
    ],
)
def test_threads_of_processes_share_the_cores_and_sleep_soon_unless_the_operator_says_otherwise(
    given, wanted, monkeypatch
):
    for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cores, "num_cores", lambda: 5)
    assert thread_environment(2) == wanted
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert thread_environment(9)["OMP_NUM_THREADS"] == "1"
