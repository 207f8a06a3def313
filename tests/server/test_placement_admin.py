"""What operators ask of live placement, over HTTP: a group with a fake migration."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random

import aiohttp
import msgspec
import numpy as np
import pytest
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from robustness.strangers.nasty_json import nasty_text
from support.placed_group import EVEN, LAYERS, NUM_EXPERTS, NUM_LAYERS, NUM_WORKERS, PlacedGroup, run

from moestro.server.admin import OperatorsPort, admin_runner
from moestro.server.experts.live_placement import LivePlacement, PlacementAdmin
from moestro.server.figures.prometheus import placement_metrics
from moestro.web.ports.connections import FrontLimits, bound_socket, http_front
from moestro.web.ports.faults import Faults, Port

EVERY_EXPERT = {
    "moestro_placement": 1,
    "num_experts": NUM_EXPERTS,
    "table": [[[0, 1, 2, 3], [4, 5, 6, 7]]] * NUM_LAYERS,
}


class Operator:
    """Sends requests to the operators' port of a group."""

    def __init__(self, routes: list[web.RouteDef]) -> None:
        self._routes = routes

    async def __aenter__(self) -> Operator:
        faults = Faults()
        runner, listener = await admin_runner(self._routes, None, faults), bound_socket("127.0.0.1", 0)
        front = http_front(Port.OPERATORS, runner, listener, FrontLimits(16), faults)
        self._port = OperatorsPort(runner, listener, front.open())
        self._url = f"http://127.0.0.1:{listener.getsockname()[1]}/admin/placement"
        self._session = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        await self._port.close()

    async def __call__(self, method: str, path: str = "", body: object = None) -> tuple[int, dict]:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        async with self._session.request(method, self._url + path, data=data) as reply:
            found = await reply.json()
            return reply.status, found.get("error", found)


def operator(group: PlacedGroup) -> Operator:
    return Operator(PlacementAdmin(group.driver, group.prices).routes())


def swapped(group: PlacedGroup) -> dict:
    """The first experts of both workers change places, as a file of `moestro place` says it."""
    rows = group.migration.table.logical_of.swapaxes(0, 1).copy()
    rows[:, 0, 0], rows[:, 1, 0] = rows[:, 1, 0].copy(), rows[:, 0, 0].copy()
    return {"moestro_placement": 1, "num_experts": NUM_EXPERTS, "table": rows.tolist()}


@run
async def test_plan_then_apply_then_show():
    group = PlacedGroup(policy="none")
    group.serve(100)
    async with operator(group) as ask:
        status, before = await ask("GET")
        assert (status, before["table_version"], before["decision"]) == (200, 0, None)
        assert before["mean_balance"] == pytest.approx(0.52)
        status, plan = await ask("POST", "/plan?policy=eplb&arrays=true")
        assert (status, plan["changes_anything"], plan["refused"]) == (200, True, "")
        assert len(plan["moves"]) == plan["num_moves"] > 0
        assert {move[0] for move in plan["moves"]} <= set(LAYERS)
        assert plan["num_bytes"] == plan["num_moves"] * plan["prices"]["expert_bytes"]
        assert plan["saved_s_per_step"] == pytest.approx(plan["before"]["step_s"] - plan["after"]["step_s"])
        assert plan["payback_steps"] == pytest.approx(plan["move_s"] / plan["saved_s_per_step"])
        assert group.migration.num_started == 0, "a plan changes nothing"
        assert (await ask("POST", "/apply"))[0] == 202
        assert (await ask("POST", "/apply"))[0] == 409
        group.migration.commit_all()
        group.tick()
        status, after = await ask("GET", "?arrays=true")
        assert after["table"] == plan["table"]
        np.testing.assert_allclose(np.sum(after["shares"], axis=(1, 2)), NUM_EXPERTS)
        assert after["mean_balance"] == pytest.approx(plan["after"]["mean_balance"])
        assert after["predicted"]["mean_balance"] == pytest.approx(after["mean_balance"])
        assert after["saved_s_per_step"]["found"] == pytest.approx(after["saved_s_per_step"]["predicted"])
        assert (after["migrations"], after["decision"]["trigger"]) == ({"completed": 1}, "operator")


@run
async def test_a_placement_in_a_file_is_applied_without_a_load():
    group = PlacedGroup(policy="none")
    async with operator(group) as ask:
        status, plan = await ask("POST", "/apply", swapped(group))
        assert (status, plan["num_moves"], plan["before"]) == (202, 2 * NUM_LAYERS, None)
        group.migration.commit_all()
        group.tick()
        rows = group.migration.table.logical_of.swapaxes(0, 1)
        assert (
            rows.tolist() == (await ask("GET", "?arrays=true"))[1]["table"] == plan["table"] if plan["table"] else True
        )
        assert rows[0, :, 0].tolist() == [4, 0]


@run
async def test_a_map_of_sglang_is_applied_too():
    group = PlacedGroup(policy="none")
    async with operator(group) as ask:
        body = {"physical_to_logical_map": [list(reversed(range(NUM_EXPERTS)))] * (LAYERS[-1] + 1)}
        status, plan = await ask("POST", "/apply", body)
        assert (status, plan["num_moves"]) == (202, NUM_EXPERTS * NUM_LAYERS)


