"""Data-parallel ranks behind one address are engines: figures, KV events, requests and health of each."""

from __future__ import annotations

import asyncio
import json

import pytest
from gateway.rig import KEYS, FakeEngine, Received, Rig, Wire, admin_of, looped, rig, say_ok, settings_of
from gateway.test_hung_engines import HANG, Hanging
from gateway.test_kv_events import BLOCK_SIZE, DEMO, Published, ask, tokens, until_known
from support.kv_listener import free_ports

from moestro.core.views import ALONE, DEFAULT_COPY_PRICE, UNKNOWN_KV_TOKENS
from moestro.errors import ConfigError
from moestro.gateway.clients.request_body import with_fields
from moestro.gateway.settings import EngineUrl

QUICK_FIGURES = {"metrics_interval": 0.02}


def vllm_figures(*kv_usage: float, first: int = 0) -> bytes:
    """`/metrics` of `vllm serve --data-parallel-size N`, with the KV use of each rank."""
    lines = []
    for rank, usage in enumerate(kv_usage, first):
        labels = f'{{engine="{rank}",model_name="m"}}'
        lines += [
            f"vllm:num_requests_running{labels} {rank + 1}.0",
            f"vllm:num_requests_waiting{labels} 0.0",
            f"vllm:kv_cache_usage_perc{labels} {usage}",
            f"vllm:generation_tokens_total{labels} {10 * (rank + 1)}",
            f'vllm:cache_config_info{{block_size="16",engine="{rank}",num_gpu_blocks="{100 * (rank + 1)}"}} 1.0',
        ]
    return "\n".join([*lines, ""]).encode()


class Server(FakeEngine):
    """`vllm serve --data-parallel-size N`, or SGLang's `--dp-size N` if it shows its server info."""

    server_info: dict | None = None

    async def answer(self, wire: Wire, request: Received) -> None:
        if request.target.endswith("/server_info") or request.target.endswith("/get_server_info"):
            wire.reply(json.dumps(self.server_info or {}).encode(), 404 if self.server_info is None else 200)
        else:
            await super().answer(wire, request)

    @property
    def ranks(self) -> list[str | None]:
        return [request.header("x-data-parallel-rank") for request in self.received]


def server(*kv_usage: float, name: str = "v", script=say_ok, first: int = 0) -> Server:
    made = Server(name, script)
    made.metrics = vllm_figures(*kv_usage, first=first) if kv_usage else None
    return made


def names(it: Rig) -> list[str]:
    return [engine.name for engine in it.app.shared.fleet]


async def until_names(it: Rig, *wanted: str) -> None:
    await it.until(lambda: names(it) == list(wanted))
    await it.until_up(*wanted)


class TestRequests:
    @looped
    async def test_each_rank_gets_requests_by_the_header(self):
        vllm = server()
        async with rig(vllm, dp_ranks="2", route_policy="round_robin") as it:
            answers = [await it.call() for _ in range(4)]
            assert vllm.ranks == ["0", "1", "0", "1"]
            assert [answer.headers["x-moestro-engine"] for answer in answers] == ["v@0", "v@1", "v@0", "v@1"]

    @looped
    async def test_a_client_chooses_no_rank(self):
        vllm = server()
        async with rig(vllm, dp_ranks="2", route_policy="round_robin") as it:
            await it.call(X_Data_Parallel_Rank="1")
            await it.call(**{"x-DATA-parallel_rank": "7"})
            headers = [sum(name.lower() == "x-data-parallel-rank" for name, _ in got.headers) for got in vllm.received]
            assert (vllm.ranks, headers) == (["0", "1"], [1, 1])

    @looped
    async def test_one_rank_is_an_engine_as_before(self):
        vllm = server(0.5)
        async with rig(vllm, dp_ranks="1", **QUICK_FIGURES) as it:
            await it.call(X_Data_Parallel_Rank="0")
            assert (names(it), vllm.ranks) == (["v"], ["0"])

    @looped
    async def test_sglangs_own_path_gets_the_rank_in_its_body(self):
        sglang = server()
        async with rig(sglang, dp_ranks="2", route_policy="round_robin") as it:
            body = {"text": "hi", "sampling_params": {"n": 1.5}, "routed_dp_rank": 9, "data_parallel_rank": 9}
            for _ in range(2):
                await it.call("/generate", body)
            await it.call(body=body)
            bodies = [json.loads(got.body) for got in sglang.received]
            plain = {"text": "hi", "sampling_params": {"n": 1.5}}
            assert bodies == [plain | {"routed_dp_rank": 0}, plain | {"routed_dp_rank": 1}, body]

    @pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b'"x"'])
    def test_a_body_that_is_no_object_stays(self, body):
        assert with_fields(body, {"a": b"1"}) == body


