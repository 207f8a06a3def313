"""Cases of the `openai` client: chats, tools, structured output, completions and responses."""

from __future__ import annotations

import json
from functools import partial

import openai
from client_cases import MAX_TOKENS, PROMPT, Place, case, refusal, run_cases
from weather import Weather

MESSAGES = [{"role": "user", "content": PROMPT}]
SCHEMA = Weather.model_json_schema()
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tell the weather.", "parameters": SCHEMA}}
RESPONSE_TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}


def client(place: Place) -> openai.OpenAI:
    return openai.OpenAI(base_url=place.url, api_key="none", max_retries=0, timeout=120)


@case("models")
def models(place: Place) -> None:
    assert place.model in [each.id for each in client(place).models.list()]


@case("chat")
def chat(place: Place) -> None:
    answer = client(place).chat.completions.create(model=place.model, messages=MESSAGES, max_tokens=24)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 24


@case("chat, streamed")
def chat_streamed(place: Place) -> None:
    fields = {"model": place.model, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = client(place).chat.completions.create(**fields).choices[0].message.content
    options = {"include_usage": True}
    chunks = list(client(place).chat.completions.create(**fields, stream=True, stream_options=options))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole, (text, whole)
    assert chunks[-1].usage.completion_tokens > 0


@case("completion with log probabilities")
def completion(place: Place) -> None:
    answer = client(place).completions.create(
        model=place.model, prompt="def close(", max_tokens=8, logprobs=2, echo=True
    )
    assert answer.choices[0].text.startswith("def close(")
    assert len(answer.choices[0].logprobs.tokens) == len(answer.choices[0].logprobs.token_logprobs)


@case("tools: auto")
def tools_auto(place: Place) -> None:
    answer = client(place).chat.completions.create(
        model=place.model, messages=MESSAGES, tools=[TOOL], max_tokens=MAX_TOKENS
    )
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


@case("tools: required")
def tools_required(place: Place) -> None:
    answer = client(place).chat.completions.create(
        model=place.model, messages=MESSAGES, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    )
    [call] = answer.choices[0].message.tool_calls
    Weather.model_validate_json(call.function.arguments)
    assert answer.choices[0].finish_reason == "tool_calls"


@case("tools: named, and the result sent back")
def tools_named(place: Place) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = client(place).chat.completions.create(
        model=place.model, messages=MESSAGES, tools=[TOOL], tool_choice=choice
    )
    message = answer.choices[0].message
    [call] = message.tool_calls
    Weather.model_validate_json(call.function.arguments)
    history = [*MESSAGES, message, {"role": "tool", "tool_call_id": call.id, "content": "It rains."}]
    last = client(place).chat.completions.create(
        model=place.model, messages=history, tools=[TOOL], tool_choice="none", max_tokens=24
    )
    assert last.choices[0].message.content


@case("tools: required, streamed")
def tools_streamed(place: Place) -> None:
    with client(place).chat.completions.stream(
        model=place.model, messages=MESSAGES, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        kinds = {event.type for event in stream}
        [call] = stream.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.delta" in kinds
    Weather.model_validate_json(call.function.arguments)


@case("parse into a pydantic model")
def parse(place: Place) -> None:
    answer = client(place).chat.completions.parse(model=place.model, messages=MESSAGES, response_format=Weather)
    assert isinstance(answer.choices[0].message.parsed, Weather)


@case("parse, streamed")
def parse_streamed(place: Place) -> None:
    with client(place).chat.completions.stream(model=place.model, messages=MESSAGES, response_format=Weather) as stream:
        answer = stream.get_final_completion()
    assert isinstance(answer.choices[0].message.parsed, Weather)


@case("parse of a tool's arguments")
def parse_tools(place: Place) -> None:
    tool = openai.pydantic_function_tool(Weather, name="weather")
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = client(place).chat.completions.parse(
        model=place.model, messages=MESSAGES, tools=[tool], tool_choice=choice
    )
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)


@case("responses")
def responses(place: Place) -> None:
    answer = client(place).responses.create(model=place.model, input=PROMPT, max_output_tokens=24)
    assert answer.output_text


@case("responses, streamed")
def responses_streamed(place: Place) -> None:
    with client(place).responses.stream(model=place.model, input=PROMPT, max_output_tokens=24) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text


@case("responses: a tool, and its result sent back")
def responses_tools(place: Place) -> None:
    fields = {"model": place.model, "tools": [RESPONSE_TOOL], "parallel_tool_calls": False}
    answer = client(place).responses.create(**fields, input=PROMPT, tool_choice="required")
    [call] = [item for item in answer.output if item.type == "function_call"]
    Weather.model_validate_json(call.arguments)
    items = [{"role": "user", "content": PROMPT}, *answer.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": json.dumps({"rain": True})})
    last = client(place).responses.create(**fields, input=items, tool_choice="none", max_output_tokens=24)
    assert last.output_text


@case("responses: parse into a pydantic model")
def responses_parse(place: Place) -> None:
    answer = client(place).responses.parse(model=place.model, input=PROMPT, text_format=Weather)
    assert isinstance(answer.output_parsed, Weather)


@case("an error has its class and its field")
def error(place: Place) -> None:
    create = client(place).chat.completions.create
    ask = partial(create, model=place.model, messages=MESSAGES, temperature=9)
    assert refusal(openai.BadRequestError, ask).param == "temperature"


run_cases()
