"""The engine client: every request ends once, whichever side ends it."""

from __future__ import annotations

import asyncio
import random

import pytest
from support.fake_rank import INFO
from support.routers import router

from moestro.core.load_figures import LoadFigures
from moestro.core.request import FinishReason, NewOutputs, Output, Request, SamplingParams, ServiceClass
from moestro.errors import ConfigError, DrainingError, EngineDiedError, NoEngineError, QueueFullError
from moestro.server.engines.engine_client import UNASSIGNED_S, EngineClient
from moestro.server.engines.request_state import MAX_MOVES, Interrupted, Metrics
from moestro.server.processes.supervisor import Launching, Supervisor
from moestro.server.processes.watchdog import LivenessTimeouts
from moestro.web.errors import GenerationError, InternalError
from moestro.web.figures import merge
from moestro.wire.messages import Abort, Add, Failed, Outputs, Phase, Ready, Refused, decode_from_rank, encode


def request(name: str, num_resumed_tokens: int = 0) -> Request:
    resumed = bytes(4 * num_resumed_tokens)
    sampling = SamplingParams(max_tokens=100)
    return Request(request_id=name, num_prompt_tokens=1, sampling=sampling, arrival_ns=0, resumed_token_ids=resumed)


def outputs(*items: Output) -> Outputs:
    return Outputs(NewOutputs(items), LoadFigures(num_running=3, num_waiting=2, kv_usage=0.5))


class World:
    """An engine client whose engines are all ready, and the messages that it sent."""

    def __init__(self, num_engines: int = 2, router=None) -> None:
        self.sent: list[tuple[int, object]] = []
        self.unreachable: set[int] = set()
        self.metrics = Metrics(num_engines)
        self.now_ns = 0
        self.engines = EngineClient(router or empty_router(num_engines), self.send, self.metrics, lambda: self.now_ns)
        for engine in range(num_engines):
            self.engines.on_message(engine, Ready(INFO))

    def send(self, engine: int, message: object) -> None:
        if engine in self.unreachable:
            raise NoEngineError
        self.sent.append((engine, message))

    def submit(self, *names: str) -> asyncio.Queue:
        inbox: asyncio.Queue = asyncio.Queue()
        for name in names:
            self.engines.submit(request(name), inbox)
        return inbox

    def move_all(self, inbox: asyncio.Queue) -> list[str]:
        """Move whatever was interrupted, as a `Generation` does. Returns what."""
        moved = [event.request_id for event in iter(lambda: inbox.get_nowait() if inbox.qsize() else None, None)]
        for name in moved:
            self.engines.move(request(name), has_begun=False)
        return moved

    @property
    def added(self) -> list[tuple[int, str]]:
        return [(engine, message.request.request_id) for engine, message in self.sent if isinstance(message, Add)]


def empty_router(num_engines: int):
    made = router(num_engines, "round_robin")
    for engine in range(num_engines):
        made.set_routable(engine, routable=False)
    return made


def run(test) -> None:
    async def inside() -> None:
        test()

    asyncio.run(inside())


def test_outputs_reach_the_inbox_and_the_last_one_ends_the_request():
    def test():
        world = World()
        inbox = world.submit("a")
        first, last = Output(request_id="a", token_ids=(1,)), Output(request_id="a", finish_reason=FinishReason.STOP)
        world.engines.on_message(0, outputs(first))
        assert world.engines.num_in_flight == 1
        world.engines.on_message(0, outputs(last))
        world.engines.on_message(0, outputs(last))
        assert [inbox.get_nowait(), inbox.get_nowait()] == [first, last]
        assert inbox.empty()
        assert world.engines.num_in_flight == 0
        assert world.engines.loads[0].num_running == 3

    run(test)


