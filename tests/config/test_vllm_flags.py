"""Flags of vLLM that Moestro lacks: what changes nothing is taken, and the rest is refused with what to do."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from moestro.cli import main
from moestro.config.config_sources import settings_in
from moestro.config.serve_settings import ServeSettings
from moestro.config.vllm_flags import VLLM_FLAGS, flag_named, without_vllm_flags
from moestro.engine.registry import BATCH_POLICIES, EVICT_POLICIES, ORDER_POLICIES, SHARE_POLICIES
from moestro.errors import ConfigError
from moestro.routing.registry import ROUTE_POLICIES


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


def test_remedies_offer_a_users_file_only_to_flags_that_take_one():
    kinds = (ROUTE_POLICIES, ORDER_POLICIES, BATCH_POLICIES, EVICT_POLICIES, SHARE_POLICIES)
    takes = {kind.flag: kind.adapt is not None for kind in kinds}
    offered = [flag.text.split()[0] for flag in VLLM_FLAGS.values() if "FILE.py" in flag.text]
    assert all(takes[name] for name in offered)


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
        ["--enable-lora", "True"],
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
        ["--enable-chunked-prefill", "False"],
        ["--enable-lora", "false"],
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


# From vLLM's own recipes of August 2026 and its documentation, without what chooses several GPUs.
STARTS = (
    r"""
openai/gpt-oss-20b --async-scheduling --no-enable-prefix-caching --max-cudagraph-capture-size 2048 \
     --max-num-batched-tokens 8192 --stream-interval 20
arcee-ai/Trinity --dtype bfloat16 --reasoning-parser deepseek_r1 --enable-auto-tool-choice \
     --tool-call-parser qwen3_coder
zai-org/GLM-5.1-FP8 --tool-call-parser glm47 --reasoning-parser glm45 --enable-auto-tool-choice \
     --chat-template-content-format=string --served-model-name glm-5.1-fp8
deepseek-ai/DeepSeek-V3.1 --enable-expert-parallel --tensor-parallel-size 1 --served-model-name ds31 \
     --default-chat-template-kwargs.thinking true --default-chat-template-kwargs.reasoning_effort high
google/gemma-4-31B-it --max-model-len auto --no-enable-prefix-caching --async-scheduling \
     --limit-mm-per-prompt '{"image": 0, "audio": 0}' --host 0.0.0.0 --port 8000
meta-llama/Llama-3.1-8B-Instruct --gpu-memory-utilization 0.9 --enable-chunked-prefill False \
     --swap-space 16 --disable-log-requests --disable-log-stats --max-seq-len-to-capture 8192
MiniMaxAI/MiniMax-M2 --trust-remote-code --compilation-config '{"cudagraph_mode": "PIECEWISE"}' \
     --enable-auto-tool-choice
facebook/opt-125m --kv-events-config.enable_kv_cache_events true --kv-events-config.endpoint tcp://*:5557 \
     --prefix-caching-hash-algo sha256
nvidia/Nemotron --mamba-backend triton --mamba-ssm-cache-dtype float32 --kv-cache-dtype auto -O3
Qwen/QwQ-32B --generation-config vllm --enable-reasoning --reasoning-parser deepseek_r1 --max-model-len -1
""".replace("\\\n", "")
    .strip()
    .splitlines()
)


@pytest.mark.parametrize("line", STARTS, ids=lambda line: line.partition(" ")[0])
def test_a_start_line_of_vllms_recipes_starts(line, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", *shlex.split(line), "--print-config"])
    assert ended.value.code == 0
    assert f'model: "{line.partition(" ")[0]}"  # command line' in capsys.readouterr().out


def test_keys_of_a_json_flag_are_one_object():
    flags = ["--default_chat_template_kwargs.a.b=1", "--default-chat-template-kwargs.c", "x"]
    assert without_vllm_flags([*flags, "org/model"]) == [
        "--default-chat-template-kwargs",
        '{"a": {"b": 1}, "c": "x"}',
        "org/model",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kv-events-config."], "give --kv-events-config.KEY VALUE"),
        (["--kv-events-config.topic"], "give --kv-events-config.topic VALUE"),
        (["--kv-events-config.a", "1", "--kv-events-config.a.b", "1"], "a has a value already"),
        (["--kv-events-config.a", "1", "--kv-events-config", "{}"], "as a whole and by its keys"),
    ],
)
def test_keys_of_a_json_flag_that_make_no_object_are_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        without_vllm_flags(arguments)


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
