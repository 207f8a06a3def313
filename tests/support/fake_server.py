"""The real API server before fake ranks; the first argument is the demo model's directory, the rest are flags."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from moestro.cli import main
from moestro.core.clock import NS_PER_S
from moestro.server import server
from moestro.server.processes import watchdog

STOPPED_S = "FAKE_STOPPED_S"  # variable of the environment: seconds until a stopped engine is replaced

if __name__ == "__main__":
    from replaced import replace_names

    real = server.serve
    command = (sys.executable, str(Path(__file__).with_name("fake_rank.py")))
    replace_names(server, serve=lambda settings: real(settings, command))
    replace_names(watchdog, FIRST_DELAY_S=0.02, STEADY_S=0.0)
    if STOPPED_S in os.environ:
        replace_names(watchdog, STOPPED_NS=int(os.environ[STOPPED_S]) * NS_PER_S)
    main(["serve", *sys.argv[1:]])