def test_further_tokens_of_a_step_reach_their_requests_without_an_object_of_each():
    def test():
        world = World(1)
        inboxes = {name: world.submit(name) for name in "abc"}
        world.engines.on_message(0, outputs(*(Output(request_id=name, token_ids=(1,)) for name in "abc")))
        world.engines.abort("b")
        message = Outputs(NewOutputs((), ("a", "b", "c"), [7, 8, 9]), LoadFigures())
        world.engines.on_message(0, decode_from_rank(encode(message)))
        tokens = {name: [each.token_ids for each in iter_queue(inbox)] for name, inbox in inboxes.items()}
        assert tokens == {"a": [(1,), (7,)], "b": [(1,)], "c": [(1,), (9,)]}
        assert world.metrics.engines[0].num_generated_tokens == 5

    run(test)


def iter_queue(inbox: asyncio.Queue) -> list:
    return [inbox.get_nowait() for _ in range(inbox.qsize())]


def test_an_abort_reaches_the_rank_once_and_only_if_the_request_runs():
    def test():
        world = World()
        world.submit("a", "b")
        world.engines.abort("b")
        world.engines.abort("b")
        world.engines.abort("never")
        aborts = [(engine, message) for engine, message in world.sent if isinstance(message, Abort)]
        assert aborts == [(1, Abort(("b",)))]
        assert world.engines.num_in_flight == 1

    run(test)


def test_an_abort_that_could_not_be_sent_is_sent_later_unless_the_engine_ended():
    def test():
        world = World()
        world.submit("a", "b")
        world.unreachable = {0, 1}
        world.engines.abort("a")
        world.engines.abort("b")
        world.engines.retry_aborts()
        world.engines.on_exit(1, "killed")
        world.unreachable = set()
        world.engines.retry_aborts()
        world.engines.retry_aborts()
        assert [each for each in world.sent if isinstance(each[1], Abort)] == [(0, Abort(("a",)))]

    run(test)


def test_an_engine_that_has_failed_takes_nothing_until_it_is_ready_again():
    def test():
        world = World()
        world.engines.on_message(0, Failed("oops"))
        world.engines.set_trusted(0, trusted=True)  # its process is still there
        world.submit("a", "b")
        assert {engine for engine, _ in world.sent} == {1}
        world.engines.on_exit(0, "status 1")
        world.engines.on_message(0, Ready(INFO))
        assert world.engines.is_routable(0)

    run(test)


def test_a_refusal_is_an_error_with_its_status():
    def test():
        world = World()
        inbox = world.submit("a")
        error = QueueFullError(5)
        world.engines.on_message(
            0, Refused("a", error.http_status, error.error_type, error.message, None, error.code, error.retry_after_s)
        )
        got = inbox.get_nowait()
        assert (got.http_status, got.code, got.retry_after_s) == (503, "queue_full", 1)
        assert world.engines.num_in_flight == 0

    run(test)


def test_an_engines_end_interrupts_its_requests_and_takes_it_out_of_rotation():
    def test():
        world = World()
        lost, kept = world.submit("a"), world.submit("b")
        world.engines.on_message(0, outputs(Output(request_id="a", token_ids=(1,))))
        assert lost.get_nowait().token_ids == (1,)
        world.engines.on_exit(0, "killed")
        interrupted = lost.get_nowait()
        assert isinstance(interrupted, Interrupted)
        assert isinstance(interrupted.error, GenerationError)
        assert kept.empty()
        assert world.engines.num_in_flight == 2
        assert world.engines.is_healthy
        world.submit("c", "d")
        assert world.added == [(0, "a"), (1, "b"), (1, "c"), (1, "d")]
        world.engines.on_exit(1, "killed")
        assert not world.engines.is_healthy
        with pytest.raises(NoEngineError):
            world.submit("e")

    run(test)


