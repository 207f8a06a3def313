"""An environment for each client: made once by pip or npm, and kept."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from shared.results import package_version

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Client:
    """A client and its packages.

    Attributes:
        packages: Requirements for pip; the first one names the client.
        script: File of its cases in `cases/`; empty for a client with a command line.
    """

    name: str
    packages: tuple[str, ...]
    script: str = ""


VERCEL = Client("ai (Vercel)", ("ai", "@ai-sdk/openai-compatible"))
SCRIPTED = (
    Client("openai", ("openai",), "openai_client.py"),
    Client("anthropic", ("anthropic",), "anthropic_client.py"),
    Client("litellm", ("litellm", "mcp"), "litellm_client.py"),
    Client("langchain-openai", ("langchain-openai",), "langchain_client.py"),
    Client("pydantic-ai", ("pydantic-ai-slim[openai]",), "pydantic_ai_client.py"),
    Client("instructor", ("instructor",), "instructor_client.py"),
)
AIPERF = Client("aiperf", ("aiperf",))
GUIDELLM = Client("guidellm", ("guidellm",))
LM_EVAL = Client("lm-eval", ("lm-eval[api]", "transformers"))


def own_environment() -> dict[str, str]:
    """Return the variables for a client's process, without what leads to this checkout's code."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def python_of(client: Client, work: Path) -> Path:
    """Return the interpreter of a client's environment below `work`; the first call installs its packages."""
    directory = work / client.packages[0].partition("[")[0]
    python = directory / "bin" / "python"
    if not (directory / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *client.packages], check=True)
        (directory / "complete").touch()
    return python


def vercel_directory(work: Path) -> Path:
    """Return the directory with Vercel's packages and the script of their cases; the first call installs them."""
    directory = work / "vercel"
    directory.mkdir(parents=True, exist_ok=True)
    for file in (HERE / "vercel").iterdir():
        shutil.copy(file, directory)
    if not (directory / "node_modules").exists():
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--silent"], cwd=directory, check=True)
    return directory


def version_of(client: Client, work: Path) -> str:
    """Return the version of a client below `work`; the first call installs it."""
    if client is VERCEL:
        modules = vercel_directory(work) / "node_modules"
        packages = [modules / package / "package.json" for package in client.packages]
        return ", ".join(json.loads(package.read_text())["version"] for package in packages)
    return package_version(python_of(client, work), client.packages[0].partition("[")[0])
