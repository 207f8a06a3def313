"""Commands of vLLM and SGLang: every flag is one of that version's, and GPUs, ranks and machines are right."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace

import pytest

from moestro.errors import ConfigError
from moestro.planner import systems
from moestro.planner.systems import (
    FlagList,
    RunLimits,
    ServerLaunch,
    flag_list,
    flags_of_sources,
    stored_lists,
    system_named,
)

LAUNCH = ServerLaunch(
    model="org/model",
    limits=RunLimits(max_num_seqs=64, max_num_batched_tokens=4096),
    max_model_len=8192,
    memory_share=0.9,
)
SPREAD = replace(LAUNCH, mode="ep", gpus_per_server=8, tensor_parallel_size=2, num_redundant_experts=32)
VERSIONS = [(system, version) for system, lists in stored_lists().items() for version in lists]


def pairs(line):
    """Flags of a command with their values."""
    words = shlex.split(line, comments=True)
    return {
        word: None if following.startswith("--") else following
        for word, following in zip(words, [*words[1:], "--"], strict=True)
        if word.startswith("--")
    }


@pytest.mark.parametrize(("system", "version"), VERSIONS)
@pytest.mark.parametrize("mode", ["ep", "ep-overlap"])
def test_every_form_of_a_command_has_flags_of_its_version_alone(system, version, mode):
    for launch in (
        replace(LAUNCH, num_servers=3, gpus_per_server=2, tensor_parallel_size=2, num_blocks=100, block_size=16),
        replace(SPREAD, mode=mode, num_servers=2, caches_prefixes=False),
        replace(SPREAD, mode=mode, gpus_per_server=16, gpus_per_machine=8),
    ):
        lines = system_named(system, version).commands(launch)
        for line in lines:
            names = {word for word in pairs(line) if not line.startswith("moestro route")}
            stored = stored_lists()[system][version]
            assert all(name in stored or f"--{name.removeprefix('--no-')}" in stored for name in names), line


def test_vllm_has_ranks_of_tensor_parallel_gpus_and_copies_of_experts():
    (line,) = system_named("vllm", "0.33.0").commands(SPREAD)
    found = pairs(line)
    assert line.startswith("vllm serve org/model ")
    assert (found["--tensor-parallel-size"], found["--data-parallel-size"]) == ("2", "4")
    assert json.loads(found["--eplb-config"]) == {"num_redundant_experts": 32}
    assert {"--enable-expert-parallel", "--enable-eplb"} <= found.keys()
    assert (found["--max-num-seqs"], found["--max-num-batched-tokens"], found["--port"]) == ("64", "4096", "8000")


@pytest.mark.parametrize(
    ("version", "ranks"),
    [("0.5.23", {"--attn-dp-size": "4"}), ("0.5.12", {"--dp-size": "4", "--enable-dp-attention": None})],
)
def test_sglang_divides_sequences_and_tokens_among_its_ranks(version, ranks):
    (line,) = system_named("sglang", version).commands(SPREAD)
    found = pairs(line)
    assert found.items() >= ranks.items()
    assert (found["--tp-size"], found["--ep-size"], found["--ep-num-redundant-experts"]) == ("8", "8", "32")
    assert (found["--max-running-requests"], found["--chunked-prefill-size"]) == ("256", "16384")


def test_servers_of_one_machine_have_gpus_of_their_own_and_a_router():
    lines = system_named("vllm", "0.33.0").commands(
        replace(LAUNCH, num_servers=4, gpus_per_server=2, tensor_parallel_size=2)
    )
    gpus = [re.match(r"CUDA_VISIBLE_DEVICES=(\S+) ", line)[1] for line in lines[:-1]]
    assert gpus == ["0,1", "2,3", "4,5", "6,7"]
    assert [pairs(line)["--port"] for line in lines] == ["8001", "8002", "8003", "8004", "8000"]
    assert all(f"http://127.0.0.1:{port}" in lines[-1] for port in range(8001, 8005))


def test_machines_are_named_where_there_are_several():
    lines = system_named("vllm", "0.33.0").commands(
        replace(LAUNCH, num_servers=3, gpus_per_server=4, tensor_parallel_size=4)
    )
    assert [line.rpartition("# on ")[2] for line in lines] == ["machine1", "machine1", "machine2", "machine1"]
    assert all("--host 0.0.0.0" in line for line in lines[:-1])
    assert "--engine http://machine2:8003" in lines[-1]


def test_a_server_on_two_machines_has_a_command_for_each():
    wide = replace(SPREAD, gpus_per_server=16, num_servers=1)
    first, second = system_named("vllm", "0.33.0").commands(wide)
    assert pairs(first)["--data-parallel-size-local"] == pairs(second)["--data-parallel-size-local"] == "4"
    assert pairs(second)["--data-parallel-start-rank"] == "4"
    assert "--headless" in pairs(second)
    assert "--port" not in pairs(second)
    first, second = system_named("sglang", "0.5.23").commands(wide)
    assert (pairs(first)["--nnodes"], pairs(first)["--node-rank"], pairs(second)["--node-rank"]) == ("2", "0", "1")
    assert pairs(first)["--dist-init-addr"] == pairs(second)["--dist-init-addr"] == "machine1:13345"


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_one_engine_on_two_machines_has_their_ranks_and_no_data_parallelism(version):
    wide = replace(LAUNCH, gpus_per_server=16, tensor_parallel_size=16)
    first, second = system_named("vllm", version).commands(wide)
    for number, line in enumerate((first, second)):
        words = pairs(line)
        assert (words["--nnodes"], words["--node-rank"], words["--master-addr"]) == ("2", str(number), "machine1")
        assert not any(name.startswith("--data-parallel") for name in words)
    assert "--headless" in pairs(second)
    assert "--headless" not in pairs(first)


def test_a_flag_that_a_version_lacks_is_refused_with_other_versions():
    old = FlagList("vllm", "0.0", frozenset({"--port"}), "a test")
    with pytest.raises(ConfigError, match=r"vllm 0.0 has no flag --max-num-seqs .*0.33.0"):
        replace(system_named("vllm", "0.33.0"), flags=old).commands(LAUNCH)


def test_systems_say_what_they_lack():
    assert system_named("moestro").why_not("fused", 2) == "moestro serve has no tensor parallelism"
    assert system_named("vllm").why_not("async", 1) == "vLLM has no asynchronous experts"
    assert system_named("sglang").why_not("ep-overlap", 1) is None


# --- flags of sources -------------------------------------------------------------------------------------------------

VLLM = """
class EngineArgs:
    @staticmethod
    def add_cli_args(parser):
        group.add_argument("--tensor-parallel-size", "-tp", **kwargs["tensor_parallel_size"])
        group.add_argument("--old", action=DeprecatedAction)
