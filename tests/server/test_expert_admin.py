"""What operators learn of the load of experts."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from support.expert_counts import NUM_EXPERTS, NUM_LAYERS, ask_for_counts
from support.running import call, call_admin, metrics

from moestro.core.experts.expert_load import SourceLoad
from moestro.server.engines import engine_reports
from moestro.server.engines.engine_reports import ExpertLoads
from moestro.wire.messages import ExpertReport, ReadExperts, report_of
from moestro.workload.experts.expert_profile import read_profile_file


def test_each_token_is_counted_at_each_of_its_experts(server):
    ask_for_counts(server, "plain")


def test_the_summary_the_arrays_and_the_file_have_one_load(server, tmp_path):
    ask_for_counts(server, "summary")
    found = call_admin(server, "GET", "/admin/experts?arrays=true").json
    tokens = np.array(found["arrays"]["tokens"])
    assert tokens.shape == (1, NUM_LAYERS, NUM_EXPERTS)
    np.testing.assert_allclose([layer["tokens"] for layer in found["layers"]], tokens.sum(axis=(0, 2)))
    np.testing.assert_allclose([layer["busiest_tokens"] for layer in found["layers"]], tokens[0].max(axis=1))
    np.testing.assert_allclose(found["balance"], np.mean(tokens[0].mean(axis=1) / tokens[0].max(axis=1)))
    assert found["engines"][0]["num_steps"] >= found["num_steps"] > 0
    reply = call_admin(server, "GET", "/admin/experts/profile")
    (tmp_path / "experts.npz").write_bytes(reply.body)
    profile = read_profile_file(tmp_path / "experts.npz")
    np.testing.assert_allclose(profile.load.tokens, tokens)
    assert profile.layers == tuple(range(NUM_LAYERS))
    assert "experts.npz" in reply.headers["content-disposition"]


def test_the_page_gets_the_load_relative_to_each_layer(server):
    ask_for_counts(server, "page")
    found = call(server, "GET", "/statistics?experts=true").json
    tokens = np.array(call_admin(server, "GET", "/admin/experts?arrays=true").json["arrays"]["tokens"])[0]
    assert found["experts"]["layers"] == list(range(NUM_LAYERS))
    np.testing.assert_allclose(found["experts"]["tokens"], tokens.mean(axis=1))
    expected = tokens / tokens.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(found["experts"]["relative"], expected, atol=0.001)
    assert call(server, "GET", "/statistics").json["experts"] is None, "only on request"


def test_pairs_come_from_a_sample_of_steps(server):
    for _ in range(3):
        ask_for_counts(server, "pairs")
        if found := call_admin(server, "GET", "/admin/experts?arrays=true").json["arrays"]["pairs"]:
            layers, counts = {pair[0] for pair in found}, [pair[3] for pair in found]
            assert layers == set(range(NUM_LAYERS - 1))
            assert counts == sorted(counts, reverse=True)
            return
    pytest.fail("no step was sampled")


def test_a_reset_empties_the_window_and_not_the_counts(server):
    ask_for_counts(server, "reset")
    reply = call_admin(server, "POST", "/admin/experts/reset").json
    assert (reply["layers"], reply["balance"], reply["engines"][0]["num_steps"]) == ([], None, 0)
    assert reply["engines"][0]["num_visits"] > 0
    assert call_admin(server, "GET", "/admin/experts/profile").json["error"]["code"] == "nothing_counted"
    ask_for_counts(server, "again")
    assert call_admin(server, "GET", "/admin/experts").json["layers"]


def test_metrics_are_a_few_series_and_at_most_one_scrape_old(server):
    num_visits = ask_for_counts(server, "metrics").sum()
    values = metrics(server)
    assert values['moestro:expert_visits_total{engine="0"}'] >= num_visits
    assert 0 < values["moestro:expert_balance_min{}"] <= values["moestro:expert_balance{}"] <= 1
    assert values['moestro:expert_window_steps{engine="0"}'] > 0
    assert len([name for name in values if name.startswith("moestro:expert_")]) == 5


def test_other_questions_are_refused(server):
    assert call_admin(server, "GET", "/admin/experts?arrays=yes").status == 400
    assert call(server, "GET", "/admin/experts").status == 404, "the port of clients has no plane of operators"


def test_a_dense_model_says_so_and_has_no_metrics(fake):
    for method, path in (("GET", ""), ("GET", "/profile"), ("POST", "/reset")):
        reply = call_admin(fake, method, f"/admin/experts{path}")
        assert (reply.status, reply.json["error"]["code"]) == (404, "no_experts")
    assert not [name for name in metrics(fake) if name.startswith("moestro:expert")]


# --- reports --------------------------------------------------------------------------------------------------------


def report(number: int, tokens: list[int], num_steps: int = 4) -> ExpertReport:
    counts = np.array([tokens], np.int64)
    return report_of(number, SourceLoad(counts, *np.array([counts, counts, counts > 0], float), num_steps, num_steps))


class Group:
    """Engines that answer when a test lets them."""

    def __init__(self, num_engines: int) -> None:
        self.questions: list[tuple[int, ReadExperts]] = []
        self.unreachable: set[int] = set()
        self.loads = ExpertLoads(num_engines, self.ask)

    def ask(self, engine: int, question: ReadExperts) -> bool:
        if engine in self.unreachable:
            return False
        self.questions.append((engine, question))
        return True


def test_an_engine_that_ended_keeps_its_load_until_its_successor_has_counted():
    group = Group(2)
    for engine in range(2):
        group.loads.on_message(engine, report(1, [4, 2]), 0)
    assert group.loads.merged().load.total.tolist() == [[8, 4]]
    group.loads.ended(0)
    assert group.loads.merged().load.total.tolist() == [[8, 4]]
    group.loads.on_message(0, ExpertReport(2), 0)
    assert group.loads.merged().load.total.tolist() == [[8, 4]]
    group.loads.on_message(0, report(3, [1, 1], num_steps=1), 0)
    np.testing.assert_allclose(group.loads.merged().load.total, [[1 + 0.8 * 4, 1 + 0.8 * 2]], err_msg="5 steps and 4")


def test_a_report_that_does_not_fit_leaves_the_last_one():
    loads = Group(1).loads
    loads.on_message(0, report(1, [4, 2]), 0)
    with pytest.raises(ValueError, match="reshape"):
        loads.on_message(0, ExpertReport(2, num_layers=2, num_experts=2, counts=bytes(8), num_steps=1), 0)
    assert loads.merged().load.total.tolist() == [[4, 2]]


def test_scrapes_ask_once_in_a_while():
    group = Group(1)
    for now_ns in (0, 1, engine_reports.REFRESH_NS - 1, engine_reports.REFRESH_NS):
        group.loads.refresh(now_ns)
    assert len(group.questions) == 2


def test_an_engine_that_is_silent_delays_no_answer_for_ever(monkeypatch):
    monkeypatch.setattr(engine_reports, "ANSWER_S", 0.01)
    group = Group(2)
    group.unreachable = {1}
    asyncio.run(group.loads.read())
    assert [engine for engine, _ in group.questions] == [0]
    group.unreachable = {0, 1}
    asyncio.run(group.loads.read())
