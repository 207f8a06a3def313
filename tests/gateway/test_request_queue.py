"""The router's queue end to end: order, bounds, deadlines, classes and what is given up, before fake engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator

import pytest
from gateway.rig import KEYS, Caller, FakeEngine, Received, Rig, Wire, looped, rig, settings_of
from gateway.test_hung_engines import HANG, Hanging

from moestro.engine.registry import ORDER_POLICIES
from moestro.errors import ConfigError


class FullEngine(FakeEngine):
    """An engine of `capacity` slots that shows its queue as vLLM does, and answers when a test lets it.

    Attributes:
        open: answers that have not been sent, by the prompt.
    """

    def __init__(self, name: str = "e", capacity: int = 2) -> None:
        super().__init__(name, self.hold)
        self.capacity = capacity
        self.kv_usage = 0.1
        self.open: dict[str, Wire] = {}
        self.order: list[str] = []
        self.left: list[str] = []

    @staticmethod
    async def hold(engine: FullEngine, wire: Wire, request: Received) -> None:
        prompt = json.loads(request.body)["prompt"]
        engine.open[prompt] = wire
        engine.order.append(prompt)
        try:
            await wire.is_lost.wait()
        finally:
            if engine.open.pop(prompt, None) is not None:
                engine.left.append(prompt)

    def finish(self, prompt: str, num_tokens: int = 1) -> None:
        wire = self.open.pop(prompt)
        usage = {"prompt_tokens": 4, "completion_tokens": num_tokens}
        wire.reply(json.dumps({"prompt": prompt, "usage": usage}).encode())

    async def answer(self, wire: Wire, request: Received) -> None:
        if request.target.endswith("/metrics"):
            running = min(self.capacity, len(self.open))
            text = f"vllm:num_requests_running {running}\nvllm:num_requests_waiting {len(self.open) - running}\n"
            wire.reply(f"{text}vllm:kv_cache_usage_perc {self.kv_usage}\n".encode())
        else:
            await super().answer(wire, request)


QUEUE = {"metrics_interval": 0.02, "queue_policy": "fcfs", "queue_waiting": 1, "api_key": KEYS}


async def send(it: Rig, prompt: str, key: str = KEYS[0], **fields) -> Caller:
    caller = await it.caller()
    caller.ask("/v1/completions", {"prompt": prompt, **fields}, Authorization=f"Bearer {key}")
    return caller


async def until_full(it: Rig, engine: FullEngine) -> None:
    """Until the router knows that the engine has as many requests as it may have."""
    await it.until(lambda: len(engine.open) > engine.capacity and bool(it.app.shared.queue._full(time.monotonic_ns())))


def num_waiting(it: Rig) -> int:
    return len(it.app.shared.queue._queue)


@contextlib.asynccontextmanager
async def full_router(*engines: FullEngine, **settings) -> AsyncIterator[tuple[Rig, list[Caller]]]:
    """A router whose engines have as many requests as they may have: the next ones wait."""
    async with rig(*engines, **QUEUE | settings) as it:
        callers = []
        for engine in engines:
            for at in range(engine.capacity + 1):
                callers.append(await send(it, f"first {engine.name}{at}"))
                await it.until(lambda: sum(len(each.open) for each in engines) == len(callers))
        await it.until(lambda: bool(it.app.shared.queue._full(time.monotonic_ns())))
        await asyncio.sleep(0.05)  # the engines' figures have both numbers
        yield it, callers
        for _ in range(500):
            for engine in engines:
                for prompt in list(engine.open):
                    engine.finish(prompt)
            if not it.app.shared.active:
                break
            await asyncio.sleep(0.01)


class TestOrder:
    @looped
    async def test_a_request_waits_until_an_engine_has_room_and_the_record_has_the_wait(self):
        engine = FullEngine()
        async with full_router(engine) as (it, callers):
            late = await send(it, "late")
            await it.until(lambda: num_waiting(it) == 1)
            await asyncio.sleep(0.1)
            assert "late" not in engine.open
            engine.finish("first e0")
            assert (await callers[0].answer()).status == 200
            await it.until(lambda: "late" in engine.open)
            engine.finish("late")
            answer = await late.answer()
            assert answer.status == 200
            story = it.app.shared.decision_log.trace(answer.headers["x-request-id"])
            assert 0.1 <= story.attempts[0].wait_s < 30
            text = it.app.exposition.text().decode()
            assert 'moestro:route_queue_wait_seconds_count{service_class="ls"} 4.0' in text
            assert 'moestro:route_engine_saturated{engine="e"}' in text

    @pytest.mark.parametrize(
        ("policy", "order"),
        [
            ("fcfs", ["be", "long", "urgent", "short"]),
            ("priority", ["urgent", "be", "long", "short"]),
            ("sjf", ["be", "short", "urgent", "long"]),
            ("prefill_aware", ["be", "short", "urgent", "long"]),
            ("qllm", ["long", "urgent", "short", "be"]),
            ("edf", ["long", "urgent", "short", "be"]),
        ],
    )
    @looped
    async def test_waiting_requests_go_in_the_order_of_the_policy(self, policy, order):
        engine = FullEngine(capacity=1)
        async with full_router(engine, queue_policy=policy) as (it, _):
            prompts = {"be": "b", "long": "l" * 900, "urgent": "u" * 100, "short": "s" * 50}
            for at, (name, prompt) in enumerate(prompts.items()):
                more = {"service_class": "be"} if name == "be" else {"priority": -1} if name == "urgent" else {}
                await send(it, prompt, **more)
                await it.until(lambda at=at: num_waiting(it) == at + 1)
            for at, name in enumerate(order):
                engine.finish(engine.order[at])
                await it.until(lambda at=at: len(engine.order) == at + 3)
                assert engine.order[-1] == prompts[name]

    @looped
    async def test_users_have_fair_shares_by_what_they_were_charged(self):
        engine = FullEngine(capacity=1)
        async with full_router(engine, queue_policy="weighted_fair") as (it, _):
            for at in range(4):
                await send(it, f"a{at}" + "x" * 400, user="a")
            for at in range(2):
                await send(it, f"b{at}" + "x" * 400, user="b")
            await it.until(lambda: num_waiting(it) == 6)
            for at in range(6):
                engine.finish(engine.order[at])
                await it.until(lambda at=at: len(engine.order) == at + 3)
            assert {prompt[0] for prompt in engine.order[2:4]} == {"a", "b"}
            assert {prompt[0] for prompt in engine.order[4:6]} == {"a", "b"}

    def test_each_order_policy_can_order_the_queue(self):
        assert set(ORDER_POLICIES.names()) >= {
            "fcfs",
            "priority",
            "sjf",
            "prefill_aware",
            "edf",
            "weighted_fair",
            "qllm",
        }
        for name in ORDER_POLICIES.names():
            assert settings_of(engine=("http://h:1",), metrics_interval=1.0, queue_policy=name).queue.has_queue

    @looped
    async def test_a_model_whose_engines_have_room_waits_for_no_other_model(self):
        busy, free = FullEngine("busy"), FullEngine("free")
        free.models = ("other",)
        async with rig(busy, free, **QUEUE) as it:
            await it.until(lambda: not it.app.shared.fleet.models.are_alike)
            for at in range(5):
                await send(it, f"{at}", model="m")
            await it.until(lambda: num_waiting(it) > 0)
            caller = await send(it, "x", model="other")
            await it.until(lambda: "x" in free.open)
            free.finish("x")
            assert (await caller.answer()).status == 200
            while it.app.shared.active:
                for prompt in list(busy.open):
                    busy.finish(prompt)
                await asyncio.sleep(0.01)

    @looped
    async def test_the_policy_chooses_among_the_engines_with_room(self):
        one, two = FullEngine("one", capacity=1), FullEngine("two", capacity=1)
        two.kv_usage = 0.99
        async with rig(one, two, **QUEUE | {"route_policy": "round_robin", "queue_waiting": 4}) as it:
            await it.until(lambda: it.app.shared.fleet.router.table.kv_usage.values[1] > 0.9)
            for at in range(3):
                await send(it, f"{at}")
            await it.until(lambda: len(one.open) == 3)
            assert two.order == []
            for prompt in list(one.open):
                one.finish(prompt)
            await it.until_idle()

    @looped
    async def test_an_engine_that_may_hang_gets_no_waiting_request_while_another_is_full(self):
        full, hung = FullEngine("full"), Hanging("hung")
        async with rig(full, hung, **QUEUE | HANG | {"hang_timeout": 6.0}) as it:
            hung.stop()
            await it.until(lambda: it.engine("hung").condition == "suspected")
            callers = [await send(it, f"{at}") for at in range(3)]
            await until_full(it, full)
            callers.append(await send(it, "late"))
            await it.until(lambda: num_waiting(it) == 1)
            await asyncio.sleep(0.1)
            assert (num_waiting(it), hung.num_arrived) == (1, 0)
            full.finish("0")
            await it.until(lambda: "late" in full.open)
            for prompt in ("1", "2", "late"):
                full.finish(prompt)
            assert [(await caller.answer()).status for caller in callers] == [200] * 4
            hung.wakes.set()

    @looped
    async def test_an_engine_that_has_refused_a_client_makes_no_room_for_it(self):
        """Each waiting request went there, was refused, and then went to a full engine at once."""

        async def refuse(engine: FakeEngine, wire: Wire, request: Received) -> None:
            wire.reply(b"{}", 503, headers="Retry-After: 60\r\n")

        full, busy = FullEngine("full"), FakeEngine("busy", refuse)
        async with rig(full, busy, **QUEUE | {"route_policy": "round_robin"}) as it:
            callers = [await send(it, f"{at}") for at in range(3)]
            await until_full(it, full)
            num_refused = len(busy.received)
            assert num_refused >= 1
            callers.append(await send(it, "late"))
            await it.until(lambda: num_waiting(it) == 1)
            await send(it, "of another client", KEYS[1])
            await it.until(lambda: len(busy.received) == num_refused + 1)
            assert num_waiting(it) == 1
            for prompt in ("0", "1", "2"):
                full.finish(prompt)
            await it.until(lambda: "late" in full.open)
            full.finish("late")
            assert [(await caller.answer()).status for caller in callers] == [200] * 4

    @looped
    async def test_a_request_that_lost_an_engine_is_charged_for_its_answer(self):
        async def refuse(engine: FakeEngine, wire: Wire, request: Received) -> None:
            wire.reply(b"{}", 503, headers="Retry-After: 60\r\n")

        busy, full = FakeEngine("busy", refuse), FullEngine("full", capacity=1)
        settings = {"queue_policy": "weighted_fair", "route_policy": "round_robin"}
        async with rig(busy, full, **QUEUE | settings) as it:
            moved = await send(it, "moved", user="a")
            await it.until(lambda: "moved" in full.open)
            full.finish("moved", 1000)
            assert (await moved.answer()).headers["x-moestro-reason"].endswith("busy answered 503")
            for prompt in ("x0", "x1"):
                await send(it, prompt, user="x")
            await until_full(it, full)
            for user in ("a", "b"):
                await send(it, user, user=user)
                await it.until(lambda user=user: num_waiting(it) == 1 + (user == "b"))
            full.finish("x0")
            await it.until(lambda: num_waiting(it) == 1)
            assert full.order[-1] == "b", "the 1,000 tokens of the other user count"


class TestBounds:
    @pytest.mark.parametrize("status", [429, 503])
    @looped
    async def test_a_request_that_waits_too_long_is_refused(self, status):
        async with full_router(FullEngine(), queue_ttl=0.1, queue_refusal=status) as (it, _):
            answer = await (await send(it, "late")).answer()
            assert (answer.status, answer.code) == (status, "queue_timeout")
            assert int(answer.headers["retry-after"]) >= 1
            assert "within 0.1 s" in answer.json["error"]["message"]
            assert 'moestro:route_queue_ends_total{cause="expired"} 1.0' in it.app.exposition.text().decode()

    @pytest.mark.parametrize("bound", [{"queue_max_requests": 2}, {"queue_max_tokens": 60}])
    @looped
    async def test_one_client_fills_its_part_and_another_one_has_its_own(self, bound):
        async with full_router(FullEngine(), **bound) as (it, _):
            for at in range(2):
                await send(it, f"{at}" + "x" * 110)
            await it.until(lambda: num_waiting(it) == 2)
            refused = await (await send(it, "third" + "x" * 110)).answer()
            assert (refused.status, refused.code) == (429, "queue_full")
            assert int(refused.headers["retry-after"]) >= 1
            await send(it, "other", KEYS[1])
            await it.until(lambda: num_waiting(it) == 3)

    @looped
    async def test_a_client_that_leaves_is_not_sent_and_leaves_no_trace(self):
        engine = FullEngine()
        async with full_router(engine) as (it, _):
            caller = await send(it, "gone")
            await it.until(lambda: num_waiting(it) == 1)
            caller.hang_up()
            await it.until(lambda: num_waiting(it) == 0)
            engine.finish("first e0")
            await asyncio.sleep(0.05)
            assert "gone" not in engine.order
            assert it.app.shared.queue._exchanges == {}

    @looped
    async def test_requests_that_wait_learn_that_no_engine_is_left(self):
        engine = FullEngine()
        async with full_router(engine) as (it, _):
            caller = await send(it, "late")
            await it.until(lambda: num_waiting(it) == 1)
            engine.health = 500
            it.engine("e").health.is_draining = True
            it.app.shared.fleet.look_now(it.engine("e"))
            answer = await caller.answer()
            assert (answer.status, answer.code) == (503, "no_engine")
            it.engine("e").health.is_draining = False

    @looped
    async def test_without_figures_no_engine_is_saturated(self):
        engine = FakeEngine("e")
        async with rig(engine, **QUEUE) as it:
            assert {(await it.call(Authorization=f"Bearer {KEYS[0]}")).status for _ in range(4)} == {200}

    @pytest.mark.parametrize(
        ("given", "problem"),
        [
            ({"queue_policy": "fastest"}, "--queue-policy: .*known: .*fcfs"),
            ({"queue_policy": "fcfs", "metrics_interval": 0.0}, "set --metrics-interval above 0"),
            ({"queue_policy": "sjf:theta_age_s=-1"}, "--queue-policy: .*0 or more"),
            ({"queue_refusal": 500}, "--queue-refusal 500 is unknown: give one of 429, 503"),
            ({"send_class": "llama"}, "--send-class 'llama' is unknown"),
            ({"queue_kv_usage": 1.5}, "--queue-kv-usage"),
        ],
    )
    def test_settings_that_cannot_be_are_refused(self, given, problem):
        with pytest.raises(ConfigError, match=problem):
            settings_of(engine=("http://h:1",), **{"metrics_interval": 1.0} | given)


class TestEviction:
    @looped
    async def test_best_effort_without_a_byte_gives_way_once_and_is_sent_again(self):
        engine = FullEngine(capacity=1)
        async with rig(engine, **QUEUE | {"queue_policy": "qllm", "evict_best_effort": True}) as it:
            be = [await send(it, f"be{at}", service_class="be") for at in range(2)]
            await until_full(it, engine)
            urgent = await send(it, "urgent")
            await it.until(lambda: "urgent" in engine.open and engine.left == ["be1"])  # the newest
            await until_full(it, engine)
            more = await send(it, "urgent 2")
            await it.until(lambda: "urgent 2" in engine.open and engine.left == ["be1", "be0"])
            assert num_waiting(it) == 2
            for prompt in ("urgent", "urgent 2"):
                engine.finish(prompt)
            await it.until(lambda: {"be0", "be1"} <= set(engine.open))
            await until_full(it, engine)
            last = await send(it, "urgent 3")
            await it.until(lambda: num_waiting(it) == 1)
            await asyncio.sleep(0.1)
            assert len(engine.left) == 2, "each gives way once at most"
            for prompt in ("be0", "be1"):
                engine.finish(prompt)
            await it.until(lambda: "urgent 3" in engine.open)
            engine.finish("urgent 3")
            answers = [await caller.answer() for caller in (*be, urgent, more, last)]
            assert [answer.status for answer in answers] == [200] * 5
            story = it.app.shared.decision_log.trace(answers[1].headers["x-request-id"])
            assert [attempt.because for attempt in story.attempts] == ["", "it gave way to a latency-sensitive request"]
            assert 'moestro:route_queue_ends_total{cause="evicted"} 2.0' in it.app.exposition.text().decode()

    @looped
    async def test_one_urgent_request_costs_one_other_its_place_even_if_that_makes_no_room(self):
        engine = FullEngine(capacity=4)
        async with rig(engine, **QUEUE | {"queue_policy": "qllm", "evict_best_effort": True}) as it:
            be = [await send(it, f"be{at}", service_class="be") for at in range(3)]
            await it.until(lambda: len(engine.open) == 3)
            engine.kv_usage = 0.99
            await it.until(lambda: it.app.shared.fleet.router.table.kv_usage.values[0] > 0.9)
            urgent = await send(it, "urgent")
            await it.until(lambda: len(engine.left) == 1)
            await asyncio.sleep(0.1)
            assert (engine.left, num_waiting(it)) == (["be2"], 2)
            for caller in (*be, urgent):
                caller.hang_up()

    @looped
    async def test_an_answer_that_has_begun_stays(self):
        async def stream(engine: FakeEngine, wire: Wire, request: Received) -> None:
            wire.open_stream()
            wire.chunk(b"data: 1\n\n")
            engine.open[json.loads(request.body)["prompt"]] = wire
            await wire.is_lost.wait()

        engine = FullEngine(capacity=1)
        engine.script = stream
        engine.kv_usage = 0.5
        async with rig(engine, **QUEUE | {"queue_policy": "qllm", "evict_best_effort": True}) as it:
            callers = [await send(it, f"be{at}", service_class="be", stream=True) for at in range(2)]
            await it.until(lambda: len(engine.open) == 2)
            engine.kv_usage = 0.99
            await it.until(lambda: it.app.shared.fleet.router.table.kv_usage.values[0] > 0.9)
            urgent = await send(it, "urgent")
            await it.until(lambda: num_waiting(it) == 1)
            await asyncio.sleep(0.1)
            assert len(engine.open) == 2
            for caller in (*callers, urgent):
                caller.hang_up()


class TestClass:
    @pytest.mark.parametrize(
        ("engines", "service_class", "expected"),
        [
            ("none", "be", {"service_class": "be", "priority": 7}),
            ("vllm", "be", {"service_class": "be", "priority": 1}),
            ("vllm", "ls", {"service_class": "ls", "priority": 0}),
            ("sglang", "be", {"service_class": "be", "priority": 0}),
            ("sglang", None, {"service_class": None, "priority": 1}),
            ("moestro", "be", {"service_class": "be", "priority": 7}),
            ("moestro", 5, {"service_class": "ls", "priority": 7}),
        ],
    )
    @looped
    async def test_engines_get_the_class_in_their_own_field(self, engines, service_class, expected):
        engine = FakeEngine("e")
        async with rig(engine, send_class=engines) as it:
            body = {"prompt": "x", "priority": 7, "service_class": service_class, "temperature": 0.5}
            await it.call("/v1/completions", body)
            await it.call("/v1/embeddings", body)
            sent = [json.loads(got.body) for got in engine.received]
            assert sent == [{"prompt": "x", "temperature": 0.5} | expected, body]

    @looped
    async def test_bodies_stay_byte_for_byte_without_the_opt_in(self):
        engine = FakeEngine("e")
        async with rig(engine, **QUEUE) as it:
            body = b'{ "prompt":"x",  "service_class" : "be","prompt":"y" }'
            await it.call("/v1/completions", body, Authorization=f"Bearer {KEYS[0]}")
            assert engine.received[0].body == body
