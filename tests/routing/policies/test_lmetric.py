"""LMetric and its detector, against a plain recount of every window."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.routers import BLOCK_SIZE, decide, request, router, table, view

from moestro.core.hashing import HASH_BYTES
from moestro.errors import ConfigError
from moestro.routing.policies.lmetric import HotspotDetector, HotspotSettings, LMetric
from moestro.routing.policy_contract import Routed

SECOND = 1_000_000_000
OF_4000 = request(num_prompt_tokens=4000)


def test_the_score_is_all_there_is_to_prefill_times_the_batch_with_the_newcomer():
    known = table(prefill_tokens=[1000, 0, 0], num_in_flight=[3, 9, 0])
    choice = decide(LMetric(), known, req=OF_4000, hit_tokens=[3200, 3200, 0])
    assert choice.scores.tolist() == [1800 * 4, 800 * 10, 4000]
    assert choice.engine == 2


def test_a_full_hit_on_an_empty_queue_scores_nothing_whatever_the_batch():
    known = table(num_in_flight=[500, 0])
    assert decide(LMetric(), known, req=request(num_prompt_tokens=160), hit_tokens=[160, 144]).engine == 0


def test_what_an_engine_has_computed_of_a_prompt_is_not_queued_any_more():
    known = table(prefill_tokens=[8000, 8000], reported_prefill_tokens=[500, np.inf], num_in_flight=[1, 1])
    assert decide(LMetric(), known, req=OF_4000).scores.tolist() == [4500 * 2, 12000 * 2]


def test_other_routers_requests_count_while_the_engine_has_spoken_lately():
    known = table(
        prefill_tokens=[100, 0], reported_prefill_tokens=[900, np.inf], queued_prefill_tokens=[900, None],
        num_in_flight=[1, 1], num_foreign=[3, 0], num_waiting=[0, None], num_running=[4, None],
    )  # fmt: skip
    assert decide(LMetric(), known, req=OF_4000).scores.tolist() == [4900 * 5, 4000 * 2]
    assert decide(LMetric(), known, req=OF_4000, now_ns=6 * SECOND).scores.tolist() == [4100 * 2, 4000 * 2]


@pytest.mark.parametrize("num_engines", [6, 80])
def test_alarms_do_not_depend_on_the_number_of_engines_that_are_out_of_rotation(num_engines):
    detector, hot = HotspotDetector(HotspotSettings(min_share=0.1)), chain(1, 4)
    for i in range(8):
        detector.note(Routed(prompt("a", hot), 0, 0, {}, i), 0, is_lower=False)
    absent = num_engines - 3
    engines = table(num_in_flight=[0] * num_engines, routable=[True] * 3 + [False] * absent)
    alarm = detector.look(view(engines, [64, 0, 0] + [64] * absent, prompt("h", hot)), np.arange(num_engines))
    assert (alarm.first, alarm.holder_share) == (True, 1 / 3)
    assert np.flatnonzero(alarm.holders).tolist() == [0]


# --- the detector


def chain(name: int, num_blocks: int) -> bytes:
    return b"".join(f"{name:08d}{depth:08d}".encode() for depth in range(num_blocks))


def prompt(name: str, blocks: bytes):
    return request(name, num_prompt_tokens=BLOCK_SIZE * len(blocks) // HASH_BYTES + 5, block_hashes=blocks)


class Recount:
    """The detector with no books: the window is counted again for each request."""

    def __init__(self, settings: HotspotSettings) -> None:
        self.settings = settings
        self.window: list[tuple[int, bytes]] = []
        self.streaks: dict[bytes, int] = {}

    @staticmethod
    def blocks(hashes: bytes) -> list[bytes]:
        return [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]

    def share(self, block: bytes) -> int:
        return sum(block in self.blocks(hashes) for _, hashes in self.window)

    def class_of(self, hashes: bytes) -> tuple[bytes, int, int] | None:
        n, found = len(self.window), None
        for depth, block in enumerate(self.blocks(hashes), 1):
            count = self.share(block)
            if count >= max(2, self.settings.min_share * n):
                found = (block, depth, count)
        return found

    def look(self, seen, scores) -> tuple[bool, bool, bool]:
        own = self.class_of(seen.request.block_hashes)
        if own is None or own[0] not in self.streaks:
            return False, False, False
        block, depth, count = own
        rows = [e for e in range(len(scores)) if seen.engines.routable[e]]
        inside = [e for e in rows if seen.hit_tokens[e] >= depth * BLOCK_SIZE]
        outside = [e for e in rows if e not in inside]
        if not inside or not outside:
            return False, False, False
        x = count / len(self.window)
        first = x >= 1 or x / (1 - x) > len(inside) / len(outside) + 1e-12
        lower = first and min(scores[e] for e in inside) < min(scores[e] for e in outside)
        return first, lower, lower and self.streaks[block] + 1 > 2 * len(inside)

    def note(self, now_ns: int, hashes: bytes, lower: bool) -> None:
        own = self.class_of(hashes)
        if own is not None and own[0] in self.streaks:
            self.streaks[own[0]] = self.streaks[own[0]] + 1 if lower else 0
        oldest = now_ns - int(self.settings.window_s * 1e9)
        self.window = [each for each in self.window if each[0] >= oldest]
        self.window = [*self.window, (now_ns, hashes)][-self.settings.max_requests :]
        own = self.class_of(hashes)
        if own is not None and own[0] not in self.streaks:
            self.streaks[own[0]] = 0


@pytest.mark.parametrize("seed", range(4))
def test_law_both_phases_equal_a_plain_recount(seed):
    rng = random.Random(seed)
    settings = HotspotSettings(window_s=20, max_requests=40, min_share=0.05, max_classes=1000)
    ours, plain = HotspotDetector(settings), Recount(settings)
    alarms = [0, 0]
    for i in range(500):
        now_ns = int(i * 0.3 * SECOND)
        hot = rng.random() < (0.8 if 150 < i < 400 else 0.2)
        name, depth = (0, 6) if hot else (rng.randrange(1, 12), rng.randrange(1, 8))
        blocks = chain(99, 1) + chain(name, depth) + chain(1000 + i, rng.randrange(3))
        holders = {0, 1, rng.randrange(6)} if hot else {name % 6}
        hits = [len(blocks) // HASH_BYTES * BLOCK_SIZE if e in holders else BLOCK_SIZE for e in range(6)]
        engines = table(num_in_flight=[rng.randrange(6) for _ in range(6)], routable=[i % 7 != e for e in range(6)])
        seen = view(engines, hits, prompt(str(i), blocks), now_ns)
        scores = (seen.request.num_prompt_tokens - seen.hit_tokens) * (engines.num_in_flight + 1)
        alarm, expected = ours.look(seen, scores), plain.look(seen, scores)
        assert (alarm.first, alarm.is_lower, alarm.second) == expected
        alarms = [alarms[0] + alarm.first, alarms[1] + alarm.second]
        ours.note(Routed(seen.request, 0, 0, {}, now_ns), alarm.num_blocks, is_lower=alarm.is_lower)
        plain.note(now_ns, blocks, expected[1])
    assert alarms[0] > alarms[1] > 10


def test_equation_2_holds_at_equality_and_fails_just_above():
    detector = HotspotDetector(HotspotSettings(min_share=0.1))
    hot, cold = chain(1, 4), [chain(100 + i, 4) for i in range(8)]
    for i in range(8):
        detector.note(Routed(prompt("a", cold[i] if i < 4 else hot), 0, 0, {}, i), 0, is_lower=False)
    # x / (1 - x) is 1: one engine of two holds the prefix, and 1 of 3.
    two = view(table(num_in_flight=[0, 0]), [64, 0], prompt("h", hot))
    three = view(table(num_in_flight=[0, 0, 0]), [64, 0, 0], prompt("h", hot))
    assert not detector.look(two, np.array([1, 2])).first
    assert detector.look(three, np.array([1, 2, 2])).first
    assert not detector.look(three, np.array([2, 2, 2])).is_lower


def test_a_prefix_that_all_engines_hold_raises_no_alarm():
    detector = HotspotDetector(HotspotSettings())
    blocks = chain(1, 4)
    for i in range(30):
        detector.note(Routed(prompt("a", blocks), 0, 0, {}, i), 0, is_lower=False)
    held = view(table(num_in_flight=[0, 0]), [4 * BLOCK_SIZE] * 2, prompt("h", blocks))
    assert not detector.look(held, np.array([1, 2])).first
    assert detector.look(view(table(2), [4 * BLOCK_SIZE, 0], prompt("h", blocks)), np.array([1, 2])).first


@pytest.mark.parametrize("order", [((1, 2), (2, 8), (3, 5)), ((2, 8), (3, 5), (1, 2))])
def test_only_the_classes_that_save_most_are_tracked(order):
    detector = HotspotDetector(HotspotSettings(max_classes=2))
    for i in range(40):
        for name, depth in order:
            detector.note(Routed(prompt("a", chain(name, depth)), 0, 0, {}, i), 0, is_lower=False)
    assert detector.num_tracked == 2
    prompts = [prompt("a", chain(name, depth)) for name, depth in ((1, 2), (2, 8), (3, 5))]
    assert [detector.look(view(table(2), None, each), np.zeros(2)).num_blocks for each in prompts] == [0, 8, 5]


@pytest.mark.parametrize("share", [0.75, 0.9, 0.95, 1.0])
@pytest.mark.parametrize("hotspots", ["off", "filter", "load"])
def test_an_adversarial_prefix_is_spread_only_by_the_detector(hotspots, share):
    """A fully cached prompt scores nothing on its one holder; requests never end."""
    policy = LMetric(hotspots=hotspots)
    four, rng = router(4, policy), random.Random(1)
    hot = chain(1, 8)
    four.kv_stored(0, hot, 0)
    for i in range(400):
        now_ns = i * SECOND // 20
        blocks = hot if rng.random() < share else chain(100 + i, 8)
        one = request(str(i), num_prompt_tokens=8 * BLOCK_SIZE, block_hashes=blocks)
        four.submit(one, now_ns)
        four.first_token(str(i), now_ns)
    most = max(four.table.num_in_flight) / (400 / 4)
    assert most > 2.5 if hotspots == "off" else most < 1.3
    assert (policy.num_alarms[1] > 0) == (hotspots != "off")


def test_an_unknown_mitigation_is_refused():
    with pytest.raises(ConfigError, match="off, filter or load"):
        LMetric(hotspots="drop")
