"""verl's load balancer with policies of Moestro: protocol, GRPO groups, trajectories of several turns, changes."""

from __future__ import annotations

import inspect
import random

import pytest
from moestro_verl import Router

NAMES = [f"rank-{number}" for number in range(16)]
# The methods that verl 0.9.1 calls (verl/workers/rollout/router.py), with the names of their arguments.
PROTOCOL = {
    "acquire_server": ["request_id"],
    "release_server": ["server_id", "request_id"],
    "require_acquire_fields": [],
    "require_release_fields": [],
    "add_servers": ["servers"],
    "remove_servers": ["server_ids"],
    "get_all_servers": [],
    "get_status": [],
    "clear_sticky_cache": [],
    "get_total_inflight": [],
}


def router(num_servers: int = 16, **config: object) -> Router:
    return Router({name: object() for name in NAMES[:num_servers]}, {"router_class": "moestro_verl.Router"} | config)


def groups(num_groups: int, group_size: int, seed: int = 0) -> list[tuple[str, list[int]]]:
    """Requests of a GRPO batch in any order: each prompt `group_size` times, under a name for each sample."""
    draws = random.Random(seed)
    prompts = [[draws.randrange(50_000) for _ in range(draws.randrange(200, 1_200))] for _ in range(num_groups)]
    requests = [(f"{number}-{sample}", prompt) for number, prompt in enumerate(prompts) for sample in range(group_size)]
    draws.shuffle(requests)
    return requests


def hits_of(sent: list[tuple[str, list[int]]]) -> float:
    """Share of prompt tokens that the chosen server had computed for an earlier request."""
    seen: set[tuple[str, int]] = set()
    num_hits = num_tokens = 0
    for server, prompt in sent:
        blocks = [hash(tuple(prompt[: end + 16])) for end in range(0, len(prompt) - 15, 16)]
        num_hits += 16 * sum((server, block) in seen for block in blocks)
        num_tokens += len(prompt)
        seen.update((server, block) for block in blocks)
    return num_hits / num_tokens


def sticky(requests: list[tuple[str, list[int]]], num_servers: int) -> list[tuple[str, list[int]]]:
    """verl's own balancer: the server of the trajectory's earlier turn, else the one with the fewest requests."""
    counts, servers, draws, sent = dict.fromkeys(NAMES[:num_servers], 0), {}, random.Random(1), []
    for name, prompt in requests:
        if name not in servers:
            least = min(counts.values())
            servers[name] = draws.choice([server for server, count in counts.items() if count == least])
        counts[servers[name]] += 1
        sent.append((servers[name], prompt))
    return sent


@pytest.mark.parametrize("num_servers", [4, 8, 16])
@pytest.mark.parametrize("seed", range(5))
def test_groups_of_sixteen_fill_servers_evenly_and_meet_their_prefixes(num_servers, seed):
    balancer, requests = router(num_servers), groups(16, 16, seed)
    sent = [(balancer.acquire_server(name, prompt_ids=prompt)[0], prompt) for name, prompt in requests]
    loads = balancer.get_status()["servers"]
    assert max(loads.values()) / (sum(loads.values()) / num_servers) <= 1.1, loads
    assert hits_of(sent) >= hits_of(sticky(requests, num_servers))
    for (server, _), (name, _) in zip(sent, requests, strict=True):
        balancer.release_server(server_id=server, request_id=name)
    assert balancer.get_total_inflight() == 0


def test_turns_of_a_trajectory_meet_the_cache_of_the_turns_before():
    balancer, draws = router(8), random.Random(0)
    histories = {f"t{number}": [draws.randrange(50_000) for _ in range(300)] for number in range(64)}
    sent = []
    for _ in range(4):
        turn = [(name, balancer.acquire_server(name, prompt_ids=list(prompt))[0]) for name, prompt in histories.items()]
        sent += [(server, list(histories[name])) for name, server in turn]
        for name, server in turn:
            balancer.release_server(server, name)
            histories[name] += [draws.randrange(50_000) for _ in range(200)]
    assert hits_of(sent) > 0.55  # of at most 0.63


