"""Settings from a file, from the environment and from flags: which one wins, and the warnings about the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest

from moestro.cli import main
from moestro.config.config_sources import SECRETS, read_config_file, settings_in
from moestro.config.serve_settings import ServeSettings
from moestro.engine.registry import BATCH_POLICIES, EVICT_POLICIES, ORDER_POLICIES, SHARE_POLICIES
from moestro.engine.settings import SchedulerOptions, SchedulerSettings
from moestro.errors import ConfigError
from moestro.flow.registry import STEP_POLICIES
from moestro.gateway.settings import RouteSettings
from moestro.routing.registry import ROUTE_POLICIES

YAML = """\
# what we serve
model: /models/it
max-num-seqs: 7
port: 8001
host: 10.0.0.1
served_model_name: [a, b]
enable_prefix_caching: false
api_key: [secret]
tokenizer: null
"""
TOML = """\
# what we serve
model = "/models/it"
max-num-seqs = 7
port = 8001
host = "10.0.0.1"
served_model_name = ["a", "b"]
enable_prefix_caching = false
api_key = ["secret"]
"""


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "conf.yaml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def printed(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["serve", *arguments, "--print-config"])
    assert caught.value.code == 0
    return capsys.readouterr().out


def refused(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["serve", *arguments])
    assert caught.value.code == 2
    text = capsys.readouterr().err
    return " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize(("text", "name"), [(YAML, "conf.yaml"), (TOML, "conf.toml")])
def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(capsys, write, monkeypatch, text, name):
    path = write(text, name)
    monkeypatch.setenv("MOESTRO_PORT", "8002")
    monkeypatch.setenv("MOESTRO_HOST", "10.0.0.2")
    lines = printed(capsys, "--config", path, "--port", "8003").splitlines()
    assert lines[0] == f'model: "/models/it"  # {path}:2'
    for line in (
        "port: 8003  # command line",
        'host: "10.0.0.2"  # environment variable MOESTRO_HOST',
        f"max_num_seqs: 7  # {path}:3",
        f'served_model_name: ["a", "b"]  # {path}:6',
        f"enable_prefix_caching: false  # {path}:7",
        "block_size: 16  # default",
        "tokenizer: null  # default",
    ):
        assert line in lines


def test_every_key_is_a_secret():
    settings = [*settings_in(ServeSettings()), *settings_in(RouteSettings())]
    names = {name for name, _ in settings if name.endswith("_key")}
    assert {name for name in names if not name.endswith("_per_key")} == SECRETS


def test_secrets_are_not_shown(capsys, write, monkeypatch):
    assert '"secret"' not in printed(capsys, "--config", write(YAML))
    monkeypatch.setenv("MOESTRO_API_KEY", "s3cret")
    text = printed(capsys)
    assert "s3cret" not in text
    assert "# api_key: not shown  # environment variable MOESTRO_API_KEY" in text


def test_what_is_printed_can_be_read_again(capsys, write):
    first = printed(capsys, "--config", write(YAML.replace("api_key: [secret]", "seed: 5")))
    again = printed(capsys, "--config", write(first, "again.yaml"))
    values = [[line.split("  # ")[0] for line in text.splitlines()] for text in (first, again)]
    assert values[0] == values[1]


def test_the_environment_can_name_the_file(capsys, write, monkeypatch):
    monkeypatch.setenv("MOESTRO_CONFIG", write("port: 8009\n"))
    assert "port: 8009" in printed(capsys)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port: 1\nmax-num-sqs: 7\n", "conf.yaml:2. Did you mean --max-num-seqs?"),
        ("port: 1\nbench: 7\n", "conf.yaml:2."),
        ("\nport: abc\n", 'conf.yaml:2: unable to convert "abc" into int'),
        ("port: 1\nmodel: /x\nport: 2\n", "conf.yaml:3: port was set before, at"),
        ("max-num-seqs: 1\nmax_num_seqs: 2\n", "conf.yaml:2: max_num_seqs was set before"),
        ("server:\n  port: 1\n", "conf.yaml:1: server must be one value or a list of values; there are no sections"),
        ("a: &a [1]\nb: [*a, *a]\n", "conf.yaml:2: b must be one value"),
        ("port: !!python/object:os.system 1\n", "is not YAML"),
        ("port: [\n", "is not YAML"),
        ("- port\n", "must hold lines of the form name: value"),
        ("config: other.yaml\n", "conf.yaml:1: config is for the command line only"),
    ],
)
def test_what_a_file_may_not_say_is_named_with_its_line(capsys, write, text, words):
    assert words in refused(capsys, "--config", write(text))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port = 1\nmax-num-sqs = 7\n", "conf.toml:2. Did you mean --max-num-seqs?"),
        ("port = 1\n[server]\nport = 2\n", "conf.toml:2: server must be one value"),
        ("port = 1\nport = 2\n", "is not TOML"),
        ("port 1\n", "line 1"),
    ],
)
def test_the_same_for_toml(capsys, write, text, words):
    assert words in refused(capsys, "--config", write(text, "conf.toml"))


def test_a_file_that_is_not_there_or_not_known_is_named(capsys, write):
    assert "cannot be read" in refused(capsys, "--config", "./nothing.yaml")
    assert "must end in .yaml, .yml or .toml" in refused(capsys, "--config", write("{}", "conf.json"))
    with pytest.raises(ConfigError, match="larger than"):
        read_config_file(_huge(write))


def _huge(write):
    return Path(write("# " + "x" * (1 << 20)))


def test_an_empty_file_changes_nothing(capsys, write):
    assert printed(capsys, "--config", write("# nothing\n")) == printed(capsys)


def test_a_queue_that_holds_nothing_is_refused(capsys):
    assert "--max-num-queued-reqs must be at least 1" in refused(capsys, "--max-num-queued-reqs", "0")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--port", "1", "--port", "2"), "port: 2"),
        (("--port=2", "--host", "a", "--port=3"), "port: 3"),
        (("--no-enable-prefix-caching", "--enable-prefix-caching"), "enable_prefix_caching: true"),
        (("--enable-prefix-caching", "--no-enable-prefix-caching"), "enable_prefix_caching: false"),
        (("--chat-template", "a.jinja", "--chat-template", "b.jinja"), 'chat_template: "b.jinja"'),
        (("--served-model-name", "a", "b", "--served-model-name", "c"), 'served_model_name: ["a", "b", "c"]'),
    ],
)
def test_a_flag_that_is_given_twice_takes_the_last(capsys, arguments, line):
    assert f"{line}  # command line" in printed(capsys, *arguments)


def test_the_error_of_an_unknown_flag_names_the_one_that_was_meant(capsys):
    assert "Did you mean --max-num-seqs?" in refused(capsys, "--max-num-sqs", "1")


def test_a_reader_that_goes_away_early_gets_no_traceback():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", "from moestro.cli import main; main()", "serve", "--print-config"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_paced_device_plays_no_host_memory(capsys):
    reported = refused(capsys, "--device", "paced:h20", "--kv-offloading-size", "1")
    assert "--kv-offloading-size does not work with a paced device" in reported


# --- policies of an engine --------------------------------------------------------------------------------------------


SERVE_KINDS = [ROUTE_POLICIES, ORDER_POLICIES, BATCH_POLICIES, EVICT_POLICIES, SHARE_POLICIES, STEP_POLICIES]


@pytest.mark.parametrize(("verb", "kinds"), [("serve", SERVE_KINDS), ("route", [ROUTE_POLICIES])])
def test_help_says_what_each_policy_does(capsys, monkeypatch, verb, kinds):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        main([verb, "--help-all"])
    text = capsys.readouterr().out
    for kind in kinds:
        for name, entry in kind.entries().items():
            assert f"{name}: {entry.description}".replace("`", "") in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--scheduling-policy", "sjf:theta=5"), "'sjf' has no setting 'theta'"),
        (("--scheduling-policy", "sjf:theta_age_s"), "settings are written NAME:SETTING=VALUE,..., got 'theta_age_s'"),
        (("--scheduling-policy", "sjf:theta_age_s=nan"), "scheduling_policy 'sjf': "),
        (("--scheduling-policy", "sjf:theta_age_s=soon"), "scheduling_policy 'sjf': "),
        (("--scheduling-policy", "sjf:theta_age_s=1,theta_age_s=2"), "gives theta_age_s twice"),
        (("--batch-policy", "qllm:max_batch=0.5"), "max_batch must be a whole number"),
        (("--evict-policy", "least_computed_be_first"), "goes with scheduling_policy qllm"),
    ],
)
def test_a_setting_that_a_policy_cannot_have_ends_the_start(capsys, arguments, words):
    assert words in refused(capsys, *arguments)


def test_a_policys_settings_come_to_the_scheduler():
    options = SchedulerOptions(scheduling_policy="sjf:theta_age_s=0.5", batch_policy="qllm:max_batch=8")
    options = msgspec.json.decode(msgspec.json.encode(options), type=SchedulerOptions)  # as a rank process gets it
    settings = SchedulerSettings(num_blocks=8, block_size=4, max_model_len=32, **asdict(options))
    assert settings.make_policies().order.max_passed_over_ns == 500_000_000