def test_an_interrupted_request_moves_and_late_words_of_the_engine_that_ended_are_ignored():
    def test():
        world = World()
        inbox = world.submit("a")
        late = outputs(Output(request_id="a", token_ids=(1,)))
        world.engines.on_exit(0, "killed")
        world.engines.on_message(0, late)
        assert world.move_all(inbox) == ["a"], "and no token"
        assert world.added == [(0, "a"), (1, "a")]
        world.engines.on_message(0, late)
        assert inbox.empty()
        last = Output(request_id="a", token_ids=(2,), finish_reason=FinishReason.STOP)
        world.engines.on_message(1, outputs(last))
        assert inbox.get_nowait() == last
        assert world.engines.num_in_flight == 0
        assert world.metrics.engines[0].num_moved == 1

    run(test)


def test_what_ended_before_it_moved_moves_no_more():
    def test():
        world = World()
        world.submit("a")
        world.engines.on_exit(0, "killed")
        world.engines.abort("a")
        world.engines.move(request("a"), has_begun=False)
        assert world.added == [(0, "a")]
        assert world.engines.num_in_flight == 0
        assert world.metrics.engines[0].ended[FinishReason.ABORT] == 1

    run(test)


@pytest.mark.parametrize(("gains", "num_engines"), [([0, 0], 2), ([3, 0], 2), ([0, 2, 0], 3), ([1] * 9, MAX_MOVES + 1)])
def test_a_request_moves_while_it_gets_on_and_not_for_ever(gains, num_engines):
    """`gains`: tokens that it gets from one engine after the other, each of which then ends."""

    def test():
        world, num_tokens = World(len(gains)), 0
        inbox = world.submit("a")
        for gain in gains:
            engine, _ = world.added[-1]
            if gain:
                world.engines.on_message(engine, outputs(Output(request_id="a", token_ids=(1,) * gain)))
                num_tokens += len(inbox.get_nowait().token_ids)
            world.engines.on_exit(engine, "killed")
            event = inbox.get_nowait()
            if not isinstance(event, Interrupted):
                break
            world.engines.move(request("a", num_tokens), has_begun=False)
        assert event.code == "engine_died"
        assert len(world.added) == num_engines
        assert world.engines.num_in_flight == 0
        assert sum(each.ended[FinishReason.ERROR] for each in world.metrics.engines) == 1

    run(test)


def test_to_begin_anew_and_fail_at_the_same_token_is_not_to_get_on():
    def test():
        world = World(3)
        inbox = world.submit("a")
        for _ in range(2):
            engine, _ = world.added[-1]
            world.engines.on_message(engine, outputs(Output(request_id="a", token_ids=(1, 2, 3))))
            inbox.get_nowait()
            world.engines.on_exit(engine, "killed")
            event = inbox.get_nowait()
            world.engines.move(request("a"), has_begun=False)
        assert event.code == "engine_died"

    run(test)


def test_a_policy_that_raises_while_requests_move_ends_that_request_alone(monkeypatch):
    def test():
        world = World(3)
        first, second = world.submit("a", "b", "c"), world.submit("d")  # a and d are on engine 0
        submit = world.engines._router.submit

        def raises_for_a(fields, now_ns):
            if fields.request_id == "a":
                raise ZeroDivisionError
            return submit(fields, now_ns)

        monkeypatch.setattr(world.engines._router, "submit", raises_for_a)
        world.engines.on_exit(0, "killed")
        assert world.move_all(first) + world.move_all(second) == ["a", "d"]
        assert first.get_nowait().code == "internal_error"
        assert world.engines.num_in_flight == 3, "d has gone elsewhere"
        assert not world.engines.is_routable(0)

    run(test)


def test_a_request_that_cannot_be_sent_for_a_bug_is_not_counted_as_in_flight():
    def test():
        world = World(1)
        world.engines._send = lambda engine, message: 1 // 0
        with pytest.raises(ZeroDivisionError):
            world.submit("a")
        assert world.engines._router.table.num_in_flight.tolist() == [0]

    run(test)


