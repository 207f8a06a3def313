"""Sources of the route policy behind `moestro route`: refused at the start, and reported when they stop and return."""

from __future__ import annotations

import io
import logging
import time

import pytest
from gateway.rig import FakeEngine, admin_of, looped, rig, settings_of
from gateway.test_command import ROUTE
from rich.console import Console
from support.running import run_command

from moestro.cli.recorded.explain import tell
from moestro.errors import ConfigError
from moestro.gateway.app import assemble
from moestro.gateway.clients.http_headers import Incoming, RequestHead
from moestro.gateway.clients.paths import CHAT_PATH
from moestro.gateway.clients.request_body import text_prompt_reader
from moestro.gateway.engines.health_checks import SourceReports
from moestro.web.ports.faults import Faults

S = 1_000_000_000
METRICS = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.5\n"


@pytest.mark.parametrize("policy", ["gimbal-v1", "most_free_kv"])
def test_a_policy_is_refused_at_the_start_if_its_sources_are_turned_off(policy):
    settings = settings_of(engine=("http://127.0.0.1:1",), route_policy=policy, metrics_interval=0)
    with pytest.raises(ConfigError, match=f"--route-policy {policy} requires kv_usage.* --metrics-interval above 0"):
        assemble(settings, text_prompt_reader(512), Faults())


@pytest.mark.parametrize(
    ("policy", "is_recorded", "is_named"),
    [
        ("least_loaded", False, False),
        ("round_robin", False, False),
        ("least_loaded", True, True),
        ("bounded_hash", False, True),
        ("moestro", False, True),
    ],
)
def test_prompts_are_hashed_only_where_the_names_of_blocks_are_read(tmp_path, policy, is_recorded, is_named):
    record = {"record": tmp_path / "record.jsonl"} if is_recorded else {}
    settings = settings_of(engine=("http://127.0.0.1:1",), route_policy=policy, **record)
    app = assemble(settings, text_prompt_reader(64), Faults())
    head = RequestHead(b"POST", CHAT_PATH.encode(), [], {})
    body = b'{"messages": [{"role": "user", "content": "%b"}]}' % (b"a question " * 60)
    request, _ = app.admission.read(Incoming(head, body, request_id="r"), 0)
    assert request.num_prompt_tokens == (len("user\n\n") + 660) // 4
    assert bool(request.block_hashes) is is_named


def test_the_command_says_so_and_ends():
    command = (*ROUTE[:2], "--engine", "http://127.0.0.1:1", "--route-policy", "gimbal-v1", "--metrics-interval", "0")
    command += ("--port", "0", "--admin-port", "0")
    found = run_command(command)
    assert found.returncode != 0
    assert "requires kv_usage" in " ".join((found.stderr + found.stdout).split())


@looped
async def test_what_stops_is_reported_once_and_so_is_its_return(caplog):
    caplog.set_level(logging.INFO)
    engine = FakeEngine("e")
    engine.metrics = METRICS
    async with rig(engine, route_policy="gimbal-v1", metrics_interval=0.01) as it:
        fleet, routed = it.app.shared.fleet, it.engine("e")
        reports = SourceReports(fleet, "gimbal-v1", 5 * S, lambda _: False)
        await it.until(lambda: fleet.router.table.kv_usage.as_of_ns[0] > 0)
        begin = time.monotonic_ns()
        reports.look(routed, begin)
        for late_s in (4, 6, 7):
            reports.look(routed, begin + late_s * S)
        assert values(reports) == {"kv_usage": 1, "num_tokens": 1}
        reports.look(routed, begin)
        assert values(reports)["kv_usage"] == 0
        assert '"e",source="kv_usage"} 0.0' in it.app.exposition.text().decode()
    logged = [record.message for record in caplog.records if "kv_usage" in record.message]
    assert len(logged) == 2
    assert logged[0].startswith("engine e no longer reports kv_usage; route policy gimbal-v1 uses nothing in place of")
    assert logged[1] == "engine e reports kv_usage again"
    never = [record for record in caplog.records if "does not report num_tokens" in record.message]
    assert [record.levelname for record in never] == ["INFO"]
    assert "uses the router's own count of tokens" in never[0].message


