"""Cases of `litellm`: its providers for OpenAI's, vLLM's and Anthropic's APIs."""

from __future__ import annotations

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # Otherwise it loads a list of prices from the network.

import litellm
from client_cases import PROMPT, Place, case, refusal, run_cases
from weather import Weather

MESSAGES = [{"role": "user", "content": PROMPT}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": Weather.model_json_schema()}}
PROVIDERS = ("openai", "hosted_vllm")


def ask(place: Place, provider: str = "hosted_vllm", **fields: object):
    common = {"api_base": place.url, "api_key": "none", "messages": MESSAGES, "num_retries": 0, "temperature": 0}
    return litellm.completion(model=f"{provider}/{place.model}", **{**common, **fields})


@case("chat: openai/ and hosted_vllm/")
def chat(place: Place) -> None:
    texts = {ask(place, provider, max_tokens=12).choices[0].message.content for provider in PROVIDERS}
    assert len(texts) == 1, texts


@case("chat, streamed")
def streamed(place: Place) -> None:
    whole = ask(place, max_tokens=12).choices[0].message.content
    pieces = ask(place, max_tokens=12, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole


@case("text completion")
def text(place: Place) -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{place.model}", prompt="def close(", max_tokens=12,
        api_base=place.url, api_key="none",
    )  # fmt: skip
    assert answer.choices[0].text


@case("anthropic/, by /v1/messages")
def messages(place: Place) -> None:
    assert ask(place, "anthropic", api_base=place.root, max_tokens=12).choices[0].message.content


@case("tools: required")
def tools(place: Place) -> None:
    for provider in PROVIDERS:
        answer = ask(place, provider, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
        [call] = answer.choices[0].message.tool_calls
        # litellm removes `additionalProperties` for vLLM, so that other keys are allowed.
        Weather.model_validate_json(call.function.arguments, extra="ignore")


@case("response_format with a pydantic model")
def structured(place: Place) -> None:
    for provider in PROVIDERS:
        content = ask(place, provider, response_format=Weather).choices[0].message.content
        Weather.model_validate(json.loads(content))


@case("too long a prompt is a ContextWindowExceededError")
def too_long(place: Place) -> None:
    refusal(litellm.ContextWindowExceededError, lambda: ask(place, "openai", max_tokens=10**6))


run_cases()
