import re
from pathlib import Path

import pytest
from support.routers import request, router

from moestro.config.user_files import accept_user_code
from moestro.engine.registry import EVICT_POLICIES
from moestro.errors import ConfigError
from moestro.routing.registry import ROUTE_POLICIES, policy_from

accept_user_code()

ROOT = Path(__file__).parents[2]


def test_a_policy_takes_settings_by_name():
    assert policy_from("bailian:hit_weight=0.55").hit_weight == 0.55
    assert policy_from("vllm-0.27:num_clients=3").num_clients == 3
    assert policy_from("lmetric:hotspots=off").num_alarms == [0, 0]
    assert policy_from("lmetric:window_s=5,max_classes=3").window_s == 5
    assert policy_from("gimbal-v1:load_gap=2500.5") is not None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("best", "unknown route policy 'best'; known: aibrix"),
        ("bailian:weight=1", "has no setting 'weight'; it has hit_weight"),
        ("bailian:0.7", "NAME:SETTING=VALUE"),
        ("bailian:hit_weight=much", "route policy 'bailian': hit_weight must be a number, got 'much'"),
        ("cache_aware:rel_threshold=x", "rel_threshold must be a number, got 'x'"),
        ("cache_aware:abs_threshold=nan", "abs_threshold must be a whole number, got 'nan'"),
        ("aibrix:max_range=1.5", "max_range must be a whole number, got 1.5"),
        ("llm-d:predict_ttft_ns=3", "has no setting 'predict_ttft_ns'; it has prices"),
        ("llm-d-affinity:predict_ttft_ns=3", "has no setting 'predict_ttft_ns'; it has min_hit, max_penalty_s, prices"),
        ("lmetric:detector=5", "has no setting 'detector'; it has hotspots, window_s, max_requests"),
        ("lmetric:hotspots=1", "hotspots must be a word, got 1"),
        ("lmetric:min_share=2", "min_share must be above 0 and at most 1, got 2"),
        ("lmetric:window_s=inf", "route policy 'lmetric'"),
        ("session_affinity:by=user", "has no setting 'by'; it has expiry_s"),
        (f"vllm-0.27:num_clients=1{'0' * 310}", "cannot decide with {'num_clients': 10"),
        ("round_robin:speed=3", "it has none at all"),
        ("nowhere.py:fn", "there is no file nowhere.py"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(text, problem):
    with pytest.raises(ConfigError, match=re.escape(problem)):
        policy_from(text)


def test_every_policy_is_described_in_the_manual():
    manual = (ROOT / "docs" / "policies.md").read_text()
    assert [name for name in ROUTE_POLICIES.names() if f"`{name}`" not in manual] == []


# --- a user's own file


def test_the_example_of_a_users_policy_routes():
    example = ROOT / "examples" / "route_policy.py"
    assert len(example.read_text().splitlines()) < 50
    for name in ("fewest_tokens", "StickyPrompt"):
        three = router(3, policy_from(f"{example}:{name}"))
        prompts = [list(range(i % 5, 64 + i % 5)) for i in range(30)]
        engines = [three.submit(request(str(i), prompt=prompt), i).engine for i, prompt in enumerate(prompts)]
        assert set(engines) == {0, 1, 2}


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("def score(view): return view.engines.num_in_flight[:1]", "shape (1,) for 2 engines"),
        ("def score(view): return view.nothing", "failed its trial: AttributeError"),
        ("score = 3", "no function or class 'score'"),
        ("def other(view): pass", "no function or class 'score'"),
        ("import nothing_of_that_name", "does not run: ModuleNotFoundError"),
        ("class score:\n  def __init__(self, x): pass", "failed its trial: TypeError"),
    ],
)
def test_a_file_that_does_not_work_is_refused_before_anything_is_served(tmp_path, source, problem):
    file = tmp_path / "mine.py"
    file.write_text(source)
    with pytest.raises(ConfigError, match=re.escape(problem)):
        policy_from(f"{file}:score")


def test_a_users_file_may_register_its_policy_and_be_named_by_several_flags(tmp_path, monkeypatch):
    monkeypatch.setattr(ROUTE_POLICIES, "_entries", dict(ROUTE_POLICIES.entries()))
    file = tmp_path / "mine.py"
    file.write_text(
        "from moestro.core.views import Victim\n"
        "from moestro.routing.policies.load import LeastLoaded\n"
        "from moestro.routing.registry import ROUTE_POLICIES\n"
        "@ROUTE_POLICIES.register('mine', 'Says another reason.', source='a test')\n"
        "class Mine(LeastLoaded):\n"
        "  def __init__(self, *, words: str = 'load'): self.words = words\n"
        "def evict(view): return Victim(0)\n"
    )
    policy_from(f"{file}:Mine")
    EVICT_POLICIES.make(f"{file}:evict")
    assert policy_from("mine:words=mine").words == "mine"


