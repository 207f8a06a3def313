"""Knows the workers of a group: what each holds, how far its start has come, and what the others have to know of it.

Uses no sockets, processes or clock: the supervisor owns the processes, and callers pass the time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.config.launch_spec import GroupSpec, name_of
from moestro.core.clock import NS_PER_S
from moestro.core.experts.expert_table import EMPTY, ExpertLayers, TableMessage, slots_of_shares
from moestro.core.processes import Worker, WorkerKind
from moestro.errors import ConfigError, EngineDiedError, MoestroError, NoEngineError
from moestro.flow.settings import GroupOptions
from moestro.placement.live.async_migration import AsyncMigration, GroupTable
from moestro.web.errors import HttpError
from moestro.wire.messages import (
    ExpertsPrepared,
    Failed,
    FromRank,
    Joined,
    Members,
    Ready,
    TableServed,
    ToRank,
    WorkerFigures,
)

START_S = 300.0  # from the start of a process to its first message: imports take minutes from a slow disk
CONNECT_S = 20.0  # from a worker's arrival in the group until it serves; a worker itself gives up after half of it


class MemberPhase(Enum):
    """How far a worker's process has come. The value says what it does meanwhile."""

    ABSENT = auto()
    STARTING = auto()
    LOADING = auto()
    CONNECTING = auto()
    SERVING = auto()
    ENDING = auto()


@dataclass(slots=True)
class _Member:
    """A place in the group, and the worker in it.

    Attributes:
        launch: Number of its present process.
        address: ZeroMQ address at which that process listens to the others; "" until it has joined.
        since_ns: Time at which its phase began.
        is_draining: Whether it gets no tokens any more.
        is_silent: Whether its process may be stopped. Copies get its tokens meanwhile, and what it owes.
        num_restarts: Processes that took the place of one that had ended.
        num_doubts: Times at which it was silent.
        figures: Last figures of its present process; None means none yet.
    """

    phase: MemberPhase = MemberPhase.ABSENT
    launch: int = 0
    address: str = ""
    since_ns: int = 0
    is_draining: bool = False
    is_silent: bool = False
    num_restarts: int = 0
    num_doubts: int = 0
    figures: WorkerFigures | None = None

    @property
    def is_up(self) -> bool:
        """Whether it listens to the others."""
        return self.phase in (MemberPhase.CONNECTING, MemberPhase.SERVING)

    @property
    def takes(self) -> bool:
        """Whether it may get tokens."""
        return self.is_up and not self.is_draining and not self.is_silent


class WorkerView(msgspec.Struct, kw_only=True):
    """State of one worker, as operators see it.

    Attributes:
        num_experts: Copies of experts that it holds, over all layers.
    """

    name: str
    kind: WorkerKind
    number: int
    phase: str
    launch: int
    num_restarts: int
    num_doubts: int
    is_draining: bool
    num_experts: int
    figures: WorkerFigures | None


