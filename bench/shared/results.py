"""The command line and the result file that benches share."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec

from moestro.config.run_record import RunRecord


def make_parser(about: str | None) -> argparse.ArgumentParser:
    """A parser with --json, whose help is the script's docstring."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="store the result here")
    return parser


def save(path: Path | None, conditions: RunRecord, figures: Mapping[str, object]) -> None:
    """Store figures and the conditions under which they hold. None stores nothing."""
    if path is not None:
        result = {"conditions": msgspec.to_builtins(conditions), **figures}
        path.write_text(json.dumps(result, indent=1) + "\n")


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": round(statistics.median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}


def package_version(python: Path | str, package: str) -> str:
    """The version of a package in the environment of another interpreter; empty if it is not installed."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
