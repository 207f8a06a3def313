"""Each kind of text file is read as any editor or shell writes it: with a byte order mark, with CRLF, as UTF-16."""

from __future__ import annotations

import json
import shutil

import pytest
from cli.test_place import GOOD, SERVED
from routing.test_decision_record import PROMPT, recorded
from support.routers import request
from support.text_files import WRITERS
from workload.test_profile_readers import GOOD as ROUTED
from workload.test_profile_readers import READING

from moestro.cli import main
from moestro.cost.settings import read_network
from moestro.cost.tables import load_table
from moestro.errors import UnsupportedModelError
from moestro.files.checkpoint import read_checkpoint
from moestro.gateway.discovery.lists import parse_file
from moestro.sim.replay import read_engines
from moestro.text.tokenizer import Tokenizer
from moestro.web.access import KeyFile
from moestro.web.record_file import record_key
from moestro.workload.experts.profile_readers import read_profile

SCENARIO = """
[workload]
prompt_tokens = 16
output_tokens = 2
num_requests = 4
rate = 4.0
[engines]
gpu = "h20"
[[policies]]
route = "round_robin"
"""
TEMPLATE = "{% for message in messages %}\n{{ message.content }}\n{% endfor %}\n"
pytestmark = pytest.mark.parametrize("write", WRITERS)


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments)])
    return ended.value.code or 0


@pytest.mark.parametrize(
    ("name", "text"), [("s.yaml", "port: 8009\nhost: é\n"), ("s.toml", 'port = 8009\nhost = "é"\n')]
)
def test_settings(write, name, text, tmp_path, capsys):
    (tmp_path / name).write_bytes(write(text))
    assert run("serve", "--config", tmp_path / name, "--print-config") == 0
    shown = capsys.readouterr().out
    assert f"port: 8009  # {tmp_path / name}:1" in shown
    assert f"# {tmp_path / name}:2" in shown


def test_a_scenario(write, tmp_path, capsys):
    (tmp_path / "s.toml").write_bytes(write(SCENARIO))
    assert run("sim", tmp_path / "s.toml") == 0
    assert "round_robin" in capsys.readouterr().out
    assert read_engines(tmp_path / "s.toml") == {"gpu": "h20"}


def test_a_topology_and_a_placement(write, tmp_path):
    topology, live = tmp_path / "t.yaml", tmp_path / "live.json"
    topology.write_bytes(write("devices:\n- {node: é, slots: 4, count: 4}\n"))
    live.write_bytes(write(json.dumps(SERVED, indent=1)))
    assert run("place", GOOD[0], "--topology", topology, "--policy", "static", "--out", tmp_path / "a.json") == 0
    assert run("place", *GOOD, "--current", live, "--out", tmp_path / "b.json") == 0


@pytest.mark.parametrize("indent", [None, 1])
def test_responses_with_routed_experts(write, indent, tmp_path):
    path = tmp_path / "responses.json"
    path.write_bytes(write(json.dumps(ROUTED, indent=indent) + "\n"))
    assert read_profile([path], READING).num_layers


def test_a_record_of_decisions(write, tmp_path, capsys):
    router, lines = recorded()
    router.submit(request("a", prompt=PROMPT), 5)
    record = tmp_path / "record.jsonl"
    record.write_bytes(write("".join(line.decode().rstrip("\n") + "\n" for line in lines)))
    assert run("replay", record) == 0
    assert "1 decisions" in capsys.readouterr().out


def test_a_chat_template(write, demo_dir, tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    (tmp_path / "t.jinja").write_bytes(write(TEMPLATE))
    given = Tokenizer(demo_dir, str(tmp_path / "t.jinja")).render_chat(messages)
    assert given == Tokenizer(demo_dir, TEMPLATE).render_chat(messages)
    if write is not WRITERS[-1]:  # transformers reads a checkpoint's own template, as UTF-8
        shutil.copytree(demo_dir, tmp_path / "checkpoint")
        (tmp_path / "checkpoint" / "chat_template.jinja").write_bytes(write(TEMPLATE))
        assert Tokenizer(tmp_path / "checkpoint").render_chat(messages) == given


def test_a_network_and_a_cost_table(write, demo_dir, tmp_path):
    text = (demo_dir / "config.json").read_text()
    (tmp_path / "config.json").write_text(text)
    plain = read_network(str(tmp_path / "config.json"))
    (tmp_path / "config.json").write_bytes(write(text))
    assert read_network(str(tmp_path / "config.json")) == plain
    (tmp_path / "table.json").write_bytes(write("{}"))
    with pytest.raises(Exception, match="missing required field"):
        load_table(tmp_path / "table.json")


def test_a_checkpoint_that_transformers_cannot_read_is_refused_with_what_to_do(write, demo_dir, tmp_path):
    checkpoint = shutil.copytree(demo_dir, tmp_path / "checkpoint")
    raw = write((demo_dir / "config.json").read_text())
    (checkpoint / "config.json").write_bytes(raw)
    if raw.startswith(b"{"):
        read_checkpoint(checkpoint)
        return
    with pytest.raises(UnsupportedModelError, match=r"config.json begins with a byte order mark.* save it as UTF-8"):
        read_checkpoint(checkpoint)


def test_a_key_of_a_record(write, tmp_path):
    (tmp_path / "key").write_bytes(b"0123456789abcdef0123")
    plain = record_key(tmp_path / "key").key_id
    if write is not WRITERS[-1]:  # a key is bytes, which may begin like UTF-16
        (tmp_path / "key").write_bytes(write("0123456789abcdef0123\n"))
        assert record_key(tmp_path / "key").key_id == plain


@pytest.mark.parametrize(
    "text", ["- url: http://h:1\n  api_key_file: key\n", '{"url": "http://h:1", "api_key_file": "key"}\n']
)
def test_a_list_of_engines_and_the_key_of_one(write, text, tmp_path):
    (tmp_path / "key").write_bytes(write("sk-a\n"))
    listed = parse_file(write(text), tmp_path)
    assert [(entry.url.url, entry.api_key) for entry in listed.entries] == [("http://h:1", "sk-a")]


@pytest.mark.parametrize("text", ["sk-a: team\nsk-b: team\n", '{"sk-a": "team", "sk-b": "team"}\n'])
def test_keys_of_clients(write, text, tmp_path):
    (tmp_path / "keys").write_bytes(write(text))
    assert KeyFile(tmp_path / "keys").keys == {"sk-a": "team", "sk-b": "team"}
