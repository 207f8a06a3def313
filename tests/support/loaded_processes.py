"""Processes of `multiprocessing` that have loaded torch and transformers: forks of one that no test has used."""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from parity import tiny

from moestro.model.load import load_ahead

LOADED = multiprocessing.get_context("forkserver")
LOADED.set_forkserver_preload(["moestro.worker.network_rank"])


def send_what_reading_loads(directory: Path, pipe: Connection) -> None:
    """Read a network, and report the modules of transformers that this loads beside those of its family."""
    load_ahead()
    before = set(sys.modules)
    tiny.load(directory)
    pipe.send([name for name in set(sys.modules) - before if name.startswith("transformers.") and "models" not in name])
