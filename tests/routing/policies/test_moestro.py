import random

import numpy as np
import pytest
from support.routers import decide, drawn_table, request, router, table, view

from moestro.core.load_figures import LoadFigures
from moestro.core.rng import Draws
from moestro.core.views import ALONE
from moestro.routing.policies.lmetric import LMetric
from moestro.routing.policies.moestro import Moestro
from moestro.routing.policy_contract import Ended, EngineLost, Routed, RouteView

MS = 1_000_000
OF_1000 = request(num_prompt_tokens=1000)


def taught(answer_tokens: int = 100, stay_ms: int = 1000) -> Moestro:
    """One that has seen answers of so many tokens; nothing was sent, so no engine has a share of recent work."""
    policy = Moestro()
    policy.observe(Ended("r", 0, 0, stay_ms * MS, answer_tokens))
    return policy


def test_the_score_is_the_delay_that_the_request_causes():
    known = table(num_in_flight=[6, 3], num_prefilling=[2, 1], prefill_tokens=[3000, 500])
    choice = decide(taught(), known, req=OF_1000, hit_tokens=[800, 0])
    # 6 decode and 3 wait, so a second of waiting weighs (6 + 1) / (3 + 1).
    weight, answer = 7 / 4, 100
    assert choice.scores.tolist() == pytest.approx(
        [
            weight * (3000 + 200 * 3) + 200 * 4 + 2 * answer * 6,
            weight * (500 + 1000 * 2) + 1000 * 2 + 2 * answer * 3,
        ]
    )


def test_a_full_hit_on_an_empty_queue_still_costs_what_its_answer_does():
    """LMetric scores it 0 whatever the batch."""
    known = table(num_in_flight=[40, 1])
    what = {"req": request(num_prompt_tokens=160), "hit_tokens": [160, 0]}
    assert decide(LMetric(), known, **what).engine == 0
    assert decide(taught(), known, **what).engine == 1
    few = table(num_in_flight=[2, 1])
    assert decide(taught(answer_tokens=1), few, **what).engine == 0


def test_near_saturation_a_queue_does_not_drown_a_hit():
    """With both queues long, LMetric multiplies the little by which they differ with the batch."""
    known = table(num_in_flight=[31, 29], num_prefilling=[15, 15], prefill_tokens=[30_000, 29_000])
    what = {"req": request(num_prompt_tokens=2000), "hit_tokens": [1900, 0]}
    assert decide(LMetric(), known, **what).engine == 1
    assert decide(taught(), known, **what).engine == 0


def test_tokens_without_a_free_block_count_as_if_they_were_to_be_computed():
    known = table(kv_usage=[0.95, 0.2], num_kv_tokens=[10_000, 10_000], num_in_flight=[1, 1])
    even = decide(taught(), table(num_in_flight=[1, 1]), req=OF_1000)
    choice = decide(taught(), known, req=OF_1000)
    missing = 1000 + 100 - 500
    assert (choice.scores - even.scores).tolist() == pytest.approx([3 * missing, 0])
    unknown = table(kv_usage=[0.95, None], num_kv_tokens=[10_000, 10_000], num_in_flight=[1, 1])
    assert decide(taught(), unknown, req=OF_1000).engine == 1


def test_a_slow_engine_and_one_whose_experts_are_pressed_cost_more():
    known = table(speed=[1, 0.5, 1], decode_speed=[1, 0.5, 1], expert_pressure=[1.0, 1.0, 1.5], num_in_flight=[1, 1, 1])
    scores = decide(taught(), known, req=OF_1000).scores
    assert (scores / scores[0]).tolist() == pytest.approx([1, 2, 1.5])


def test_a_hit_in_host_memory_costs_its_copy_and_delays_no_neighbour():
    known = table(num_in_flight=[6, 6], num_prefilling=[2, 2], copy_price=[0.1, 0.5])
    alone = decide(taught(), known, req=OF_1000, hit_tokens=[800, 800]).scores
    scores = decide(taught(), known, req=OF_1000, hit_tokens=[800, 800], host_tokens=[500, 500]).scores
    weight = 9 / 5  # 8 decode and 4 wait
    assert (scores - alone).tolist() == pytest.approx([weight * 500 * 0.1, weight * 500 * 0.5])


def group_scores(rows: list[tuple[int, int, int]], num_new: list[int], answer: int) -> list[float]:
    """The score of the page, engine by engine: rows of (Q, requests without a first token, requests)."""
    n, waiting, batch = len(rows), sum(row[1] for row in rows), sum(row[2] for row in rows)
    running = batch - waiting
    weight = max(1.0, (running + 1) / (waiting + 1))
    longest, largest = max(row[0] for row in rows), max(row[2] for row in rows)
    scores = []
    level = sum(row[0] for row in rows) / n / longest if longest else 0.0
    for (queued, own_waiting, own), new in zip(rows, num_new, strict=True):
        longer = max(0, queued + new - longest)
        growth = max(own + 1, largest) - largest + own / n
        delay = (1 - level) * longer + level * new / n
        prompts = weight * (queued + new * (1 + own_waiting)) + delay * running
        scores.append(prompts + answer * (running + waiting) * growth)
    return scores