class TestGroups:
    """Ranks of one server begin every step together, unless its operator says otherwise."""

    @looped
    async def test_the_ranks_of_an_address_are_one_group_and_those_of_another_one_are_another(self):
        async with rig(server(0.1, 0.1, name="v"), server(0.1, 0.1, name="w"), dp_ranks="2", **QUICK_FIGURES) as it:
            table = it.app.shared.fleet.router.table
            await it.until(lambda: table.num_kv_tokens[0] < UNKNOWN_KV_TOKENS)  # a report leaves the group
            group = it.app.shared.fleet.router.table.group.tolist()
            assert group[0] == group[1] != group[2] == group[3]
            assert ALONE not in group

    @looped
    async def test_a_server_of_one_engine_steps_alone(self):
        async with rig(server(0.1), **QUICK_FIGURES) as it:
            assert it.app.shared.fleet.router.table.group is None

    @looped
    async def test_an_operator_names_groups_and_speeds(self):
        async with rig(server(0.1, name="u"), dp_ranks="2", **QUICK_FIGURES) as it:
            for text in ("v=http://127.0.0.1:9,group=none,speed=2", "w=http://127.0.0.1:8,group=all,copy_price=0.3"):
                it.app.engine_admin.add(EngineUrl.parse(text))
            it.app.engine_admin.add(EngineUrl.parse("x=http://127.0.0.1:7,group=all"))
            table = it.app.shared.fleet.router.table
            group = table.group.tolist()
            assert group[2:4] == [ALONE, ALONE]
            assert len({*group[4:]}) == 1
            assert len({*group}) == 3
            assert table.speed.tolist() == [1, 1, 2, 2, 1, 1, 1, 1]
            assert table.copy_price.tolist() == [*[DEFAULT_COPY_PRICE] * 4, 0.3, 0.3, *[DEFAULT_COPY_PRICE] * 2]

    @looped
    async def test_a_report_of_a_cache_leaves_what_the_operator_gave(self):
        vllm = server(0.1, name="u")
        async with rig(vllm, **QUICK_FIGURES) as it:
            it.app.engine_admin.add(EngineUrl.parse(f"v=http://localhost:{vllm.port},speed=3"))
            table = it.app.shared.fleet.router.table
            await it.until(lambda: bool((table.num_kv_tokens < UNKNOWN_KV_TOKENS).all()))
            assert table.speed.tolist() == [1, 3]

    @pytest.mark.parametrize(
        ("traits", "words"),
        [
            ("speed=0", "speed=0: give a number from 0.01 to 100"),
            ("speed=nan", "speed=nan: give a number"),
            ("speed=fast", "speed=fast: give a number"),
            ("copy_price=2", "copy_price=2: give a number from 0 to 1"),
            ("speed=1,speed=2", "'speed' is given twice"),
            ("weight=2", "'weight' is no trait of an engine; give speed, copy_price, group"),
            ("", "'' is no trait"),
            ("group=", "a group has letters"),
            ("group=a b", "a group has letters"),
        ],
    )
    def test_what_is_no_trait_is_refused_in_words(self, traits, words):
        with pytest.raises(ConfigError, match=words):
            settings_of(engine=(f"e=http://127.0.0.1:1,{traits}",))


