"""The real `moestro serve`, whose workers run on imitated accelerators; the arguments are its flags."""

from __future__ import annotations

import sys
from pathlib import Path

from replaced import replace_names

from moestro.cli import main
from moestro.server import server

COMMAND = (sys.executable, str(Path(__file__)))

if __name__ == "__main__":
    real = server.serve
    rank = (sys.executable, str(Path(__file__).with_name("imitated_rank.py")))
    replace_names(server, serve=lambda settings: real(settings, rank))
    main(["serve", "--device", "cuda", *sys.argv[1:]])
