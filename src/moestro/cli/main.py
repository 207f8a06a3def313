"""The entry point of `moestro`, and the form of its errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module

from moestro.cli.app import app
from moestro.cli.loading import uncollected
from moestro.cli.short_help import choose_help
from moestro.config.user_code import accept_user_code
from moestro.config.vllm_flags import without_vllm_flags
from moestro.errors import ConfigError, MoestroError

VERBS = (
    *("bench", "calibrate", "chat", "explain", "place", "plan", "replay", "repro", "route", "run-batch", "serve"),
    "sim",
)


def register(verbs: Iterable[str] = VERBS) -> None:
    """Add verbs to the command. Each has a file here, whose settings take up to half a second to import."""
    with uncollected():
        for verb in verbs:
            import_module(f"moestro.cli.{verb.replace('-', '_')}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the `moestro` command. The exit status is 2 for an error in the settings and 1 for any other failure."""
    accept_user_code()
    given = sys.argv[1:] if arguments is None else arguments
    register(given[:1] if given[:1] and given[0] in VERBS else VERBS)
    try:
        if given[:1] == ["serve"]:
            given = ["serve", *without_vllm_flags(given[1:])]
        app(choose_help(app, given))
    except MoestroError as error:
        print(f"moestro: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except BrokenPipeError:  # a reader such as `head` closed the pipe; without this, Python reports it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
