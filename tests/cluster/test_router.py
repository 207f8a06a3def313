import pytest

from moestro.cluster.router import Router
from moestro.core.request import Request, SamplingParams
from moestro.errors import ConfigError, InvariantError, NoEngineError, QueueFullError

REQUEST = Request(request_id="r", num_prompt_tokens=1, sampling=SamplingParams(), arrival_ns=0)


def test_requests_in_flight_are_counted_until_they_end():
    router = Router(2, "least_loaded")
    router.set_routable(0, routable=True)
    router.set_routable(1, routable=True)
    engines = [router.submit(REQUEST).engine for _ in range(4)]
    assert sorted(engines) == [0, 0, 1, 1]
    router.ended(1)
    assert router.submit(REQUEST).engine == 1
    assert router.num_in_flight == 4


def test_without_a_routable_engine_the_refusal_says_when_to_retry():
    router = Router(2, "round_robin")
    with pytest.raises(NoEngineError) as refused:
        router.submit(REQUEST)
    assert (refused.value.http_status, refused.value.retry_after_s) == (503, 1)


def test_a_full_queue_takes_nothing_and_the_refusal_says_when_to_retry():
    router = Router(2, "least_loaded", max_num_queued=2)
    for engine in (0, 1):
        router.set_routable(engine, routable=True)
    assert sorted(router.submit(REQUEST).engine for _ in range(4)) == [0, 0, 1, 1]
    with pytest.raises(QueueFullError, match="4 waiting") as refused:
        router.submit(REQUEST)
    assert (refused.value.http_status, refused.value.retry_after_s) == (503, 1)
    router.set_num_running(1, 1)  # one of its two waits no more
    assert router.submit(REQUEST).engine == 1
    router.ended(0)
    assert router.submit(REQUEST).engine == 0


def test_an_unknown_policy_names_the_known_ones():
    with pytest.raises(ConfigError, match="unknown route policy 'best'; known: round_robin, least_loaded"):
        Router(1, "best")


def test_ending_what_never_began_is_a_bug():
    with pytest.raises(InvariantError, match="did not have"):
        Router(1, "round_robin").ended(0)
