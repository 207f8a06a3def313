"""The real API server before fake ranks; the first argument is the demo model's directory, the rest are flags."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import moestro.server.processes.watchdog
import moestro.server.server
from moestro.cli import main
from moestro.core.clock import NS_PER_S

STOPPED_S = "FAKE_STOPPED_S"  # variable of the environment: seconds until a stopped engine is replaced

if __name__ == "__main__":
    real = moestro.server.server.serve
    command = (sys.executable, str(Path(__file__).with_name("fake_rank.py")))
    moestro.server.server.serve = lambda settings: real(settings, command)
    moestro.server.processes.watchdog.FIRST_DELAY_S = 0.02
    moestro.server.processes.watchdog.STEADY_S = 0.0
    if STOPPED_S in os.environ:
        moestro.server.processes.watchdog.STOPPED_NS = int(os.environ[STOPPED_S]) * NS_PER_S
    main(["serve", *sys.argv[1:]])
