"""Values of vLLM for flags that Moestro has: they mean one of its own, or the error says what to do."""

from __future__ import annotations

import pytest

from moestro.cli import main
from moestro.config.config_sources import VLLM_VALUES, settings_in
from moestro.config.serve_settings import ServeSettings
from moestro.core.setting_checks import choices_of
from moestro.model.settings import ModelSettings
from moestro.text.parsing.output_parser import REASONING_PARSERS, TOOL_PARSERS


def printed(*flags: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *flags, "--print-config"])
    assert ended.value.code == 0


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--dtype", "half"), 'dtype: "float16"'),
        (("--dtype=float",), 'dtype: "float32"'),
        (("--load-format", "safetensors"), 'load_format: "auto"'),
        (("--load-format", "dummy"), 'load_format: "dummy"'),
        (("--tool-call-parser", "qwen3_xml"), 'tool_call_parser: "qwen3_coder"'),
        (("--reasoning-parser", "deepseek_v3"), 'reasoning_parser: "qwen3"'),
    ],
)
def test_a_value_of_vllm_means_one_of_our_own(flags, line, capsys):
    printed(*flags)
    assert f"\n{line}  # command line\n" in capsys.readouterr().out


def test_a_value_that_changes_nothing_is_named_once(capsys, caplog):
    printed("--load-format", "runai_streamer")
    (record,) = caplog.records
    assert record.getMessage() == (
        "--load-format runai_streamer is a value of vLLM that changes nothing here: weights are always read from"
        " safetensors files, by one loader"
    )


@pytest.mark.parametrize("name", ["gguf", "bitsandbytes", "pt"])
def test_a_value_that_needs_what_is_missing_says_what_to_do(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--load-format", name])
    assert ended.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith(f"moestro: --load-format {name} is a value of vLLM and not supported: ")


def test_files_and_variables_have_the_same_values(tmp_path, monkeypatch, capsys):
    file = tmp_path / "settings.yaml"
    file.write_text("dtype: half\n")
    monkeypatch.setenv("MOESTRO_LOAD_FORMAT", "safetensors")
    printed("--config", str(file))
    out = capsys.readouterr().out
    assert 'dtype: "float16"  # ' in out
    assert 'load_format: "auto"  # environment variable' in out


def test_the_table_has_no_value_of_our_own_and_each_of_its_targets_is_one():
    own = {name for name, _ in settings_in(ServeSettings())}
    known = {
        "dtype": choices_of(ModelSettings, "dtype"),
        "load_format": choices_of(ModelSettings, "load_format"),
        "tool_call_parser": TOOL_PARSERS.names(),
        "reasoning_parser": REASONING_PARSERS.names(),
    }
    for name, values in VLLM_VALUES.items():
        assert name in own
        foreign = {*values.same, *values.taken, *values.refused}
        assert not foreign & set(known[name])
        assert {*values.same.values(), *values.taken.values()} <= set(known[name])
