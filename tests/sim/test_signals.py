import numpy as np
import pytest
from support.routers import router

from moestro.core.views import NEVER_NS
from moestro.engine.settings import SchedulerSettings
from moestro.errors import ConfigError
from moestro.routing.settings import EngineSpec
from moestro.sim.cluster import AtTimes, Cluster
from moestro.sim.groups.group import Group, OneRank
from moestro.sim.signals import AT_ONCE, NO_GROUP, ChannelSettings, ReportChannel, Signals, SignalSettings
from moestro.workload.rows import RequestForm, RequestMaker, Rows, equal_rows

MS = 1_000_000
BOUNDS = SchedulerSettings(num_blocks=100, block_size=16, max_model_len=1600)


class TenMilliseconds:
    """A cost model for which every step takes as long."""

    def move_ns(self, num_tokens: int) -> int:
        return 0

    def step_ns(self, batch) -> int:
        return 10 * MS

    def decode_steps_ns(self, start, num_steps):
        return np.full(num_steps, 10 * MS)


class Watcher:
    """The router's table, as it was at each arrival."""

    def __init__(self, watched) -> None:
        self.watched = watched
        self.seen = []

    def __getattr__(self, name):
        return getattr(self.watched, name)

    def submit(self, request, now_ns, exclude=()):
        table = self.watched.table
        figures = ("num_waiting", "num_running", "kv_usage", "num_tokens", "queued_prefill_tokens")
        row = {name: (getattr(table, name).values[0], int(getattr(table, name).as_of_ns[0])) for name in figures}
        self.seen.append(row | {"num_in_flight": int(table.num_in_flight[0])})
        return self.watched.submit(request, now_ns, exclude)


class Responses:
    """The requests of responses, in the order in which a router received them."""

    def __init__(self) -> None:
        self.received = []

    def __getattr__(self, name):
        return lambda request_id, *_: self.received.append((name, request_id))


def test_a_late_first_token_is_delivered_before_what_was_sent_later():
    router = Responses()
    signals = Signals(router, [], AT_ONCE)
    signals.ended("refused", 2, NO_GROUP, 0)
    signals.ended("b", 5, 1, 7)
    signals.first_token("c", 9, 0)
    signals.first_token("late", 3, 1)
    signals.first_token("of the first group", 5, 0)
    signals.bring(9)
    assert router.received == [
        ("ended", "refused"),
        ("first_token", "late"),
        ("first_token", "of the first group"),
        ("ended", "b"),
        ("first_token", "c"),
    ]


class Decisions:
    """What the router took for cached, of the engine that it chose."""

    def __init__(self, router) -> None:
        self.router = router
        self.hit_tokens = []

    def __getattr__(self, name):
        return getattr(self.router, name)

    def submit(self, request, now_ns, exclude=()):
        decision = self.router.submit(request, now_ns, exclude)
        self.hit_tokens.append(decision.hit_tokens)
        return decision


def seen_at(arrivals_ms, signals: SignalSettings, *, num_output_tokens=100) -> list[dict]:
    """What the router of one engine knows at each arrival, prompts of 32 tokens; every step takes 10 ms."""
    watcher = Watcher(router(1, "round_robin"))
    cluster = Cluster([Group(BOUNDS, OneRank(TenMilliseconds()))], watcher, signals)
    rows = equal_rows(len(arrivals_ms), 32, num_output_tokens)
    cluster.run(RequestMaker(rows, RequestForm(block_size=16)), AtTimes(np.array(arrivals_ms) * MS))
    return watcher.seen


def channel(*figures, **how) -> ChannelSettings:
    return ChannelSettings(figures=figures, **how)


def test_each_column_has_an_age_of_its_own():
    signals = SignalSettings(
        channels=(
            channel("num_running", delay_ms=1.0),
            channel("kv_usage", channel=ReportChannel.BROADCAST, period_ms=100, delay_ms=2.0),
            channel("num_waiting", channel=ReportChannel.POLLED, period_ms=50, delay_ms=30.0),
        )
    )
    *_, seen = seen_at([0, 375], signals)
    assert seen["num_in_flight"] == 1, "the router's own count is never late"
    # The first request's prompt is one step, so that steps end at 10, 20, ... 370.
    assert seen["num_running"] == (1, 370 * MS)
    # Broadcast at 300; the step that begins then computes token 32 + 30 and makes it 63, in 4 blocks.
    assert seen["kv_usage"] == (4 / 100, 300 * MS)
    assert seen["num_waiting"] == (0, 300 * MS), "what was read at 350 is still on its way"
    assert seen["num_tokens"][1] == NEVER_NS, "no channel brings it"


@pytest.mark.parametrize("delay_ms", [0, 1, 9, 10, 95, 1000])
def test_a_piggybacked_figure_is_as_old_as_its_delay_and_a_step_at_most(delay_ms):
    seen = seen_at(
        [0, 1205], SignalSettings(channels=(channel("num_tokens", delay_ms=delay_ms),)), num_output_tokens=500
    )
    last_step = (1205 - delay_ms) // 10 * 10
    assert seen[-1]["num_tokens"] == (32 + last_step / 10, last_step * MS)


def test_an_idle_engine_that_is_polled_speaks_of_now_and_one_that_piggybacks_of_its_last_step():
    polled, piggybacked = channel("num_running", channel=ReportChannel.POLLED, period_ms=100), channel("num_tokens")
    *_, seen = seen_at([0, 950], SignalSettings(channels=(polled, piggybacked)), num_output_tokens=3)
    assert seen["num_running"] == (0, 900 * MS)
    assert seen["num_tokens"] == (0, 30 * MS)


def test_ends_are_reported_late():
    signals = SignalSettings(response_delay_ms=50.0)
    seen = seen_at([0, 30, 79, 81, 100], signals, num_output_tokens=3)
    assert [each["num_in_flight"] for each in seen] == [0, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("kv_events_delay_ms", "hit_tokens"),
    [
        (None, [0, 0, 128, 128]),  # predicted: nothing tells the router that there was no room for both prompts
        (0, [0, 0, 16, 16]),
        (40, [0, 0, 128, 16]),  # when the third request comes, what the second one pushed out is reported to be there
    ],
)
def test_a_router_that_hears_kv_events_knows_what_a_cache_forgot(kv_events_delay_ms, hit_tokens):
    bounds = SchedulerSettings(num_blocks=10, block_size=16, max_model_len=160)
    listener = Decisions(router(1, "cache_aware", EngineSpec(num_blocks=1000)))
    signals = SignalSettings(kv_events_delay_ms=kv_events_delay_ms)
    cluster = Cluster([Group(bounds, OneRank(TenMilliseconds()))], listener, signals)
    prompts = np.arange(8), np.arange(8, 16)  # of 8 blocks each, and 1 for the answer: 10 hold one, and 1 of the other
    rows = Rows(np.full(4, 128), np.full(4, 2), hash_ids=prompts * 2, block_size=16)
    results = cluster.run(RequestMaker(rows, RequestForm(block_size=16)), AtTimes(np.array([0, 100, 130, 300]) * MS))
    assert listener.hit_tokens == hit_tokens
    assert results.num_hit_tokens.tolist() == [0, 0, 16, 16]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: channel("num_cats"),
        lambda: channel("num_preemptions"),
        lambda: channel("num_running", delay_ms=-1.0),
        lambda: channel("num_running", period_ms=0.0),
        lambda: SignalSettings(response_delay_ms=-1.0),
        lambda: SignalSettings(kv_events_delay_ms=-1.0),
    ],
)
def test_impossible_signals_are_refused(wrong):
    with pytest.raises(ConfigError, match="signals"):
        wrong()
