import numpy as np
import pytest

from moestro.config.user_files import accept_user_code
from moestro.core.views import BE, LS, EvictView, Victim
from moestro.engine.policies.batching import LastInOrder, LeastComputedBeFirst
from moestro.engine.registry import EVICT_POLICIES
from moestro.errors import ConfigError

accept_user_code()


def view_of(ranks, computed, classes):
    return EvictView(np.array(ranks), np.array(computed, np.int32), np.array(classes, np.uint8), 0)


def test_the_last_in_the_order_of_admission_is_evicted():
    assert LastInOrder()(view_of([1, 3, 0, 2], [0] * 4, [LS] * 4)) == Victim(1)


def test_best_effort_yields_first_and_of_it_who_loses_least():
    assert LeastComputedBeFirst()(view_of([3, 0, 1, 2], [1, 50, 20, 30], [LS, BE, BE, LS])) == Victim(2)


def test_among_equals_of_best_effort_the_last_in_order_yields():
    assert LeastComputedBeFirst()(view_of([0, 1, 2], [7, 7, 7], [BE, BE, LS])) == Victim(1)


def test_without_best_effort_the_last_in_order_yields():
    assert LeastComputedBeFirst()(view_of([0, 2, 1], [9, 8, 7], [LS, LS, LS])) == Victim(1)


# --- a user's own -----------------------------------------------------------------------------------------------------


def test_a_policy_that_comes_with_moestro_goes_by_name():
    assert EVICT_POLICIES.make("last_in_order") == LastInOrder()
    with pytest.raises(
        ConfigError,
        match=r"unknown evict_policy 'lru'; known: last_in_order, .*, or FILE\.py:NAME",
    ):
        EVICT_POLICIES.make("lru")


@pytest.mark.parametrize(
    ("text", "makes_way"),
    [
        ("def mine(view):\n    return Victim(1, keeps=False)", False),
        ("class mine:\n    makes_way = True\n    def __call__(self, view):\n        return Victim(1, False)", True),
    ],
)
def test_a_file_may_have_a_function_or_a_class(tmp_path, text, makes_way):
    (tmp_path / "own.py").write_text(f"from moestro.core.views import Victim\n\n\n{text}\n")
    policy = EVICT_POLICIES.make(f"{tmp_path}/own.py:mine")
    assert policy.makes_way == makes_way
    assert policy(view_of([0, 1], [5, 6], [LS, BE])) == Victim(1, keeps=False)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("def mine(view):\n    return 1", "it answered 1 for 2 rows: a Victim of row 0 to 1 is wanted"),
        ("from moestro.core.views import Victim\ndef mine(view):\n    return Victim(0.0)", "a Victim of row 0 to 1"),
        ("def mine(view):\n    return view.nothing", "AttributeError"),
        ("mine = 3", "has no function or class 'mine'"),
        ("import nothing_at_all", "does not run: ModuleNotFoundError"),
    ],
)
def test_a_file_that_cannot_work_is_refused_with_the_cause(tmp_path, text, cause):
    (tmp_path / "own.py").write_text(text + "\n")
    with pytest.raises(ConfigError, match=cause):
        EVICT_POLICIES.make(f"{tmp_path}/own.py:mine")


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        ("None", r"it answered None for 3 rows: a Victim of row 0 to 2 is wanted"),
        ("Victim(-1)", r"it answered Victim\(row=-1, keeps=True\) for 3 rows"),
        ("Victim(3)", r"it answered Victim\(row=3, keeps=True\) for 3 rows"),
        ("view.nothing", r"AttributeError: .*\(own.py, line 3\)"),
    ],
)
def test_a_policy_of_a_file_that_fails_later_is_named_by_the_error(tmp_path, answer, cause):
    head = "from moestro.core.views import Victim\ndef mine(view):\n"
    (tmp_path / "own.py").write_text(f"{head}    return Victim(0) if len(view.order_rank) == 2 else {answer}\n")
    policy = EVICT_POLICIES.make(f"{tmp_path}/own.py:mine")
    with pytest.raises(ConfigError, match=f"--evict-policy {tmp_path}/own.py:mine: {cause}"):
        policy(view_of([0, 1, 2], [5, 6, 7], [LS, BE, BE]))


def test_a_row_may_be_a_number_of_numpy(tmp_path):
    (tmp_path / "own.py").write_text(
        "from moestro.core.views import Victim\ndef mine(view):\n    return Victim(view.order_rank.argmax())\n"
    )
    victim = EVICT_POLICIES.make(f"{tmp_path}/own.py:mine")(view_of([0, 1], [5, 6], [LS, BE]))
    assert (victim, type(victim.row)) == (Victim(1), int)
