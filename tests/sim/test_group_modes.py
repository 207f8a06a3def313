"""Groups of workers in a scenario file: every mode serves the same requests, and none exceeds its bound."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.cli import main
from moestro.errors import ConfigError
from moestro.sim.groups.group_builder import StageJitter, item_factors
from moestro.sim.groups.group_figures import covered_ns
from moestro.sim.scenario import make_scenario, num_kv_blocks, run, run_with_figures
from moestro.sim.settings import PolicySettings, read_settings

HEAD = """
seed = {seed}
[workload]
prompt_tokens = 40
output_tokens = 3
num_requests = {num_requests}
rate = 100000.0
[engines]
gpu = "a100"
network = "mixtral-8x7b-mqa-top1"
{engines}
[group]
num_workers = 4
{group}
{more}
"""
MODES = """
[[policies]]
mode = "ep"
name = "ep"
[[policies]]
mode = "ep-overlap"
name = "ep-overlap"
[[policies]]
mode = "afd"
name = "afd"
num_expert_workers = 2
[[policies]]
mode = "async"
name = "async, both on each worker"
[[policies]]
mode = "async"
name = "async 2+2"
num_expert_workers = 2
"""
AMOE = 'engine = "amoe"\ndummy_kv = true'
NUM_REQUESTS = 40


def text(policies: str = MODES, *, engines=AMOE, group="", more="", seed=0, num_requests=NUM_REQUESTS) -> str:
    return HEAD.format(engines=engines, group=group, more=more, seed=seed, num_requests=num_requests) + policies


def mode(name: str, *lines: str) -> str:
    return "\n".join(["[[policies]]", f"mode = '{name}'", *lines, ""])


def sim(directory, scenario: str) -> dict[str, dict]:
    """Outcomes of the real command by title."""
    path, out = directory / "scenario.toml", directory / "out.json"
    path.write_text(scenario)
    with pytest.raises(SystemExit) as ended:
        main(["sim", str(path), "--json", str(out)])
    assert not ended.value.code
    return {outcome["title"]: outcome for outcome in json.loads(out.read_text())["outcomes"]}


def prepared(directory, scenario: str):
    """The scenario and its policies."""
    path = directory / "scenario.toml"
    path.write_text(scenario)
    settings = read_settings(path)
    return make_scenario(settings, directory), settings.policies


# --- through the command ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engines", "group", "more"),
    [
        (AMOE, "", ""),
        ("dummy_kv = true\nhost_attention_us = 100\nhost_expert_us = 50", "slowdown = [1.5]\njitter = 0.2", ""),
        ("", "workers_per_machine = 2", '[popularity]\nskew = 1.0\nhot_ids = "permuted"\nnum_domains = 3'),
    ],
    ids=["amoe", "uneven roofline", "two machines and prompts"],
)
def test_every_mode_answers_all_and_the_same_seed_gives_the_same_run(tmp_path, capsys, engines, group, more):
    scenario = text(engines=engines, group=group, more=more, num_requests=16)
    first, again = sim(tmp_path, scenario), sim(tmp_path, scenario)
    assert len(first) == 5
    for title, outcome in first.items():
        assert outcome["report"]["num_ok"] == 16
        assert outcome["report"]["num_output_tokens"] == 48
        assert (outcome["digest"], outcome["group"]) == (again[title]["digest"], again[title]["group"])
        figures = outcome["group"]
        assert len(figures["stall_shares"]) == 4
        assert all(0 <= share < 1 for share in figures["stall_shares"])
        assert 0 < figures["share_of_bound"] < 1
        assert (figures["num_messages"] is not None) == title.startswith("async")
    assert len({outcome["digest"] for title, outcome in first.items() if title != "ep-overlap"}) == 4
    lock_step = mode("ep", "name = 'ep'")
    other = sim(tmp_path, text(lock_step, engines=engines, group=group, more=more, num_requests=16, seed=1))
    assert other["ep"]["digest"] != first["ep"]["digest"]
    printed = capsys.readouterr().out
    assert "Stall share of each worker" in printed
    assert "bound" in printed


def test_modes_of_single_engines_stand_beside_groups_in_one_file(tmp_path, capsys):
    policies = mode("fused", "name = 'fused'") + mode("preemptive", "name = 'preemptive'") + mode("ep", "name = 'ep'")
    gpu = "num_blocks = 5000\nmax_model_len = 2000"
    found = sim(tmp_path, text(policies, engines=gpu, more="[popularity]\nskew = 0.0", num_requests=5))
    assert found["fused"]["group"] is None
    assert found["ep"]["group"]["num_attention_workers"] == 4
    assert all(outcome["report"]["num_ok"] == 5 for outcome in found.values())


def test_async_does_not_beat_ideal_ep_where_nothing_is_uneven(tmp_path, capsys):
    """Uniform experts, full batches, no host time, free links. `test_balanced_groups` has the same in detail."""
    policies = "".join(
        mode(name, f"name = '{name}'", "free_links = true", *more)
        for name, *more in (("ep",), ("async", 'attention_step_policy = "flfs"', 'expert_step_policy = "flfs"'))
    )
    engines = AMOE + "\nmax_num_seqs = 200"
    found = sim(tmp_path, text(policies, engines=engines, more='[popularity]\nfamily = "uniform"', num_requests=800))
    ideal, flow = found["ep"], found["async"]
    assert ideal["group"]["bound_same"] == pytest.approx(ideal["group"]["bound_permuted"], rel=0.02)
    assert ideal["group"]["bound_same"] == flow["group"]["bound_same"]
    assert ideal["group"]["share_of_bound"] > 0.6
    assert flow["group"]["share_of_bound"] < ideal["group"]["share_of_bound"]
    assert flow["report"]["tpot_ms"]["mean"] > ideal["report"]["tpot_ms"]["mean"]


# --- what the settings change -----------------------------------------------------------------------------------------


def spans(directory, scenario: str) -> list[int]:
    """End of the last answer under each policy, ns."""
    made, policies = prepared(directory, scenario)
    return [int(run(made, policy).last_token_ns.max()) for policy in policies]


@pytest.fixture(scope="module")
def plain_ns(tmp_path_factory) -> dict[str, int]:
    """End of the last answer in each mode without anything that makes work slower, ns."""
    directory = tmp_path_factory.mktemp("plain")
    policies = mode("ep", "name = 'ep'") + mode("async", "name = 'async'")
    return dict(zip(("ep", "async"), spans(directory, text(policies)), strict=True))


@pytest.mark.parametrize(
    ("name", "engines", "group"),
    [
        ("ep", AMOE, "slowdown = [1.0, 3.0]"),
        ("async", AMOE, "slowdown = [1.0, 3.0]"),
        ("ep", AMOE, 'link_within = "ethernet-100g"'),  # a slow link may shorten a run of `async`: more tokens meet
        ("ep", AMOE + "\nhost_step_us = 1000", ""),
        ("async", AMOE + "\nhost_attention_us = 1000\nhost_expert_us = 1000", ""),
    ],
)
def test_what_makes_work_or_messages_slower_makes_the_run_longer(tmp_path, plain_ns, name, engines, group):
    (slower,) = spans(tmp_path, text(mode(name), engines=engines, group=group))
    assert slower > plain_ns[name]


def test_free_links_stalls_and_the_bound(tmp_path):
    policies = [
        mode("ep", "name = 'plain'"),
        mode("ep", "name = 'ideal'", "free_links = true"),
        mode("ep", "name = 'stalls'", "stall_share = 0.9"),
    ]
    scenario = text("".join(policies))
    plain, ideal, stalls = spans(tmp_path, scenario)
    assert ideal < plain < stalls
    made, (policy, *_) = prepared(tmp_path, scenario)
    slow, _ = prepared(tmp_path, text(policies[0], group="slowdown = [2.0]"))
    bounds = [run_with_figures(each, policy)[1].bound_same for each in (made, slow)]
    assert bounds[1] < bounds[0] < 2 * bounds[1], "attention leaves the slow worker, its experts stay"


def test_an_attention_worker_without_experts_holds_more_kv(tmp_path):
    made, policies = prepared(tmp_path, text())
    num_blocks = []
    for policy in policies:
        results, figures = run_with_figures(made, policy)
        assert figures is not None
        assert results.is_answered.all()
        num_blocks.append((figures.num_expert_workers, num_kv_blocks(made.engines, made.group, policy)))
    assert len(set(num_blocks)) == 2
    both, alone = (dict(num_blocks)[number] for number in (0, 2))
    assert alone > 1.4 * both, "a worker holds two experts of each layer less"
    assert made.bounds.num_blocks == both
    assert made.bounds.max_model_len == both * 16, "requests fit under every policy"


def test_popularity_reaches_engines_that_compute_alone(tmp_path):
    for name in ("fused", "preemptive"):
        found = []
        for skew in (0.0, 2.0):
            more = f"[popularity]\nskew = {skew}"
            found += spans(tmp_path, text(mode(name), engines="num_blocks = 99", more=more, num_requests=8))
        assert found[1] < found[0], "fewer experts are read"


def test_domains_are_drawn_for_requests_that_have_none(tmp_path):
    made, _ = prepared(tmp_path, text(mode("ep"), more="[popularity]\nnum_domains = 3"))
    assert set(made.workload.rows.domain.tolist()) == {0, 1, 2}
    plain, _ = prepared(tmp_path, text(mode("ep")))
    assert plain.workload.rows.domain is None


# --- parts ------------------------------------------------------------------------------------------------------------


def test_jitter_has_mean_one_and_its_own_draws_for_each_seed():
    factors = StageJitter(0.3, 7)((20_000,))
    assert factors.mean() == pytest.approx(1, abs=0.01)
    assert factors.std() == pytest.approx(0.3, abs=0.01)
    assert (StageJitter(0.3, 7)((20_000,)) == factors).all()
    assert (StageJitter(0.3, 8)((20_000,)) != factors).any()


def test_factors_of_a_worker():
    assert item_factors(1.0, None) is None
    assert item_factors(2.5, None)() == 2.5
    drawn = item_factors(2.0, StageJitter(0.3, 7))
    assert [drawn() / 2 for _ in range(3)] == StageJitter(0.3, 7)((1024,))[:3].tolist()


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=8))
def test_covered_time_is_counted_once(intervals):
    starts = np.array([start for start, _ in intervals], np.int64)
    ends = starts + np.array([length for _, length in intervals], np.int64)
    plain = {moment for start, end in zip(starts, ends, strict=True) for moment in range(start, end)}
    assert covered_ns(starts, ends) == len(plain)


# --- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        (
            text(mode("eq")),
            r"value 'eq' in \[policies.*mode\]: give one of fused, preemptive, ep, ep-overlap, afd, async",
        ),
        (text(mode("afd")), "'afd' needs num_expert_workers of at least 1"),
        (text(mode("ep", "num_expert_workers = 2")), "goes with mode 'afd' or 'async', not with 'ep'"),
        (text(mode("async", "num_expert_workers = 4")), "leaves none of the 4 workers"),
        (text(mode("async", "stall_share = 0.5")), "goes with mode 'ep'"),
        (text(mode("ep", "stall_share = 1.0")), "below 1"),
        (text(mode("async", "expert_step_policy = 'dice'")), "unknown step policy 'dice'; known: .*defrag"),
        (text(mode("fused")), "engine = 'amoe' prices workers of a group, mode ep or ep-overlap or afd or async, not"),
        (text(mode("ep"), engines="ep_ranks = 2"), "needs prices of stages and single ranks"),
        (text(mode("ep"), group='link_within = "string"'), r"\[group\] link_within: .*'string'; known: nvswitch-a100"),
        (text(mode("ep"), group="slowdown = [1, 1, 1, 1, 1]"), "at most one factor above 0 for each of the 4 workers"),
        (text(mode("ep"), group="slowdown = [0.0]"), "at most one factor above 0"),
        (text(mode("ep"), group="jitter = -0.1"), r"\[group\] jitter must be at least 0"),
        (text(mode("ep"), group="colour = 1"), r"unknown field `colour` in \[group\]; known: jitter, link_across"),
        (text(mode("ep"), more="[popularity]\nskew = -1.0"), r"\[popularity\] skew must be at least 0"),
        (
            text(mode("ep"), more="[popularity]\nfamily = 'large'"),
            "'large' in .*: give one of uniform, zipf, exponential",
        ),
        (text(mode("ep"), more="[popularity]\nheat = 1"), r"unknown field `heat` in \[popularity\]"),
        (text(mode("ep")).replace("[group]\nnum_workers = 4", ""), r"mode = 'ep' needs a table \[group\]"),
    ],
)
def test_a_file_with_a_mistake_is_refused(tmp_path, scenario, words):
    path = tmp_path / "bad.toml"
    path.write_text(scenario)
    with pytest.raises(ConfigError, match=words):
        read_settings(path)


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        (
            text(mode("ep")).replace("a100", "a100-40g").replace("= 4\n", "= 2\n"),
            "4 experts of each layer .* do not fit",
        ),
        (text(mode("ep"), engines="").replace("mixtral-8x7b-mqa-top1", "qwen2-7b"), "spreads experts over workers"),
    ],
)
def test_what_only_the_prices_know_is_refused_before_anything_runs(tmp_path, scenario, words):
    with pytest.raises(ConfigError, match=words):
        prepared(tmp_path, scenario)


def test_a_policy_object_needs_a_group_too(tmp_path):
    made, _ = prepared(tmp_path, text(mode("fused"), engines="num_blocks = 99"))
    with pytest.raises(ConfigError, match="needs a table"):
        run(made, PolicySettings(mode="ep"))


# --- placement while serving ------------------------------------------------------------------------------------------

PLACED = """
[[policies]]
mode = "ep"
name = "static"
[[policies]]
mode = "ep"
name = "eplb"
place = "eplb"
place_interval_steps = 8
num_spare_slots = 1
[[policies]]
mode = "ep-overlap"
name = "moestro"
place = "moestro"
place_interval_steps = 8
place_bytes_per_step = 1000000000
num_spare_slots = 1
[[policies]]
mode = "ep"
name = "gimbal_v1"
place = "gimbal_v1:top_pairs=2"
place_interval_steps = 8
"""


def test_a_file_can_ask_for_placement_while_serving(tmp_path):
    skewed = '[popularity]\nfamily = "exponential"\nskew = 0.5\nhot_ids = "permuted"'
    made, policies = prepared(tmp_path, text(PLACED, engines="", more=skewed))
    for policy in policies:
        results, figures = run_with_figures(made, policy)
        assert results.is_answered.all()
        assert 0 < figures.share_of_bound <= 1


@pytest.mark.parametrize("wrong", [{"mode": "async", "place": "eplb"}, {"mode": "ep", "place": "no-policy"},
                                   {"mode": "fused", "num_spare_slots": 1}])  # fmt: skip
def test_placement_goes_with_lock_step_and_a_known_policy(wrong):
    with pytest.raises(ConfigError):
        PolicySettings(**wrong)
