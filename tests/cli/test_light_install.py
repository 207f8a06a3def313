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
# Runs a verb after the other in one process, which takes a fraction of the time: its arguments, status and stderr.
ALL_IN_TURN = f"""{ABSENCE}
import contextlib, io, json
from moestro.cli import main
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            main(arguments)
            status = 0
        except SystemExit as end:
            status = end.code
    print("ended:", json.dumps([arguments, status, errors.getvalue()]))
"""
NOWHERE = ("route", "--engine", "http://127.0.0.1:1")
PROFILE = str(ROOT / "examples" / "gptoss20b_mmlu.npz")
PLACE = ("--devices", "8", "--slots-per-device", "5", "--policy", "static")
# Verbs that need an extra: its words, or the purpose and the name.
REFUSED = {
    ("repro", "lmetric", "--loads", "no-such-load"): "no-such-load",
    ("repro", "qllm", "--loads", "no-such-load"): "no-such-load",
    ("sim", "scenario.toml", "--plot", "plots"): ("--plot", "plots"),
    (*NOWHERE, "--tokenizer", "somewhere"): ("--tokenizer", "tokenizer"),
    (*NOWHERE, "--ext-proc", "0"): ("--ext-proc", "envoy"),
    (*NOWHERE, "--otlp-traces-endpoint", "http://127.0.0.1:4318"): ("--otlp-traces-endpoint", "otel"),
    ("serve",): ("moestro serve", "serve"),
    ("calibrate",): ("moestro calibrate", "serve"),
    ("place", PROFILE, *PLACE, "--png", "x.png"): ("--png", "plots"),
    # Only torch reads dumps of SGLang.
    ("place", str(ROOT / "tests" / "workload" / "sglang_dumps" / "stat.pt"), *PLACE): (
        "torch reads: pip install 'moestro[serve]'"
    ),
}
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


@pytest.fixture(scope="module")
def refused() -> dict[tuple[str, ...], tuple[int, str]]:
    """The status and stderr of each of `REFUSED`."""
    code = [sys.executable, "-c", ALL_IN_TURN, json.dumps(list(REFUSED))]
    done = subprocess.run(code, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    ended = [json.loads(line.removeprefix("ended:")) for line in done.stdout.splitlines() if line.startswith("ended:")]
    return {tuple(arguments): (status, errors) for arguments, status, errors in ended}


@pytest.mark.parametrize("arguments", REFUSED, ids=lambda arguments: f"{arguments[0]} {arguments[-2:][0]}")
def test_a_verb_without_its_extra_says_what_to_install(refused, arguments):
    """Or is found: the verb of a paper names a wrong load itself."""
    words, (status, errors) = REFUSED[arguments], refused[arguments]
    assert status == 2
    if isinstance(words, tuple):
        assert errors == missing(*words)
    else:
        assert words in errors


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


def test_place_compiles_the_placement_kernel_without_an_extra(tmp_path, monkeypatch):
    try:
        find_compiler()
    except CompilerError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = light("place", PROFILE, "--devices", 8, "--slots-per-device", 5)
    assert done.returncode == 0, done.stderr
    code = f"{ABSENCE}; from moestro.placement.kernel.choice import placement_kernel; print(placement_kernel.look())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert "SearchKernel" in done.stdout, done.stderr


def test_place_needs_no_torch():
    done = light("place", PROFILE, *PLACE)
    assert done.returncode == 0, done.stderr
