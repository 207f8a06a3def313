"""Sources of the route policy behind `moestro route`: refused at the start, and told when they stop and return."""

from __future__ import annotations

import logging
import subprocess
import time

import pytest
from gateway.rig import FakeEngine, looped, rig, settings_of
from gateway.test_command import ROUTE

from moestro.errors import ConfigError
from moestro.gateway.app import assemble
from moestro.gateway.prompt_blocks import text_prompt_reader
from moestro.gateway.source_reports import SourceReports
from moestro.web.faults import Faults

S = 1_000_000_000
METRICS = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.5\n"


@pytest.mark.parametrize("policy", ["gimbal-v1", "most_free_kv"])
def test_a_policy_is_refused_at_the_start_if_its_sources_are_turned_off(policy):
    settings = settings_of(engine=("http://127.0.0.1:1",), route_policy=policy, metrics_interval=0)
    with pytest.raises(ConfigError, match=f"--route-policy {policy} requires kv_usage.* --metrics-interval above 0"):
        assemble(settings, text_prompt_reader(512), Faults())


def test_the_command_says_so_and_ends():
    command = (*ROUTE[:2], "--engine", "http://127.0.0.1:1", "--route-policy", "gimbal-v1", "--metrics-interval", "0")
    command += ("--port", "0", "--admin-port", "0")
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode != 0
    assert "requires kv_usage" in " ".join((found.stderr + found.stdout).split())


@looped
async def test_what_stops_is_said_once_and_so_is_its_return(caplog):
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
    said = [record.message for record in caplog.records if "kv_usage" in record.message]
    assert len(said) == 2
    assert said[0].startswith("engine e no longer reports kv_usage; route policy gimbal-v1 uses nothing in place of")
    assert said[1] == "engine e reports kv_usage again"
    never = [record for record in caplog.records if "does not report num_tokens" in record.message]
    assert [record.levelname for record in never] == ["INFO"]
    assert "uses the router's own count of tokens" in never[0].message


def values(reports: SourceReports) -> dict[str, float]:
    (family,) = reports.collect()
    return {sample.labels["source"]: sample.value for sample in family.samples}
