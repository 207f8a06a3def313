"""Requests as coding agents really send them (one file a client and version) are answered, directly and routed.

`python bench/clients/agents.py --record tests/agents` records them; a new version is one file more. Long texts are cut,
and names of people, machines and sessions are placeholders. Each request has what it must yield: the roles and the
functions that reach the model, and the fields and tools without effect here, which the answer's header names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.running import Running, call, routing

from moestro.web.adapters.paths import chat_body

CORPUS = sorted(Path(__file__).parent.glob("*.json"))
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


REQUESTS = [(file, number) for file in CORPUS for number in range(len(json.loads(file.read_text())["requests"]))]


def recorded(file: Path, number: int) -> dict[str, Any]:
    return json.loads(file.read_text())["requests"][number]


@pytest.mark.parametrize(("file", "number"), REQUESTS, ids=[f"{file.stem}-{number}" for file, number in REQUESTS])
def test_every_request_of_an_agent_is_answered(place, file, number):
    sent = recorded(file, number)
    is_response = sent["path"].startswith("/v1/responses")
    body = sent["body"] | {"max_output_tokens" if is_response else "max_tokens": 4}
    reply = call(place, "POST", sent["path"], body)
    assert reply.status == 200, (sent["path"], reply.body)
    named = reply.headers.get("warning", "").removeprefix('299 moestro "fields were ignored: ').removesuffix('"')
    assert list(filter(None, named.split(", "))) == sent["yields"]["ignored"]
    events = reply.events if body.get("stream") else [reply.json]
    ends = {"/v1/messages": "message_stop", "/v1/responses": "response.incomplete"}
    if (end := ends.get(sent["path"].partition("?")[0])) is not None:
        assert events[-1]["type"] == end
    else:
        choices = [each for event in events if event != "[DONE]" for each in event["choices"]]
        assert choices[-1]["finish_reason"] == "length"


@pytest.mark.parametrize(("file", "number"), REQUESTS, ids=[f"{file.stem}-{number}" for file, number in REQUESTS])
def test_every_message_and_function_of_an_agent_reaches_the_chat(file, number):
    sent = recorded(file, number)
    body = json.dumps(sent["body"]).encode()
    chat = json.loads(chat_body(sent["path"].partition("?")[0], body) or body)
    assert [message["role"] for message in chat["messages"]] == sent["yields"]["roles"]
    assert [tool["function"]["name"] for tool in chat.get("tools", [])] == sent["yields"]["tools"]


def test_the_corpus_has_the_agents_that_are_documented():
    assert REQUESTS, "a corpus without requests proves nothing"
    agents = {json.loads(file.read_text())["agent"] for file in CORPUS}
    assert {"Codex", "Claude Code", "opencode", "qwen-code", "cline", "mini-swe-agent", "aider", "smolagents"} <= agents
