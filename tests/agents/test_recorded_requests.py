"""Requests as coding agents really send them (one file a client and version) are answered, directly and routed.

`python bench/clients/agents.py --record tests/agents` records them; a new version is one file more. Long texts are cut,
and names of people, machines and sessions are placeholders.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.running import Running, call, routing

CORPUS = sorted(Path(__file__).parent.glob("*.json"))
# Fields and tools without effect here that an agent always sends; the answer's header names them.
IGNORED = {
    "Codex": {"tools[8] (web_search)"},
    "Claude Code": {"output_config.effort"},
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}"
    "{% endfor %}{{ (tools or []) | map(attribute='function.name') | join(' ') }}<|im_start|>assistant "
)


@pytest.fixture(scope="module")
def direct(fake_command, tmp_path_factory) -> Iterator[Running]:
    flags = ("--chat-template", TEMPLATE, "--served-model-name", "scripted")
    server = Running((*fake_command, *flags), tmp_path_factory.mktemp("serve"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def routed(direct, tmp_path_factory) -> Iterator[Running]:
    with routing(direct, tmp_path_factory.mktemp("route")) as router:
        yield router


@pytest.fixture(params=["direct", "routed"])
def place(request) -> Running:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("file", CORPUS, ids=lambda file: file.stem)
def test_every_request_of_an_agent_is_answered(place, file):
    recorded = json.loads(file.read_text())
    assert recorded["requests"], "a recording without requests proves nothing"
    for sent in recorded["requests"]:
        limit = "max_output_tokens" if sent["path"].startswith("/v1/responses") else "max_tokens"
        body = sent["body"] | {limit: 4}
        reply = call(place, "POST", sent["path"], body)
        assert reply.status == 200, (sent["path"], reply.body)
        named = reply.headers.get("warning", "").removeprefix('299 moestro "fields were ignored: ').removesuffix('"')
        assert set(filter(None, named.split(", "))) <= IGNORED.get(recorded["agent"], set())
        events = reply.events if body.get("stream") else [reply.json]
        assert "error" not in events[-1], events[-1]


def test_the_corpus_has_the_agents_that_are_documented():
    agents = {json.loads(file.read_text())["agent"] for file in CORPUS}
    assert {"Codex", "Claude Code", "opencode", "qwen-code", "cline", "mini-swe-agent", "aider", "smolagents"} <= agents
