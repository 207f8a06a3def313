"""Flags of vLLM that Moestro lacks: what changes nothing is taken, and the rest is refused with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from moestro.cli import main
from moestro.config.config_sources import settings_in
from moestro.config.serve_settings import ServeSettings
from moestro.config.vllm_flags import VLLM_FLAGS, flag_named, without_vllm_flags
from moestro.errors import ConfigError


def test_no_flag_of_moestro_is_taken_for_one_of_vllm():
    own = {"--" + name.replace("_", "-") for name, _ in settings_in(ServeSettings())}
    assert not own & VLLM_FLAGS.keys()
    negated = {"--no-" + name.removeprefix("--") for name in own}
    assert not [name for name in own | negated if flag_named(name) is not None]


def test_remedies_name_flags_that_exist():
    own = {"--" + name.replace("_", "-") for name, _ in settings_in(ServeSettings())}
    for name, flag in VLLM_FLAGS.items():
        named = {word.strip(",;.") for word in flag.text.split() if word.startswith("--")}
        assert named <= own, f"{name}: {named - own}"
        assert not flag.text.endswith("."), name


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tensor-parallel-size", "2"],
        ["--tensor_parallel_size=2"],
        ["-tp", "2"],
        ["org/model", "--quantization", "awq"],
        ["--enable-lora"],
        ["--uds", "/tmp/socket"],
        ["--tokenizer-mode", "mistral"],
        ["--speculative-config.model", "x"],
    ],
)
def test_a_flag_that_would_change_answers_is_refused_in_every_spelling(arguments):
    with pytest.raises(ConfigError, match=r"is a flag of vLLM and not supported, see docs/scope.md: "):
        without_vllm_flags(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--async-scheduling"],
        ["--no-async-scheduling"],
        ["--no-enable-lora"],
        ["--async_scheduling=true"],
        ["-tp", "1"],
        ["--tensor-parallel-size=1"],
        ["-O3"],
        ["-O", "3"],
        ["-cc.mode=3"],
        ["--compilation-config", '{"level": 3}'],
        ["--cudagraph-capture-sizes", "1", "2", "4"],
        ["--structured-outputs-config.backend", "xgrammar"],
        ["--limit-mm-per-prompt", '{"image": 0}'],
        ["--trust-remote-code", "--disable-log-requests", "--swap-space", "4"],
    ],
)
def test_a_flag_that_changes_nothing_is_taken_with_one_warning(arguments, caplog):
    assert without_vllm_flags(["org/model", *arguments, "--port", "1"]) == ["org/model", "--port", "1"]
    (record,) = caplog.records
    names = [each.partition("=")[0] for each in arguments if each.startswith("-")]
    assert all(f"{name} (" in record.getMessage() for name in names)


def test_each_flag_with_each_verdict_is_found_among_others(caplog):
    for name, flag in VLLM_FLAGS.items():
        given = {"none": [name], "one": [name, "v"], "many": [name, "v", "w"]}[flag.values]
        if flag.is_taken:
            assert without_vllm_flags([*given, "--port", "1"]) == ["--port", "1"], name
        else:
            with pytest.raises(ConfigError, match="is a flag of vLLM"):
                without_vllm_flags(given)
        for value in flag.neutral:
            assert without_vllm_flags([name, value, "--port", "1"]) == ["--port", "1"], name


def test_other_arguments_pass(caplog):
    given = ["org/model", "--max-model-len", "100", "--unheard-of", "-x", "--", "--enforce-eager"]
    assert without_vllm_flags(given) == given
    assert not caplog.records


def test_a_start_script_of_vllm_starts(capsys, caplog):
    script = "org/model --port 8009 --trust-remote-code --gpu-memory-utilization 0.92 --tensor-parallel-size 1"
    script += " --disable-log-requests --enforce-eager --max-model-len 8k --max-num-seqs 256 --enable-chunked-prefill"
    with pytest.raises(SystemExit) as ended:
        main(["serve", *script.split(), "--print-config"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert 'model: "org/model"' in out
    assert "max_num_seqs: 256" in out
    assert "gpu_memory_utilization: 0.92" in out
    assert "flags of vLLM that change nothing here: --trust-remote-code (" in caplog.text


def test_the_command_ends_with_the_remedy(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--tensor-parallel-size", "2"])
    assert ended.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith("moestro: --tensor-parallel-size 2 is a flag of vLLM and not supported, see docs/scope.md: ")
    assert "--mode ep" in text


def test_a_file_of_settings_is_refused_by_its_line(tmp_path: Path, capsys):
    file = tmp_path / "settings.yaml"
    file.write_text("port: 8000\nquantization: awq\n")
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--config", str(file), "--print-config"])
    assert ended.value.code == 2
    assert f"{file}:2: --quantization is a flag of vLLM and not supported" in capsys.readouterr().err


def test_a_file_of_settings_may_have_what_changes_nothing(tmp_path: Path, capsys, caplog):
    file = tmp_path / "settings.yaml"
    file.write_text("enforce-eager: true\nswap_space: 4\ntensor-parallel-size: 1\nenable-lora: false\n")
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--config", str(file), "--print-config"])
    assert ended.value.code == 0
    assert "--swap-space (--kv-offloading-size keeps" in caplog.text
    assert len(caplog.records) == 1
