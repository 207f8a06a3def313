"""What is decided before anything runs: the checkpoint, the settings, the words of the banner."""

from __future__ import annotations

import io
import shlex

import msgspec
import pytest
from rich.console import Console
from support.fake_rank import INFO

import moestro.config.checkpoint_directory
from moestro.config.checkpoint_directory import locate_model
from moestro.config.serve_settings import ServerSettings
from moestro.core.request import CardMemory
from moestro.engine.settings import SchedulerOptions
from moestro.errors import ConfigError
from moestro.server.api.request_builder import ServedModel
from moestro.server.figures.statistics import serve_banner
from moestro.server.processes.start_checks import StartClock
from moestro.text.chats.chat_format import chat_format
from moestro.text.settings import ChatSettings
from moestro.web.banner import print_banner
from moestro.web.ports.lifecycle import process_age_s
from moestro.wire.messages import Phase


def test_a_directory_with_a_config_is_a_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        locate_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert locate_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("model", ["./missing", "/missing/dir", "~/missing", "a/b/c"])
def test_what_looks_like_a_path_is_not_looked_up_elsewhere(model):
    with pytest.raises(ConfigError, match="there is no directory"):
        locate_model(model)


def test_a_hub_id_is_fetched_without_pickles_and_code(tmp_path, monkeypatch):
    params = {}

    def fetch(name: str, allow_patterns: list[str]) -> str:
        params[name] = allow_patterns
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr(moestro.config.checkpoint_directory, "snapshot_download", fetch)
    assert locate_model("org/name") == tmp_path
    assert "*.safetensors" in params["org/name"]
    assert not {"*.bin", "*.pt", "*.py", "*"} & set(params["org/name"])


@pytest.mark.parametrize("model", ["org/name", "org/na me", "-x-"])
def test_a_hub_id_that_cannot_be_fetched_is_the_operators_to_put_right(model, monkeypatch):
    def fetch(name: str, allow_patterns: list[str]) -> str:
        raise OSError("no route\nto host")

    monkeypatch.setattr(moestro.config.checkpoint_directory, "snapshot_download", fetch)
    with pytest.raises(ConfigError, match="HF_TOKEN") as caught:
        locate_model(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (SchedulerOptions, {"max_num_seqs": 100, "max_num_batched_tokens": 50}),
        (SchedulerOptions, {"max_num_queued_reqs": -1}),
        (ServerSettings, {"served_model_name": ("",)}),
        (ServerSettings, {"served_model_name": ("m",), "port": 70_000}),
        (ServerSettings, {"served_model_name": ("m",), "api_key": ("",)}),
    ],
)
def test_impossible_settings_are_refused_when_made(kind, fields):
    with pytest.raises(ConfigError, match=r"--\w"):
        kind(**fields)


def test_the_phases_of_a_start_account_for_every_second_since_the_process_began():
    clock = StartClock()
    assert process_age_s() > 0
    clock.mark("API server")
    clock.mark_engines([[Phase("load", 1.0)], [Phase("load", 2.0), Phase("check", 1.0)]])
    clock.mark("listen")
    names = [phase.name for phase in clock.phases]
    assert names == ["API server", "load", "check", "listen"]
    # The engines' seconds are made up here; what is left of the whole is the last phase's, negative or not.
    assert sum(phase.seconds for phase in clock.phases) == pytest.approx(process_age_s(), abs=0.2)


def test_the_banner_says_what_the_memory_of_a_card_went_to(tokenizer):
    gib = 1 << 30
    card = CardMemory(total_bytes=80 * gib, num_sharing=2, weight_bytes=15 * gib, other_bytes=gib // 2,
                      step_bytes=3 * gib, graph_bytes=0, kv_bytes=gib * 35 // 2)  # fmt: skip
    model = ServedModel(
        names=("m",), created=0, fingerprint="fp", info=INFO, tokenizer=tokenizer, chat=chat_format(ChatSettings(), ""),
    )  # fmt: skip
    rows = {}
    for infos in ([INFO], [msgspec.structs.replace(INFO, card=card)] * 2):
        rows[len(infos)] = dict(serve_banner(model, infos, [], "http://h:1", needs_key=False).rows)
    assert "GPU memory" not in rows[1]
    assert rows[2]["GPU memory"] == (
        "80.0 GiB, shared by 2 processes: each weights 15.0, peak of a step 3.0, KV cache 17.5, other 0.5"
    )


def test_the_banner_says_what_the_operator_wants_to_know(tokenizer):
    model = ServedModel(
        names=("it's",), created=0, fingerprint="fp", info=INFO, tokenizer=tokenizer,
        chat=chat_format(ChatSettings(), "[TOOL_CALLS]"),
    )  # fmt: skip
    phases = [Phase("start", 0.5), Phase("load weights", 2.5)]
    banner = serve_banner(model, [INFO, INFO], phases, "http://h:1", needs_key=True)
    console = Console(file=io.StringIO(), width=120)
    print_banner(banner, console)
    text = console.file.getvalue()
    for words in ("32,768 tokens: 8.0 sequences", "3.0 s (start 0.5, load weights 2.5)", "http://h:1", "2 x none"):
        assert words in text
    assert "mistral: the chat template has [TOOL_CALLS]" in text
    words = shlex.split(banner.example)
    assert words[0] == "curl"
    assert '"model":"it\'s"' in words[-1]
    assert "$MOESTRO_API_KEY" in banner.example
