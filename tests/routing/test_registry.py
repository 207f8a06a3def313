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
        ("class score:\n  def decide(self, view, draws): raise KeyError(1)", "failed its trial: KeyError"),
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
    with pytest.raises(ConfigError, match="chose engine 7 of two"):
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