"""
FRONT = '''
class BaseFrontendArgs:
    """Text."""
    chat_template: str | None = None
class FrontendArgs(BaseFrontendArgs):
    port: int = 8000
'''
SGLANG = """
class Parallel(Struct):
    tp_size: A[int, Arg(help="Size.", aliases=["--tensor-parallel-size"])] = 1
    nnodes: A[int, "The number of nodes."] = 1
    hidden: A[bool, Arg(help="None.", no_cli=True)] = False
    renamed: A[bool, Arg(help="None.", cli_name="--other-name")] = False
    plain: int = 0
"""


@pytest.fixture
def vllm(tmp_path):
    (tmp_path / "vllm" / "engine").mkdir(parents=True)
    (tmp_path / "vllm" / "entrypoints" / "openai").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('the package must not be imported')\n")
    (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text(VLLM)
    (tmp_path / "vllm" / "entrypoints" / "openai" / "cli_args.py").write_text(FRONT)
    return tmp_path


def test_flags_are_read_from_declarations_and_deprecated_ones_left_out(vllm, tmp_path):
    assert flags_of_sources("vllm", vllm / "vllm") == {"--tensor-parallel-size", "--chat-template", "--port"}
    fields = tmp_path / "sglang" / "srt" / "arg_groups" / "fields"
    fields.mkdir(parents=True)
    (fields / "parallel.py").write_text(SGLANG)
    assert flags_of_sources("sglang", tmp_path / "sglang") == {
        "--tp-size", "--tensor-parallel-size", "--nnodes", "--other-name",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="holds no declarations"):
        flags_of_sources("vllm", tmp_path / "sglang")


def test_an_installed_package_is_read_without_being_imported(vllm, monkeypatch):
    monkeypatch.syspath_prepend(vllm)
    monkeypatch.setattr(systems, "version", lambda name: "0.40.1+cpu")
    found = flag_list("vllm")
    assert (found.version, found.source) == ("0.40.1", "installed package")
    assert found.has("--no-port")
    assert flag_list("vllm", "0.33.0").source == "list of this Moestro"
    with pytest.raises(ConfigError, match=r"Known: .*0.33.0, and 0.40.1 is installed"):
        flag_list("vllm", "0.1")
