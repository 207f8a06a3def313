"""The real `moestro serve`, whose workers run on imitated accelerators; the arguments are its flags."""

from __future__ import annotations

import sys
from pathlib import Path

import moestro.server.server
from moestro.cli import main

COMMAND = (sys.executable, str(Path(__file__)))

if __name__ == "__main__":
    real = moestro.server.server.serve
    rank = (sys.executable, str(Path(__file__).with_name("imitated_rank.py")))
    moestro.server.server.serve = lambda settings: real(settings, rank)
    main(["serve", "--device", "cuda", *sys.argv[1:]])
