"""The answer that the cases ask for: a model of 8 million parameters ends it, because every part is bounded."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Weather(BaseModel):
    """Weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Ulm", "Kyoto"]
    degrees: int = Field(ge=-40, le=50)
    note: str = Field(max_length=12)


class Sky(BaseModel):
    """Sky over a city, without a number or a text: Anthropic's client removes their bounds from a schema."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Ulm", "Kyoto"]
    sky: Literal["sun", "rain", "snow"]
    is_cold: bool