def values(reports: SourceReports) -> dict[str, float]:
    (family,) = reports.collect()
    return {sample.labels["source"]: sample.value for sample in family.samples}


UNKNOWN_NAMES = b'acme_llm_num_requests_running{engine="0"} 20\nacme_llm_num_requests_waiting{engine="0"} 30\n'
BUSY = (
    b"vllm:num_requests_running 3\nvllm:num_requests_waiting 2\nvllm:kv_cache_usage_perc 0.6\n"
    b"moestro:queued_prefill_tokens 900\nmoestro:context_tokens 900\nmoestro:expert_pressure 2\n"
)


@pytest.mark.parametrize(
    "policy",
    [
        *("moestro", "lmetric", "dynamo", "least_loaded", "vllm-0.26", "vllm-0.27", "gimbal-v1", "gimbal-v2"),
        *("most_free_kv", "score:kv_usage", "score:num_waiting", "score:num_running", "score:expert_pressure"),
        "score:p_tokens",
    ],
)
@looped
async def test_no_engine_is_compared_by_a_figure_that_another_one_lacks(policy):
    """An engine whose metrics have unknown names counted as empty, and got every request."""
    busy, silent = FakeEngine("busy"), FakeEngine("silent")
    busy.metrics, silent.metrics = BUSY, UNKNOWN_NAMES
    kind, _, score = policy.rpartition(":")
    given = {"route_score": score} if kind else {"route_policy": policy}
    async with rig(busy, silent, metrics_interval=0.02, **given) as it:
        table = it.app.shared.fleet.router.table
        await it.until(lambda: (table.kv_usage.as_of_ns > 0).sum() == 1)
        for number in range(30):
            assert (await it.call("/v1/completions", {"prompt": f"{number} is a number"})).status == 200
        shares = [len(engine.received) for engine in (busy, silent)]
        assert sum(shares) == 30
        assert min(shares) >= 5, shares


@looped
async def test_an_engine_without_a_figure_is_logged_once_and_shown_in_the_decision(caplog, tmp_path):
    busy, silent = FakeEngine("busy"), FakeEngine("silent")
    busy.metrics, silent.metrics = BUSY, UNKNOWN_NAMES
    settings = {"route_policy": "vllm-0.26", "metrics_interval": 0.01}
    async with rig(busy, silent, **settings) as it, admin_of(it) as session:
        fleet = it.app.shared.fleet
        await it.until(lambda: (fleet.router.table.kv_usage.as_of_ns > 0).sum() == 1)
        reports = SourceReports(fleet, "vllm-0.26", 5 * S, lambda _: False)
        begin = time.monotonic_ns()
        for late_s in (0, 6, 7, 8):
            reports.look(it.engine("silent"), begin)
            reports.look(it.engine("silent"), begin + late_s * S)
        answer = await it.call()
        ((decision,),) = [
            each["attempts"] for each in (await (await session.get("/admin/decisions")).json())["decisions"]
        ]
        assert answer.status == 200
        assert decision["not_compared"] == {"num_waiting": ["silent"], "num_running": ["silent"]}
        (trace,) = it.app.shared.decision_log.recent(1)
        printed = io.StringIO()
        tell(trace, Console(file=printed, width=120))
        assert "no engine was compared by num_waiting, which silent had not reported" in printed.getvalue()
    logged = [record for record in caplog.records if "silent" in record.message and "num_waiting" in record.message]
    assert [record.levelname for record in logged] == ["WARNING"]
    assert logged[0].message == (
        "engine silent does not report num_waiting, num_running, which other engines do; route policy vllm-0.26"
        " compares no engine by them and uses waiting: without a first token; running: the rest"
    )
