"""The process of a server that belongs to its parent (`moestro.offline.server`). It is no verb.

Standard output carries reports, one a line. The end of standard input is the end of the parent, and stops the server.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading

import msgspec
from cyclopts import CycloptsError

from moestro.cli.app import app
from moestro.cli.serve import run_serve, serve  # noqa: F401 the import registers the verb
from moestro.config.serve_settings import ServeSettings
from moestro.config.user_files import accept_user_code
from moestro.config.vllm_flags import without_vllm_flags
from moestro.errors import ConfigError, MoestroError
from moestro.offline.server import ServerReport

_STDIN, _STDOUT, _STDERR = 0, 1, 2


def main() -> None:
    """Serve with the settings of the command line until the parent ends or closes standard input."""
    reports = os.dup(_STDOUT)  # Engines do not inherit it.
    os.dup2(_STDERR, _STDOUT)
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    try:
        _run(reports, sys.argv[1:])
    except CycloptsError as error:
        _report(reports, ServerReport(error=" ".join(str(error).split()), is_config=True))
        sys.exit(2)
    except MoestroError as error:
        _report(reports, ServerReport(error=str(error), is_config=isinstance(error, ConfigError)))
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def _run(reports: int, arguments: list[str]) -> None:
    accept_user_code()
    _, bound, _ = app.parse_args(["serve", *without_vllm_flags(arguments)], print_error=False, exit_on_error=False)
    settings = bound.arguments.get("settings", ServeSettings())
    run_serve(settings, lambda url: _report(reports, ServerReport(url=url)))


def _report(reports: int, report: ServerReport) -> None:
    with contextlib.suppress(OSError):  # The parent has ended, and this process follows.
        os.write(reports, msgspec.json.encode(report) + b"\n")


def _stop_with_parent() -> None:
    while os.read(_STDIN, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
