"""A step policy of the user's own: loaded from a file, tried once, refused with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from moestro.config.user_files import accept_user_code
from moestro.errors import ConfigError
from moestro.flow.policies.qllm import ExpertLevelPreemption
from moestro.flow.registry import _one_token_waits, make_step_policy

accept_user_code()

GOOD = """
from moestro.core.views import Wait
from moestro.flow.policies.one_queue import in_order
class Plain:
    def __call__(self, view, now_ns):
        return in_order(view, now_ns)
ready = Plain()
def elsewhere(view, now_ns):
    return in_order(view, now_ns).__class__(1, 0, 1, (0, 1))
def half(view, now_ns):
    return in_order(view, now_ns).__class__(0.0, 0, 1, (0, 1))
def far(view, now_ns):
    answer = in_order(view, now_ns)
    return answer if now_ns == 0 else answer.__class__(9, 0, 1, (0, 1))
def at_once(view, now_ns):
    return Wait(now_ns)
class Overlapping(Plain):
    overlaps_prefill = True
def broken(view, now_ns):
    return view.missing
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    return path


@pytest.mark.parametrize("name", ["Plain", "ready"])
def test_a_class_or_an_object_of_a_file_is_a_step_policy(file, name):
    assert type(make_step_policy(f"{file}:{name}", 1).choose).__name__ == "Plain"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("elsewhere", "where one token waits for the attention of layer 0"),
        ("half", r"it answered Run\(layer=0.0, .*a Run of the view's layers and groups, is wanted"),
        ("at_once", r"it answered Wait\(until_ns=0\) at 0 ns: a Wait until later is wanted"),
        ("broken", "failed its trial: AttributeError"),
        ("nothing", "has no function or class 'nothing'"),
    ],
)
def test_one_that_fails_its_trial_is_refused(file, name, why):
    with pytest.raises(ConfigError, match=why):
        make_step_policy(f"{file}:{name}", 1)


def test_one_that_fails_after_its_trial_is_named_by_the_error(file):
    policy = make_step_policy(f"{file}:far", 1)
    with pytest.raises(ConfigError, match=rf"--step-policy {file}:far: it answered Run\(layer=9, "):
        policy(_one_token_waits(), 1)


def test_one_may_say_that_decodes_overlap_prompts(file):
    assert make_step_policy(f"{file}:Overlapping", 1).overlaps_prefill
    assert not make_step_policy(f"{file}:Plain", 1).overlaps_prefill


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no file"):
        make_step_policy(f"{tmp_path}/none.py:policy", 1)


def test_seconds_of_waiting_are_given_to_qllm():
    assert make_step_policy("qllm", 0.5) == ExpertLevelPreemption(max_wait_ns=500_000_000)
    assert make_step_policy("qllm", float("inf")) == ExpertLevelPreemption(max_wait_ns=None)
