"""What runs without the extras, and what a verb says that needs one.

Each verb runs in a process in which the libraries of all extras cannot be imported, as after `pip install moestro`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.running import Running, complete

from moestro.cli.app import EXTRAS
from moestro.native.compiler import CompilerError, find_compiler

# Packages whose modules have other names.
MODULES = {
    "opentelemetry_exporter_otlp_proto_http": "opentelemetry.exporter.otlp.proto.http",
    "opentelemetry_sdk": "opentelemetry.sdk",
    "protobuf": "google.protobuf",
}
ROOT = Path(__file__).parents[2]
ABSENT = sorted({"scipy", "pandas"}.union(*EXTRAS.values()))
ABSENCE = f"import sys; sys.modules.update(dict.fromkeys({ABSENT}))"  # a None there makes the import fail
LIGHT = (sys.executable, "-c", f"{ABSENCE}; from moestro.cli import main; main()")
SCENARIO = """
[workload]
prompt_tokens = 100
output_tokens = 10
num_requests = 20
rate = 10.0

[engines]
count = 2
gpu = "h20"

[[policies]]
route = "moestro"
"""


def light(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LIGHT, *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False)


def missing(purpose: str, extra: str) -> str:
    return f"moestro: {purpose} needs libraries that are not installed: pip install 'moestro[{extra}]'\n"


def test_the_table_of_extras_names_the_packages_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {
        extra: [re.split(r"[\[><=]", requirement)[0].replace("-", "_") for requirement in requirements]
        for extra, requirements in project["optional-dependencies"].items()
    }
    extras["serve"] = [*set(extras["serve"]) - {"moestro"}, *extras["tokenizer"]]
    assert {extra: set(modules) for extra, modules in EXTRAS.items()} == {
        extra: {MODULES.get(package, package) for package in packages} for extra, packages in extras.items()
    }


def test_every_verb_shows_its_help():
    verbs = [
        "serve",
        "route",
        "sim",
        "bench",
        "replay",
        "explain",
        "repro",
        "calibrate",
        "plan",
        "place",
        "chat",
        "run-batch",
    ]
    help_of_all = f"[app([verb, '--help'], result_action='return_value') for verb in {verbs}]"
    code = f"{ABSENCE}; from moestro.cli.main import app, register; register(); {help_of_all}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"Usage: moestro ([\w-]+)", done.stdout) == verbs


def test_sim_runs(tmp_path):
    scenario = tmp_path / "scenario.toml"
    scenario.write_text(SCENARIO)
    done = light("sim", scenario, "--json", tmp_path / "figures.json")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "figures.json").read_text())


@pytest.mark.parametrize("paper", ["lmetric", "qllm"])
def test_repro_finds_its_papers(paper):
    done = light("repro", paper, "--loads", "no-such-load")
    assert done.returncode == 2
    assert "no-such-load" in done.stderr


def test_route_bench_explain_and_replay_run(fake, tmp_path):
    record = tmp_path / "record.jsonl"
    command = (*LIGHT, "route", "--engine", fake.url, "--admin-port", "0", "--record", str(record))
    routed = Running(command, tmp_path)
    try:
        done = light("bench", "--base-url", routed.url, "--num-prompts", "2", "--num-warmups", "0")
        assert done.returncode == 0, done.stderr
        request_id = complete(routed, max_tokens=2).headers["x-request-id"]
    finally:
        assert routed.stop() == 0
    assert light("replay", record).returncode == 0
    assert fake.url.removeprefix("http://") in light("explain", request_id, "--record", record).stdout


def test_a_plot_without_its_extra_says_what_to_install(tmp_path):
    done = light("sim", tmp_path / "scenario.toml", "--plot", tmp_path)
    assert (done.returncode, done.stderr) == (2, missing("--plot", "plots"))


def test_a_tokenizer_without_its_extra_says_what_to_install(tmp_path):
    done = light("route", "--engine", "http://127.0.0.1:1", "--tokenizer", tmp_path)
    assert (done.returncode, done.stderr) == (2, missing("--tokenizer", "tokenizer"))


def test_an_endpoint_picker_without_its_extra_says_what_to_install():
    done = light("route", "--engine", "http://127.0.0.1:1", "--ext-proc", 0)
    assert (done.returncode, done.stderr) == (2, missing("--ext-proc", "envoy"))


def test_traces_without_their_extra_say_what_to_install():
    done = light("route", "--engine", "http://127.0.0.1:1", "--otlp-traces-endpoint", "http://127.0.0.1:4318")
    assert (done.returncode, done.stderr) == (2, missing("--otlp-traces-endpoint", "otel"))


@pytest.mark.parametrize("verb", ["serve", "calibrate"])
def test_a_verb_without_its_extra_says_what_to_install(verb):
    done = light(verb)
    assert (done.returncode, done.stderr) == (2, missing(f"moestro {verb}", "serve"))


def test_place_compiles_the_placement_kernel_without_an_extra(tmp_path, monkeypatch):
    try:
        find_compiler()
    except CompilerError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = light("place", ROOT / "examples" / "gptoss20b_mmlu.npz", "--devices", 8, "--slots-per-device", 5)
    assert done.returncode == 0, done.stderr
    code = f"{ABSENCE}; from moestro.placement.kernel.choice import search_kernel; print(search_kernel())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert "SearchKernel" in done.stdout, done.stderr


def test_place_needs_torch_only_for_dumps_of_sglang(tmp_path):
    devices = ("--devices", 8, "--slots-per-device", 5, "--policy", "static")
    profile = ROOT / "examples" / "gptoss20b_mmlu.npz"
    done = light("place", profile, *devices)
    assert done.returncode == 0, done.stderr
    done = light("place", profile, *devices, "--png", tmp_path / "x.png")
    assert (done.returncode, done.stderr) == (2, missing("--png", "plots"))
    done = light("place", ROOT / "tests" / "workload" / "sglang_dumps" / "stat.pt", *devices)
    assert done.returncode == 2
    assert "torch reads: pip install 'moestro[serve]'" in done.stderr
