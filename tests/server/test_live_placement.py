"""Experts move while `moestro serve` answers, in both modes that have a group: the tokens stay, the balance rises."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.interrupted_answers import running
from support.running import EXACT, Running, call_admin, complete, metrics, wait_until
from support.short_demo import NUM_LAYERS

from moestro.cli import main
from moestro.config.serve_settings import ServeSettings
from moestro.errors import ConfigError
from moestro.flow.settings import SteppingSettings
from moestro.placement.settings import LivePlacementSettings

PROMPTS = ["def fibonacci(n):\n", "import os\n" * 8, "class Stack:\n    def push(self, item):\n", "x = 1\n" * 12]
ASYNC = ("--mode", "async", "--attention", "2", "--experts", "2", "--num-redundant-experts", "4")
MODES = {
    "ep": ("--mode", "ep", "--engines", "2", "--num-redundant-experts", "4"),
    "async": (*ASYNC, "--expert-timeout", "100"),  # on a busy machine no worker counts as hung
}
INTERVAL = 12
NUM_TOKENS = 8  # of an answer, so that a round of answers is some twenty steps


@pytest.fixture(scope="module", params=MODES)
def placed(request, short_command, tmp_path_factory) -> Iterator[Running]:
    """A group that plans only when a test asks."""
    slowly = ("--placement-max-bytes-per-step", "1")  # one expert at a time
    command = (*short_command, *EXACT, *MODES[request.param], *slowly, "--route-policy", "round_robin")
    with running(command, tmp_path_factory.mktemp(request.param)) as server:
        yield server


def ask(server: Running, number: int) -> str:
    reply = complete(server, prompt=PROMPTS[number % 4] + f"# {number}\n", max_tokens=NUM_TOKENS, temperature=0)
    assert reply.status == 200, reply.body
    return reply.json["choices"][0]["text"]


def answers(server: Running, numbers: range) -> list[str]:
    with ThreadPoolExecutor(6) as pool:
        return list(pool.map(lambda number: ask(server, number), numbers))


def shown(server: Running, query: str = "") -> dict:
    return call_admin(server, "GET", f"/admin/placement{query}").json


def test_plan_then_apply_while_requests_run(placed, short_server):
    expected = answers(short_server, range(8))
    assert answers(placed, range(8)) == expected
    before = shown(placed, "?arrays=true")
    plan = call_admin(placed, "POST", "/admin/placement/plan?policy=eplb&arrays=true").json
    assert plan["after"]["mean_balance"] > plan["before"]["mean_balance"] == pytest.approx(before["mean_balance"])
    call_admin(placed, "POST", "/admin/placement/freeze")
    assert call_admin(placed, "POST", "/admin/placement/apply").json["error"]["code"] == "frozen"
    call_admin(placed, "POST", "/admin/placement/unfreeze")
    found: list[list[str]] = []
    asking = threading.Thread(target=lambda: found.append(answers(placed, range(8))))
    asking.start()
    assert call_admin(placed, "POST", "/admin/placement/apply").status == 202
    wait_until(lambda: not shown(placed)["progress"]["is_running"])
    asking.join()
    after = shown(placed, "?arrays=true")
    assert (found, after["progress"]["error"]) == ([expected], "")
    assert sorted(np.sort(after["table"], axis=2).ravel()) == sorted(np.sort(plan["table"], axis=2).ravel())
    assert after["table_version"] > before["table_version"]
    assert after["mean_balance"] > before["mean_balance"]
    wait_until(lambda: metrics(placed)['moestro:placement_migrations_total{,outcome="completed"}'] == 1)
    assert metrics(placed)["moestro:placement_moved_bytes_total{}"] == after["moved_bytes"] > 0
    assert answers(placed, range(8)) == expected


def test_a_file_of_moestro_place_is_applied(placed, short_server, tmp_path, capsys):
    expected = answers(short_server, range(8))
    assert answers(placed, range(8)) == expected
    reply = call_admin(placed, "GET", "/admin/experts/profile")
    assert reply.status == 200, reply.body
    (tmp_path / "load.npz").write_bytes(reply.body)
    arguments = ["place", tmp_path / "load.npz", "--devices", 2, "--slots-per-device", 10]
    apply = ["--apply", f"http://127.0.0.1:{placed.admin_port}"]
    for policy, words in (("static", "Moves: none"), ("gimbal_v2", r"moves \d+ copies of experts|already")):
        with pytest.raises(SystemExit) as end:
            main([*map(str, arguments), "--policy", policy, *apply])
        assert end.value.code in (None, 0)
        assert re.search(words, capsys.readouterr().out)
    wait_until(lambda: not shown(placed)["progress"]["is_running"])
    assert shown(placed)["progress"]["error"] == ""
    assert answers(placed, range(8)) == expected


def test_a_worker_that_is_killed_while_experts_move_leaves_a_table_that_serves(placed, short_server):
    rows = [[*range(15, -1, -1)]] * NUM_LAYERS
    assert call_admin(placed, "POST", "/admin/placement/apply", {"physical_to_logical_map": rows}).status == 202
    experts = [worker for name, worker in placed.workers().items() if name.startswith("experts")]
    (experts or placed.ranks())[-1].kill()
    wait_until(lambda: not shown(placed)["progress"]["is_running"])
    wait_until(lambda: complete(placed, max_tokens=1).status == 200)  # a group in lock-step restarts as a whole
    assert answers(placed, range(4)) == answers(short_server, range(4))
    found = shown(placed, "?arrays=true")
    every = [{expert for worker in layer for expert in worker if expert >= 0} for layer in found["table"]]
    assert every == [set(range(16))] * NUM_LAYERS
    applied = call_admin(placed, "POST", "/admin/placement/apply", {"physical_to_logical_map": rows})
    assert applied.status in (200, 202), applied.body
    wait_until(lambda: not shown(placed)["progress"]["is_running"])
    assert shown(placed)["progress"]["error"] == ""
    assert answers(placed, range(4)) == answers(short_server, range(4))


def test_a_server_without_a_group_says_why(short_server, fake):
    found = call_admin(short_server, "GET", "/admin/placement")
    assert (found.status, found.json["error"]["code"]) == (404, "no_placement")
    assert "--mode fused each engine has all experts" in found.json["error"]["message"]
    assert "dense" in call_admin(fake, "POST", "/admin/placement/plan").json["error"]["message"]


@pytest.mark.parametrize("flags", [{"placement_policy": "moestro"}, {"init_expert_location": "init.json"}])
def test_flags_of_placement_need_a_group(flags):
    with pytest.raises(ConfigError, match="moves experts between workers, and in --mode fused"):
        ServeSettings(placement=LivePlacementSettings(**flags), stepping=SteppingSettings(mode="fused"))


def test_unknown_names_are_refused_at_the_start():
    for flag in ("placement_policy", "placement_gpu", "placement_link", "placement_link_across"):
        with pytest.raises(ConfigError, match="nonsense"):
            LivePlacementSettings(**{flag: "nonsense"})


@pytest.mark.parametrize("mode", MODES)
def test_a_first_placement_comes_from_a_file_and_the_policy_plans_after_its_interval(mode, short_command, tmp_path):
    rows = [[*range(15, -1, -1)]] * NUM_LAYERS
    (tmp_path / "init.json").write_text(json.dumps({"physical_to_logical_map": rows}))
    flags = ("--placement-policy", "moestro", "--placement-interval", str(INTERVAL), "--init-expert-location")
    command = (*short_command, *EXACT, *MODES[mode], *flags, str(tmp_path / "init.json"))
    with running(command, tmp_path) as server:
        wait_until(lambda: not shown(server)["progress"]["is_running"])
        found = shown(server, "?arrays=true")
        assert (found["decision"]["trigger"], found["progress"]["error"]) == ("start", "")
        first, second = ({expert for expert in found["table"][0][worker] if expert >= 0} for worker in found["workers"])
        assert (first, second) == (set(range(8, 16)), set(range(8)))

        def has_planned() -> bool:
            answers(server, range(2))  # one for each engine
            return shown(server)["decision"]["trigger"] == "interval"

        wait_until(has_planned)
        assert re.search(r"placement: (started|unchanged|does not pay) \(interval\): moestro ", server.text)


def test_algorithm_3_runs_by_one_flag(short_command, short_server, tmp_path):
    """Gimbal v1 moves experts at each interval, whether that pays or not, and no token differs."""
    flags = ("--placement-policy", "gimbal_v1", "--placement-interval", str(INTERVAL))
    expected = answers(short_server, range(12))
    with running((*short_command, *EXACT, *MODES["ep"], *flags), tmp_path) as group:

        def has_moved() -> bool:
            assert answers(group, range(4)) == expected[:4]
            return metrics(group).get('moestro:placement_migrations_total{,outcome="completed"}', 0) >= 1

        wait_until(has_moved)
        assert answers(group, range(12)) == expected
        assert re.search(r"placement: started \(interval\): gimbal_v1 moves \d+ experts", group.text)
        assert "does not pay" not in group.text
        assert shown(group)["progress"]["error"] == ""


def test_a_policy_that_needs_pairs_is_refused_where_no_engine_counts_them():
    placement = LivePlacementSettings(placement_policy="gimbal_v1:top_pairs=4")
    with pytest.raises(ConfigError, match=r"gimbal_v1:top_pairs=4 needs pairs .* async counts none: give --mode ep"):
        ServeSettings(placement=placement, stepping=SteppingSettings(mode="async"))
    placement.check_mode("ep")