class TestFigures:
    @looped
    async def test_gimbal_v1_compares_the_ranks_of_one_server(self):
        """Algorithm 1 in its own setting: it chooses a DP engine by the KV use of each."""
        vllm = server(0.95, 0.2)
        async with rig(vllm, dp_ranks="2", route_policy="gimbal-v1", **QUICK_FIGURES) as it:
            await it.until(lambda: it.app.shared.fleet.router.table.kv_usage.values[:2].tolist() == [0.95, 0.2])
            answers = [await it.call() for _ in range(3)]
            assert {answer.headers["x-moestro-reason"] for answer in answers} == {"least KV"}
            assert vllm.ranks == ["1", "1", "1"]
            vllm.metrics = vllm_figures(0.1, 0.95)
            await it.until(lambda: it.app.shared.fleet.router.table.kv_usage.values[0] == 0.1)
            await it.call()
            assert vllm.ranks[-1] == "0"
            table = it.app.shared.fleet.router.table
            assert table.num_running.values[:2].tolist() == [1, 2]
            assert table.num_kv_tokens[:2].tolist() == [1536, 3200]  # whole blocks of the router
            assert [engine.totals.num_generated_tokens for engine in it.app.shared.fleet] == [10, 20]


class TestAuto:
    @looped
    async def test_ranks_follow_from_the_figures_and_from_their_changes(self):
        vllm = server()
        async with rig(vllm, dp_ranks="auto", **QUICK_FIGURES, route_policy="round_robin") as it:
            assert (await it.call()).headers["x-moestro-engine"] == "v"
            vllm.metrics = vllm_figures(0.1, 0.2)
            await until_names(it, "v@0", "v@1")
            await it.call()
            vllm.metrics = vllm_figures(0.1, 0.2, 0.3)
            await until_names(it, "v@0", "v@1", "v@2")
            vllm.metrics = vllm_figures(0.1)
            await until_names(it, "v")
            await it.call()
            assert (vllm.ranks[0], vllm.ranks[-1]) == (None, None)
            assert vllm.ranks[1] in {"0", "1"}

    @looped
    async def test_a_request_on_a_rank_that_goes_is_answered(self):
        goes_on = asyncio.Event()

        async def wait(engine: FakeEngine, wire: Wire, request: Received) -> None:
            await goes_on.wait()
            wire.reply(b"{}")

        vllm = server(0.1, 0.2, script=wait)
        async with rig(vllm, dp_ranks="auto", **QUICK_FIGURES, route_policy="round_robin") as it:
            await until_names(it, "v@0", "v@1")
            callers = [await it.caller() for _ in range(2)]
            for caller in callers:
                caller.ask(body={"prompt": "x"})
            await it.until(lambda: len(vllm.received) == 2)
            vllm.metrics = vllm_figures(0.1)
            await until_names(it, "v")
            goes_on.set()
            assert [(await caller.answer()).status for caller in callers] == [200, 200]

    @looped
    async def test_ranks_of_a_larger_group_are_named_by_their_place(self):
        """A server of a hybrid group shows the ranks 2 and 3, and takes 0 and 1."""
        vllm = server(0.1, 0.2, first=2)
        async with rig(vllm, dp_ranks="auto", **QUICK_FIGURES, route_policy="round_robin") as it:
            await until_names(it, "v@2", "v@3")
            for _ in range(2):
                await it.call()
            assert set(vllm.ranks) == {"0", "1"}

    @looped
    async def test_a_rank_whose_place_changes_is_named_by_the_new_one(self):
        vllm = server(0.1, 0.2, first=2)
        async with rig(vllm, dp_ranks="auto", **QUICK_FIGURES, route_policy="round_robin") as it:
            await until_names(it, "v@2", "v@3")
            vllm.metrics = vllm_figures(0.1, 0.2, first=3)  # started again, as another part of the group
            await until_names(it, "v@3", "v@4")
            for _ in range(2):
                await it.call()
            assert set(vllm.ranks) == {"0", "1"}

    @looped
    async def test_sglang_without_figures_shows_its_size_in_the_server_info(self):
        sglang = server()
        sglang.server_info = {"dp_size": 2, "tp_size": 4}
        async with rig(sglang, dp_ranks="auto", **QUICK_FIGURES) as it:
            await until_names(it, "v@0", "v@1")

    @pytest.mark.parametrize("info", [{}, {"dp_size": 0}, {"dp_size": -1}, {"dp_size": "x"}, {"dp_size": 10**9}])
    @looped
    async def test_an_answer_without_a_size_leaves_one_engine(self, info):
        sglang = server()
        sglang.server_info = info
        async with rig(sglang, dp_ranks="auto", **QUICK_FIGURES) as it:
            await asyncio.sleep(0.1)
            assert names(it) == ["v"]

    @looped
    async def test_engines_of_moestro_have_a_router_of_their_own(self):
        ours = server(0.1, 0.2)
        ours.metrics += ours.metrics.replace(b"vllm:", b"moestro:")
        async with rig(ours, dp_ranks="auto", **QUICK_FIGURES) as it:
            await it.until(lambda: it.app.shared.fleet.router.table.num_running.values[0] == 3)
            assert names(it) == ["v"]


