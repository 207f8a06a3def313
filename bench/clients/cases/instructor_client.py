"""Cases of `instructor` in three modes: tools, a JSON object, and a JSON schema."""

from __future__ import annotations

import instructor
import openai
from client_cases import MAX_TOKENS, PROMPT, Place, case, run_cases
from pydantic import BaseModel
from weather import Weather

MESSAGES = [{"role": "user", "content": PROMPT}]


class AnyObject(BaseModel):
    """Any JSON object: this mode tells the schema to the model alone, and the demo model cannot read it.

    A free object has no bounds. With the seed of `ask` the demo model ends one.
    """

    city: object = None


def ask(place: Place, mode: instructor.Mode, wanted: type[BaseModel]) -> BaseModel:
    with openai.OpenAI(base_url=place.url, api_key="none", max_retries=0, timeout=120) as client:
        return instructor.from_openai(client, mode=mode).chat.completions.create(
            model=place.model, messages=MESSAGES, response_model=wanted, max_retries=0, max_tokens=MAX_TOKENS, seed=1
        )


@case("TOOLS")
def tools(place: Place) -> None:
    assert isinstance(ask(place, instructor.Mode.TOOLS, Weather), Weather)


@case("JSON, of an object without a schema")
def json_object(place: Place) -> None:
    assert isinstance(ask(place, instructor.Mode.JSON, AnyObject), AnyObject)


@case("JSON_SCHEMA")
def json_schema(place: Place) -> None:
    assert isinstance(ask(place, instructor.Mode.JSON_SCHEMA, Weather), Weather)


run_cases()
