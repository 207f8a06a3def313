"""Flags of vLLM that Moestro lacks are refused with what to do in their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from moestro.cli import main
from moestro.config.config_sources import settings_in
from moestro.config.serve_settings import ServeSettings
from moestro.config.vllm_flags import VLLM_FLAGS, refuse_vllm_flags, remedy_of
from moestro.errors import ConfigError


def test_no_flag_of_moestro_is_refused():
    own = {"--" + name.replace("_", "-") for name, _ in settings_in(ServeSettings())}
    assert not own & VLLM_FLAGS.keys()
    negated = {"--no-" + name.removeprefix("--") for name in own}
    assert not [name for name in own | negated if remedy_of(name) is not None]


def test_remedies_name_flags_that_exist():
    own = {"--" + name.replace("_", "-") for name, _ in settings_in(ServeSettings())}
    for name, remedy in VLLM_FLAGS.items():
        named = {word.strip(",;.") for word in remedy.split() if word.startswith("--")}
        assert named <= own, f"{name}: {named - own}"
        assert not remedy.endswith("."), name


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tensor-parallel-size", "2"],
        ["--tensor_parallel_size=2"],
        ["-tp", "2"],
        ["org/model", "--enforce-eager"],
        ["--no-enable-chunked-prefill"],
        ["--no-async-scheduling"],
    ],
)
def test_a_flag_of_vllm_is_refused_in_every_spelling(arguments):
    with pytest.raises(ConfigError, match=r"is a flag of vLLM and not supported, see docs/scope.md: "):
        refuse_vllm_flags(arguments)


def test_other_arguments_pass():
    refuse_vllm_flags(["org/model", "--max-model-len", "100", "--unheard-of", "-x", "--"])


def test_the_command_ends_with_the_remedy(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--tensor-parallel-size", "2"])
    assert ended.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith("moestro: --tensor-parallel-size is a flag of vLLM and not supported, see docs/scope.md: ")
    assert "--mode ep" in text


def test_a_file_of_settings_is_refused_by_its_line(tmp_path: Path, capsys):
    file = tmp_path / "settings.yaml"
    file.write_text("port: 8000\ngpu_memory_utilization: 0.9\n")
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--config", str(file), "--print-config"])
    assert ended.value.code == 2
    assert f"{file}:2: gpu_memory_utilization is a flag of vLLM and not supported" in capsys.readouterr().err