def test_in_a_group_a_request_counts_by_what_it_adds_to_the_steps_of_all():
    rows = [(4000, 3, 9), (1000, 1, 4), (0, 0, 9)]
    known = table(num_in_flight=[9, 4, 9], num_prefilling=[3, 1, 0], prefill_tokens=[4000, 1000, 0], group=[0, 0, 0])
    scores = decide(taught(), known, req=OF_1000, hit_tokens=[800, 0, 0]).scores
    assert scores.tolist() == pytest.approx(group_scores(rows, [200, 1000, 1000], 100))


def test_in_a_group_without_queues_a_prompt_delays_all_decodes_by_its_whole_length():
    rows = [(0, 0, 5), (0, 0, 2)]
    known = table(num_in_flight=[5, 2], num_prefilling=[0, 0], prefill_tokens=[0, 0], group=[0, 0])
    scores = decide(taught(), known, req=OF_1000).scores
    assert scores.tolist() == pytest.approx(group_scores(rows, [1000, 1000], 100))


def test_a_copy_from_host_memory_delays_no_decode_of_the_group():
    known = table(num_in_flight=[5, 5], num_prefilling=[0, 0], copy_price=[0.1, 0.1], group=[0, 0])
    alone = decide(taught(), known, req=OF_1000, hit_tokens=[800, 800]).scores
    scores = decide(taught(), known, req=OF_1000, hit_tokens=[800, 800], host_tokens=[500, 500]).scores
    weight = 11.0  # 10 decode and none waits
    assert (scores - alone).tolist() == pytest.approx([weight * 500 * 0.1] * 2)


def test_groups_count_apart_and_engines_outside_count_as_ever():
    rows = [(4000, 3, 9), (1000, 1, 4)]
    alone = {"num_in_flight": [5], "num_prefilling": [2], "prefill_tokens": [700]}
    twice = {name: [*values, *alone[name], *values] for name, values in _columns(rows).items()}
    scores = decide(taught(), table(**twice, group=[3, 3, ALONE, 0, 0]), req=OF_1000).scores
    plain = decide(taught(), table(**twice), req=OF_1000).scores
    assert scores[:2].tolist() == scores[3:].tolist()
    assert scores[2] == plain[2]
    assert scores[0] != plain[0]


def _columns(rows: list[tuple[int, int, int]]) -> dict[str, list[int]]:
    queued, waiting, batch = (list(column) for column in zip(*rows, strict=True))
    return {"num_in_flight": batch, "num_prefilling": waiting, "prefill_tokens": queued}


def test_what_was_sent_lately_counts_as_load_and_fades():
    policy = taught()
    for i in range(3):
        policy.observe(Routed(request(str(i), 1000), 0, 0, {}, i))
    assert {decide(policy, table(2), i).engine for i in range(8)} == {1}
    for i in range(200):
        policy.observe(Routed(request(str(i), 1000), i % 2, 0, {}, i))
    scores = decide(policy, table(2)).scores
    assert scores[0] / scores[1] == pytest.approx(1, rel=0.1)
    policy.observe(EngineLost(1, 0))
    assert decide(policy, table(2)).engine == 1


def test_its_means_and_shares_stay_finite_over_millions_of_decisions():
    policy = taught()
    policy._worth = 1e11
    for i in range(2000):
        policy.observe(Routed(request(str(i), 1000), i % 3, 0, {}, i))
    assert policy._worth < 1e12
    assert policy._recent_share(view(table(3))).sum() == pytest.approx(3)


def test_the_work_of_an_engine_that_is_lost_is_no_share():
    policy = Moestro()
    for i in range(30):
        policy.observe(Routed(OF_1000, i % 3, 0, {}, i))
    policy.observe(EngineLost(1, 30))
    share = policy._recent_share(view(table(3)))
    assert share[1] == 0
    assert share.sum() == pytest.approx(3)
    policy.observe(EngineLost(7, 31))  # of which it knows nothing


def test_of_other_routers_only_what_they_cannot_have_changed_since_counts():
    known = table(
        num_in_flight=[2, 2], num_foreign=[12, 2], num_waiting=[0, 0], num_running=[14, 4],
        prefill_tokens=[0, 0], reported_prefill_tokens=[0, 0], queued_prefill_tokens=[0, 0],
    )  # fmt: skip
    alone = decide(taught(stay_ms=1000), table(num_in_flight=[2, 2]), req=OF_1000).scores
    at_once = decide(taught(stay_ms=1000), known, req=OF_1000).scores
    # 14 of theirs come in the second that one stays, so 7 in half of it, of the 10 by which the engines differ.
    later = decide(taught(stay_ms=1000), known, req=OF_1000, now_ns=500 * MS).scores
    much_later = decide(taught(stay_ms=1000), known, req=OF_1000, now_ns=1000 * MS).scores
    assert (at_once - alone).tolist() == pytest.approx([10 * (1000 + 200), 0])
    assert (later - alone).tolist() == pytest.approx([3 * (1000 + 200), 0])
    assert (much_later - alone).tolist() == [0, 0]