def test_without_another_engine_a_request_waits_for_the_next_life_of_its_own():
    def test():
        world = World(1)
        inbox = world.submit("a", "b")
        world.engines.on_exit(0, "killed")
        world.move_all(inbox)
        world.engines.abort("b")
        assert world.engines.num_in_flight == 1
        world.engines.on_message(0, Ready(INFO))
        assert world.added == [(0, "a"), (0, "b"), (0, "a")]
        world.engines.on_message(0, outputs(Output(request_id="a", finish_reason=FinishReason.STOP)))
        assert inbox.get_nowait().finish_reason == "stop"

    run(test)


def test_a_request_does_not_wait_for_another_engine_for_ever():
    def test():
        world = World(1)
        inbox = world.submit("a")
        world.engines.on_exit(0, "killed")
        world.move_all(inbox)
        world.engines.settle_unassigned()
        assert inbox.empty()
        world.now_ns = int(UNASSIGNED_S * 1e9)
        world.engines.settle_unassigned()
        assert inbox.get_nowait().code == "no_engine"
        assert world.engines.num_in_flight == 0

    run(test)


def test_an_engine_that_does_not_get_on_takes_nothing_until_it_does():
    def test():
        world = World()
        world.engines.set_trusted(0, trusted=False)
        world.submit("a", "b")
        assert {engine for engine, _ in world.sent} == {1}
        world.engines.on_exit(1, "killed")
        world.engines.set_trusted(1, trusted=True)  # it is not there
        assert not world.engines.is_healthy
        world.engines.set_trusted(0, trusted=True)
        assert world.engines.is_healthy

    run(test)


def test_what_a_request_took_is_measured_where_its_tokens_arrive():
    def test():
        world = World(1)
        world.submit("a")
        for now_s, reason in ((3, None), (5, None), (6, FinishReason.LENGTH)):
            world.now_ns = now_s * 10**9
            world.engines.on_message(0, outputs(Output(request_id="a", token_ids=(1,), finish_reason=reason)))
        metrics = world.metrics.engines[0]
        first_token_s, mean_gap_s = metrics.first_token_s[ServiceClass.LS], metrics.mean_gap_s[ServiceClass.LS]
        totals = [h.total for h in (first_token_s, metrics.gap_s, mean_gap_s, metrics.whole_s)]
        assert totals == [3.0, 3.0, 1.5, 6.0]
        assert [sum(h.counts) for h in (first_token_s, metrics.gap_s)] == [1, 2]
        assert merge(metrics.first_token_s.values()).counts == first_token_s.counts, "the other class has none"
        assert (metrics.num_prompt_tokens, metrics.num_generated_tokens) == (1, 3)
        assert metrics.ended[FinishReason.LENGTH] == 1

    run(test)


def test_what_an_interrupted_request_took_is_measured_once():
    def test():
        world = World(2)
        inbox = world.submit("a")
        say = [Output(request_id="a", token_ids=(1,), finish_reason=each) for each in (None, FinishReason.LENGTH)]
        world.now_ns = 3 * 10**9
        world.engines.on_message(0, outputs(say[0]))
        inbox.get_nowait()
        world.engines.on_exit(0, "killed")
        inbox.get_nowait()
        world.engines.move(request("a", 1), has_begun=True)
        table = world.engines._router.table
        assert (table.num_prefilling.tolist(), table.prefill_tokens.tolist()) == ([0, 1], [0, 2])
        world.now_ns = 7 * 10**9
        world.engines.on_message(1, outputs(say[0]))
        assert table.num_prefilling.tolist() == [0, 0]
        world.engines.on_message(1, outputs(say[1]))
        first, second = world.metrics.engines
        for name in ("first_token_s", "queue_s"):
            assert [sum(merge(getattr(each, name).values()).counts) for each in (first, second)] == [1, 0], name
        assert [sum(each.prefill_s.counts) for each in (first, second)] == [1, 0]
        assert [each.num_generated_tokens for each in (first, second)] == [1, 2]
        assert [each.num_prompt_tokens for each in (first, second)] == [1, 0]
        assert second.gap_s.total == 4.0, "the client waited for so long"
        assert (second.generation_tokens.total, second.ended[FinishReason.LENGTH]) == (3, 1)
        assert (first.num_moved, first.num_streams_resumed) == (1, 1)

    run(test)