class Coordinator:
    """Brings workers together, and tells all of them when one joins or ends.

    Args:
        options: The workers at the start, and their settings.
        load_s: Time in which a worker must load its part, in seconds.
        send: Callable that sends a message to a worker; raises `NoEngineError` if it cannot be reached.
        num_redundant_experts: Slots of each layer beyond those that the experts fill at the start, of all workers.

    Attributes:
        migration: Moves experts between the workers.
        all_serve: Future that is done when all workers serve for the first time, or fails with the culprit.
    """

    def __init__(
        self,
        options: GroupOptions,
        load_s: float,
        send: Callable[[int, ToRank], None],
        num_redundant_experts: int = 0,
    ) -> None:
        self._options, self._load_s, self._send = options, load_s, send
        self._num_spare = -(-num_redundant_experts // options.num_shares)
        self.num_homes = options.num_homes
        num_present = options.num_homes + options.num_expert_workers
        self._members = [_Member() for _ in range(options.num_places)]
        self._table: GroupTable | None = None  # until a worker has reported the network
        self._present = set(range(num_present))  # places whose worker runs, or is to run
        self._version = 0
        self._has_begun = False  # whether all workers of the start have joined
        self._causes: dict[int, MoestroError] = {}
        self.migration = AsyncMigration(self)
        self.all_serve: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def num_places(self) -> int:
        """Places for workers, taken or not."""
        return len(self._members)

    @property
    def present(self) -> list[int]:
        """Places whose worker runs, or is to run."""
        return sorted(self._present)

    def name(self, worker: int) -> Worker:
        """Return the name of a worker for messages."""
        return name_of(worker, self.spec(worker))

    def spec(self, worker: int) -> GroupSpec:
        """Return the place of a worker in its group, and what a process loads that starts now."""
        return GroupSpec(
            worker=worker,
            num_homes=self.num_homes,
            num_workers=self.num_places,
            num_shares=self._options.num_shares,
            first_shares=self._options.first_shares,
            num_spare=self._num_spare,
            table=None if self._table is None else self._message(self.table.logical_of, (True,) * self.num_places),
            is_colocated=self._options.num_expert_workers == 0,
            stepping=self._options,
        )

    # --- life of a worker -------------------------------------------------------------------------------------------

    def launched(self, worker: int, launch: int, now_ns: int) -> None:
        """Note that a worker's process was started."""
        member = self._members[worker]
        member.launch, member.address, member.figures, member.is_silent = launch, "", None, False
        self._enter(member, MemberPhase.STARTING, now_ns)

    def on_message(self, worker: int, message: FromRank, now_ns: int) -> None:
        """Take in a message of a worker."""
        member = self._members[worker]
        if member.phase is MemberPhase.STARTING:
            self._enter(member, MemberPhase.LOADING, now_ns)
        match message:
            case Joined(address, experts):
                member.address = address
                self._table = self._table or self._first_table(experts)
                self._enter(member, MemberPhase.CONNECTING, now_ns)
                self._begin(now_ns)
            case Ready():
                self._enter(member, MemberPhase.SERVING, now_ns)
                if not self.all_serve.done() and all(self._serves(each) for each in self._present):
                    self.all_serve.set_result(None)
            case WorkerFigures():
                member.figures = message
            case ExpertsPrepared():
                self.migration.prepared(worker, message)
            case TableServed(version):
                self.migration.served(worker, version)
            case Failed(cause, is_config):
                kind = ConfigError if is_config else EngineDiedError
                self._causes[worker] = kind(f"{self.name(worker)}: {cause}")

    def _first_table(self, experts: ExpertLayers) -> GroupTable:
        """Return the slots with which the group starts."""
        options = self._options
        num_experts, num_shares = experts.num_experts, options.num_shares
        return GroupTable(
            experts,
            slots_of_shares(num_experts, num_shares, options.first_shares, self._num_spare),
            first=options.num_homes if options.num_expert_workers else 0,
            num_filled=-(-num_experts // num_shares),
        )

    def ended(self, worker: int, how: str, now_ns: int) -> MoestroError:
        """Note that a worker's process has ended, and return the cause.

        Args:
            how: One line that says how the process ended.
        """
        cause = self._causes.pop(worker, None) or EngineDiedError(f"{self.name(worker)}: {how}")
        self._members[worker].is_silent = False
        self._enter(self._members[worker], MemberPhase.ABSENT, now_ns)
        if self.is_given_up(worker):
            self._forget(worker)
        if not self.all_serve.done():
            self._fail(cause)
        elif self._has_begun:
            self.announce()
        self.migration.ended(worker)
        return cause

    def doubt(self, worker: int, *, is_silent: bool) -> None:
        """Note whether a worker's process may be stopped, and tell the homes if copies take its place or give it back.

        A worker that was silent in vain has lost nothing but time: what it owed is computed twice.
        """
        member = self._members[worker]
        if member.is_silent == is_silent or self._table is None:
            return
        before = self._used()
        member.is_silent = is_silent
        if (self._used() != before).any():
            member.num_doubts += is_silent
            self.announce()

    def is_covered(self, worker: int) -> bool:
        """Whether other workers get the tokens of all experts of a worker that has ended."""
        return bool((self._used()[worker] == EMPTY).all())

    def restarted(self, worker: int) -> None:
        """Count that a worker is started again."""
        self._members[worker].num_restarts += 1

    def _serves(self, worker: int) -> bool:
        return self._members[worker].phase is MemberPhase.SERVING

    def _enter(self, member: _Member, phase: MemberPhase, now_ns: int) -> None:
        member.phase, member.since_ns = phase, now_ns

    def _fail(self, cause: MoestroError) -> None:
        self.all_serve.set_exception(cause)
        self.all_serve.exception()  # Marked as retrieved: of several failures, only the first is awaited.

    # --- start ------------------------------------------------------------------------------------------------------

    def check_start(self, now_ns: int) -> None:
        """Fail the start of the group if a phase of a worker takes too long; the cause names the worker."""
        if self.all_serve.done():
            return
        for worker in self.present:
            member = self._members[worker]
            limit_s = self._limit_s(member.phase)
            if limit_s is not None and now_ns - member.since_ns > limit_s * NS_PER_S:
                doing = member.phase.name.lower()
                self._fail(EngineDiedError(f"{self.name(worker)} was still {doing} after {limit_s:g} s"))
                return

    def describe_start(self) -> str:
        """Return how many workers serve, and what the others do, each phase with its first worker."""
        phases = [(self._members[worker].phase, worker) for worker in self.present]
        parts = []
        for phase in MemberPhase:
            found = [worker for each, worker in phases if each is phase]
            if phase is not MemberPhase.SERVING and found:
                doing = "not started" if phase is MemberPhase.ABSENT else phase.name.lower()
                more = f" and {len(found) - 1} more" if len(found) > 1 else ""
                parts.append(f"{self.name(found[0])}{more} {doing}")
        num_serving = sum(phase is MemberPhase.SERVING for phase, _ in phases)
        return f"{num_serving} of {len(phases)} workers serve; {', '.join(parts)}"

    def _limit_s(self, phase: MemberPhase) -> float | None:
        """Longest time of a phase, in seconds. None means that a worker in this phase waits for others."""
        match phase:
            case MemberPhase.STARTING:
                return START_S
            case MemberPhase.LOADING:
                return self._load_s
            case MemberPhase.CONNECTING:
                return CONNECT_S if self._has_begun else None
        return None

    def _begin(self, now_ns: int) -> None:
        """Describe the group to its workers, at first when all of them have joined."""
        if not self._has_begun:
            if not all(self._members[worker].is_up for worker in self._present):
                return
            self._has_begun = True
            for worker in self._present:
                self._members[worker].since_ns = now_ns
        self.announce()

    # --- members ----------------------------------------------------------------------------------------------------

    @property
    def table(self) -> GroupTable:
        """Slots of all workers, as those that start load them. It is known once a worker has joined."""
        assert self._table is not None, "no worker has reported the network yet"
        return self._table

    @property
    def takes(self) -> NDArray[np.bool_]:
        """bool[places], whether each worker may get tokens."""
        return np.array([member.takes for member in self._members], np.bool_)

    @property
    def homes_up(self) -> set[int]:
        """Workers with attention that listen to the others."""
        return {worker for worker in range(self.num_homes) if self._members[worker].is_up}

    def members(self) -> Members:
        """Describe the group as it is now."""
        used = self._used()
        return Members(
            version=self._version,
            addresses=tuple(member.address if member.is_up else "" for member in self._members),
            launches=tuple(member.launch for member in self._members),
            table=self._message(used, tuple(self.alive(used).tolist())),
        )

    def alive(self, used: NDArray[np.int32]) -> NDArray[np.bool_]:
        """bool[places], whether to wait for what each worker owes: no other one has what it uses, or it is not silent.

        Args:
            used: int32[places, layers, slots], as of `GroupTable.used`.
        """
        is_silent = np.array([member.is_silent for member in self._members], np.bool_)
        alive: NDArray[np.bool_] = ~is_silent | (used != EMPTY).any(axis=(1, 2))
        return alive

    def served_slots(self) -> tuple[NDArray[np.bool_], int]:
        """Implement `MovingGroup.served_slots`."""
        used = self._used()
        return self.takes | (self.alive(used) & (used != EMPTY).any(axis=(1, 2))), self._version

    def _message(self, logical_of: NDArray[np.int32], alive: tuple[bool, ...]) -> TableMessage:
        return TableMessage.of_slots(self.table.experts, self._version, logical_of, alive)

    def _used(self) -> NDArray[np.int32]:
        return self.table.used(self.takes, np.array([member.is_draining for member in self._members], np.bool_))

    def announce(self) -> int:
        """Describe the group to all workers. Returns the version of the description."""
        self._version += 1
        members = self.members()
        for worker, member in enumerate(self._members):
            if member.is_up:
                self.send(worker, members)
        return self._version

    def send(self, worker: int, message: ToRank) -> None:
        """Send a message to a worker; one whose process has just ended gets none, and the supervisor will say so."""
        with contextlib.suppress(NoEngineError):
            self._send(worker, message)

    # --- operators --------------------------------------------------------------------------------------------------

    def views(self) -> list[WorkerView]:
        """Return the state of each worker that runs, or is to run."""
        return [self.view(worker) for worker in self.present]

    def view(self, worker: int) -> WorkerView:
        """Return the state of one worker."""
        member, name = self._members[worker], self.name(worker)
        return WorkerView(
            name=str(name),
            kind=name.kind,
            number=name.number,
            phase=member.phase.name.lower(),
            launch=member.launch,
            num_restarts=member.num_restarts,
            num_doubts=member.num_doubts,
            is_draining=member.is_draining,
            num_experts=0 if self._table is None else int((self.table.logical_of[worker] != EMPTY).sum()),
            figures=member.figures,
        )

    def expert_worker(self, number: int) -> int | None:
        """Return the place of a worker with experts alone by its number; None means that there is none."""
        worker = self.num_homes + number
        return worker if worker in self._present else None

    def add(self) -> int:
        """Take a place for another worker, which holds the experts with the fewest copies. Returns the place.

        Raises:
            HttpError: All places are taken.
        """
        free = [
            worker
            for worker, member in enumerate(self._members)
            if worker not in self._present and member.phase is MemberPhase.ABSENT
        ]
        if not free:
            raise HttpError(409, f"The group has no place for more than {len(self._members)} workers.", "no_place")
        worker = free[0]
        member = self._members[worker]
        self.table.fill(worker, [other for other in self._present if not self._members[other].is_draining])
        member.is_draining = False
        member.num_restarts = member.num_doubts = 0
        self._present.add(worker)
        return worker

    def drain(self, worker: int, *, is_draining: bool) -> None:
        """Send a worker no more tokens, or send it tokens again.

        Raises:
            HttpError: No other worker that serves holds one of its experts.
        """
        others = [
            other for other in self._present - {worker} if self._serves(other) and not self._members[other].is_draining
        ]
        if is_draining and (alone := self.table.alone(worker, others)) is not None:
            layer, expert = alone
            text = f"No other worker holds expert {expert} of layer {layer}: add a worker or move the expert first."
            raise HttpError(409, text, "only_copy")
        member = self._members[worker]
        member.is_draining = is_draining
        self.announce()

    def give_up(self, worker: int) -> bool:
        """Remove a worker that does not start, if others have its experts: now, or when they have started again.

        Returns:
            Whether the group can go on without it.
        """
        others = sorted(self._present - {worker})
        if self.table.alone(worker, others) is not None:
            return False
        for other in others:
            active = [each for each in others if not self._members[each].is_draining]
            if self.table.alone(worker, active) is None:
                break
            self._members[other].is_draining = False  # The operator's wish waits for another copy.
        self.remove(worker)
        self.announce()
        return True

    def remove(self, worker: int) -> None:
        """Give up a drained worker's place; its process ends, and is not started again."""
        self._present.discard(worker)
        member = self._members[worker]
        if member.phase is MemberPhase.ABSENT:  # Otherwise it holds them until its process ends.
            self._forget(worker)

    def _forget(self, worker: int) -> None:
        if self._table is not None:
            self._table.clear(worker)

    def dismissed(self, worker: int, now_ns: int) -> None:
        """Note that a removed worker was sent a shutdown: it listens no more, though its process may still run."""
        self._enter(self._members[worker], MemberPhase.ENDING, now_ns)

    def is_given_up(self, worker: int) -> bool:
        """Whether a worker was removed, so that its process is not started again."""
        return worker not in self._present
