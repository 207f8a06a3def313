"""Imitated NCCL between processes that each have another imitated accelerator: gloo carries its bytes."""

from __future__ import annotations

import pytest


def imitate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch find NCCL."""
