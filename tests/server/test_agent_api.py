"""`/v1/messages` and `/v1/responses`, with the clients of Anthropic and OpenAI, directly and through the router."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.fake_rank import FAIL_ONE
from support.running import MOESTRO, Running, call, chat

TEXT = "def read_file(path):\n"
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]
FIXED = {"model": "moestro-demo", "temperature": 0}
GREEDY = {"model": "moestro-demo", "extra_body": {"temperature": 0}}  # The client of Anthropic has no such argument.


@pytest.fixture(scope="module")
def routed(server, demo_dir, tmp_path_factory) -> Iterator[Running]:
    """A router that tokenizes, before the real server."""
    flags = ("--tokenizer", str(demo_dir), "--block-size", "16", "--admin-port", "0")
    running = Running((MOESTRO, "route", "--engine", server.url, *flags), tmp_path_factory.mktemp("route"))
    yield running
    running.kill()


@pytest.fixture(params=["direct", "routed"])
def place(request, server) -> Running:
    return server if request.param == "direct" else request.getfixturevalue("routed")


def chatted(server: Running, **fields: object) -> str:
    reply = chat(server, TEXT, temperature=0, **fields).json
    return reply["choices"][0]["message"]["content"]


class TestMessages:
    def test_a_message_says_what_a_chat_says(self, claude, place):
        message = claude.messages.create(**GREEDY, messages=MESSAGES, max_tokens=12)
        assert [block.type for block in message.content] == ["text"]
        assert message.content[0].text == chatted(place, max_tokens=12)
        assert (message.id[:4], message.role, message.stop_reason) == ("msg_", "assistant", "max_tokens")
        counted = claude.messages.count_tokens(model="moestro-demo", messages=MESSAGES).input_tokens
        assert message.usage.input_tokens + message.usage.cache_read_input_tokens == counted
        assert message.usage.output_tokens == 12

    def test_a_stream_adds_up_to_the_message(self, claude):
        whole = claude.messages.create(**GREEDY, messages=MESSAGES, max_tokens=12, system="be brief")
        with claude.messages.stream(**GREEDY, messages=MESSAGES, max_tokens=12, system="be brief") as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == whole.content[0].text == final.content[0].text
        assert final.stop_reason == whole.stop_reason
        assert final.usage.output_tokens == whole.usage.output_tokens

    def test_the_stop_sequence_is_named(self, claude, place):
        stop = chatted(place, max_tokens=12)[4:6]
        message = claude.messages.create(**GREEDY, messages=MESSAGES, max_tokens=12, stop_sequences=[stop])
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
        assert stop not in message.content[0].text

    def test_errors_are_those_of_anthropics_client(self, claude, anthropic):
        image = {"type": "image", "source": {"type": "url", "url": "x"}}
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\]: only text") as caught:
            claude.messages.create(**GREEDY, messages=[{"role": "user", "content": [image]}], max_tokens=3)
        assert caught.value.body["error"]["type"] == "invalid_request_error"
        with pytest.raises(anthropic.NotFoundError, match="The model `other` does not exist"):
            claude.messages.create(model="other", messages=MESSAGES, max_tokens=3)


class TestResponses:
    def test_a_response_says_what_a_chat_says(self, openai_client, place):
        response = openai_client.responses.create(**FIXED, input=TEXT, max_output_tokens=12)
        assert response.output_text == chatted(place, max_tokens=12)
        assert (response.id[:5], response.status) == ("resp_", "incomplete")
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.usage.output_tokens == 12

    def test_a_stream_adds_up_to_the_response(self, openai_client):
        items = [{"role": "user", "content": [{"type": "input_text", "text": TEXT}]}]
        whole = openai_client.responses.create(**FIXED, input=items, max_output_tokens=12, instructions="be brief")
        events = list(
            openai_client.responses.create(
                **FIXED, input=items, max_output_tokens=12, instructions="be brief", stream=True
            )
        )
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == (
            whole.output_text
        )
        assert events[-1].type == "response.incomplete"
        assert events[-1].response.output_text == whole.output_text
        with openai_client.responses.stream(**FIXED, input=items, max_output_tokens=12) as stream:
            for _ in stream:
                pass

    @pytest.mark.parametrize(("field", "value"), [("previous_response_id", "resp_1"), ("conversation", "c")])
    def test_nothing_is_stored(self, openai_client, openai, field, value):
        with pytest.raises(openai.BadRequestError, match="This server stores no responses") as caught:
            openai_client.responses.create(**FIXED, input="x", **{field: value})
        assert (caught.value.param, caught.value.code) == (field, "unsupported_parameter")
        with pytest.raises(openai.NotFoundError, match="stores no responses"):
            openai_client.responses.retrieve("resp_1")

    def test_logprobs_come_on_request(self, openai_client):
        fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 3}
        part = openai_client.responses.create(**FIXED, input=TEXT, **fields).output[0].content[0]
        assert "".join(each.token for each in part.logprobs) == part.text
        assert [len(each.top_logprobs) for each in part.logprobs] == [2, 2, 2]


def test_the_router_knows_the_prompts_of_all_apis(routed, server):
    """The second request of one prompt is predicted to hit what the engine then has."""
    system = "one two three four five six seven eight nine ten " * 20
    for path, body in (
        ("/v1/messages", {"system": system, "messages": MESSAGES, "max_tokens": 1}),
        ("/v1/responses", {"instructions": system, "input": TEXT, "max_output_tokens": 1}),
    ):
        call(routed, "POST", path, body)
        reply = call(routed, "POST", path, body)
        assert reply.status == 200
        usage = reply.json["usage"]
        cached = usage.get("cache_read_input_tokens") or usage["input_tokens_details"]["cached_tokens"]
        assert cached > 100
        assert reply.headers["x-moestro-engine"]


def test_both_apis_and_chats_have_the_same_prompt(tokenizer, fake):
    system = "be brief " * 30
    bodies = {
        "/v1/messages": {"system": system, "messages": MESSAGES, "max_tokens": 1},
        "/v1/responses": {"instructions": system, "input": TEXT, "max_output_tokens": 1},
        "/v1/chat/completions": {
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": TEXT}],
            "max_tokens": 1,
        },
    }
    counts = set()
    for path, body in bodies.items():
        usage = call(fake, "POST", path, body).json["usage"]
        cached = usage.get("cache_read_input_tokens") or 0
        counts.add(usage.get("prompt_tokens") or usage["input_tokens"] + cached)
    assert len(counts) == 1


class TestBrokenStreams:
    def test_a_message_that_breaks_carries_anthropics_error(self, fake, anthropic):
        fields = {"model": "moestro-demo", "messages": MESSAGES, "max_tokens": 9, "extra_body": {"priority": FAIL_ONE}}
        with (
            anthropic.Anthropic(base_url=fake.url, api_key="x", max_retries=0) as claude,
            claude.messages.stream(**fields) as stream,
            pytest.raises(anthropic.APIError, match="The engine failed on this request"),
        ):
            stream.until_done()

    def test_a_response_that_breaks_is_an_error_for_the_client(self, fake, openai):
        fields = {"model": "moestro-demo", "input": TEXT, "max_output_tokens": 9, "extra_body": {"priority": FAIL_ONE}}
        with (
            openai.OpenAI(base_url=f"{fake.url}/v1", api_key="x", max_retries=0) as client,
            client.responses.create(**fields, stream=True) as events,
            pytest.raises(openai.APIError, match="The engine failed on this request"),
        ):
            list(events)


def test_refusals_before_a_handler_have_the_form_of_the_path(fake):
    for path, method, status in (("/v1/messages", "GET", 405), ("/v1/messages/unknown", "POST", 404)):
        reply = call(fake, method, path, {})
        assert (reply.status, reply.json["type"]) == (status, "error")
        assert reply.json["request_id"] == reply.headers["x-request-id"]
    assert "type" not in call(fake, "GET", "/v1/responses").json
    assert call(fake, "POST", "/v1/messages", b"{").json["error"]["type"] == "invalid_request_error"


USES = [{"type": "text", "text": "I look."}, {"type": "tool_use", "id": "t"}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 1_000_000}]}, "This model's maximum context length"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": USES}]}, "messages[1].content[1].name"),
        ({"stop_sequences": list("abcde") * 13}, "stop_sequences"),
        ({"metadata": {"user_id": "x" * 2000}}, "metadata.user_id"),
        ({"tools": [{"name": ""}]}, "tools[0].name"),
        ({"tools": [{"name": "f"}, {"name": "g", "input_schema": 5}]}, "tools[1].input_schema"),
        ({"tools": [{"name": "f"}], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format.schema"),
        ({"output_format": {"type": "json_schema", "schema": 5}}, "output_format.schema"),
    ],
)
def test_a_refused_field_of_a_message_is_named_as_the_client_wrote_it(fake, fields, param):
    body = {"system": "be brief", "messages": MESSAGES, "max_tokens": 3} | fields
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        if path == "/v1/messages" or fields.keys() & {"messages", "tools", "output_config"}:
            reply = call(fake, "POST", path, body)
            assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
            assert reply.json["error"]["message"].startswith(param)


def test_a_refused_field_of_a_count_is_named(fake):
    reply = call(fake, "POST", "/v1/messages/count_tokens", {"messages": MESSAGES, "mcp_servers": [{"a": 1}]})
    assert (reply.status, "mcp_servers" in reply.json["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncation": "middle"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": None}, "input"),
        ({"input": [], "instructions": None}, "input"),
        ({"input": "x" * 1_000_000}, "input"),
        ({"input": [{"role": "x", "content": "hi"}]}, "input[0].role"),
        ({"input": [*MESSAGES, {"type": "function_call", "call_id": "c"}]}, "input[1].name"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 5}]}, "tools[0].parameters"),
        ({"tools": [{"type": None, "name": "f"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": "verbose"}}, "text.verbosity"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ],
)
def test_a_refused_field_of_a_response_is_named_as_the_client_wrote_it(fake, fields, param):
    reply = call(fake, "POST", "/v1/responses", {"input": "x", "instructions": "be brief"} | fields)
    error = reply.json["error"]
    assert (reply.status, error["param"]) == (400, param)
    assert param in error["message"] or error["code"] == "context_length_exceeded"


def test_the_grammar_of_a_message_is_refused_by_its_own_name(place):
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}, "required": ["a"]}
    wanted = {"type": "json_schema", "schema": schema}
    body = {"messages": MESSAGES, "max_tokens": 3, "output_config": {"format": wanted}}
    reply = call(place, "POST", "/v1/messages", body)
    assert reply.status == 400
    assert reply.json["error"]["message"].startswith("output_config.format.schema cannot be used as a grammar")


def test_unknown_fields_of_an_adapter_are_named_in_a_warning(fake):
    for path, fields in (
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": MESSAGES}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1}),
    ):
        reply = call(fake, "POST", path, fields | {"frobnicate": 1})
        assert reply.headers["warning"] == '299 moestro "fields were ignored: frobnicate"', path


def test_the_events_of_a_message_are_named(fake):
    reply = call(fake, "POST", "/v1/messages", {"messages": MESSAGES, "max_tokens": 2, "stream": True})
    names = [line[7:] for line in reply.body.decode().splitlines() if line.startswith("event: ")]
    assert names == [event["type"] for event in reply.events]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert reply.events[0]["message"]["usage"]["input_tokens"] > 0
    assert reply.headers["content-type"].startswith("text/event-stream")


# --- requests without an answer, and requests for nothing


def test_input_tokens_are_those_of_the_response(place):
    body = {"model": "moestro-demo", "instructions": "Be short.", "input": TEXT}
    counted = call(place, "POST", "/v1/responses/input_tokens", body)
    answered = call(place, "POST", "/v1/responses", body | {"max_output_tokens": 1})
    assert counted.json == {"object": "response.input_tokens", "input_tokens": answered.json["usage"]["input_tokens"]}
    named = call(place, "POST", "/v1/responses/input_tokens", body | {"input": [{"content": TEXT, "zzz": 1}]})
    assert named.headers["warning"] == '299 moestro "fields were ignored: input[0].zzz"'
    refused = call(place, "POST", "/v1/responses/input_tokens", body | {"previous_response_id": "resp_1"})
    assert (refused.status, refused.json["error"]["param"]) == (400, "previous_response_id")


def test_openais_client_counts_input_tokens(openai_client):
    counted = openai_client.responses.input_tokens.count(model="moestro-demo", input=TEXT)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens > 3


@pytest.mark.parametrize(
    "given", ["", [], [{"role": "user", "content": ""}], [{"role": "user", "content": []}], [{"type": "reasoning"}]]
)
@pytest.mark.parametrize("instructions", [None, "Be short."])
def test_an_empty_input_is_refused_and_generates_nothing(place, given, instructions):
    body = {"model": "moestro-demo", "instructions": instructions, "input": given}
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        reply = call(place, "POST", path, body)
        assert (reply.status, reply.json["error"]["param"]) == (400, "input"), reply.body
        assert "is empty" in reply.json["error"]["message"]
