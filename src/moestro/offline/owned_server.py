"""A server process that belongs to this process: it is started for `LLM` or a verb, and ends with it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

import msgspec

from moestro.errors import ConfigError, EngineDiedError, MoestroError
from moestro.offline.api_client import ApiClient, api_root

OWNED_SERVER = (sys.executable, "-m", "moestro.cli.owned_server")
# The process has its own limit for a stop: the running requests' time and 10 s. This one is for a broken process.
_STOP_S = 40.0
# The address and the key are chosen here. The others end the process without serving.
_OWN_SETTINGS = ("host", "port", "api_key", "print_config", "help", "version")


class ServerReport(msgspec.Struct, omit_defaults=True):
    """One line from the server process.

    Attributes:
        url: Address, once the server takes requests.
        error: Cause of the process's end.
        is_config: Whether other settings would avoid the error.
    """

    url: str = ""
    error: str = ""
    is_config: bool = False


class OwnedServer:
    """A running server process.

    The constructor returns once the server takes requests. Ctrl-C does not reach the process, which ends at `close`,
    with a `with` block, with the garbage collection of this object, or with this process, even if it is killed.

    Args:
        arguments: Arguments of `moestro serve`.

    Attributes:
        url: Address of the server, on this machine.
        api_key: Random key; the server refuses requests without it.

    Raises:
        ConfigError: The settings cannot be honoured; the text says what to do.
        EngineDiedError: An engine failed before it was ready.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        _refuse_own_settings(arguments)
        self.api_key = secrets.token_urlsafe(32)
        self._process = subprocess.Popen(  # noqa: S603 the arguments are those of the program that runs
            [*OWNED_SERVER, *arguments, "--host=127.0.0.1", "--port=0"],
            stdin=subprocess.PIPE,  # Its end tells the server that this process has ended.
            stdout=subprocess.PIPE,
            env={"MOESTRO_LOG_LEVEL": "warning"} | os.environ | {"MOESTRO_API_KEY": self.api_key},
            start_new_session=True,
        )
        self._finalizer = weakref.finalize(self, _stop, self._process)
        try:
            self.url = self._report().url
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> OwnedServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the server and wait for its end. Further calls do nothing."""
        self._finalizer()

    @property
    def process_id(self) -> int:
        """Id of the process, for `ps` and `kill`."""
        return self._process.pid

    def raise_if_closed(self) -> None:
        """Raise EngineDiedError after `close`."""
        if not self._finalizer.alive:
            raise EngineDiedError("the server of this object is closed: make a new one")

    def raise_if_ended(self) -> None:
        """Raise EngineDiedError with the cause if the process has ended, or is about to."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)  # A refused connection may precede the end of the process.
        if self._process.poll() is not None:
            self._report()

    def _report(self) -> ServerReport:
        """Wait for the next report and return it; an error, or the end of the process, is raised."""
        stdout = self._process.stdout
        assert stdout is not None
        if not (line := stdout.readline()):
            raise EngineDiedError(f"the server ended with status {self._process.wait(_STOP_S)}; its log has the cause")
        report = msgspec.json.decode(line, type=ServerReport)
        if report.error:
            kind: type[MoestroError] = ConfigError if report.is_config else EngineDiedError
            raise kind(report.error)
        return report


def flags_from(settings: Mapping[str, object]) -> list[str]:
    """Return settings as arguments of `moestro serve`: `max_num_seqs=8` becomes `--max-num-seqs=8`.

    None leaves a setting at its default, True and False become a flag with and without `--no-`, a list repeats the
    flag, and a dictionary becomes JSON.
    """
    return [flag for name, value in settings.items() for flag in _flags(name.replace("_", "-"), value)]


def _flags(name: str, value: object) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list | tuple):
        return [flag for each in value for flag in _flags(name, each)]
    return [f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"]


def _refuse_own_settings(arguments: Sequence[str]) -> None:
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.startswith("--") and name[2:].replace("-", "_") in _OWN_SETTINGS:
            raise ConfigError(f"{name} is not for a server that is started here and that no other program uses")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the process, and kill it if it does not end by itself. Its engines end with it."""
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


# The server of a verb: a running one by its URL, or one that is started for the verb.


@dataclass(frozen=True, slots=True)
class AnyServer:
    """A server that takes requests. `owned` is its process, if it was started for this one."""

    root: str
    api_key: str | None
    owned: OwnedServer | None = None

    def client(self) -> ApiClient:
        """Return a client, which is not yet open."""
        return ApiClient(self.root, self.api_key)

    def raise_if_ended(self) -> None:
        """Raise EngineDiedError with the cause if the process that was started has ended."""
        if self.owned is not None:
            self.owned.raise_if_ended()


@contextlib.contextmanager
def any_server(url: str | None, api_key: str | None, arguments: Sequence[str]) -> Iterator[AnyServer]:
    """Open the server at `url`; without a URL, start one, which ends with the block.

    Args:
        api_key: Bearer token of a running server.
        arguments: Arguments of `moestro serve` for a server that is started.

    Raises:
        ConfigError: The URL is none, there are both a URL and arguments, or the arguments cannot be honoured.
        EngineDiedError: An engine failed before it was ready.
    """
    if url is None:
        with OwnedServer(arguments) as owned:
            yield AnyServer(owned.url, owned.api_key, owned)
        return
    if arguments:
        raise ConfigError(f"{arguments[0]} is for a server that is started here: leave it or --url out")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url must begin with http:// or https://, got {url}")
    yield AnyServer(api_root(url), api_key)