def test_of_prompt_tokens_those_of_others_are_what_is_not_ones_own():
    known = table(
        num_in_flight=[1, 1], num_prefilling=[1, 1], num_foreign=[1, 1], num_waiting=[0, 0], num_running=[2, 2],
        prefill_tokens=[1000, 1000], reported_prefill_tokens=[6000, 1000], queued_prefill_tokens=[6000, 1000],
    )  # fmt: skip
    scores = decide(taught(), known, req=OF_1000).scores
    assert scores[0] - scores[1] == pytest.approx(5000)


def test_it_works_from_the_first_request_on():
    three = router(3, Moestro())
    engines = []
    for i in range(30):
        engines.append(three.submit(request(str(i), prompt=range(i, i + 100)), i * MS).engine)
        three.report(engines[-1], LoadFigures(kv_usage=0.1, num_waiting=1, num_running=0), i * MS, i * MS)
    assert [engines.count(e) for e in range(3)] == [10, 10, 10]


def test_an_engine_that_is_not_routable_is_no_measure_of_other_routers_load():
    own = {"num_in_flight": [2, 2, 2], "routable": [True, True, False]}
    known = table(
        **own, num_foreign=[12, 2, 0], num_waiting=[0, 0, 0], num_running=[14, 4, 2],
        prefill_tokens=[0, 0, 0], reported_prefill_tokens=[0, 0, 0], queued_prefill_tokens=[0, 0, 0],
    )  # fmt: skip
    alone = decide(taught(), table(**own), req=OF_1000).scores
    scores = decide(taught(), known, req=OF_1000).scores
    assert (scores - alone)[:2].tolist() == pytest.approx([10 * (1000 + 200), 0])


def plain_scores(policy: Moestro, seen: RouteView) -> list[float]:
    """The module's formula, engine by engine, with the sums in the policy's order."""
    engines, oldest_ns = seen.engines, seen.now_ns - seen.fresh_ns
    in_all, num_waiting = sum(engines.num_in_flight.tolist()), sum(engines.num_prefilling.tolist())
    weight = max(1.0, (in_all - num_waiting + 1) / (num_waiting + 1))
    answer = policy._answer_tokens.value or 16.0
    per_work = len(engines) / policy._work_in_all if policy._work_in_all > 0 else 1.0
    hosted = np.zeros(len(engines)) if seen.host_tokens is None else seen.host_tokens
    scores = []
    for row in range(len(engines)):
        work = policy._work[row] if row < len(policy._work) else 0.0
        new = max(seen.request.num_known_tokens - seen.hit_tokens[row], 1)
        batch, waiting = engines.num_in_flight[row] + work * per_work, engines.num_prefilling[row]
        ahead = min(engines.prefill_tokens[row], engines.reported_prefill_tokens[row])
        if engines.kv_usage.as_of_ns[row] >= oldest_ns:
            room = (1 - engines.kv_usage.values[row]) * engines.num_kv_tokens[row]
            ahead += max(new + answer - room, 0.0)
        ahead = ahead + new + hosted[row] * engines.copy_price[row]
        delay = weight * (ahead + new * waiting) + new * (batch - waiting)
        score = delay / engines.speed[row] + 2.0 * answer * batch / engines.decode_speed[row]
        if engines.expert_pressure.as_of_ns[row] >= oldest_ns:
            score *= max(engines.expert_pressure.values[row], 1.0)
        scores.append(float(score))
    return scores


@pytest.mark.parametrize("seed", range(4))
def test_scores_are_those_of_the_formula_to_the_bit(seed):
    rng = random.Random(seed)
    for _ in range(100):
        num_engines, num_tokens = rng.choice([1, 5, 16, 70]), rng.randrange(1, 4000)
        policy = Moestro()
        for _ in range(rng.randrange(5)):
            policy.observe(Ended("r", 0, 0, rng.randrange(1, 10**9), rng.randrange(1, 300)))
            newest = request(num_prompt_tokens=rng.randrange(1, 5000))
            policy.observe(Routed(newest, rng.randrange(num_engines), 0, {}, 0))
        hits = [rng.randrange(num_tokens + 1) for _ in range(num_engines)]
        hosted = rng.choice([None, [rng.randrange(hit + 1) for hit in hits]])
        new = request(num_prompt_tokens=num_tokens)
        seen = view(drawn_table(rng, num_engines), hits, new, rng.choice([0, 5001 * MS]), host_tokens=hosted)
        assert policy.decide(seen, Draws(0, 0)).scores.tolist() == plain_scores(policy, seen)
