"""Ranks that begin each step together: no rank waits for ever, none spins, and tokens are those of a rank alone."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import numpy as np
import pytest
from support.fake_device import KvDevice, expected_tokens, make_request
from support.lock_step_ranks import SETTINGS, RankThreads

from moestro.engine.lock_step import LockStepExecutor, LockStepRank, build_lock_step_rank
from moestro.engine.rank import build_rank
from moestro.engine.scheduler import Scheduler
from moestro.errors import CopyError, InvariantError
from moestro.wire.messages import Abort, Add


def run_history(seed: int, num_ranks: int, device_delay: int = 0, num_requests: int = 24) -> RankThreads:
    """Requests and aborts at random times on random ranks, until all is quiet. Judges the tokens.

    The ranks sleep at least once in between, after half of the requests.
    """
    rng = random.Random(seed)
    middle = num_requests // 2
    group = RankThreads(num_ranks, lambda *_: rng.choice([0.0, 0.0005, 0.004]), device_delay)
    fields, aborted = {}, set()
    for number in range(num_requests):
        rank = rng.randrange(num_ranks)
        prompt = [rng.randrange(50) for _ in range(rng.randrange(1, 30))]
        request = make_request(f"r{number}", prompt, max_tokens=rng.randrange(1, 12))
        fields[request.request_id] = request
        group.channels[rank].inbox.put(Add(request))
        if rng.random() < 0.2:
            aborted.add(request.request_id)
            group.channels[rank].inbox.put(Abort((request.request_id,)))
        if rng.random() < 0.5:
            time.sleep(rng.choice([0.0003, 0.002, 0.008]))
        if rng.random() < 0.1 or number + 1 == middle:
            group.wait_until_asleep()
    group.wait_until_asleep()
    reported = {name: [] for name in fields}
    for channel in group.channels:
        for output in channel.outputs:
            reported[output.request_id] += output.token_ids
    if not group.lost:
        for name, request in fields.items():
            expected = expected_tokens(request)
            assert reported[name] == (expected[: len(reported[name])] if name in aborted else expected)
    group.stop()
    return group


@pytest.mark.parametrize("device_delay", [0, 3])
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_law_ranks_in_lock_step_serve_everything_and_then_all_sleep(num_ranks, device_delay):
    group = run_history(num_ranks, num_ranks, device_delay)
    assert group.lost == []
    assert not any(rank.has_work for rank in group.ranks)
    counts = [rank.stats().lock_step for rank in group.ranks]
    assert len({(each.num_group_steps, each.num_group_tokens, each.num_largest_tokens) for each in counts}) == 1
    assert [each.num_idle_steps for each in counts] == [device.num_idle for device in group.devices]
    assert sum(device.num_launched_tokens for device in group.devices) == counts[0].num_group_tokens
    assert group.num_woken > 1, "the group has slept in between"


def test_one_request_alone_needs_all_ranks():
    group = RankThreads(3, lambda *_: 0.0)
    group.channels[1].inbox.put(Add(make_request("a", range(5), max_tokens=4)))
    while not group.channels[1].outputs:
        time.sleep(0.001)
    group.wait_until_asleep()
    group.stop()
    assert [device.num_idle for device in group.devices] == [4, 0, 4]


def test_a_group_whose_message_is_lost_is_stuck(monkeypatch):
    monkeypatch.setattr(LockStepRank, "wake", lambda self, step: None)
    assert run_history(3, 2, num_requests=1).lost


def lose_by_late_message() -> list[int]:
    """Rank 0 wakes the group; rank 1 wakes by itself before the message comes, which finds all asleep again."""
    group = RankThreads(3, lambda sender, receiver: 0.5 if (sender, receiver) == (0, 1) else 0.0)
    for rank in (0, 1):
        group.channels[rank].inbox.put(Add(make_request("a", range(5), max_tokens=2)))
        while group.num_woken == rank:
            time.sleep(0.001)
    group.wait_until_asleep()
    group.stop()
    return group.lost


def test_a_message_that_comes_after_its_step_wakes_no_rank(monkeypatch):
    assert lose_by_late_message() == []
    monkeypatch.setattr(LockStepExecutor, "wake", lambda self, step: setattr(self, "is_awake", True))
    assert lose_by_late_message() == [1]


def test_a_request_that_is_aborted_at_once_wakes_no_rank():
    woken = []
    device = KvDevice(SETTINGS.num_blocks, SETTINGS.block_size)
    rank = LockStepRank(Scheduler(SETTINGS), LockStepExecutor(device, woken.append))
    rank.add(make_request("a", range(5), max_tokens=4), 0)
    rank.abort("a", 0)
    rank.step(0)
    assert woken == []
    assert not rank.has_work


class LosingDevice(KvDevice):
    """The device of a group of one rank; every second copy of KV fails."""

    is_moving = False
    num_moves = 0

    def open_step(self, units) -> np.ndarray:
        return np.array([0 if units is None else int(units.num_tokens.sum())])

    def move_blocks(self, moves, now_ns: int) -> None:
        self.num_moves += 1
        if self.num_moves % 2:
            self.host[moves.kept[1]] = self.kv[moves.restored[1]] = 5
            raise CopyError("a copy fails, as this test wants it")
        super().move_blocks(moves, now_ns)


def test_after_failed_copies_a_rank_computes_again_and_its_group_goes_on():
    settings, tokens = replace(SETTINGS, num_blocks=14, num_host_blocks=40), {}
    device = LosingDevice(settings.num_blocks, settings.block_size, num_host_blocks=settings.num_host_blocks)
    rank = LockStepRank(Scheduler(settings), LockStepExecutor(device, lambda step: None))
    requests = [make_request(f"r{i}", range(i % 4, 20 + i % 4), max_tokens=8) for i in range(12)]
    for request in requests:
        rank.add(request, 0)
    for now_ns in range(1000):
        for output in rank.step(now_ns):
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        rank.scheduler.check()
    assert tokens == {request.request_id: expected_tokens(request) for request in requests}
    assert rank.scheduler.counts.num_failed_copies > 1
    assert not rank.has_work


def test_a_rank_learns_what_its_prompts_cost_against_copies_from_host_memory():
    settings = replace(SETTINGS, num_host_blocks=40, max_num_batched_tokens=64)
    device = LosingDevice(settings.num_blocks, settings.block_size, num_host_blocks=settings.num_host_blocks)
    rank = build_lock_step_rank(settings, device, lambda step: None, host_block_ns=100)
    rank.add(make_request("r", range(40), max_tokens=1), 0)
    rank.begin(1_000)
    rank.collect(1_000)
    rank.begin(1_000 + 40 * 7)
    prices = rank.scheduler.state.host.prices
    assert (prices.copying_ns(1), prices.computing_ns(0, 1)) == (100, 7)


def test_a_rank_alone_belongs_to_no_group():
    with pytest.raises(InvariantError, match="without a group"):
        build_rank(SETTINGS, KvDevice(SETTINGS.num_blocks, SETTINGS.block_size)).wake(0)
