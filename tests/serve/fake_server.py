"""The real front door before fake ranks; the first argument is the demo model's directory, the rest are flags."""

from __future__ import annotations

import sys
from pathlib import Path

import moestro.serve.restarts
import moestro.serve.server
from moestro.cli import main

if __name__ == "__main__":
    real = moestro.serve.server.serve
    command = (sys.executable, str(Path(__file__).with_name("fake_rank.py")))
    moestro.serve.server.serve = lambda settings, access: real(settings, access, command)
    moestro.serve.restarts.FIRST_DELAY_S = 0.02
    moestro.serve.restarts.STEADY_S = 0.0
    main(["serve", *sys.argv[1:]])
