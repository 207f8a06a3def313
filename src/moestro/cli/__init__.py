"""The verbs of `moestro`, a file each. A verb imports its room when it runs, so that `moestro --help` is fast."""

from __future__ import annotations

from moestro.cli.main import main

__all__ = ["main"]
