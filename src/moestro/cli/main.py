"""The entry point: all verbs, and what an error looks like to the operator."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from moestro.cli import bench, calibrate, explain, replay, repro, route, serve, sim  # noqa: F401 each registers its verb
from moestro.cli.app import app
from moestro.config.user_code import accept_user_code
from moestro.errors import ConfigError, MoestroError


def main(arguments: Sequence[str] | None = None) -> None:
    """The `moestro` command: exit status 2 for what the operator can put right, 1 for what failed."""
    accept_user_code()
    try:
        app(arguments)
    except MoestroError as error:
        print(f"moestro: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except BrokenPipeError:  # whoever read our output, `head` say, has enough; Python would complain again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
