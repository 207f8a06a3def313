"""Who may ask what: keys, paths, models, the admin plane; and what is reported about it."""

from __future__ import annotations

import asyncio
import json

import pytest
from gateway.rig import CHAT, KEYS, FakeEngine, Received, Wire, admin_of, looped, rig, settings_of
from prometheus_client.parser import text_string_to_metric_families

from moestro.errors import ConfigError
from moestro.gateway.figures import RouteLines
from moestro.gateway.settings import EngineUrl


class TestKeys:
    @pytest.mark.parametrize(
        "given", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic k1"}, {"Authorization": "Bearer "}]
    )
    @looped
    async def test_without_a_key_nothing_is_read(self, given):
        engine = FakeEngine("e")
        async with rig(engine, api_key=("k1", "k2")) as it:
            answer = await it.call(body=b"x" * 100, **given)
            assert (answer.status, answer.code) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
            assert not engine.received
            assert (await it.call("/metrics", method="GET", **given)).status == 401
            assert (await it.call("/v1/models", method="GET", **given)).status == 401
            for probe in ("/health", "/ping", "/ready", "/readyz"):
                assert (await it.call(probe, method="GET", **given)).status == 200

    @looped
    async def test_any_of_the_keys_opens_and_none_of_them_reaches_an_engine(self):
        engine = FakeEngine("e")
        async with rig(engine, api_key=("k1", "k2")) as it:
            for key in ("k1", "k2"):
                assert (await it.call(Authorization=f"bearer {key}")).status == 200
            assert {request.header("authorization") for request in engine.received} == {None}

    @looped
    async def test_an_engine_gets_its_own_key_instead(self):
        engine = FakeEngine("e")
        async with rig(engine, api_key=("k1",), engine_api_key="e1") as it:
            await it.call(Authorization="Bearer k1")
            assert [v for n, v in engine.received[0].headers if n.lower() == "authorization"] == ["Bearer e1"]

    @looped
    async def test_a_router_that_asks_for_none_hands_on_what_it_gets(self):
        engine = FakeEngine("e")
        async with rig(engine) as it:
            await it.call(Authorization="Bearer the-engines")
            assert engine.received[0].header("authorization") == "Bearer the-engines"


class TestPaths:
    @pytest.mark.parametrize("path", [CHAT, "/v1/embeddings", "/v1/responses?x=1", "/tokenize", "/generate", "/mine"])
    @looped
    async def test_apis_of_engines_are_sent_on_with_their_query(self, path):
        engine = FakeEngine("e")
        async with rig(engine, open_path=("/mine",)) as it:
            assert (await it.call(path)).status == 200
            assert engine.received[0].target == path

    @pytest.mark.parametrize(
        "path",
        [
            "/pause",
            "/sleep",
            "/flush_cache",
            "/update_weights",
            "/v1/load_lora_adapter",
            "/admin/engines",
            "/v1",
        ],
    )
    @looped
    async def test_nothing_else_of_an_engine_can_be_reached(self, path):
        engine = FakeEngine("e")
        async with rig(engine) as it:
            answer = await it.call(path)
            assert (answer.status, answer.code) == (404, "not_found")
            assert not engine.received

    @pytest.mark.parametrize("target", ["http://127.0.0.1:1/v1/x", "//evil/v1/x", "*"])
    @looped
    async def test_no_request_chooses_where_it_goes(self, target):
        engine = FakeEngine("e")
        async with rig(engine) as it:
            assert (await it.call(target)).status in (400, 404)
            assert not engine.received

    @looped
    async def test_the_wrong_method_is_refused_as_such(self):
        async with rig(FakeEngine("e")) as it:
            assert (await it.call("/v1/models", method="POST")).status == 405
            assert (await it.call("/metrics", method="DELETE")).status == 405

    @looped
    async def test_an_engine_may_lie_under_a_path_of_its_own(self):
        engine = FakeEngine("e")
        await engine.start()
        async with rig() as it:
            it.app.engine_admin.add(EngineUrl.parse(f"deep=http://127.0.0.1:{engine.port}/deep/v1"))
            await it.until_up("deep")
            await it.call()
            assert engine.received[-1].target == f"/deep{CHAT}"
        engine.die()


