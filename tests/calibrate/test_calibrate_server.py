"""`moestro calibrate --server` itself, against servers with known constants, and against servers with faults."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.known_engine import go_first
from support.running import MOESTRO, Running, run_command, start_process

from moestro.cost.gpus import gpu_named
from moestro.cost.model import Batch
from moestro.cost.networks import network_named
from moestro.cost.roofline import Roofline, RooflineSettings
from moestro.cost.tables import MeasuredCost, load_table
from moestro.routing.scoring import described_ttft

KNOWN = str(Path(__file__).parents[1] / "support" / "known_engine.py")
# Steps long enough that the timers of a busy machine hardly count.
SLOW_STEPS = {"step_ns": 10e6, "row_ns": 500e3, "prompt_ns": 50e3, "context_ns": 2e3, "api_ns": 5e6}
JITTER = 0.15  # of a busy machine, beside the interval
SMALL = ("--max-concurrency", "8", "--max-prompt-tokens", "512")


@contextlib.contextmanager
def known_server(**constants) -> Iterator[str]:
    read, write = os.pipe()
    try:
        process = start_process([sys.executable, KNOWN, json.dumps(constants)], write, os.environ)
    finally:
        os.close(write)
    with os.fdopen(read) as output:
        try:
            yield output.readline().split()[1]
        finally:
            process.kill()
            process.wait()


def calibrate(url: str, out: Path, *flags: str, seconds: float = 30) -> subprocess.CompletedProcess[str]:
    command = [MOESTRO, "calibrate", "--server", url, "--seconds", str(seconds), "--out", str(out), *SMALL, *flags]
    return run_command(command, started=go_first)


def estimates(out: Path) -> dict[str, dict]:
    return {each["name"]: each for each in json.loads(out.read_text())["about"]["estimates"]}


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """The files of a server with known constants, and what the commands of the docs printed."""
    page = (Path(__file__).parents[2] / "docs" / "costs.md").read_text()
    example = page.partition("runs this example -->\n")[2].lstrip("\n").partition("\n\n")[0]
    folder = tmp_path_factory.mktemp("known")
    path = f"{Path(MOESTRO).parent}:{os.environ['PATH']}"
    with known_server(**SLOW_STEPS, budget=256, max_rows=5, num_blocks=160) as url:
        script = "set -e\n" + example.replace("URL", url).rpartition("\n")[0]  # the last line starts a router
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False, timeout=500,
            preexec_fn=lambda: go_first(0),
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "engine.json", done.stdout


def test_known_constants_are_found_over_a_socket(calibrated):
    found = estimates(calibrated[0])
    for name, truth in (("step", 10), ("row", 500), ("prompt_token", 50), ("context_token", 2)):
        each = found[name]
        assert each["low"] - JITTER * truth <= truth <= each["high"] + JITTER * truth, each
    assert found["api"]["value"] > 4
    assert found["max_num_batched_tokens"]["value"] == 256
    assert found["max_num_seqs"]["value"] == 5
    assert found["block_size"]["value"] == 16
    assert found["num_kv_tokens"]["low"] <= 160 * 16 <= found["num_kv_tokens"]["high"]


def test_the_command_prints_estimates_with_intervals_and_the_check(calibrated):
    text = calibrated[1]
    assert re.search(r"constant of a step +[\d.]+ ms \([\d.]+ to [\d.]+\)", text)
    assert re.search(r"tokens of a step +256\n", text)
    assert "prefixes are cached" in text
    assert re.search(r"other sizes +\d probes priced with a mean error of", text)


def test_the_simulator_reads_the_description(calibrated, tmp_path):
    out = calibrated[0]
    engines = out.with_suffix(".toml").read_text()
    assert tomllib.loads(engines)["engines"]["max_num_seqs"] == 5
    load = "[workload]\nprompt_tokens = 100\noutput_tokens = 11\nnum_requests = 3\nrate = 0.1\narrivals = 'constant'\n"
    (out.parent / "load.toml").write_text(load + engines)
    figures = tmp_path / "figures.json"
    assert run_command([MOESTRO, "sim", out.parent / "load.toml", "--json", figures]).returncode == 0
    report = json.loads(figures.read_text())["outcomes"][0]["report"]
    assert report["ttft_ms"]["mean"] == pytest.approx(5 + 10 + 5, rel=0.3)
    assert report["tpot_ms"]["mean"] == pytest.approx(10 + 0.5 + 105 * 0.002, rel=JITTER)


def test_the_example_of_the_docs_ends_with_a_simulation(calibrated):
    assert "TTFT" in calibrated[1].partition("Written to engine.json and engine.toml.")[2]


def test_the_router_predicts_with_the_description(calibrated, tmp_path):
    engines = calibrated[0].with_suffix(".toml")
    predict = described_ttft(engines)
    short, long = predict(np.array([100.0, 200.0]), np.zeros(2), np.zeros(2, np.int64)) / 1e6
    assert short == pytest.approx(10 + 5, rel=0.2)
    assert long == pytest.approx(10 + 10, rel=0.2)
    router = Running((MOESTRO, "route", "--engine", "http://127.0.0.1:9", "--admin-port", "0", "--route-policy",
                      f"llm-d:prices={engines}"), tmp_path)  # fmt: skip
    assert router.stop() == 0


def test_a_limit_of_requests_is_found_and_no_reason_to_stop(tmp_path):
    out = tmp_path / "engine.json"
    with known_server(**SLOW_STEPS, max_requests=4, faults=["no metrics"]) as url:
        done = calibrate(url, out, seconds=20)
    assert done.returncode == 0, done.stderr
    assert estimates(out)["max_requests"]["value"] == 4
    assert "accepts no more than 4 requests at once" in done.stdout
    assert "shows no /metrics" in done.stdout


FAULTS = {
    "busy": r"the server is busy: \d+ of \d+ probes found other requests on it.*--max-added-load",
    "rate limit": r"refused a probe .* with 429 \(12 requests a minute\): it limits the rate",
    "counts too little": r"/metrics count [\d,]+ tokens during the probes, and the answers alone report [\d,]+",
    "smaller cache": r"/metrics show a KV cache of 256 tokens, and the probes found [\d,]+ tokens in it",
    "ends early": r"an answer has 12 tokens where 24 were requested: the server does not honour ignore_eos",
    "holds back": r"24 tokens arrived in 1 events: the server or a proxy before it holds the stream back",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_server_gets_a_sentence_and_no_file(fault, tmp_path):
    out = tmp_path / "engine.json"
    constants = {"step_ns": 5e6, "prompt_ns": 20e3, "num_blocks": 160}
    with known_server(**constants, faults=[fault]) as url:
        done = calibrate(url, out, seconds=20)
    assert done.returncode != 0
    assert re.search(FAULTS[fault], done.stderr), done.stderr + done.stdout
    assert not out.exists()
    assert not out.with_suffix(".toml").exists()


def test_a_slow_server_gets_a_sentence(tmp_path):
    with known_server(step_ns=2e9) as url:
        done = calibrate(url, tmp_path / "engine.json", seconds=5)
    assert done.returncode != 0
    assert "the server is too slow for --seconds 5" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_other_traffic_gets_a_sentence_or_is_calibrated_beside(tmp_path):
    out = tmp_path / "engine.json"
    with known_server(**SLOW_STEPS) as url, traffic(url):
        refused = calibrate(url, out, seconds=20)
        began = time.monotonic()
        done = calibrate(url, out, "--max-added-load", "0.5", seconds=40)
        took = time.monotonic() - began
    assert refused.returncode != 0
    assert "the server is busy" in refused.stderr
    assert done.returncode == 0, done.stderr
    assert took > 30
    found = estimates(out)
    cost = MeasuredCost(load_table(out))
    for rows in (1, 3):
        priced = cost.step_ns(Batch(np.full(rows, 100), np.ones(rows, np.int64)))
        assert priced == pytest.approx((10 + 0.5 * rows + 0.2 * rows) * 1e6, rel=0.4)
    assert found["max_num_batched_tokens"]["value"] is None
    assert "not probed beside traffic" in done.stdout


@contextlib.contextmanager
def traffic(url: str) -> Iterator[None]:
    """Two clients, each with one request after the other and pauses between."""
    is_over = threading.Event()

    def send(number: int) -> None:
        body = {"prompt": [number] * 60, "max_tokens": 40, "stream": True}
        while not is_over.wait(0.2 * number):
            request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
            with urllib.request.urlopen(request, timeout=100) as answer:
                answer.read()

    threads = [threading.Thread(target=send, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def test_a_paced_server_has_the_prices_of_its_gpu(tmp_path):
    """`moestro serve` itself: other code than the probes, and a cost model that is not linear."""
    out = tmp_path / "engine.json"
    flags = ("--paced-arithmetic", "none", "--pace-dilation", "4", "--max-num-batched-tokens", "256")
    server = Running((MOESTRO, "serve", "--device", "paced:h20", *flags), tmp_path)
    try:
        with contextlib.suppress(PermissionError):
            for process in server.processes():
                for thread in process.threads():
                    os.sched_setscheduler(thread.id, os.SCHED_RR, os.sched_param(1))
        done = calibrate(server.url, out, seconds=120)
    finally:
        server.stop()
    assert done.returncode == 0, done.stderr
    found, cost = estimates(out), MeasuredCost(load_table(out))
    # On a busy machine tokens of one step may be read apart; then the budget is not identified, and never wrong.
    assert found["max_num_batched_tokens"]["value"] in {256, None}, found["max_num_batched_tokens"]
    assert found["block_size"]["value"] == 16
    roofline = Roofline(RooflineSettings(network=network_named("qwen3-30b-a3b"), gpu=gpu_named("h20")))
    for rows in (1, 2, 4, 8):
        batch = Batch(np.full(rows, 40), np.ones(rows, np.int64))
        assert cost.step_ns(batch) == pytest.approx(4 * roofline.step_ns(batch), rel=0.15), rows
    for new in (64, 128, 250):
        batch = Batch(np.zeros(1, np.int64), np.array([new]))
        assert cost.step_ns(batch) == pytest.approx(4 * roofline.step_ns(batch), rel=0.2), new


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--server", "ftp://x"), "--server must begin with http:// or https://, got ftp://x"),
        (("--seconds", "20"), "--seconds is for a running server: give --server URL too"),
        (
            ("--server", "http://127.0.0.1:1", "--max-num-seqs", "8"),
            "--max-num-seqs measures a model in this process, and --server a running one",
        ),
        (("--server", "http://127.0.0.1:1", "--rounds", "3"), "--rounds measures a model in this process"),
        (("some/model", "--server", "http://127.0.0.1:1"), "give --served-model some/model"),
        (("--server", "http://127.0.0.1:1"), "no server answers at http://127.0.0.1:1/v1/models"),
        (("--server", "http://127.0.0.1:1", "--max-added-load", "2"), "--max-added-load must be"),
        (("--server", "http://127.0.0.1:1", "--out", "x.toml"), "the engine file beside it ends in .toml: give .json"),
        (("--server", "http://127.0.0.1:1", "--out", "/nowhere/x.json"), "there is no directory /nowhere"),
    ],
)
def test_wrong_flags_get_a_sentence(flags, words):
    done = run_command([MOESTRO, "calibrate", *flags])
    assert done.returncode == 2
    assert words in done.stderr