def test_a_released_request_of_two_turns_ends_once():
    balancer = router(1)
    for _ in range(2):  # the next turn begins before verl has released the one before
        balancer.acquire_server("t", prompt_ids=[1, 2, 3])
    balancer.release_server("rank-0", "t")
    assert balancer.get_total_inflight() == 1
    for _ in range(3):
        balancer.release_server("rank-0", "t")
    balancer.release_server("unknown", "t")
    balancer.release_server("rank-0")
    assert balancer.get_total_inflight() == 0


def test_servers_come_and_go():
    balancer = router(2)
    server, handle = balancer.acquire_server("a", prompt_ids=list(range(64)))
    assert handle is balancer._handles[server]
    balancer.remove_servers([server, "unknown"])
    assert balancer.get_all_servers() == [name for name in NAMES[:2] if name != server]
    assert balancer.acquire_server("a", prompt_ids=list(range(64)))[0] != server
    balancer.release_server(server, "a")
    balancer.add_servers({server: "again"})
    assert sorted(balancer.get_all_servers()) == NAMES[:2]
    assert balancer.get_inflight_count(server) == 0
    balancer.remove_servers(NAMES[:2])
    with pytest.raises(RuntimeError, match="No available servers"):
        balancer.acquire_server("b", prompt_ids=[1])
    assert router(0).get_all_servers() == []


def test_a_phase_switch_forgets_prompts_and_keeps_counts():
    balancer, prompt = router(4, answer_tokens=64), list(range(6_400))
    first = balancer.acquire_server("a", prompt_ids=prompt)[0]
    balancer.release_server(first, "a")
    assert {balancer.acquire_server(f"b{number}", prompt_ids=prompt)[0] for number in range(3)} == {first}
    cleared = balancer.clear_sticky_cache()
    assert cleared["cleared_entries"] > 0
    assert cleared["server_loads"] == dict.fromkeys(NAMES[:4], 0) | {first: 3}
    assert balancer.clear_sticky_cache()["cleared_entries"] == 0
    assert balancer.acquire_server("c", prompt_ids=prompt)[0] != first


def test_a_request_without_tokens_is_routed():
    balancer = router(2)
    assert balancer.acquire_server("a")[0] in NAMES[:2]
    assert balancer.acquire_server("b", prompt_ids=[], image_data=None)[0] in NAMES[:2]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"policy": "lmetric"}, "knows no policy: give route_policy, route_score, answer_tokens, block_size, seed"),
        ({"route_policy": "best"}, "best"),
        ({"route_score": "p_tokens +"}, "p_tokens"),
        ({"block_size": 0}, "block_size"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(config, words):
    with pytest.raises(ValueError, match=words):
        router(2, **config)


@pytest.mark.parametrize("policy", ["lmetric", "least_loaded", "session_affinity", "power_of_two"])
def test_any_policy_can_be_chosen(policy):
    balancer = router(4, route_policy=policy)
    for name, prompt in groups(4, 4):
        balancer.acquire_server(name, prompt_ids=prompt)
    assert sum(balancer.get_status()["servers"].values()) == 16


def test_the_methods_are_those_that_verl_calls():
    for name, arguments in PROTOCOL.items():
        parameters = inspect.signature(getattr(Router, name)).parameters
        assert set(arguments) <= set(parameters), name
    assert set(router(1).require_acquire_fields()) <= set(inspect.signature(Router.acquire_server).parameters)
    assert set(router(1).require_release_fields()) <= set(inspect.signature(Router.release_server).parameters)


def test_the_installed_verl_asks_for_no_other_methods():
    theirs = pytest.importorskip("verl.workers.rollout.router").RequestLoadBalancer
    methods = {name for name in vars(theirs) if not name.startswith("_")}
    assert methods <= set(PROTOCOL), "verl calls methods that this package does not have"