def test_law_any_json_in_place_of_a_placement_is_answered(caplog):
    sglang = {"physical_to_logical_map": [list(reversed(range(NUM_EXPERTS)))] * (LAYERS[-1] + 1)}
    shares = {"shares": [[[1.0] * 4, [1.0] * 4]] * NUM_LAYERS}

    @run
    async def ask_all() -> None:
        group, rng = PlacedGroup(policy="none"), Random(1)
        valid = (EVERY_EXPERT | shares, sglang, swapped(group))
        async with operator(group) as ask:
            for _ in range(300):
                body = nasty_text(rng, valid)
                status, error = await ask("POST", "/apply", body)
                assert status < 500, (status, error, body)
                group.migration.commit_all()
                group.tick()

    ask_all()
    assert not [each for each in caplog.records if each.exc_info]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/apply", None, 409, "There is no plan yet"),
        ("/apply", b"{", 400, "no JSON"),
        ("/apply", b"[" * 100_000, 400, "no JSON"),
        ("/apply", b'"\xff"', 400, "no JSON"),
        ("/apply", [], 400, "it is no placement"),
        ("/apply", {"moestro_placement": 1, "num_experts": 8, "table": 3}, 400, "does not fit"),
        ("/apply", {"moestro_placement": 1, "num_experts": 8, "table": [[[0], [0, 1]]]}, 400, "does not fit"),
        ("/apply", EVERY_EXPERT | {"shares": [[[1.0]]]}, 400, "does not fit"),
        ("/apply", EVERY_EXPERT | {"num_experts": 9}, 400, "it has 9 experts, and 8 are placed"),
        ("/apply", {}, 400, "it is no placement"),
        ("/apply", {"moestro_placement": 1, "num_experts": 8, "table": [[[0]]]}, 400, "it has 1 devices, and 2"),
        ("/apply", {"physical_to_logical_map": [[0] * 8] * 3}, 400, "expert 1 of layer 0 has no copy"),
        ("/apply?arrays=maybe", None, 400, "arrays must be true or false"),
        ("/plan", None, 400, "The server has no policy"),
        ("/plan?policy=nonsense", None, 400, "unknown place policy 'nonsense'"),
        ("/plan?policy=/tmp/mine.py:policy", None, 400, "Name a registered policy"),
        ("/plan?policy=eplb", None, 409, "no engine has counted any token yet"),
        ("/cancel", None, 409, "Nothing is running"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_reason(path, body, status, words):
    @run
    async def fields() -> tuple[int, dict]:
        async with operator(PlacedGroup(policy="none")) as ask:
            return await ask("POST", path, body)

    found, error = fields()
    assert found == status
    assert words in error["message"]


@run
async def test_frozen_placement_refuses_tables_until_it_is_lifted():
    group = PlacedGroup(policy="none")
    async with operator(group) as ask:
        assert (await ask("POST", "/freeze"))[1]["is_frozen"]
        status, error = await ask("POST", "/apply", swapped(group))
        assert (status, error["code"]) == (409, "frozen")
        assert not (await ask("POST", "/unfreeze"))[1]["is_frozen"]
        assert (await ask("POST", "/apply", swapped(group)))[0] == 202
        assert (await ask("POST", "/cancel"))[0] == 200
        assert group.migration.num_cancelled == 1


@run
async def test_where_nothing_can_be_placed_every_request_says_why():
    async with Operator(LivePlacement(None, why_not="The model is dense: it has no experts.").routes()) as ask:
        for method, path in (("GET", ""), ("POST", "/plan"), ("POST", "/apply"), ("POST", "/freeze")):
            status, error = await ask(method, path)
            assert (status, error["message"]) == (404, "The model is dense: it has no experts.")


@run
async def test_metrics_show_both_balances_and_what_was_found():
    group = PlacedGroup()
    group.serve(3000)
    await group.check()
    group.migration.commit_all()
    group.tick()
    group.serve(10, EVEN)
    await group.check()
    await group.check()
    samples = {
        (sample.name, *(value for key, value in sample.labels.items() if key != "model_name")): sample.value
        for metric in placement_metrics(group.control, "m", lambda: group.now_ns)
        for sample in metric.samples
    }
    predicted = group.control.applied.change.after
    assert samples["moestro:placement_balance_predicted", "ratio_of_sums"] == predicted.balance_of_sums
    assert samples["moestro:placement_balance_predicted", "mean_of_ratios"] == predicted.mean_balance
    assert samples["moestro:placement_balance", "mean_of_ratios"] == group.control.balance
    found, expected = (samples["moestro:placement_saved_seconds_per_step", kind] for kind in ("found", "predicted"))
    assert found < expected
    assert samples["moestro:placement_moved_bytes_total",] == NUM_LAYERS * 1000
    assert samples["moestro:placement_migrations_total", "completed"] == 1
    assert samples["moestro:placement_decisions_total", "started"] == 1
    assert samples["moestro:placement_frozen",] == samples["moestro:placement_stalled",] == 0


@run
async def test_the_view_is_json_without_any_load():
    group = PlacedGroup(policy="none")
    async with operator(group) as ask:
        status, found = await ask("GET")
        assert (status, found["mean_balance"], found["plan_age_s"]) == (200, None, None)
        assert found["workers"] == list(range(NUM_WORKERS))
        assert msgspec.json.encode(found)
