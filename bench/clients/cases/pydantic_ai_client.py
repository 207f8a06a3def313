"""Cases of `pydantic-ai`: agents with text, tools, and both ways of structured output."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from client_cases import MAX_TOKENS, PROMPT, Place, case, run_cases
from pydantic_ai import Agent, NativeOutput, RunContext, Tool, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition
from weather import Weather


def agent(place: Place, **fields: Any) -> Agent:
    provider = OpenAIProvider(base_url=place.url, api_key="none")
    settings = {"max_tokens": MAX_TOKENS, "parallel_tool_calls": False}
    return Agent(OpenAIChatModel(place.model, provider=provider), model_settings=settings, retries=0, **fields)


@case("agent with text")
def text(place: Place) -> None:
    assert agent(place).run_sync(PROMPT).output


@case("agent with text, streamed")
def streamed(place: Place) -> None:
    async def run() -> str:
        async with agent(place).run_stream(PROMPT) as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    assert asyncio.run(run())


@case("output by a tool")
def by_tool(place: Place) -> None:
    assert isinstance(agent(place, output_type=ToolOutput(Weather)).run_sync(PROMPT).output, Weather)


@case("output by a JSON schema")
def by_schema(place: Place) -> None:
    assert isinstance(agent(place, output_type=NativeOutput(Weather)).run_sync(PROMPT).output, Weather)


@case("loop: a tool is called, then the output")
def loop(place: Place) -> None:
    called: list[str] = []

    async def until_called(_context: RunContext, tool: ToolDefinition) -> ToolDefinition | None:
        """Offer the tool once, because a model of this size does not know when to stop."""
        return None if called else tool

    def look(city: Literal["Paris", "Ulm", "Kyoto"]) -> str:
        """Tell the weather of a city."""
        called.append(city)
        return f"It rains in {city}."

    looking = agent(place, output_type=ToolOutput(Weather), tools=[Tool(look, prepare=until_called)])
    assert isinstance(looking.run_sync(PROMPT).output, Weather)


run_cases()
