"""The entry point of `moestro`, and the form of its errors."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module

from cyclopts import App
from cyclopts.help import DefaultFormatter, HelpEntry, HelpPanel
from rich.console import Console, ConsoleOptions

from moestro.cli.app import app, uncollected
from moestro.config.user_files import accept_user_code
from moestro.config.vllm_flags import without_vllm_flags
from moestro.errors import ConfigError, MoestroError

# Short help: `--help` of a verb with many flags shows those that operators set, and `--help-all` shows all.

HELP_ALL = "--help-all"
_ALL_POLICIES = f" ({HELP_ALL} describes each.)"

# The flags of a verb's short help. Every other flag is in `--help-all`, docs/flags.md and `--print-config`.
EVERYDAY = {
    "serve": (
        *("--model", "--tokenizer", "--dtype", "--device", "--load-format"),
        *("--max-model-len", "--kv-offloading-size", "--gpu-memory-utilization", "--kv-cache-memory-bytes"),
        *("--max-num-seqs", "--max-num-batched-tokens", "--max-num-queued-reqs"),
        *("--scheduling-policy", "--share-policy", "--mode", "--step-policy"),
        *("--chat-template", "--tool-call-parser", "--reasoning-parser", "--default-chat-template-kwargs"),
        *("--host", "--port", "--api-key", "--served-model-name", "--log-level", "--record", "--shutdown-timeout"),
        *(
            "--ssl-certfile",
            "--ssl-keyfile",
            "--admin-port",
            "--admin-api-key",
            "--users-are-clients",
            "--api-key-file",
        ),
        *("--engines", "--route-policy", "--kv-events-config", "--launcher"),
        *("--attention", "--experts", "--expert-copies", "--num-redundant-experts"),
        *("--placement-policy", "--placement-interval", "--init-expert-location", "--otlp-traces-endpoint"),
        *("--max-requests-per-minute-per-key", "--max-concurrent-requests-per-key"),
        *("--config", "--print-config"),
    ),
    "route": (
        *("--engine", "--engine-api-key", "--health-path", "--kv-events", "--ext-proc"),
        *("--engine-file", "--engine-dns", "--service-discovery", "--selector", "--api-key-file"),
        *("--route-policy", "--tokenizer", "--block-size"),
        *("--max-retries", "--first-byte-timeout"),
        *("--host", "--port", "--api-key", "--log-level", "--record", "--shutdown-timeout"),
        *("--ssl-certfile", "--ssl-keyfile", "--engine-ca-certs", "--admin-port", "--admin-api-key"),
        *("--otlp-traces-endpoint",),
        *("--max-requests-per-minute-per-key", "--max-concurrent-requests-per-key"),
        *("--config", "--print-config"),
    ),
}


class ShortHelp(DefaultFormatter):
    """Formats the panels of one verb's help with its everyday flags alone, and policies by name alone.

    Args:
        flags: Long names of the flags that are shown.
    """

    def __init__(self, flags: tuple[str, ...]) -> None:
        super().__init__()
        self._flags = frozenset(flags)

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print `panel`, or nothing if it has no everyday flag."""
        shown = [_shortened(entry) for entry in panel.entries if self._flags.intersection(entry.names)]
        if shown:
            super().__call__(console, options, panel.copy(entries=shown))


def _shortened(entry: HelpEntry) -> HelpEntry:
    """Return `entry` with the names of policies in place of their descriptions, if it has a list of policies."""
    from rich.markdown import Markdown  # help alone needs it, and it takes a fifth of the time of all imports here

    text = getattr(getattr(entry.description, "primary_renderable", None), "markup", None)
    if text is None or "\n\n* " not in text:
        return entry
    summary, *policies = text.split("\n\n* ")
    names = ", ".join(policy.partition(":")[0] for policy in policies)
    entry.description.primary_renderable = Markdown(f"{summary} One of {names}.{_ALL_POLICIES}")
    return entry


def choose_help(app: App, given: Sequence[str]) -> list[str]:
    """Let `--help` show the flags of `EVERYDAY`, or all flags if the command line has `--help-all`.

    Args:
        app: The command with its verbs.
        given: Arguments of the command line.

    Returns:
        The arguments, with `--help` in place of `--help-all`.
    """
    is_short = HELP_ALL not in given
    for verb in EVERYDAY.keys() & set(given[:1]):
        flags = EVERYDAY[verb]
        more = f"These are the flags that operators set. moestro {verb} {HELP_ALL} lists all flags."
        app[verb].help_formatter = ShortHelp(flags) if is_short else None
        app[verb].help_epilogue = more if is_short else None
    return ["--help" if argument == HELP_ALL else argument for argument in given]


VERBS = (
    *("bench", "calibrate", "chat", "explain", "place", "plan", "replay", "repro", "route", "run-batch", "serve"),
    "sim",
)


def register(verbs: Iterable[str] = VERBS) -> None:
    """Add verbs to the command. Each has a file here, whose settings take up to half a second to import."""
    with uncollected():
        for verb in verbs:
            import_module(f"moestro.cli.{verb.replace('-', '_')}")


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # errors of an output that has no room


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the `moestro` command. The exit status is 2 for an error in the settings and 1 for any other failure."""
    accept_user_code()
    given = sys.argv[1:] if arguments is None else arguments
    register(given[:1] if given[:1] and given[0] in VERBS else VERBS)
    try:
        if given[:1] == ["serve"]:
            given = ["serve", *without_vllm_flags(given[1:])]
        try:
            app(choose_help(app, given))
        finally:
            print(end="", flush=True)  # A full disk is reported here. A process may have no standard output.
    except MoestroError as error:
        print(f"moestro: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except BrokenPipeError:  # a reader such as `head` closed the pipe
        _drop_output()
        sys.exit(1)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _drop_output()
        print(f"moestro: the output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _drop_output() -> None:
    """Write nothing more to the standard output, whose failure Python would report again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