def test_a_users_policy_that_chooses_what_is_not_there_is_refused(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from moestro.routing.policy_contract import Choice, Needs\n"
        "class Far:\n"
        "  needs = Needs()\n"
        "  def decide(self, view, draws): return Choice(7, 0.0, 'far')\n"
        "  def observe(self, event): pass\n"
    )
    with pytest.raises(ConfigError, match="chose engine 7 of 2"):
        policy_from(f"{file}:Far")


def test_what_a_users_policy_raises_in_observe_goes_no_further_than_the_log(tmp_path, caplog):
    file = tmp_path / "mine.py"
    file.write_text(
        "from moestro.routing.policy_contract import Choice, Needs\n"
        "class Deaf:\n"
        "  needs = Needs()\n"
        "  def decide(self, view, draws): return Choice(1, 0.0, 'second')\n"
        "  def observe(self, event): raise KeyError('the user')\n"
    )
    two = router(2, policy_from(f"{file}:Deaf"))
    assert two.submit(request("r"), 0).engine == 1
    two.ended("r", 1)
    two.engine_lost(1, 2)
    assert [record.message.rpartition(" ")[2] for record in caplog.records] == ["Routed", "Ended", "EngineLost"]


CHOOSES = """
import numpy as np
from moestro.routing.policy_contract import Choice, Needs
class Mine:
  needs = NEEDS
  def decide(self, view, draws): return ANSWER
  def observe(self, event): pass
"""


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("view.nothing", "AttributeError: 'RouteView' object has no attribute 'nothing' (mine.py, line 6)"),
        ("None", "it answered None in place of a Choice"),
        ("Choice(0.0, 0.0, 'first')", "it chose engine 0.0 of 2; engine must be a whole number from 0"),
        ("Choice(-1, 0.0, 'last')", "it chose engine -1 of 2"),
        ("Choice(0, 0.0, None)", "the reason of its choice must be a text, got None"),
        ("Choice(0, 'low', 'first')", "the score of its choice must be a number, got 'low'"),
        ("Choice(0, 0.0, 'first', np.zeros(1))", "it returned shape (1,) for 2 engines"),
    ],
)
def test_a_users_policy_whose_choice_would_break_the_router_is_refused(tmp_path, answer, problem):
    (tmp_path / "mine.py").write_text(CHOOSES.replace("NEEDS", "Needs()").replace("ANSWER", answer))
    with pytest.raises(ConfigError, match=re.escape(f"mine.py:Mine failed its trial: {problem}")):
        policy_from(f"{tmp_path}/mine.py:Mine")


def test_a_users_policy_states_its_needs_in_names_that_a_router_knows_and_observes(tmp_path):
    file, first = tmp_path / "mine.py", CHOOSES.replace("ANSWER", "Choice(0, 0.0, 'first')")
    faults = {
        "'hits'": "its attribute needs must be a Needs of moestro.routing.policy_contract, got 'hits'",
        "Needs(figures=('heat',))": "its needs name no figure heat; known: ",
    }
    for needs, problem in faults.items():
        file.write_text(first.replace("NEEDS", needs))
        with pytest.raises(ConfigError, match=re.escape(problem)):
            policy_from(f"{file}:Mine")
    file.write_text(first.replace("NEEDS", "Needs()").replace("observe", "look_on"))
    with pytest.raises(ConfigError, match=re.escape("it has no method observe(event)")):
        policy_from(f"{file}:Mine")


def test_a_choice_in_numbers_of_numpy_is_a_choice(tmp_path):
    file = tmp_path / "mine.py"
    answer = "Choice(np.int64(1), np.float32(0.5), 'second', [2, 1])"
    file.write_text(CHOOSES.replace("NEEDS", "Needs()").replace("ANSWER", answer))
    decision = router(2, policy_from(f"{file}:Mine")).submit(request("r"), 0)
    assert (type(decision.engine), decision.engine, type(decision.score), decision.score) == (int, 1, float, 0.5)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("def Mine(view): return [0, 0] if len(view.engines) == 2 else None", "it returned shape () for 3 engines"),
        ("def Mine(view): return [[0, 0][i] for i in range(len(view.engines))]", "IndexError: list index out of range"),
        (CHOOSES.replace("ANSWER", "Choice((len(view.engines) - 2) * 9, 0.0, 'far')"), "it chose engine 9 of 3"),
    ],
)
def test_a_users_policy_that_fails_after_its_trial_is_named_by_the_error(tmp_path, source, problem):
    file = tmp_path / "mine.py"
    file.write_text(source.replace("NEEDS", "Needs()"))
    three = router(3, policy_from(f"{file}:Mine"))
    with pytest.raises(ConfigError, match=re.escape(f"--route-policy {file}:Mine: {problem}")):
        three.submit(request("r"), 0)
