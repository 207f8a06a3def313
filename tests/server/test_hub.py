"""Checkpoints and tokenizers by their name on the Hugging Face hub: the real client downloads from an imitated hub."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from support.hub import Hub, hub
from support.running import MOESTRO, Running, chat, routing


@pytest.fixture(scope="module")
def demo_hub(tmp_path_factory, demo_dir):
    """The demo model with files that must not be downloaded, and a repository with its tokenizer alone."""
    model, tokenizer = (tmp_path_factory.mktemp(name) for name in ("model", "tokenizer"))
    shutil.copytree(demo_dir, model, dirs_exist_ok=True)
    for name in ("pytorch_model.bin", "modeling_demo.py"):
        (model / name).write_text("not to be read")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        shutil.copy(demo_dir / name, tokenizer)
    with hub({"org/model": model, "org/tokenizer": tokenizer, "org/gated": None}) as server:
        yield server


@pytest.fixture
def at_hub(demo_hub: Hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", demo_hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    demo_hub.downloaded.clear()
    return demo_hub


def test_server_and_router_download_by_name_what_they_need(at_hub, tmp_path):
    serve = (MOESTRO, "serve", "org/model", "--tokenizer", "org/tokenizer")
    server = Running(serve, tmp_path)
    try:
        of_model, of_tokenizer = (
            {file for repository, file in at_hub.downloaded if repository == name}
            for name in ("org/model", "org/tokenizer")
        )
        assert {"config.json", "model.safetensors"} <= of_model
        assert not {"pytorch_model.bin", "modeling_demo.py"} & of_model
        assert {"tokenizer.json", "chat_template.jinja"} <= of_tokenizer
        num_downloaded = len(at_hub.downloaded)
        (tmp_path / "router").mkdir()
        with routing(server, tmp_path / "router", "--tokenizer", "org/tokenizer") as router:
            replies = [chat(each, model="org/model", max_tokens=4) for each in (server, router)]
        assert [reply.status for reply in replies] == [200, 200]
        assert len(at_hub.downloaded) == num_downloaded, "the router reads what the server has downloaded"
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("org/gated",), ("org/gated", "HF_TOKEN")),
        (("demo", "--tokenizer", "org/none"), ("--tokenizer: org/none", "check the name")),
    ],
)
def test_start_without_the_files_ends_with_a_sentence(at_hub, arguments, words):
    end = subprocess.run([MOESTRO, "serve", *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert end.returncode not in (0, -9)
    assert "Traceback" not in end.stderr
    for each in words:
        assert each in " ".join(end.stderr.split())
