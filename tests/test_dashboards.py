"""The boards and alerts of deploy/: each expression finds figures in a real Prometheus that scrapes a loaded router."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.running import MOESTRO, PATIENCE_S, Running, call, free_port, wait_until

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import dashboards  # noqa: E402 a script beside the package
import metric_tables  # noqa: E402

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
# Expressions of vLLM's own board (examples/observability in its repository), with its model's name.
STOCK = [
    "histogram_quantile(0.99, sum by(le) (rate(vllm:e2e_request_latency_seconds_bucket{{{m}}}[$__rate_interval])))",
    "rate(vllm:e2e_request_latency_seconds_sum{{{m}}}[$__rate_interval])",
    "rate(vllm:e2e_request_latency_seconds_count{{{m}}}[$__rate_interval])",
    "rate(vllm:prompt_tokens_total{{{m}}}[$__rate_interval])",
    "rate(vllm:generation_tokens_total{{{m}}}[$__rate_interval])",
    "histogram_quantile(0.9, sum by(le) (rate(vllm:inter_token_latency_seconds_bucket{{{m}}}[$__rate_interval])))",
    "vllm:num_requests_running{{{m}}}",
    "vllm:num_requests_waiting{{{m}}}",
    "histogram_quantile(0.95, sum by(le) (rate(vllm:time_to_first_token_seconds_bucket{{{m}}}[$__rate_interval])))",
    "vllm:kv_cache_usage_perc{{{m}}}",
    "sum by(le) (increase(vllm:request_prompt_tokens_bucket{{{m}}}[$__rate_interval]))",
    "sum by(le) (increase(vllm:request_generation_tokens_bucket{{{m}}}[$__rate_interval]))",
    "sum by(finished_reason) (increase(vllm:request_success_total{{{m}}}[$__rate_interval]))",
    "rate(vllm:request_queue_time_seconds_sum{{{m}}}[$__rate_interval])",
    "rate(vllm:request_prefill_time_seconds_sum{{{m}}}[$__rate_interval])",
    "rate(vllm:request_decode_time_seconds_sum{{{m}}}[$__rate_interval])",
    "max_over_time(vllm:request_max_num_generation_tokens_bucket{{{m}}}[$__rate_interval])",
]


def expressions() -> list[str]:
    return [text for board in dashboards.BOARDS for panel in board.panels for text in panel.series.values()]


def test_the_files_of_deploy_are_current():
    tool = [sys.executable, str(ROOT / "tools" / "dashboards.py"), "--check"]
    subprocess.run(tool, check=True)


def test_every_metric_of_a_board_or_an_alert_is_declared():
    tables = {
        "vllm:": metric_tables.shared_metrics(),
        "moestro:route_": metric_tables.route_metrics() + metric_tables.kv_event_metrics(),
        "moestro:": metric_tables.own_metrics() + metric_tables.shared_metrics(),
    }
    used = {name for text in [*expressions(), *(a.expression for a in dashboards.ALERTS)] for name in names_in(text)}
    for name in sorted(used):
        prefix = next(each for each in tables if name.startswith(each))
        plain = name.removeprefix(prefix).removesuffix("_bucket")
        assert f"`{plain}`" in tables[prefix] or f"`{name}`" in tables[prefix], name


def names_in(expression: str) -> list[str]:
    return dashboards.METRIC.findall(expression)


def test_panels_of_a_board_do_not_overlap_and_have_a_text():
    for board in dashboards.BOARDS:
        panels = dashboards.board_of(board)["panels"]
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
        assert len(set(places)) == len(places)
        assert all(panel["description"] and panel["targets"] for panel in panels)


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")
def test_prometheus_takes_the_alert_rules():
    subprocess.run([PROMTOOL, "check", "rules", str(dashboards.RULES_FILE)], check=True, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def address(demo_dir, real_command, tmp_path_factory) -> Iterator[str]:
    """Prometheus beside a router, an engine with KV events and a group that shares experts, all under load."""
    kv_port = free_port()
    events = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{kv_port}"}
    # Without a gate, so that experts move whatever a step takes on this machine.
    placing = ("--placement-policy", "eplb", "--placement-payback-horizon", "0", "--placement-interval", "40")
    group = ("--mode", "ep", "--engines", "2", *placing)
    with contextlib.ExitStack() as stack:
        plain = start(
            stack, (*real_command, "--kv-events-config", json.dumps(events)), tmp_path_factory.mktemp("plain")
        )
        experts = start(stack, (*real_command, *group), tmp_path_factory.mktemp("group"))
        engines = ("--engine", f"plain={plain.url}", "--engine", f"group={experts.url}")
        known = ("--tokenizer", str(demo_dir), "--kv-events", f"plain=tcp://127.0.0.1:{kv_port}")
        command = (MOESTRO, "route", *engines, *known, "--metrics-interval", "0.2", "--route-policy", "round_robin")
        router = start(stack, command, tmp_path_factory.mktemp("router"), admin_port=free_port())
        targets = [
            f"127.0.0.1:{router.admin_port}",
            *(f"{host}:{port}" for host, port in (plain.address, experts.address)),
        ]
        stack.enter_context(load(router))
        yield stack.enter_context(prometheus(targets, tmp_path_factory.mktemp("prometheus")))


def start(stack: contextlib.ExitStack, command: tuple[str, ...], directory: Path, **options: int) -> Running:
    running = Running(command, directory, **options)
    stack.callback(running.kill)
    return running


@contextlib.contextmanager
def load(router: Running) -> Iterator[None]:
    """Send requests until the block ends."""
    ends = threading.Event()

    def send(number: int) -> None:
        while not ends.is_set():
            prompt = f"def f_{number}(path):\n" * 8
            call(router, "POST", "/v1/completions", {"prompt": prompt, "max_tokens": 16, "stream": bool(number % 2)})

    senders = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for each in senders:
        each.start()
    try:
        yield
    finally:
        ends.set()
        for each in senders:
            each.join()


@contextlib.contextmanager
def prometheus(targets: list[str], directory: Path) -> Iterator[str]:
    settings = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [str(dashboards.RULES_FILE)],
        "scrape_configs": [{"job_name": "moestro", "static_configs": [{"targets": targets}]}],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(settings))
    address = f"127.0.0.1:{free_port()}"
    assert PROMETHEUS is not None
    command = [
        *(PROMETHEUS, f"--config.file={directory / 'prometheus.yml'}", f"--storage.tsdb.path={directory / 'data'}"),
        *(f"--web.listen-address={address}", "--log.level=error"),
    ]
    process = subprocess.Popen(command)
    try:
        wait_until(lambda: is_ready(address))
        yield address
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def is_ready(address: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{address}/-/ready", timeout=5) as answer:
        return answer.status == 200
    return False


def ask(address: str, expression: str) -> list[dict]:
    query = urllib.parse.urlencode({"query": expression.replace("$__rate_interval", "15s")})
    with urllib.request.urlopen(f"http://{address}/api/v1/query?{query}", timeout=PATIENCE_S) as answer:
        return json.load(answer)["data"]["result"]


@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed (Debian: prometheus)")
def test_every_expression_of_the_boards_and_of_vllms_own_finds_figures(address):
    stock = [text.format(m='model_name="moestro-demo"') for text in STOCK]
    wanted = [*expressions(), *stock]
    empty: list[str] = wanted
    deadline_s = time.monotonic() + 2 * PATIENCE_S
    while empty and time.monotonic() < deadline_s:
        time.sleep(1)
        empty = [text for text in empty if not ask(address, text)]
    assert empty == []


@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed (Debian: prometheus)")
def test_no_alert_fires_beside_engines_that_serve(address):
    with urllib.request.urlopen(f"http://{address}/api/v1/rules", timeout=PATIENCE_S) as answer:
        [group] = json.load(answer)["data"]["groups"]
    assert len(group["rules"]) == len(dashboards.ALERTS)
    assert {rule["name"]: rule["lastError"] for rule in group["rules"] if rule.get("lastError")} == {}
    assert [rule["name"] for rule in group["rules"] if rule["state"] == "firing"] == []
