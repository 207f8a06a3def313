"""BLAS has one thread while a placement is planned."""

from __future__ import annotations

import pytest
from support.expert_loads import even_load, first_view, zipf_shares
from threadpoolctl import ThreadpoolController, threadpool_limits

from moestro.placement.contract import PLACE_POLICIES
from moestro.placement.policies import moestro
from moestro.placement.score import on_one_core


def num_threads() -> list[int]:
    """Number of threads of NumPy's BLAS library, without SciPy's library, which other tests load."""
    libraries = ThreadpoolController().info()
    return [
        each["num_threads"] for each in libraries if each["user_api"] == "blas" and "scipy.libs" not in each["filepath"]
    ]


def test_blas_has_one_thread_within_and_what_it_had_before_afterwards():
    with threadpool_limits(2, "blas"):
        before = num_threads()
        assert set(on_one_core(num_threads)()) == {1}
        assert num_threads() == before
        with pytest.raises(ZeroDivisionError):
            on_one_core(lambda: 1 // 0)()
        assert num_threads() == before


@pytest.mark.parametrize("name", ["moestro", "gimbal_v2"])
def test_policies_plan_with_one_thread(name, monkeypatch):
    seen: list[int] = []
    problem_of = moestro.problem_of

    def counted(*args: object, **kwargs: object) -> object:
        seen.extend(num_threads())
        return problem_of(*args, **kwargs)

    monkeypatch.setattr(moestro, "problem_of", counted)
    view = first_view(even_load(zipf_shares(4, 64, 0.8), 8), 10, 2)
    with threadpool_limits(2, "blas"):
        PLACE_POLICIES.make(name)(view)
    assert set(seen) == {1}
