"""Engines that start, end and restart together: the engines of mode `ep`, or a single one in the other modes."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

from moestro.errors import MoestroError
from moestro.server.processes.restarts import RestartRule
from moestro.wire.messages import Ready


@dataclass(slots=True, kw_only=True, eq=False)
class EngineGroup:
    """State of one group.

    Attributes:
        members: Engines of the group, ascending.
        rule: Rule for the restarts of the group.
        num_launches: Starts of the group so far.
        was_ready: Whether all engines were ready after one of these starts.
        is_given_up: Whether the group is not restarted.
        ready: Ready messages of the present start, by engine.
        end: First engine that ended in the present start, and the cause; None while all engines run.
    """

    members: tuple[int, ...]
    rule: RestartRule = field(default_factory=RestartRule)
    num_launches: int = 0
    was_ready: bool = False
    is_given_up: bool = False
    ready: dict[int, Ready] = field(default_factory=dict)
    end: tuple[int, MoestroError] | None = None

    @property
    def is_single(self) -> bool:
        """Whether the group is a single engine."""
        return len(self.members) == 1

    def __str__(self) -> str:
        return f"engine{'' if self.is_single else 's'} {', '.join(map(str, self.members))}"

    def describe_end(self, name: str) -> str:
        """Return which engine ended first, by its `name`, and why, and which engines restart."""
        assert self.end is not None, "an engine of the group has ended"
        cause = str(self.end[1])
        culprit = cause if cause.startswith(f"{name}:") else f"{name}: {cause}"
        return f"{culprit}; {'it restarts' if self.is_single else f'{self} restart together'}"

    @contextlib.contextmanager
    def launch(self) -> Iterator[tuple[int, socket.socket | None]]:
        """Reset the state for a new start, and yield its number and its listening socket.

        The processes of a group meet at the socket; the first engine's process inherits it. It is bound here to a free
        port, so no other program can take the port between its choice and its use. A single engine has no socket.
        """
        number, self.num_launches = self.num_launches, self.num_launches + 1
        self.ready, self.end = {}, None
        with contextlib.ExitStack() as stack:
            listener = None
            if not self.is_single:
                listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            yield number, listener
