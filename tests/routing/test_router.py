import random

import pytest
from support.routers import BLOCK_SIZE, request, router

from moestro.core.load_figures import ROUTED_FIGURES, LoadFigures
from moestro.core.views import NEVER_NS
from moestro.errors import ConfigError, InvariantError, NoEngineError, QueueFullError
from moestro.routing.columns import EngineColumns
from moestro.routing.registry import ROUTE_POLICIES
from moestro.routing.settings import EngineSpec

HOUR = 3600 * 10**9


def submit(to, *names, now_ns=0, **fields):
    return [to.submit(request(name, **fields), now_ns).engine for name in names]


def prompt_of(name, num_blocks):
    hashes = b"".join(f"{name:>8}{depth:08d}".encode() for depth in range(num_blocks))
    return request(name, num_prompt_tokens=BLOCK_SIZE * num_blocks + 5, block_hashes=hashes)


def test_requests_in_flight_are_counted_until_they_end():
    two = router(2, "least_loaded")
    engines = submit(two, "a", "b", "c", "d")
    assert sorted(engines) == [0, 0, 1, 1]
    two.ended("abcd"[engines.index(1)], 0)
    assert submit(two, "e") == [1]
    assert two.num_in_flight == 4
    assert len(two.in_flight_on(1)) == 2


def test_without_a_routable_engine_the_refusal_says_when_to_retry():
    two = router(2, "round_robin")
    for engine in (0, 1):
        two.set_routable(engine, routable=False)
    with pytest.raises(NoEngineError) as refused:
        submit(two, "a")
    assert (refused.value.http_status, refused.value.retry_after_s) == (503, 1)


def test_a_full_queue_takes_nothing_and_the_refusal_says_when_to_retry():
    two = router(2, "least_loaded", max_num_queued=2)
    engines = submit(two, "a", "b", "c", "d")
    assert sorted(engines) == [0, 0, 1, 1]
    with pytest.raises(QueueFullError, match="4 waiting") as refused:
        submit(two, "e")
    assert (refused.value.http_status, refused.value.retry_after_s) == (503, 1)
    two.report(1, LoadFigures(num_running=1), 0, 0)  # one of its two waits no more
    assert submit(two, "e") == [1]
    two.ended("abcd"[engines.index(0)], 0)
    assert submit(two, "f") == [0]


def test_an_unknown_policy_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown route policy 'best'; known: .*power_of_two, .*round_robin"):
        ROUTE_POLICIES.make("best")


def test_an_unknown_setting_of_a_policy_is_named():
    with pytest.raises(ConfigError, match=r"round_robin.*speed"):
        ROUTE_POLICIES.make("round_robin:speed=3")


def test_ending_what_never_began_is_a_bug():
    with pytest.raises(InvariantError, match="was not in flight"):
        router(1, "round_robin").ended("a", 0)


def test_prompt_tokens_to_compute_are_counted_until_the_first_token():
    one = router(1, "round_robin")
    submit(one, "a", "b", num_prompt_tokens=100)
    assert (one.table.prefill_tokens[0], one.table.num_prefilling[0], one.table.context_tokens[0]) == (200, 2, 200)
    one.first_token("a", 1)
    one.first_token("a", 2)
    assert (one.table.prefill_tokens[0], one.table.num_prefilling[0], one.table.context_tokens[0]) == (100, 1, 200)
    one.ended("b", 3)
    one.first_token("b", 4)  # late
    assert (one.table.prefill_tokens[0], one.table.num_prefilling[0], one.table.context_tokens[0]) == (0, 0, 100)


def test_the_tokens_of_an_answer_that_is_resumed_are_tokens_to_compute():
    one = router(1, "round_robin")
    submit(one, "a", num_prompt_tokens=100, resumed_token_ids=bytes(4 * 10))
    assert (one.table.prefill_tokens[0], one.table.context_tokens[0]) == (110, 110)
    one.ended("a", 1)
    assert (one.table.prefill_tokens[0], one.table.context_tokens[0]) == (0, 0)


