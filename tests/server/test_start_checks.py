"""What is refused before any process starts: more workers than experts, and more engines than memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import moestro.server.processes.start_checks
from moestro.cli import main
from moestro.config.linux_process import available_memory_bytes
from moestro.config.serve_settings import ProcessSettings, ServeSettings
from moestro.errors import ConfigError
from moestro.flow.settings import GroupOptions, SteppingSettings
from moestro.model.settings import ModelSettings
from moestro.server.processes.start_checks import check_start

GIB = 1 << 30


def settings(directory: Path, mode: str = "async", engines: int = 1, **group: int) -> ServeSettings:
    return ServeSettings(
        model=ModelSettings(model=str(directory), device="cpu", kv_cache_memory_bytes=GIB),
        stepping=SteppingSettings(mode=mode),
        processes=ProcessSettings(engines=engines),
        group=GroupOptions(**group),
    )


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint of 16 experts and a mebibyte of weights."""
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"n_routed_experts": 16}}))
    header = json.dumps({"norm": {"dtype": "U8", "shape": [1 << 20], "data_offsets": [0, 1 << 20]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(1 << 20))
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ({"experts": 17}, "over 17 workers, and the network has 16 experts a layer: lower --experts"),
        ({"attention": 17, "experts": 0}, "lower --attention"),
        ({"mode": "ep", "engines": 17}, "give --engines 16 or less"),
    ],
)
def test_each_worker_needs_an_expert(kind, text, checkpoint, monkeypatch):
    monkeypatch.setattr(moestro.server.processes.start_checks, "available_memory_bytes", lambda: 100 * GIB)
    with pytest.raises(ConfigError, match=text):
        check_start(settings(checkpoint, **kind))
    check_start(settings(checkpoint, **{name: 16 if number == 17 else number for name, number in kind.items()}))


def test_a_network_whose_config_names_its_experts_otherwise_is_left_to_the_workers(checkpoint):
    (checkpoint / "config.json").write_text(json.dumps({"experts_by_layer": [4, 8]}))
    check_start(settings(checkpoint, experts=60))


def test_engines_that_do_not_fit_into_memory_are_refused(checkpoint, monkeypatch):
    monkeypatch.setattr(moestro.server.processes.start_checks, "available_memory_bytes", lambda: 2 * GIB + GIB // 2)
    check_start(settings(checkpoint, attention=2))
    with pytest.raises(ConfigError, match=r"3 engines need 3.0 GiB .* and 2.5 are free: lower --attention or --kv"):
        check_start(settings(checkpoint, attention=3))


def test_host_memory_has_to_fit_beside_weights_and_kv(checkpoint, monkeypatch):
    monkeypatch.setattr(moestro.server.processes.start_checks, "available_memory_bytes", lambda: 5 * GIB)
    two = settings(checkpoint, "fused", engines=2)
    check_start(replace(two, model=replace(two.model, kv_offloading_size=1.4)))
    text = r"-size 1.6 GiB for each of 2 engines is more .* beside weights and KV, 1.50 GiB for each of 2 engines fit"
    with pytest.raises(ConfigError, match=text):
        check_start(replace(two, model=replace(two.model, kv_offloading_size=1.6)))


def test_memory_that_cannot_be_read_refuses_nothing(checkpoint, monkeypatch):
    monkeypatch.setattr(moestro.server.processes.start_checks, "available_memory_bytes", lambda: None)
    check_start(settings(checkpoint, attention=3))


def test_this_machine_has_memory():
    found = available_memory_bytes()
    assert found is None or found > 1 << 20


@pytest.mark.parametrize(
    "flags", [("--mode", "async", "--experts", "60"), ("--mode", "ep", "--engines", "99")], ids=["async", "ep"]
)
def test_the_command_refuses_more_workers_than_experts_at_once(flags, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--port", "0", *flags])
    assert ended.value.code == 2
    assert "16 experts a layer" in " ".join(capsys.readouterr().err.split())
