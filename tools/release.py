"""Builds the packages, installs each into an empty environment, and runs there what its users run first.

    python tools/release.py [--out dist] [--only light|serve|integrations]

An environment gets what `pip install` alone brings, within the versions of constraints.txt: the wheel and the sdist
without extras (`moestro route`, `sim`, `place`), the wheel with `serve` (a server that answers and ends), and
`moestro-vllm`, `moestro-sglang` and `moestro-verl` beside Moestro's wheel. The exit status is 1 if one of them fails.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
INTEGRATIONS = ("vllm", "sglang", "verl")
_START_S = 120.0
_LIGHT = (
    ("--version",),
    ("route", "--engine", "http://127.0.0.1:9", "--print-config"),
    ("sim", str(ROOT / "examples" / "orders_under_load.toml")),
    ("place", "--help"),
)


class Environment:
    """An empty environment with `packages` in it, and nothing that they do not bring.

    Args:
        directory: Where the environment is made.
        packages: Requirements as `pip install` takes them.
    """

    def __init__(self, directory: Path, *packages: str) -> None:
        venv.create(directory, with_pip=True)
        self._bin = directory / "bin"
        pip = [self._bin / "python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
        subprocess.run([*pip, *packages], check=True)

    def run(self, *arguments: str) -> str:
        """Run `moestro` with `arguments` away from the sources.

        Returns:
            Standard output.

        Raises:
            subprocess.CalledProcessError: The exit status is not 0.
        """
        command = [self._bin / "moestro", *arguments]
        done = subprocess.run(command, check=True, cwd=self._bin, stdout=subprocess.PIPE, text=True)
        return done.stdout

    def python(self, code: str) -> None:
        """Run `code` in the environment."""
        subprocess.run([self._bin / "python", "-c", code], check=True, cwd=self._bin)

    def serve(self) -> None:
        """Start a server, get one answer, and end the server by SIGTERM; its exit status must be 0."""
        with subprocess.Popen(
            [self._bin / "moestro", "serve", "--port", "0"],
            cwd=self._bin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as server:
            try:
                url = _url_of(server)
                body = {"model": "moestro-demo", "prompt": "def read_file(path):\n", "max_tokens": 8}
                request = urllib.request.Request(
                    f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
                )
                with urllib.request.urlopen(request, timeout=60) as response:
                    answer = json.load(response)
                assert answer["usage"]["completion_tokens"] == 8, answer
            finally:
                server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0, server.returncode


def _url_of(server: subprocess.Popen[str]) -> str:
    """Return the address in the banner of `server`."""
    assert server.stdout is not None
    end = time.monotonic() + _START_S
    for line in server.stdout:
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            return found[0]
        if time.monotonic() > end:
            break
    raise SystemExit("the server printed no address")


def build(out: Path) -> dict[str, Path]:
    """Build sdist and wheel of Moestro, and the wheels of its integrations.

    Returns:
        The files by `wheel`, `sdist` and the names of integrations.
    """
    for old in [*out.glob("moestro-*"), *out.glob("moestro_*")]:
        old.unlink()
    command = [sys.executable, "-m", "build", "--outdir", str(out)]
    subprocess.run([*command, str(ROOT)], check=True)
    for integration in INTEGRATIONS:
        subprocess.run([*command, "--wheel", str(ROOT / "integrations" / integration)], check=True)
    patterns = {"wheel": "moestro-*.whl", "sdist": "moestro-*.tar.gz"}
    patterns |= {name: f"moestro_{name}-*.whl" for name in INTEGRATIONS}
    return {name: next(out.glob(pattern)) for name, pattern in patterns.items()}


def _try_light(directory: Path, files: dict[str, Path]) -> None:
    for kind in ("wheel", "sdist"):
        environment = Environment(directory / kind, str(files[kind]))
        for arguments in _LIGHT:
            environment.run(*arguments)


def _try_serve(directory: Path, files: dict[str, Path]) -> None:
    Environment(directory / "serve", f"moestro[serve] @ {files['wheel'].as_uri()}").serve()


def _try_integrations(directory: Path, files: dict[str, Path]) -> None:
    wheels = [str(files[name]) for name in ("wheel", *INTEGRATIONS)]
    environment = Environment(directory / "integrations", *wheels)
    environment.python("import moestro_vllm.plugin; moestro_vllm.plugin.register()")
    environment.python("import moestro_sglang.plugin; moestro_sglang.plugin.register()")
    environment.python("import moestro_verl; moestro_verl.Router({'a': None}, {}).acquire_server('t', prompt_ids=[1])")


TRIALS: dict[str, Callable[[Path, dict[str, Path]], None]] = {
    "light": _try_light,
    "serve": _try_serve,
    "integrations": _try_integrations,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="directory of the packages (default: dist)")
    parser.add_argument("--only", choices=TRIALS, help="try this installation alone")
    chosen = parser.parse_args()
    files = build(chosen.out.resolve())
    for name, trial in TRIALS.items():
        if chosen.only in {None, name}:
            with tempfile.TemporaryDirectory() as directory:
                trial(Path(directory), files)
            print(f"{name}: works")


if __name__ == "__main__":
    main()
