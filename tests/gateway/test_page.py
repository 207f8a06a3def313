"""What `moestro route` gives its page: files without a key, figures with a client's, decisions with the admin key."""

from __future__ import annotations

import asyncio

import pytest
from gateway.rig import FakeEngine, Received, Wire, admin_of, looped, rig

from moestro.web.page import PAGE_PATHS

KEY, ADMIN = {"X_Api_Key": "k1"}, {"Authorization": "Bearer a1"}


async def say_usage(engine: FakeEngine, wire: Wire, request: Received) -> None:
    wire.reply(b'{"usage": {"prompt_tokens": 8, "prompt_tokens_details": {"cached_tokens": 4}}}')


@looped
async def test_the_files_need_no_key_and_the_figures_do():
    async with rig(FakeEngine("e"), api_key=("k1",)) as it:
        for path in PAGE_PATHS:
            answer = await it.call(path, method="GET")
            assert answer.status == 200
            assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
            assert (await it.call(path, method="POST")).status == 405
        assert (await it.call("/page/none.js", method="GET", **KEY)).status == 404
        assert (await it.call("/statistics", method="GET")).status == 401
        assert (await it.call("/statistics", method="GET", **KEY)).status == 200


@looped
async def test_the_page_does_not_use_up_a_limit_of_requests():
    async with rig(FakeEngine("e"), api_key=("k1",), max_requests_per_minute_per_key=1) as it:
        for path in ("/", "/statistics", "/statistics", "/page/page.js"):
            assert (await it.call(path, method="GET", **KEY)).status == 200
        assert [(await it.call(**KEY)).status for _ in range(2)] == [200, 429]


@looped
async def test_the_figures_are_those_of_the_engines():
    a, b = FakeEngine("a", say_usage), FakeEngine("b", say_usage)
    a.metrics = b"vllm:num_requests_running 3\nvllm:num_requests_waiting 2\nvllm:kv_cache_usage_perc 0.25\n"
    async with rig(a, b, metrics_interval=0.02, route_policy="round_robin") as it:
        for _ in range(4):
            await it.call()
        table = it.app.shared.fleet.router.table
        await it.until(lambda: table.num_running.values[it.engine("a").row] == 3)
        it.app.engine_admin.drain(it.engine("b"), is_draining=True)
        found = (await it.call("/statistics", method="GET")).json
        assert (found["program"], found["policy"], found["num_requests"]) == ("route", "round_robin", 0)
        first, second = found["engines"]
        assert (first["condition"], first["breaker"], second["condition"]) == ("up", "closed", "draining")
        assert (first["num_requests"], first["num_prompt_tokens"], first["num_cached_tokens"]) == (2, 16, 8)
        assert {name: first["load"][name] for name in ("num_running", "num_waiting", "kv_usage")} == {
            "num_running": 3,
            "num_waiting": 2,
            "kv_usage": 0.25,
        }
        assert "num_running" not in second["load"], "an engine without figures"
        assert sum(found["first_token_s"]["counts"]) == 4


@looped
async def test_hits_and_tokens_are_those_that_engines_report():
    a, b = FakeEngine("a"), FakeEngine("b")
    a.metrics = (
        b"vllm:generation_tokens_total 40\nvllm:prefix_cache_queries_total 100\nvllm:prefix_cache_hits_total 25\n"
        b"vllm:request_prefill_time_seconds_sum 1\nvllm:request_prefill_kv_computed_tokens_sum 500\n"
    )
    async with rig(a, b, metrics_interval=0.02) as it:
        await it.until(lambda: it.engine("a").totals.num_generated_tokens == 40)
        first, second = (await it.call("/statistics", method="GET")).json["engines"]
        assert (first["num_generated_tokens"], first["prompt_token_s"]) == (40, 0.002)
        assert (first["load"]["num_queried_tokens"], first["load"]["num_hit_tokens"]) == (100, 25)
        assert (second["num_generated_tokens"], second["load"]) == (None, {})


@looped
async def test_errors_of_clients_and_overload_are_counted_apart():
    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        wire.reply(b"{}", int(request.header("x-status")))

    async with rig(FakeEngine("a", script), api_key=("k1",), max_retries=0) as it:
        for status in ("200", "400", "422", "429", "503"):
            await it.call(X_Status=status, **KEY)
        assert (await it.call()).status == 401
        it.app.engine_admin.drain(it.engine("a"), is_draining=True)
        assert (await it.call(X_Status="200", **KEY)).status == 503
        found = (await it.call("/statistics", method="GET", **KEY)).json
        assert (found["num_client_errors"], found["num_overload"]) == (3, 3)


@looped
async def test_decisions_need_the_admin_key_and_have_scores_and_reasons():
    go_on = asyncio.Event()

    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        if request.header("x-request-id") == "late":
            await go_on.wait()
        wire.reply()

    a, b = FakeEngine("a", script), FakeEngine("b", script)
    async with rig(a, b, api_key=("k1",)) as it, admin_of(it, admin_api_key="a1") as admin:
        for number in range(5):
            await it.call(X_Request_Id=f"r{number}", **KEY)
        running = asyncio.ensure_future(it.call(X_Request_Id="late", **KEY))
        await it.until(lambda: it.num_in_flight == 1)
        for headers in ({}, {"Authorization": "Bearer k1"}):
            for path in ("/admin/decisions", "/statistics"):
                assert (await admin.get(path, headers=headers)).status == 401
        assert (await admin.get("/")).status == 200
        found = await (await admin.get("/admin/decisions?limit=4", headers=ADMIN)).json()
        assert [each["request_id"] for each in found["decisions"]] == ["late", "r4", "r3", "r2"]
        assert [each["status"] for each in found["decisions"]] == [None, 200, 200, 200]
        for each in found["decisions"]:
            [attempt] = each["attempts"]
            assert attempt["reason"]
            assert {candidate["engine"] for candidate in attempt["candidates"]} == {"a", "b"}
        for limit in ("0", "1001", "x", "-1", "%C2%B2", ""):
            assert (await admin.get(f"/admin/decisions?limit={limit}", headers=ADMIN)).status == 400, limit
        go_on.set()
        assert (await running).status == 200


@looped
async def test_a_router_that_remembers_nothing_shows_what_runs_alone():
    async with rig(FakeEngine("a"), remember=0) as it, admin_of(it) as admin:
        await it.call()
        assert (await (await admin.get("/admin/decisions")).json()) == {"decisions": []}


@pytest.mark.parametrize("has_key", [True, False])
@looped
async def test_only_the_own_page_may_act(has_key):
    settings = {"admin_api_key": "a1"} if has_key else {}
    async with rig(FakeEngine("a")) as it, admin_of(it, **settings) as admin:
        own = str(admin._base_url).rstrip("/")
        port = own.rsplit(":", 1)[1]
        foreign = (
            "https://evil.example",
            f"https://127.0.0.1:{port}",
            "http://127.0.0.1:1",
            f"{own}.evil.example",
            "null",
        )
        for path, ask in (("/admin/engines/a/drain", admin.post), ("/admin/decisions", admin.get)):
            for origin in foreign:
                assert (await ask(path, headers=ADMIN | {"Origin": origin})).status == 403, origin
            # A name that has come to mean this address: the browser takes the page for the own one.
            name = f"evil.example:{port}"
            assert (await ask(path, headers=ADMIN | {"Origin": f"http://{name}", "Host": name})).status == 403
            answer = await ask(path, headers=ADMIN | {"Origin": own})
            assert answer.status == 200
            assert not any(header.lower().startswith("access-control") for header in answer.headers)
