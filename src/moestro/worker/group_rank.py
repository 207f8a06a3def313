"""The two kinds of workers of a group, as `run_rank` drives them."""

from __future__ import annotations

from moestro.core.load_figures import IDLE, LoadFigures
from moestro.core.request import NewOutputs, Request
from moestro.core.work import IsWanted, never_wanted
from moestro.engine.rank import Rank
from moestro.errors import InvariantError
from moestro.flow.executor import FlowExecutor


class Home(Rank):
    """A rank whose tokens visit experts of other workers, and which may compute experts for others."""

    @property
    def has_work(self) -> bool:
        """Whether there may be anything to do: guests come unannounced, so only `ready_at_ns` says."""
        return True


class ExpertRank:
    """Computes experts for homes, and takes no requests; implements `worker.rank_loop.Steppable`.

    Args:
        executor: of a device without attention.
    """

    has_work = True  # guests come unannounced, so only `ready_at_ns` says

    def __init__(self, executor: FlowExecutor) -> None:
        self._executor = executor

    def add(self, request: Request, now_ns: int) -> int:
        """Refuse: the API server sends requests to homes alone."""
        raise InvariantError("a request came to a worker without attention")

    def abort(self, request_id: str, now_ns: int) -> None:
        """Ignore: there are no requests."""

    def take_given_way(self) -> list[str]:
        """Return none: no request waits here."""
        return []

    def wake(self, step: int) -> None:
        """Refuse: workers of this group take no steps together."""
        raise InvariantError("a worker without attention cannot take part in a step")

    def outputs(self, now_ns: int, is_wanted: IsWanted = never_wanted) -> NewOutputs:
        """Compute, or take what the device has computed; replies leave through the links."""
        self._executor.poll(now_ns, is_wanted)
        return NewOutputs()

    def begin(self, now_ns: int) -> None:
        """Start the next item."""
        self._executor.start(now_ns)

    def ready_at_ns(self) -> int | None:
        """Implement `Steppable.ready_at_ns`."""
        return self._executor.ready_at_ns()

    @property
    def num_steps(self) -> int:
        """Pieces of work since the start."""
        return self._executor.num_pieces

    def stats(self) -> LoadFigures:
        """Return figures that never change: there are no requests."""
        return IDLE
