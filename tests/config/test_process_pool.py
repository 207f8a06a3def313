"""Independent jobs: answers in the order of the jobs, in one process or in several."""

from __future__ import annotations

import os

import pytest
from support.pool_jobs import failing, with_process

from moestro.config import cores
from moestro.config.cores import num_cores, run_jobs


@pytest.mark.parametrize(("num_processes", "is_here"), [(1, True), (2, False)])
def test_answers_come_in_the_order_of_the_jobs(num_processes, is_here):
    answers = list(run_jobs(with_process, [3, 1, 2], num_processes))
    assert [square for square, _ in answers] == [9, 1, 4]
    assert ({process for _, process in answers} == {os.getpid()}) == is_here


def test_one_job_needs_no_process():
    assert list(run_jobs(with_process, [5], 8)) == [(25, os.getpid())]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_an_error_of_a_job_is_the_callers(num_processes):
    with pytest.raises(ZeroDivisionError):
        list(run_jobs(failing, [0, 1, 2], num_processes))


def test_there_is_a_core():
    assert num_cores() >= 1


@pytest.mark.parametrize(("limit", "wanted"), [(None, 4), (8.0, 4), (2.5, 2), (0.5, 1)])
def test_a_quota_of_a_container_lessens_the_cores(limit, wanted, monkeypatch):
    monkeypatch.setattr(cores, "usable_cores", lambda: (0, 1, 2, 3))
    monkeypatch.setattr(cores, "cpu_limit", lambda: limit)
    assert num_cores() == wanted
