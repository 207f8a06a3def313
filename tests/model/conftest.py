from __future__ import annotations

from parity.conftest import checkpoint

__all__ = ["checkpoint"]
