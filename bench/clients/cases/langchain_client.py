"""Cases of `langchain-openai`: chats, bound tools and structured output."""

from __future__ import annotations

from typing import Any, Literal

from client_cases import PROMPT, Place, case, run_cases
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from weather import Weather


@tool
def weather_in(city: Literal["Paris", "Ulm", "Kyoto"]) -> str:
    """Tell the weather of a city."""
    return f"It rains in {city}."


def model(place: Place, **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=place.url, api_key="none", model=place.model, max_retries=0, timeout=120, **fields)


@case("invoke")
def invoke(place: Place) -> None:
    answer = model(place, max_tokens=24).invoke(PROMPT)
    assert answer.content
    assert answer.usage_metadata["output_tokens"] > 0


@case("stream")
def stream(place: Place) -> None:
    assert "".join(chunk.content for chunk in model(place, max_tokens=24).stream(PROMPT))


@case("bind_tools: auto")
def bind_auto(place: Place) -> None:
    answer = model(place, max_tokens=64).bind_tools([weather_in]).invoke(PROMPT)
    assert answer.content or answer.tool_calls


@case("bind_tools: required, and the result sent back")
def bind_required(place: Place) -> None:
    bound = model(place).bind_tools([weather_in], tool_choice="required", parallel_tool_calls=False)
    answer = bound.invoke(PROMPT)
    [call] = answer.tool_calls
    result = weather_in.invoke(call)
    assert isinstance(result, ToolMessage)
    last = model(place, max_tokens=24).invoke([HumanMessage(PROMPT), answer, result])
    assert last.content


@case("bind_tools: required, streamed")
def bind_streamed(place: Place) -> None:
    bound = model(place).bind_tools([weather_in], tool_choice="weather_in")
    whole = None
    for chunk in bound.stream(PROMPT):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["name"] == "weather_in"
    assert whole.tool_calls[0]["args"]["city"] in ("Paris", "Ulm", "Kyoto")


@case("with_structured_output: json_schema")
def by_schema(place: Place) -> None:
    assert isinstance(model(place).with_structured_output(Weather, method="json_schema").invoke(PROMPT), Weather)


@case("with_structured_output: function_calling")
def by_call(place: Place) -> None:
    assert isinstance(model(place).with_structured_output(Weather, method="function_calling").invoke(PROMPT), Weather)


@case("use_responses_api")
def by_responses(place: Place) -> None:
    assert model(place, max_tokens=24, use_responses_api=True).invoke(PROMPT).text


run_cases()