def test_an_engine_that_cannot_be_reached_is_passed_over():
    def test():
        world = World()
        world.unreachable = {0}
        world.submit("a", "b")
        assert [engine for engine, _ in world.sent] == [1, 1]

    run(test)


def test_engines_that_cannot_be_reached_take_nothing():
    def test():
        world = World()
        world.unreachable = {0, 1}
        with pytest.raises(NoEngineError):
            world.submit("a")
        assert world.engines.num_in_flight == 0

    run(test)


def test_at_the_end_all_hear_why():
    def test():
        world = World()
        inbox = world.submit("a", "b")
        error = DrainingError()
        world.engines.fail_all(error)
        assert [inbox.get_nowait(), inbox.get_nowait()] == [error, error]
        assert world.engines.num_in_flight == 0

    run(test)


@pytest.mark.parametrize(
    ("message", "kind", "text"),
    [
        (Failed("no such file", is_config=True), ConfigError, "no such file"),
        (Failed("RuntimeError: oops"), EngineDiedError, "RuntimeError: oops"),
        (None, EngineDiedError, "engine 0: it ended"),
    ],
)
def test_the_cause_of_a_failed_start_is_what_is_raised(message, kind, text):
    async def test():
        engines = EngineClient(empty_router(1), lambda engine, message: None, Metrics(1))
        if message:
            engines.on_message(0, message)
        engines.on_exit(0, "it ended")
        with pytest.raises(kind, match=text):
            await engines.all_ready()

    asyncio.run(test())


def test_law_requests_are_conserved_under_random_histories():
    def test():
        rng = random.Random(0)
        for _ in range(300):
            world, inboxes = World(3), {}
            for step in range(80):
                happen(world, inboxes, step, rng)
            world.engines.fail_all(DrainingError())
            assert world.engines.num_in_flight == 0
            assert [world.engines.num_in_flight_on(engine) for engine in range(3)] == [0, 0, 0]
            for inbox in inboxes.values():
                ends = [inbox.get_nowait() for _ in range(inbox.qsize())]
                ends = [end for end in ends if not isinstance(end, Interrupted)]
                assert sum(isinstance(end, Exception) or end.finish_reason is not None for end in ends) == 1

    run(test)


def happen(world: World, inboxes: dict[str, asyncio.Queue], step: int, rng: random.Random) -> None:
    """One of the things that happen to engines and requests."""
    name, engine = f"r{rng.randrange(step + 1)}", rng.randrange(3)
    match rng.randrange(10):
        case 0 if rng.random() < 0.3:
            world.engines.on_exit(engine, "chaos")
        case 0:
            world.now_ns += int(UNASSIGNED_S / 3 * 1e9)
            world.engines.settle_unassigned()
        case 1:
            world.engines.on_message(engine, Ready(INFO))
        case 2:
            world.engines.abort(name)
            inboxes.pop(name, None)
        case 3 | 4 | 5:
            ids, reason = rng.choice([(), (1,)]), rng.choice([None, FinishReason.STOP])
            world.engines.on_message(engine, outputs(Output(request_id=name, token_ids=ids, finish_reason=reason)))
        case 6 if inboxes:
            move_one(world, rng.choice(list(inboxes.values())))
        case _ if world.engines.is_healthy:
            inboxes[f"r{step}"] = world.submit(f"r{step}")