def test_each_figure_keeps_its_own_age_and_an_older_one_changes_nothing():
    one = router(1, "round_robin")
    one.report(0, LoadFigures(kv_usage=0.5, num_running=3), 50, 60)
    one.report(0, LoadFigures(kv_usage=0.1), 40, 70)
    one.report(0, LoadFigures(num_running=2), 65, 70)
    assert (one.table.kv_usage.values[0], one.table.kv_usage.as_of_ns[0]) == (0.5, 50)
    assert (one.table.num_running.values[0], one.table.num_running.as_of_ns[0]) == (2, 65)
    assert one.table.kv_usage.known(70, 20).tolist() == [True]
    assert one.table.kv_usage.known(71, 20).tolist() == [False]
    assert one.table.num_waiting.known(71, 1 << 60).tolist() == [False]


def test_requests_that_are_not_this_routers_are_those_that_it_cannot_account_for():
    one = router(1, "round_robin")
    submit(one, "a", "b", now_ns=10)
    submit(one, "c", now_ns=20)
    one.ended("a", 25)
    # At 15 the engine had a and b, and 5 of another router; c it could not have seen.
    one.report(0, LoadFigures(num_waiting=4, num_running=3, queued_prefill_tokens=7), 15, 30)
    assert (one.table.num_foreign[0], one.table.num_unseen[0], one.table.reported_prefill_tokens[0]) == (5, 1, 8)
    submit(one, "d", now_ns=30)
    assert one.table.num_unseen[0] == 2
    one.ended("c", 31)
    assert (one.table.num_unseen[0], one.table.reported_prefill_tokens[0]) == (1, 8)
    one.report(0, LoadFigures(num_waiting=0, num_running=2), 32, 33)
    assert (one.table.num_foreign[0], one.table.num_unseen[0]) == (0, 0)


def test_a_first_token_takes_away_only_prompt_tokens_that_the_report_did_not_hold():
    one = router(1, "round_robin")
    submit(one, "seen", now_ns=10, num_prompt_tokens=100)
    one.report(0, LoadFigures(queued_prefill_tokens=40), 15, 30)  # of the 100 tokens 60 were computed by then
    submit(one, "unseen", now_ns=20, num_prompt_tokens=100)
    assert one.table.reported_prefill_tokens[0] == 140
    one.first_token("seen", 31)
    assert one.table.reported_prefill_tokens[0] == 140, "the report held 40 of its tokens, and is not corrected"
    one.first_token("unseen", 32)
    assert one.table.reported_prefill_tokens[0] == 40


def test_requests_that_ended_after_an_engine_counted_them_are_not_foreign():
    one = router(1, "round_robin")
    submit(one, "a", "b", "c", "d", now_ns=10)
    for at, name in enumerate(("a", "b", "c")):
        one.ended(name, 21 + at)
    one.report(0, LoadFigures(num_waiting=1, num_running=3), 20, 30)
    assert one.table.num_foreign[0] == 0
    one.report(0, LoadFigures(num_waiting=1, num_running=3), 24, 31)
    assert one.table.num_foreign[0] == 3


def test_an_engine_that_was_started_again_has_reported_nothing_and_holds_nothing():
    one = router(1, "round_robin")
    submit(one, "a", now_ns=5)
    one.report(0, LoadFigures(kv_usage=0.5, num_running=9, num_waiting=0), 5, 5)
    one.engine_lost(0, 6)
    assert not one.table.kv_usage.known(6, 1 << 60).any()
    assert one.table.num_foreign[0] == 0
    one.ended("a", 7)
    assert one.num_in_flight_on(0) == one.table.num_unseen[0] == 0


def test_the_number_of_a_removed_engine_is_free_once_nothing_is_in_flight_there():
    two = router(2, "round_robin")
    submit(two, "a", "b")
    two.remove_engine(0, 1)
    assert two.add_engine() == 2
    two.ended(two.in_flight_on(0)[0], 2)
    assert two.add_engine() == 0
    assert not two.is_routable(0)


def test_many_engines_are_rows_of_one_table():
    many = router(100, "least_loaded")
    assert sorted(submit(many, *map(str, range(100)))) == list(range(100))
    with pytest.raises(ValueError, match="read-only"):
        many.table.num_in_flight[0] = 1


def test_the_last_words_of_an_engine_that_was_removed_are_not_its_successors():
    one = router(2, "lmetric")
    one.remove_engine(1, 0)
    one.kv_cleared(1, 1)
    one.kv_stored(1, bytes(16), 1)
    one.report(1, LoadFigures(kv_usage=0.5, num_running=3, num_waiting=4), 1, 1)
    assert one.add_engine() == 1
    one.set_routable(1, routable=True)
    assert one.table.kv_usage.as_of_ns[1] == NEVER_NS
    one.keeps_candidates = True
    decision = one.submit(request("r", block_hashes=bytes(16), num_prompt_tokens=20), 2)
    assert decision.candidates.hit_tokens.tolist() == [0, 0]


