"""One inbox for all that reaches a worker of a group: the API server, the other workers, and timers."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from moestro.config.launch_spec import GroupSpec, name_of
from moestro.core.clock import NS_PER_MS, NS_PER_S
from moestro.core.load_figures import PaceCounts
from moestro.errors import EngineDiedError, MoestroError
from moestro.flow.executor import FlowExecutor
from moestro.wire.messages import (
    ExpertsPrepared,
    FromRank,
    Members,
    PrepareExperts,
    Shutdown,
    TableServed,
    ToRank,
    WorkerFigures,
)
from moestro.worker.channel import Channel
from moestro.worker.peer_links import PeerLinks

# Brings experts into free slots of a worker that serves: a thread reads them, the main loop writes them in parts.

LOADER_LOOK_NS = NS_PER_MS  # between looks whether the thread has read, or a slot is idle; far less than reading takes


class SlotMemory(Protocol):
    """Memory of a worker's experts.

    Attributes:
        expert_bytes: Bytes of one expert's weights.
    """

    expert_bytes: int

    def read(self, layer: int, experts: Sequence[int]) -> Sequence[Any]:
        """Read the weights of experts, on a thread beside the main loop. `layer`: of the network.

        Raises:
            MoestroError: They cannot be read.
        """
        ...

    def write(self, layer: int, slot: int, expert: int, weights: Any) -> None:
        """Write weights into a slot that nothing uses, between two pieces of work."""
        ...


class _Job:
    """One message, and the thread that reads for it."""

    def __init__(self, message: PrepareExperts, memory: SlotMemory) -> None:
        self.message = message
        self.num_written = 0
        self.weights: Sequence[Any] | None = None
        self.error = ""
        self._memory = memory
        threading.Thread(target=self._read, name="expert-loader", daemon=True).start()

    def _read(self) -> None:
        try:
            self.weights = self._memory.read(self.message.layer, self.message.experts)
        except MoestroError as error:
            self.error = str(error)
        except Exception as error:  # whatever it is, the coordinator has to hear of it
            self.error = f"{type(error).__name__}: {error}"


class ExpertLoader:
    """Follows the coordinator's messages about experts, one at a time.

    Args:
        memory: Of the worker's experts.
        is_idle: Says whether nothing uses (layer, slot).
        send: Sends the answers.
    """

    def __init__(
        self,
        memory: SlotMemory,
        is_idle: Callable[[int, int], bool],
        send: Callable[[ExpertsPrepared], None],
    ) -> None:
        self._memory, self._is_idle, self._send = memory, is_idle, send
        self._job: _Job | None = None

    @property
    def is_busy(self) -> bool:
        """Whether `step` has something to do, or will have."""
        return self._job is not None

    def begin(self, message: PrepareExperts) -> None:
        """Follow a message instead of the one before."""
        self._job = _Job(message, self._memory)

    def step(self) -> None:
        """Write as much as a step may, and answer when all is written. The caller is between two pieces of work."""
        job = self._job
        if job is None:
            return
        ticket, size = job.message.ticket, self._memory.expert_bytes
        if job.error:
            self._end(ExpertsPrepared(ticket, error=" ".join(job.error.split())))
            return
        if job.weights is None:
            return
        slots, experts, layer = job.message.slots, job.message.experts, job.message.layer
        for _ in range(max(job.message.max_bytes // max(size, 1), 1)):
            at = job.num_written
            if at == len(slots):
                break
            if not self._is_idle(layer, slots[at]):
                return  # Tokens that their home has given up wait there; they are computed soon, in vain.
            self._memory.write(layer, slots[at], experts[at], job.weights[at])
            job.num_written += 1
        if job.num_written == len(slots):
            self._end(ExpertsPrepared(ticket, num_bytes=len(slots) * size))

    def _end(self, answer: ExpertsPrepared) -> None:
        self._job = None
        self._send(answer)


LOOK_NS = NS_PER_S  # between looks for connections between machines that broke
REPORT_NS = NS_PER_S  # between reports of a worker that works
CONFIRM_NS = NS_PER_MS  # between looks whether tokens wait for former slots; a look takes 20 us
CONNECT_S = 10  # from the description of the group to the last hello; sockets of one machine take milliseconds


class PeerInbox:
    """Waits for whatever comes first, hands messages of workers to the executor, and follows the group's changes.

    Implements `worker.rank_loop.RankInbox`.

    Args:
        group: this worker's place in its group.
        channel: to the API server.
        links: to the other workers.
        memory: of the worker's experts; None means a worker without experts.
        pace_counts: supplier of the counts of a paced device.

    Attributes:
        members: the group as the coordinator described it last; None means not yet.
    """

    def __init__(
        self,
        group: GroupSpec,
        channel: Channel,
        links: PeerLinks,
        memory: SlotMemory | None = None,
        pace_counts: Callable[[], PaceCounts | None] = lambda: None,
    ) -> None:
        self._group, self._channel, self._links, self._memory = group, channel, links, memory
        self._pace_counts = pace_counts
        self._loader: ExpertLoader | None = None
        self._preparation: PrepareExperts | None = None  # the latest question, before the loader follows it
        self._unconfirmed: int | None = None  # version of the table to confirm to the coordinator
        self._confirm_at_ns = self._load_at_ns = self._loaded_in_step = 0
        self._executor: FlowExecutor | None = None
        self.members: Members | None = None
        self._began_ns = channel.now_ns()
        self._idle_ns = self._report_at_ns = self._look_at_ns = 0
        self._reported = (0, 0)  # steps, and messages sent, at the last report
        self._has_reported = True  # whether the last report is true still

    def use(self, executor: FlowExecutor) -> None:
        """Hand messages to `executor`, which sends by the table of `members`, from now on."""
        self._executor = executor
        if self._memory is not None:
            self._loader = ExpertLoader(self._memory, executor.is_slot_idle, self._channel.send)
        if self._group.is_home and self.members is not None:
            self._unconfirmed = self.members.version

    # --- RankInbox --------------------------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """Steps since the start."""
        return self._channel.num_steps

    @num_steps.setter
    def num_steps(self, num_steps: int) -> None:
        self._channel.num_steps = num_steps

    @property
    def owes(self) -> bool:
        """Whether this worker has something to do, and waits for no other."""
        return self._channel.owes

    @owes.setter
    def owes(self, owes: bool) -> None:
        self._channel.owes = owes

    def has_messages(self) -> bool:
        """Implement `RankInbox.has_messages`; a few µs."""
        return self._channel.has_messages() or self._links.has_messages()

    def send(self, message: FromRank) -> None:
        """Implement `RankInbox.send`."""
        self._channel.send(message)

    def receive(self, wait_s: float | None) -> list[ToRank]:
        """Implement `RankInbox.receive`. A message that the pace holds back ends no wait before it is due."""
        until_ns = None if wait_s is None else self._channel.now_ns() + round(wait_s * NS_PER_S)
        while True:
            if wait_s != 0 and not self.has_messages():
                self._sleep(until_ns)
            others, is_news = self._take_in()
            if is_news or others or not self._waits_on(until_ns):
                return others

    def _waits_on(self, until_ns: int | None) -> bool:
        return until_ns is None or self._channel.now_ns() < until_ns

    def _take_in(self) -> tuple[list[ToRank], bool]:
        """Return the API server's messages for the rank, and whether anything else happened that may give it work."""
        others, is_news = self._hear_server() if self._channel.has_messages() else ([], False)
        if self._executor is None:
            return others, True  # messages wait in the socket
        now_ns, num_notices = self._channel.now_ns(), self._links.num_notices
        for hop_message in self._links.receive(now_ns):
            self._executor.receive(hop_message, now_ns)
            is_news = True
        if now_ns >= self._look_at_ns:
            self._look_at_ns = now_ns + LOOK_NS
            self._links.find_breaks()
        if self._links.to_resend:
            self._resend(now_ns)
            is_news = True
        self._follow_up(now_ns)
        self._report(now_ns)
        return others, is_news or self._links.num_notices > num_notices

    def _hear_server(self) -> tuple[list[ToRank], bool]:
        """Return the API server's messages for the rank, and whether it sent any; follow the others."""
        others: list[ToRank] = []
        messages = self._channel.receive(0)
        for message in messages:
            match message:
                case Members():
                    self._follow(message)
                case PrepareExperts():
                    self._preparation = message
                case _:
                    others.append(message)
        return others, bool(messages)

    def _sleep(self, until_ns: int | None) -> None:
        """Wait for whatever comes first, and count the time in which nothing could run."""
        before_ns = self._channel.now_ns()
        times = (until_ns, None if self._has_reported else self._report_at_ns, self._links.ready_at_ns())
        due_ns = min((each for each in (*times, self._look_again_ns()) if each is not None), default=None)
        bound_s = None if due_ns is None else max(due_ns - before_ns, 0) / NS_PER_S
        if self._links.may_break:  # what waits for a lost message would not wake
            bound_s = min(LOOK_NS / NS_PER_S, LOOK_NS / NS_PER_S if bound_s is None else bound_s)
        ready, _, _ = select.select((self._channel.arrival.fd, *self._links.fds), (), (), bound_s)
        if self._channel.arrival.fd in ready:
            self._channel.arrival.clear()
        if until_ns is None:
            self._idle_ns += self._channel.now_ns() - before_ns

    def _follow_up(self, now_ns: int) -> None:
        """Go on with what takes several steps: experts that are loaded, and a table that is to be confirmed."""
        # The coordinator may ask before the worker serves.
        if self._preparation is not None and self._loader is not None:
            self._loader.begin(self._preparation)
            self._preparation = None
        # The loop reads its inbox twice in a step, and an idle one takes no steps.
        is_next_step = self._channel.num_steps != self._loaded_in_step or now_ns >= self._load_at_ns
        if self._loader is not None and self._loader.is_busy and is_next_step:
            self._loaded_in_step, self._load_at_ns = self._channel.num_steps, now_ns + LOADER_LOOK_NS
            self._loader.step()
        if self._unconfirmed is not None and now_ns >= self._confirm_at_ns:
            self._confirm(now_ns)

    def _look_again_ns(self) -> int | None:
        """Time of the next look for what no message announces. None means that nothing changes by itself."""
        load_ns = self._load_at_ns if self._loader is not None and self._loader.is_busy else None
        confirm_ns = None if self._unconfirmed is None or self._executor is None else self._confirm_at_ns
        return min((each for each in (load_ns, confirm_ns) if each is not None), default=None)

    def _confirm(self, now_ns: int) -> None:
        """Tell the coordinator once no token waits for a slot that the present table does not have."""
        assert self._executor is not None, "a table is in use with the executor"
        assert self._unconfirmed is not None, "called while a table is to be confirmed"
        if self._executor.is_settled:
            self._channel.send(TableServed(self._unconfirmed))
            self._unconfirmed = None
        else:
            self._confirm_at_ns = now_ns + CONFIRM_NS

    def _report(self, now_ns: int) -> None:
        """Send the figures of the queues and links, once a second while they change."""
        activity = self._channel.num_steps, self._links.num_sent
        if activity != self._reported:
            self._has_reported = False
        if self._has_reported or now_ns < self._report_at_ns:
            return
        assert self._executor is not None, "there is nothing to report before the worker serves"
        num_waiting, oldest_ns = self._executor.waiting_by_layer(now_ns)
        links = self._links
        self._channel.send(
            WorkerFigures(
                num_waiting=tuple(num_waiting.tolist()),
                oldest_ns=tuple(oldest_ns.tolist()),
                idle_ns=self._idle_ns,
                lived_ns=now_ns - self._began_ns,
                num_sent=tuple(counts.num_messages for counts in links.sent),
                sent_bytes=tuple(counts.num_bytes for counts in links.sent),
                num_two_phase=tuple(counts.num_two_phase for counts in links.sent),
                two_phase_bytes=tuple(counts.two_phase_bytes for counts in links.sent),
                num_dropped=self._executor.num_dropped + links.num_garbage + links.num_undelivered + links.num_refused,
                pace=self._pace_counts(),
            )
        )
        self._has_reported, self._reported = True, activity
        self._report_at_ns = now_ns + REPORT_NS

    def _resend(self, now_ns: int) -> None:
        to_resend, self._links.to_resend = self._links.to_resend, set()
        if self._executor is not None and self._group.is_home:
            for worker in sorted(to_resend):
                self._executor.lose(worker, now_ns)

    # --- the group --------------------------------------------------------------------------------------------------

    def await_members(self) -> Members | None:
        """Wait for the first description of the group. None means that the API server asks the process to end."""
        while self.members is None:
            if _has_shutdown(self.receive(None)):
                return None
        return self.members

    def await_peers(self) -> bool:
        """Wait for a hello of all workers that exchange messages with this one.

        Returns:
            False if the API server asks the process to end.

        Raises:
            EngineDiedError: a worker says nothing; the text names it.
        """
        deadline = time.monotonic() + CONNECT_S
        while missing := self._missing():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                names = ", ".join(str(name_of(worker, self._group)) for worker in missing)
                raise EngineDiedError(f"{names} did not connect to {self._group.name} within {CONNECT_S} s")
            if _has_shutdown(self.receive(left_s)):
                return False
        return True

    def _missing(self) -> list[int]:
        """Workers that run and have not sent their hello."""
        assert self.members is not None, "called after await_members"
        processes = zip(self.members.launches, self.members.addresses, strict=True)
        return [
            worker
            for worker, (launch, address) in enumerate(processes)
            if address and self._is_peer(worker) and self._links.launches[worker] != launch
        ]

    def _is_peer(self, worker: int) -> bool:
        """Whether messages pass between `worker` and this one: one is a home, and the other has experts."""
        group = self._group
        if worker == group.worker:
            return False
        return group.is_colocated or (worker < group.num_homes) != group.is_home

    def _follow(self, members: Members) -> None:
        """Connect and disconnect workers, change the table, and send again what the former processes owed."""
        old, self.members = self.members, members
        now_ns, changed = self._channel.now_ns(), []
        for worker, address in enumerate(members.addresses):
            is_new = old is None or (old.addresses[worker], old.launches[worker]) != (address, members.launches[worker])
            if not is_new or not self._is_peer(worker):
                continue
            changed.append(worker)
            if address:
                self._links.connect(worker, address, members.launches[worker])
            else:
                self._links.disconnect(worker)
        if old is None or self._executor is None:
            return
        if not self._group.is_home:
            return
        is_near = near_workers(members.addresses, self._group.worker)
        if old.table != members.table or is_near != near_workers(old.addresses, self._group.worker):
            self._executor.change_table(members.table.whole_table(), now_ns, is_near)
        for worker in changed:
            self._executor.lose(worker, now_ns)
        self._unconfirmed, self._confirm_at_ns = members.version, now_ns


def near_workers(addresses: Sequence[str], worker: int) -> tuple[bool, ...]:
    """Return whether each worker of a group is on the machine of `worker`, by the addresses at which they listen."""
    machines = [_machine_of(address) for address in addresses]
    return tuple(machine == machines[worker] for machine in machines)


def _machine_of(address: str) -> str:
    """Host of a TCP address; "" for a socket of this machine's file system, and for a worker that does not run."""
    kind, _, rest = address.partition("://")
    return rest.rpartition(":")[0] if kind == "tcp" else ""


def _has_shutdown(messages: Sequence[ToRank]) -> bool:
    """Whether the API server asks the process to end; other messages before it is ready have no meaning."""
    return any(isinstance(message, Shutdown) for message in messages)