class TestModels:
    @looped
    async def test_the_lists_of_all_engines_are_one(self):
        a, b = FakeEngine("a"), FakeEngine("b")
        a.models, b.models = ("m", "x/y"), ("m", "z")
        async with rig(a, b) as it:
            await it.until(lambda: len(it.app.shared.fleet.models.names_of(1)) == 2)
            listed = (await it.call("/v1/models", method="GET")).json
            assert [card["id"] for card in listed["data"]] == ["m", "x/y", "z"]
            assert listed["object"] == "list"
            for name in ("x/y", "x%2Fy"):
                assert (await it.call(f"/v1/models/{name}", method="GET")).json["owner"] == "a"
            missing = await it.call("/v1/models/none", method="GET")
            assert (missing.status, missing.code) == (404, "model_not_found")

    @looped
    async def test_a_request_goes_to_an_engine_that_serves_its_model(self):
        a, b = FakeEngine("a"), FakeEngine("b")
        a.models, b.models = ("m", "only-a"), ("m", "only-b")
        async with rig(a, b) as it:
            for model in ("only-a", "only-b"):
                went = {(await it.call(body={"model": model})).headers["x-moestro-engine"] for _ in range(6)}
                assert went == {model[-1]}
            assert len({(await it.call(body={"model": "m"})).headers["x-moestro-engine"] for _ in range(10)}) == 2
            unknown = {(await it.call(body={"model": "none"})).headers["x-moestro-engine"] for _ in range(10)}
            assert len(unknown) == 2, "an unlisted model is for the engines to refuse"
            it.app.engine_admin.drain(it.engine("a"), is_draining=True)
            assert (await it.call(body={"model": "only-a"})).status == 503

    @looped
    async def test_a_list_that_is_none_changes_nothing(self):
        engine = FakeEngine("e")
        async with rig(engine) as it:
            models = it.app.shared.fleet.models
            for body in (b"", b"{", b'{"data": 5}', b'{"data": [{"id": 5}]}', b"[" * 100_000, b"\xff"):
                models.learn(0, body)
            assert models.names_of(0) == ("m",)


