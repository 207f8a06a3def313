"""Policies and their settings as an operator writes them."""

from __future__ import annotations

from collections.abc import Mapping


def policy_text(name: str, settings: Mapping[str, float] | None = None) -> str:
    """`sjf:theta_age_s=5.0`."""
    return name + (":" if settings else "") + ",".join(f"{key}={value}" for key, value in (settings or {}).items())
