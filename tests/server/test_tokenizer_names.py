"""`--tokenizer` takes a directory, the demo model's name, or a name on the Hugging Face hub, on serve and on route."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.running import MOESTRO, Running, call

from moestro.cli import main
from moestro.config.checkpoint_directory import locate_tokenizer
from moestro.errors import ConfigError

REVISION = "0" * 40
PACED = (MOESTRO, "serve", "qwen3-30b-a3b", "--device", "paced:h20", "--paced-arithmetic", "none")
ROUTE = (MOESTRO, "route", "--engine", "http://127.0.0.1:9", "--admin-port", "0")


@pytest.fixture
def hub_cache(tmp_path, demo_dir, monkeypatch) -> Path:
    """A cache of the hub's client that holds the tokenizer of `org/tok`, and no network."""
    repository = tmp_path / "hub" / "models--org--tok"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    snapshot = repository / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    for path in demo_dir.iterdir():
        if path.suffix in {".json", ".jinja"} and path.name != "config.json":
            shutil.copy(path, snapshot)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return snapshot


def test_a_server_takes_the_name_of_a_cached_tokenizer(hub_cache, tmp_path):
    running = Running((*PACED, "--tokenizer", "org/tok"), tmp_path)
    try:
        assert call(running, "POST", "/tokenize", {"prompt": "def f(x):"}).json["count"] > 1
    finally:
        running.kill()


def test_a_router_takes_the_name_of_a_cached_tokenizer(hub_cache, tmp_path):
    running = Running((*ROUTE, "--tokenizer", "org/tok"), tmp_path)
    running.kill()
    assert "as tokens of" in running.text


@pytest.mark.parametrize("verb", [PACED[1:], ROUTE[1:]])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("", "--tokenizer is empty: give a directory or a name"),
        ("org/other", "--tokenizer: org/other is not a local directory, and its download from the Hugging Face hub"),
        ("./tok", "--tokenizer: there is no directory ./tok"),
    ],
)
def test_a_tokenizer_that_cannot_be_found_ends_the_start(verb, name, text, hub_cache, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit) as ended:
        main([*verb, "--tokenizer", name])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"moestro: {text}")


def test_the_demo_models_tokenizer_has_a_name(demo_dir):
    assert locate_tokenizer("moestro-demo") == demo_dir.resolve()


def test_a_directory_without_a_tokenizer_is_refused_by_its_flag(tmp_path):
    with pytest.raises(ConfigError, match=r"--tokenizer .* holds no tokenizer\.json, and only fast tokenizers"):
        locate_tokenizer(str(tmp_path))
