"""Cases of the `anthropic` client: messages, streams, tools, structured output and counts of tokens."""

from __future__ import annotations

from functools import partial

import anthropic
from client_cases import MAX_TOKENS, PROMPT, Place, case, refusal, run_cases
from weather import Sky, Weather

MESSAGES = [{"role": "user", "content": PROMPT}]
TOOL = {"name": "weather", "description": "Tell the weather.", "input_schema": Weather.model_json_schema()}
ANY_ONE = {"type": "any", "disable_parallel_tool_use": True}


def client(place: Place) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=place.root, api_key="none", max_retries=0, timeout=120)


@case("messages")
def messages(place: Place) -> None:
    answer = client(place).messages.create(model=place.model, messages=MESSAGES, max_tokens=24, system="Be brief.")
    assert answer.content[0].text
    assert answer.usage.output_tokens <= 24


@case("messages, streamed")
def streamed(place: Place) -> None:
    with client(place).messages.stream(model=place.model, messages=MESSAGES, max_tokens=24) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_message().content[0].text == text


@case("tools: auto")
def tools_auto(place: Place) -> None:
    answer = client(place).messages.create(model=place.model, messages=MESSAGES, tools=[TOOL], max_tokens=MAX_TOKENS)
    assert answer.content


@case("tools: any, and the result sent back")
def tools_any(place: Place) -> None:
    fields = {"model": place.model, "tools": [TOOL], "max_tokens": MAX_TOKENS}
    answer = client(place).messages.create(**fields, messages=MESSAGES, tool_choice=ANY_ONE)
    [use] = [block for block in answer.content if block.type == "tool_use"]
    Weather.model_validate(use.input)
    assert answer.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "It rains."}
    history = [*MESSAGES, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    last = client(place).messages.create(**fields, messages=history, tool_choice={"type": "none"})
    assert last.content[0].text


@case("tools: any, streamed")
def tools_streamed(place: Place) -> None:
    with client(place).messages.stream(
        model=place.model, messages=MESSAGES, tools=[TOOL], tool_choice=ANY_ONE, max_tokens=MAX_TOKENS
    ) as stream:
        kinds = {event.type for event in stream}
        [use] = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert "input_json" in kinds
    Weather.model_validate(use.input)


@case("parse into a pydantic model")
def parse(place: Place) -> None:
    answer = client(place).messages.parse(
        model=place.model, messages=MESSAGES, output_format=Sky, max_tokens=MAX_TOKENS
    )
    assert isinstance(answer.parsed_output, Sky)


@case("count_tokens")
def count_tokens(place: Place) -> None:
    counted = client(place).messages.count_tokens(model=place.model, messages=MESSAGES).input_tokens
    answer = client(place).messages.create(model=place.model, messages=MESSAGES, max_tokens=1)
    assert counted == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


@case("an error has its class and its field")
def error(place: Place) -> None:
    ask = partial(client(place).messages.create, model=place.model, messages=MESSAGES, max_tokens=0)
    assert "max_tokens must be" in str(refusal(anthropic.BadRequestError, ask))


run_cases()