def test_the_time_in_which_the_server_stood_still_does_not_count_for_requests_that_wait_for_an_engine():
    def test():
        world = World(1)
        inbox = world.submit("a")
        world.engines.on_exit(0, "it was killed")
        move_one(world, inbox)
        pause_ns = int(2 * UNASSIGNED_S * 1e9)
        world.now_ns += pause_ns
        world.engines.extend_unassigned(pause_ns)
        world.engines.settle_unassigned()
        assert inbox.empty()
        world.now_ns += int(UNASSIGNED_S * 1e9)
        world.engines.settle_unassigned()
        assert isinstance(inbox.get_nowait(), NoEngineError)

    run(test)


class FailingRouter:
    """A router in which one call raises, for one request or always."""

    def __init__(self, method: str, request_id: str | None) -> None:
        self._router = empty_router(2)
        self._method, self._request_id = method, request_id

    def __getattr__(self, name: str):
        found = getattr(self._router, name)
        if name != self._method:
            return found

        def call(*args, **kwargs):
            if self._request_id in (None, args[0]):
                raise AssertionError("a bug of ours")
            return found(*args, **kwargs)

        return call


@pytest.mark.parametrize("method", ["first_token", "ended"])
def test_an_error_of_ours_in_delivery_ends_that_request_alone_and_stops_it(method):
    def test():
        world = World(router=FailingRouter(method, "a"))
        inboxes = {name: world.submit(name) for name in "abc"}
        reason = FinishReason.STOP if method == "ended" else None
        batch = [Output(request_id=name, token_ids=(1,), finish_reason=reason) for name in "ac"]
        world.engines.on_message(0, outputs(*batch))
        error = inboxes["a"].get_nowait()
        assert isinstance(error, InternalError)
        assert inboxes["a"].empty()
        assert inboxes["c"].get_nowait() == batch[1]
        assert inboxes["b"].empty()
        assert world.metrics.num_delivery_errors == 1
        assert world.engines.num_in_flight == (1 if method == "ended" else 2)

    run(test)


def test_a_refusal_that_cannot_be_taken_in_is_an_error_to_its_client():
    def test():
        world = World(router=FailingRouter("ended", "a"))
        inbox = world.submit("a")
        refused = Refused(
            request_id="a", http_status=400, error_type="x", message="", param=None, code=None, retry_after_s=None
        )
        world.engines.on_message(0, refused)
        assert isinstance(inbox.get_nowait(), InternalError)

    run(test)


def test_figures_that_the_router_cannot_take_cost_no_request_its_tokens():
    def test():
        world = World(router=FailingRouter("report", None))
        inbox, output = world.submit("a"), Output(request_id="a", token_ids=(1,))
        with pytest.raises(AssertionError, match="a bug of ours"):
            world.engines.on_message(0, outputs(output))
        assert inbox.get_nowait() == output

    run(test)


def move_one(world: World, inbox: asyncio.Queue) -> None:
    """Answer the first interruption that `inbox` holds, and put everything else back."""
    events = [inbox.get_nowait() for _ in range(inbox.qsize())]
    found = next((event for event in events if isinstance(event, Interrupted)), None)
    for event in events:
        if event is not found:
            inbox.put_nowait(event)
    if found is not None:
        world.engines.move(request(found.request_id), has_begun=False)


def test_a_message_that_cannot_be_taken_in_is_logged_and_counted_and_says_nothing_about_its_engine(caplog):
    class FailingEngines:
        def on_message(self, engine: int, message: object) -> None:
            raise AssertionError("a bug of ours")

    def test():
        metrics = Metrics(1)
        timeouts = LivenessTimeouts(start_ns=1, doubt_ns=1, silence_ns=1, stall_ns=1, step_ns=1)
        launching = Launching(
            spec=lambda rank, launch, listener: None, launcher=None, timeouts=timeouts, expert_timeouts=timeouts
        )
        supervisor = Supervisor(FailingEngines(), None, metrics, launching)
        supervisor._on_message(0, Phase("load", 0.0))
        assert metrics.num_delivery_errors == 1
        assert not supervisor.over.done()

    run(test)
    assert "cannot process a Phase of engine 0" in caplog.text