def test_requests_that_are_on_their_way_take_places_in_the_queues():
    two = router(2, "least_loaded", max_num_queued=3)
    submit(two, "a", "b")
    two.check_room(num_coming=3)
    with pytest.raises(QueueFullError, match="6 waiting"):
        two.check_room(num_coming=4)
    submit(two, "c", "d", "e", "f")
    with pytest.raises(QueueFullError, match="6 waiting"):
        two.check_room()


def test_an_excluded_engine_gets_nothing_and_stays_in_rotation():
    two = router(2, "least_loaded", max_num_queued=1)
    assert [two.submit(request("a"), 0, exclude={0}).engine] == [1]
    with pytest.raises(QueueFullError, match="1 waiting"):
        two.submit(request("b"), 0, exclude={0})
    with pytest.raises(NoEngineError):
        two.submit(request("b"), 0, exclude={0, 1})
    assert two.num_routable == 2
    assert submit(two, "b") == [0]


def test_a_prompt_is_remembered_for_as_long_as_the_cache_has_room():
    one = router(1, "lmetric", EngineSpec(num_blocks=8))
    prompts, found = {name: prompt_of(name, 4) for name in "abc"}, []
    for at, name in enumerate("aababca"):
        found.append(one.submit(prompts[name], at * HOUR).hit_tokens)
        one.ended(name, at * HOUR + 1, cached_share=0.0)  # a known size is not learned
    assert found == [0, 64, 0, 64, 64, 0, 0]


def test_an_engine_of_unknown_size_is_believed_to_hold_what_its_answers_say():
    one = router(1, "lmetric")
    prompts = {name: prompt_of(name, 4) for name in "abcd"}
    for name in "abcd":
        assert one.submit(prompts[name], 0).hit_tokens == 0
        one.ended(name, 1, cached_share=0.0)
    assert one.submit(prompts["a"], 2).hit_tokens == 64
    one.ended("a", 3, cached_share=0.0)  # so it has no room for all four, which are 16 blocks
    assert one.submit(prompts["b"], 4).hit_tokens == 0
    one.ended("b", 5, cached_share=0.5)  # half of the prompt was there all the same
    one.submit(prompts["b"], 6)
    one.engine_lost(0, 7)
    one.ended("b", 8, cached_share=0.0)  # the answer of a process that is gone teaches nothing


def test_the_figures_that_count_are_those_of_a_look_at_every_decision():
    rng = random.Random(4)
    columns, now_ns, fresh_ns = EngineColumns(), 0, 50
    rows = [columns.add() for _ in range(3)]
    num_uneven = 0
    for _ in range(3000):
        now_ns += rng.randrange(12)
        row, name = rng.choice(rows), rng.choice(["kv_usage", "num_waiting", "num_running"])
        match rng.randrange(8):
            case 0:
                columns.routable[row] = not columns.routable[row]
            case 1:
                columns.forget_figures(row)
            case 2 if len(rows) < 40:
                rows.append(columns.add())
            case 3 | 4 | 5:
                for each in rows if rng.random() < 0.5 else [row]:
                    columns.report(each, LoadFigures(**{name: 1}), now_ns - rng.randrange(9))
            case _:
                pass
        table = columns.table.without([row]) if rng.random() < 0.1 else columns.table
        compared, lacking = columns.compared(table, now_ns - fresh_ns)
        expected = {}
        for figure in ROUTED_FIGURES:
            is_lacking = (getattr(table, figure).as_of_ns < now_ns - fresh_ns) & table.routable
            if 0 < is_lacking.sum() < table.routable.sum():
                expected[figure] = is_lacking.tolist()
            shown = getattr(compared, figure).as_of_ns.tolist()
            is_hidden = figure in expected
            assert shown == ([NEVER_NS] * len(rows) if is_hidden else getattr(table, figure).as_of_ns.tolist())
        assert {figure: each.tolist() for figure, each in lacking.items()} == expected
        num_uneven += bool(expected)
    assert 300 < num_uneven < 2900