class TestFigures:
    @looped
    async def test_polled_figures_reach_the_router(self):
        engine = FakeEngine("e")
        engine.metrics = (
            b"vllm:num_requests_running 3.0\nvllm:num_requests_waiting 2.0\nvllm:kv_cache_usage_perc 0.5\n"
            b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n'
        )
        async with rig(engine, metrics_interval=0.02) as it:
            table = it.app.shared.fleet.router.table
            await it.until(lambda: table.num_running.values[0] == 3)
            assert (table.num_waiting.values[0], table.kv_usage.values[0]) == (2, 0.5)
            assert table.num_foreign[0] == 5
            assert table.num_kv_tokens[0] == 1600 - 1600 % it.app.shared.fleet.block_tokens
            engine.metrics = b"vllm:num_requests_running nan\nvllm:num_requests_waiting 1.0\n"
            await it.until(lambda: table.num_waiting.values[0] == 1)
            assert table.num_running.values[0] == 3, "what is no number changes nothing"

    @looped
    async def test_what_happened_is_in_the_metrics(self):
        async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
            if request.body == b"busy":
                wire.reply(status=503)
            else:
                usage = {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 60}}
                wire.reply(json.dumps({"choices": [{"text": '"usage": {"cached_tokens": 9'}], "usage": usage}).encode())

        async with rig(FakeEngine("e", script), api_key=KEYS) as it:
            await it.call(Authorization="Bearer key-0")
            await it.call("/nowhere", Authorization="Bearer key-0")
            for key in KEYS[:2]:
                await it.call(body=b"busy", Authorization=f"Bearer {key}")
            text = (await it.call("/metrics", method="GET", Authorization="Bearer key-0")).body.decode()
            found = {
                (sample.name.removeprefix("moestro:route_"), *sample.labels.values()): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
            assert found["requests_total",] == 3
            assert found["decisions_total", "e"] == 3
            assert (found["answers_total", "e", "200"], found["answers_total", "e", "503"]) == (1, 2)
            assert found["prompt_tokens_total", "e"] == 100
            assert found["hit_tokens_total", "e"] == 60
            assert found["refused_total", "not_found"] == 1
            assert found["engine_condition", "up", "e"] == 1
            assert found["engine_ready", "e"] == 1
            assert found["breaker_state", "e"] == 0
            assert found["decision_seconds_count",] == 3
            assert found["first_byte_seconds_count", "e"] == 1
            assert found["imbalance",] == 1
            assert ("index_bytes",) in found

    @looped
    async def test_what_engines_had_cached_bounds_what_is_predicted(self):
        """The engine says no size: its answers tell that it keeps no prompt."""

        async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
            usage = {"prompt_tokens": 3000, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
            wire.reply(json.dumps({"choices": [], "usage": usage}).encode())

        async with rig(FakeEngine("e", script), route_policy="lmetric") as it:
            counts, predicted = it.engine("e").counts, []
            for name in "abab":
                await it.call("/v1/completions", body={"prompt": f"{name} " * 4000, "model": "m"})
                predicted.append(counts.num_predicted_tokens)
            assert predicted[:2] == [0, 0]
            assert predicted[2] > 2800, "the router believes that the prompt is there still"
            assert predicted[3] == predicted[2], "and no more"

    @looped
    async def test_usage_is_found_at_the_end_of_a_stream(self):
        async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
            wire.open_stream()
            wire.chunk(b'data: {"usage": null}\n\n' * 500)
            last = (
                b'data: {"choices":[],"usage":{"prompt_tokens":8,"completion_tokens":2,"prompt_tokens_details":{"cach'
            )
            wire.chunk(last)
            await asyncio.sleep(0.01)
            wire.chunk(b'ed_tokens":4}}}\n\ndata: [DONE]\n\n')
            wire.end_stream()

        async with rig(FakeEngine("e", script)) as it:
            await it.call()
            counts = it.engine("e").counts
            assert (counts.num_prompt_tokens, counts.num_hit_tokens) == (8, 4)

    @looped
    async def test_the_lines_tell_what_happened_since_the_last_ones(self):
        async with rig(FakeEngine("a"), FakeEngine("b")) as it:
            lines = RouteLines(it.app.shared.fleet, it.counts)
            assert lines.lines(10) == []
            for _ in range(4):
                await it.call()
            counts = it.engine("a").counts
            counts.num_prompt_tokens, counts.num_hit_tokens, counts.num_predicted_tokens = 100, 60, 50.0
            found = lines.lines(2)
            assert found[-1].startswith(
                "all: 0 in flight, 2.0 requests/s, 0 retried, 0 refused, imbalance 1.00, 2 of 2"
            )
            assert any("prefix hits 60% (predicted 50%)" in line for line in found)
            assert lines.lines(2) == []


class TestAdmin:
    @looped
    async def test_engines_are_drained_and_resumed(self):
        a, b = FakeEngine("a"), FakeEngine("b")
        async with rig(a, b) as it, admin_of(it) as admin:
            assert (await (await admin.post("/admin/engines/a/drain")).json())["condition"] == "draining"
            assert {(await it.call()).headers["x-moestro-engine"] for _ in range(6)} == {"b"}
            assert (await (await admin.post("/admin/engines/a/resume")).json())["condition"] == "up"
            assert len({(await it.call()).headers["x-moestro-engine"] for _ in range(10)}) == 2
            assert (await admin.post("/admin/engines/none/drain")).status == 404

    @looped
    async def test_engines_come_and_go_and_what_runs_on_one_is_answered_first(self):
        go_on = asyncio.Event()

        async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
            await go_on.wait()
            wire.reply(b"late")

        a, b = FakeEngine("a", script), FakeEngine("b")
        await b.start()
        async with rig(a) as it, admin_of(it) as admin:
            running = asyncio.ensure_future(it.call())
            await it.until(lambda: it.num_in_flight == 1)
            added = await admin.post("/admin/engines", json={"url": f"b=http://127.0.0.1:{b.port}"})
            assert added.status == 201
            again = await admin.post("/admin/engines", json={"url": f"b=http://127.0.0.1:{b.port}"})
            assert again.status == 400
            await it.until_up("b")
            assert (await admin.delete("/admin/engines/a")).status == 204
            listed = (await (await admin.get("/admin/engines")).json())["engines"]
            assert [(engine["name"], engine["condition"], engine["models"]) for engine in listed] == [
                ("b", "up", ["m"])
            ]
            assert {(await it.call()).headers["x-moestro-engine"] for _ in range(4)} == {"b"}
            go_on.set()
            assert (await running).body == b"late"
            await it.until(lambda: all(wire.is_lost.is_set() for wire in a.wires))
        b.die()

    @pytest.mark.parametrize(
        "url", ["", "ftp://x", "http://", "file:///etc/passwd", "a/b=http://x:1", "http://x:99999", "x"]
    )
    @looped
    async def test_an_address_that_is_none_is_refused(self, url):
        async with rig(FakeEngine("e")) as it, admin_of(it) as admin:
            refused = await admin.post("/admin/engines", json={"url": url})
            assert (refused.status, (await refused.json())["error"]["code"]) == (400, "invalid_value")

    @looped
    async def test_a_decision_is_explained(self):
        a, b = FakeEngine("a"), FakeEngine("b")
        async with rig(a, b, route_policy="least_loaded") as it, admin_of(it) as admin:
            answer = await it.call(X_Request_Id="why")
            story = await (await admin.get("/admin/explain/why")).json()
            [attempt] = story["attempts"]
            assert attempt["engine"] == answer.headers["x-moestro-engine"]
            assert {candidate["engine"] for candidate in attempt["candidates"]} == {"a", "b"}
            assert (story["status"], attempt["regret"], story["policy"]) == (200, 0, "least_loaded")
            assert (await admin.get("/admin/explain/other")).status == 404

    @looped
    async def test_a_story_keeps_its_engines_name_when_another_has_taken_its_place(self):
        one, two = FakeEngine("one"), FakeEngine("two")
        async with rig(one) as it:
            assert (await it.call(X_Request_Id="r")).headers["x-moestro-engine"] == "one"
            row = it.engine("one").row
            it.app.engine_admin.remove(it.engine("one").address)
            await two.start()
            assert it.app.engine_admin.add(EngineUrl.parse(f"two=http://127.0.0.1:{two.port}")).engines[0].row == row
            await it.until_up("two")
            [attempt] = it.app.shared.decision_log.trace("r").attempts
            assert [attempt.engine, *(each.engine for each in attempt.candidates)] == ["one", "one"]
            await it.call(X_Request_Id="s")
            assert it.app.shared.decision_log.trace("s").attempts[0].engine == "two"
            two.die()

    @looped
    async def test_what_has_been_tried_before_is_in_the_story(self):
        async def fail(engine: FakeEngine, wire: Wire, request: Received) -> None:
            wire.reply(status=502)

        engines = [FakeEngine(name, fail) for name in "ab"]
        async with rig(*engines) as it, admin_of(it) as admin:
            await it.call(X_Request_Id="r")
            story = await (await admin.get("/admin/explain/r")).json()
            first, second = story["attempts"]
            assert second["because"] == f"{first['engine']} answered 502"
            assert [candidate["engine"] for candidate in second["candidates"]] == [second["engine"]]
            assert story["status"] == 502

    @looped
    async def test_it_has_a_key_of_its_own(self):
        async with rig(FakeEngine("e"), api_key=("data",)) as it, admin_of(it, admin_api_key="admin") as admin:
            statuses = [
                (await admin.get(path, headers={"Authorization": f"Bearer {key}"})).status
                for path in ("/admin/engines", "/metrics")
                for key in ("data", "admin")
            ]
            assert statuses == [401, 200, 401, 200]
            assert (await it.call(Authorization="Bearer admin")).status == 401

    @pytest.mark.parametrize("headers", [{"Origin": "http://evil"}, {"Host": "evil.example:8081"}])
    @looped
    async def test_no_page_in_a_browser_reaches_it(self, headers):
        async with rig(FakeEngine("e")) as it, admin_of(it) as admin:
            refused = await admin.get("/admin/engines", headers=headers)
            assert (refused.status, (await refused.json())["error"]["code"]) == (403, "permission_denied")


class TestSettings:
    @pytest.mark.parametrize(
        ("text", "name", "url"),
        [
            ("http://h:1", "h:1", "http://h:1"),
            ("http://h", "h:80", "http://h:80"),
            ("https://h/", "h:443", "https://h:443"),
            ("n=http://h:1/v1/", "n", "http://h:1"),
            ("n=http://h:1/p/v1", "n", "http://h:1/p"),
            ("http://[::1]:9", "[::1]:9", "http://[::1]:9"),
            ("http://h:1/a?b=c", None, None),
            ("http://user:pw@h:1", None, None),
            ("n n=http://h:1", None, None),
            ("h:1", None, None),
        ],
    )
    def test_an_engine_is_a_url_with_or_without_a_name(self, text, name, url):
        if name is None:
            with pytest.raises(ConfigError, match="--engine"):
                EngineUrl.parse(text)
        else:
            parsed = EngineUrl.parse(text)
            assert (parsed.name, parsed.url) == (name, url)

    @pytest.mark.parametrize(
        "given",
        [
            {"port": 70_000}, {"api_key": ("",)}, {"engine_api_key": ""}, {"admin_api_key": ""}, {"remember": -1},
            {"retry_share": -1}, {"first_byte_timeout": 0}, {"text_block_bytes": 1}, {"open_path": ("x",)},
            {"admin_host": "0.0.0.0"}, {"breaker_failures": 0}, {"breaker_failures": 1001},
        ],
    )  # fmt: skip
    def test_impossible_settings_are_refused_when_made(self, given):
        with pytest.raises(ConfigError, match=r"--\w"):
            settings_of(**given)

    def test_no_engine_is_no_router(self):
        with pytest.raises(ConfigError, match="--engine http"):
            settings_of().check_has_engines()

    def test_the_admin_plane_may_be_opened_with_a_key(self):
        assert settings_of(admin_host="0.0.0.0", admin_api_key="k").admin.admin_api_key == "k"
