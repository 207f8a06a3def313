"""Calls in which an answer of `/v1/responses` ends: cut by a limit, or left incomplete by the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.interrupted_answers import running
from support.model_outputs import hermes
from support.parroting_server import FLAGS, WEATHER_TOOL
from support.running import Running, call, routing

CALL = hermes("get_weather", '{"city": "Paris"}')
TOOL = {"type": "function", "name": "get_weather", "parameters": WEATHER_TOOL["function"]["parameters"]}
PATCH = {"type": "custom", "name": "patch"}


@pytest.fixture(scope="module")
def direct(fake_command, tmp_path_factory) -> Iterator[Running]:
    with running((*fake_command, *FLAGS, "hermes"), tmp_path_factory.mktemp("cut")) as server:
        yield server


@pytest.fixture(scope="module")
def routed(direct, tmp_path_factory) -> Iterator[Running]:
    with routing(direct, tmp_path_factory.mktemp("route")) as router:
        yield router


@pytest.fixture(params=["direct", "routed"])
def place(request, direct) -> Running:
    return direct if request.param == "direct" else request.getfixturevalue("routed")


def responses(place: Running, text: str, **fields: Any) -> Iterator[dict[str, Any]]:
    """Yield the response that recites `text`, whole and as the end of its stream."""
    body = {"input": text, "tools": [TOOL, PATCH]} | fields
    yield call(place, "POST", "/v1/responses", body).json
    *_, last = call(place, "POST", "/v1/responses", body | {"stream": True}).events
    assert last["type"] == f"response.{last['response']['status']}"
    yield last["response"]


def num_tokens(place: Running, text: str) -> int:
    return call(place, "POST", "/tokenize", {"prompt": text, "add_special_tokens": False}).json["count"]


def test_a_limit_within_a_call_leaves_it_and_the_response_incomplete(place):
    limit = num_tokens(place, CALL[: CALL.index("Paris")])
    for response in responses(place, CALL, max_output_tokens=limit):
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        *_, made = response["output"]
        assert (made["type"], made["name"], made["status"]) == ("function_call", "get_weather", "incomplete")


@pytest.mark.parametrize("rest", ["", " And then", "\n<tool_call>"])
def test_a_limit_after_a_call_leaves_the_call_complete(place, rest):
    limit = num_tokens(place, CALL + rest)
    for response in responses(place, CALL + rest + " more text than fits" * 9, max_output_tokens=limit):
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        (made,) = [item for item in response["output"] if item["type"] == "function_call"]
        assert (made["status"], json.loads(made["arguments"])) == ("completed", {"city": "Paris"})


@pytest.mark.parametrize("call_text", [CALL[: CALL.index("Paris")], hermes("patch", '{"input": "a'), CALL + CALL[:-24]])
def test_a_call_that_the_model_leaves_is_incomplete_in_a_completed_response(place, call_text):
    for response in responses(place, call_text.removesuffix("\n</tool_call>").removesuffix("}")):
        assert (response["status"], response["incomplete_details"]) == ("completed", None)
        assert response["output"][-1]["status"] == "incomplete"
        assert all(item["status"] == "completed" for item in response["output"][:-1])


def test_calls_that_end_are_complete(place):
    for response in responses(place, "I look. " + CALL + hermes("patch", '{"input": "a"}')):
        assert [item["status"] for item in response["output"]] == ["completed"] * 3
        assert response["output"][-1]["input"] == "a"