class TestKvEvents:
    @looped
    async def test_rank_r_publishes_at_the_port_plus_r(self):
        port, replay_port = free_ports(2)
        first, second = Published(port, replay_port), Published(port + 1, replay_port + 1)
        settings = {"kv_events": (f"tcp://*:{port}",), "kv_replay": (f"tcp://*:{replay_port}",)}
        settings |= {"tokenizer": DEMO, "block_size": BLOCK_SIZE, "route_policy": "lmetric"}
        try:
            first.store(tokens("import os\n" * 20))
            async with rig(server(), dp_ranks="2", **settings) as it:
                await until_known(it, "v@0", len(tokens("import os\n" * 20)) // BLOCK_SIZE)
                await until_known(it, "v@1", 0)
                second.store(tokens())
                await until_known(it, "v@1", len(tokens()) // BLOCK_SIZE)
                assert [await ask(it, "import os\n" * 20), await ask(it)] == ["v@0", "v@1"]
        finally:
            first.die()
            second.die()

    @pytest.mark.parametrize(
        ("given", "problem"),
        [
            ({"kv_events": ("tcp://*:65535",)}, "rank 1 of v has no port"),
            ({"kv_events": ("v=ipc:///tmp/x",)}, "rank 1 of v has no port"),
            ({"kv_events": ("v@0=tcp://h:1", "w=tcp://h:2")}, "unknown engine w"),
            ({"kv_events": ("tcp://*:5557",), "kv_replay": ("tcp://*:65535",)}, "rank 1 of v has no port"),
            ({"dp_ranks": "0"}, "give auto, or a number from 1 to 1024"),
            ({"dp_ranks": "many"}, "give auto, or a number from 1 to 1024"),
            ({"dp_ranks": "auto", "metrics_interval": 0.0}, "set --metrics-interval above 0"),
        ],
    )
    def test_what_cannot_be_is_refused_at_the_start(self, given, problem):
        with pytest.raises(ConfigError, match=problem):
            settings_of(engine=("v=http://h:1",), tokenizer=DEMO, **({"dp_ranks": "2"} | given))


class TestHealth:
    @looped
    async def test_an_address_that_refuses_connections_takes_all_its_ranks(self):
        vllm, other = server(), server(name="w")
        async with rig(vllm, other, dp_ranks="2", route_policy="round_robin", health_interval=30.0) as it:
            vllm.die()
            assert {(await it.call()).status for _ in range(4)} == {200}
            assert [it.engine(name).condition for name in ("v@0", "v@1")] == ["open", "open"]
            assert it.engine("v@0").counts.num_decisions + it.engine("v@1").counts.num_decisions == 1
            assert len(other.received) == 4

    @looped
    async def test_a_failed_check_takes_all_ranks_and_a_passed_one_brings_them_back(self):
        vllm = server()
        async with rig(vllm, dp_ranks="2") as it:
            vllm.health = 500
            await it.until(lambda: not it.app.shared.fleet.num_up)
            vllm.health = 200
            await it.until_up("v@0", "v@1")

    @looped
    async def test_requests_of_a_hung_address_move_to_another_address(self):
        hung, other = Hanging("v"), server(name="w")
        async with rig(hung, other, dp_ranks="2", route_policy="round_robin", **HANG) as it:
            hung.stop()
            callers = [await it.caller() for _ in range(4)]
            for caller in callers:
                caller.ask(body={"prompt": "x"})
            answers = [await caller.answer() for caller in callers]
            assert {answer.headers["x-moestro-engine"][0] for answer in answers} == {"w"}
            assert hung.num_arrived <= 2  # no request went from one of its ranks to the other

    @looped
    async def test_failures_of_one_rank_leave_the_other_in_rotation(self):
        async def fail_on_rank_0(engine: FakeEngine, wire: Wire, request: Received) -> None:
            is_bad = request.header("x-data-parallel-rank") == "0"
            wire.reply(b"{}", 500 if is_bad else 200)

        vllm = server(script=fail_on_rank_0)
        settings = {"api_key": KEYS, "route_policy": "round_robin", "health_interval": 30.0}
        async with rig(vllm, dp_ranks="2", **settings) as it:
            for at in range(8):
                await it.call(body={"prompt": f"{at}"}, Authorization=f"Bearer {KEYS[at // 2 % 3]}")
                await asyncio.sleep(1.1 if at == 5 else 0)  # A breaker waits so long for a success.
            assert (it.engine("v@0").condition, it.engine("v@1").condition) == ("open", "up")
            assert (await it.call(Authorization=f"Bearer {KEYS[0]}")).status == 200

    @looped
    async def test_output_of_one_rank_excuses_a_failed_check_of_both(self):
        async def stream(engine: FakeEngine, wire: Wire, request: Received) -> None:
            wire.open_stream()
            for _ in range(60):
                wire.chunk(b"data: 1\n\n")
                await asyncio.sleep(0.01)
            wire.end_stream()

        vllm = server(script=stream)
        async with rig(vllm, dp_ranks="2", route_policy="round_robin") as it:
            caller = await it.caller()
            caller.ask(body={"prompt": "x", "stream": True})
            await it.until(lambda: it.app.shared.fleet.router.num_in_flight == 1)
            vllm.health = 503
            seen = set()
            for _ in range(25):
                seen.add(it.engine("v@1").condition)
                await asyncio.sleep(0.01)
            assert seen == {"up"}
            vllm.health = 200
            assert (await caller.answer()).status == 200


class TestAdmin:
    @looped
    async def test_an_address_and_its_ranks_drain_and_only_an_address_is_removed(self):
        async with rig(server(), dp_ranks="2") as it, admin_of(it) as admin:
            one = await (await admin.post("/admin/engines/v@1/drain")).json()
            assert (one["name"], one["rank"], one["condition"]) == ("v@1", 1, "draining")
            assert it.engine("v@0").condition == "up"
            both = (await (await admin.post("/admin/engines/v/drain")).json())["engines"]
            assert [each["condition"] for each in both] == ["draining", "draining"]
            await admin.post("/admin/engines/v/resume")
            await it.until_up("v@0", "v@1")
            refused = await admin.delete("/admin/engines/v@0")
            assert (refused.status, "drain the rank" in await refused.text()) == (409, True)
            assert (await admin.delete("/admin/engines/v")).status == 204
            assert names(it) == []
