"""Front door and rank over the real socket: messages arrive, strangers and garbage do not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import random
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
import zmq
from support.fake_rank import FakeRank
from support.hosts import LOOPBACK
from support.running import PATIENCE_S, wait_until

from moestro.core.processes import in_address
from moestro.core.request import NewOutputs, Output, Request, SamplingParams, ServiceClass
from moestro.core.scheduling_events import SequenceLeft
from moestro.errors import ConfigError, NoEngineError
from moestro.server.engines.rank_socket import RankSocket
from moestro.server.processes.start_checks import private_directory
from moestro.wire.messages import (
    MAX_MESSAGE_BYTES,
    Abort,
    Add,
    EngineEvents,
    Failed,
    Heartbeat,
    Outputs,
    Phase,
    Shutdown,
    decode_from_rank,
    decode_to_rank,
    encode,
    identity_of,
)
from moestro.wire.sockets import LocalStream, allow_ipv6, local_path, new_curve_keys
from moestro.worker.channel import Beats, Channel
from moestro.worker.rank_loop import _LOOK_AGAIN_S, SideJobs, run_rank

ADD = Add(
    Request(
        request_id="a",
        num_prompt_tokens=2,
        sampling=SamplingParams(max_tokens=3, seed=2**64 - 1),
        arrival_ns=1,
        token_ids=bytes(8),
    )
)


BROKEN = "broken"


@pytest.fixture
def address():
    with private_directory() as directory:
        yield f"ipc://{directory / 'ranks'}"


@pytest.fixture
def parent_fd():
    """The rank's end of a pipe that stays open."""
    read, write = os.pipe()
    yield read
    os.close(write)
    os.close(read)


def take(inbox: asyncio.Queue, rank: int, message: object) -> None:
    """What the front door does with a message."""
    if not isinstance(message, Heartbeat):
        inbox.put_nowait((rank, message))


def on_loop(address: str, test) -> RankSocket:
    """Run `test(wire, inbox)` with the front door's end on an event loop."""

    async def inside() -> RankSocket:
        wire = RankSocket(address, 2)
        inbox: asyncio.Queue = asyncio.Queue()
        wire.listen(
            lambda rank, message: take(inbox, rank, message), lambda rank: inbox.put_nowait((rank, BROKEN)), str
        )
        try:
            async with asyncio.timeout(60):
                await test(wire, inbox)
        finally:
            wire.close()
        return wire

    return asyncio.run(inside())


def test_the_address_is_in_a_directory_for_this_user_only(address):
    directory = Path(address.removeprefix("ipc://")).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_messages_go_both_ways(address, parent_fd):
    async def test(wire, inbox):
        channel = Channel(address, identity_of(1, 0), parent_fd)
        channel.send(Phase("load", 1.5))
        assert await inbox.get() == (1, Phase("load", 1.5))
        for message in (ADD, Abort(("a",)), Shutdown()):
            wire.send(1, message)
        got = []
        while len(got) < 3:
            got += await asyncio.to_thread(channel.receive, None)
        assert got == [ADD, Abort(("a",)), Shutdown()]
        assert channel.receive(0) == channel.receive(0.001) == []
        channel.send(Failed("bye"))
        await asyncio.to_thread(channel.close)
        assert await inbox.get() == (1, Failed("bye"))

    on_loop(address, test)


def test_a_message_needs_no_turn_of_the_channels_thread(address, parent_fd):
    """On the only core of an engine the thread may not run before the next step is planned."""

    async def test(wire, inbox):
        channel = Channel(address, identity_of(0, 0), parent_fd)
        channel.send(Phase("load", 1.5))
        await inbox.get()
        link, may_go_on, is_held = channel._link, threading.Event(), threading.Event()
        wait = link.wait

        def held(fds, timeout_ms):
            is_held.set()
            may_go_on.wait(PATIENCE_S)
            return wait(fds, timeout_ms)

        link.wait = held
        wire.send(0, Abort(("first",)))  # ends the wait that runs now
        await asyncio.to_thread(is_held.wait, PATIENCE_S)
        for number in range(20):
            wire.send(0, Abort((f"r{number}",)))
        got = await asyncio.to_thread(lambda: [message for _ in range(1000) for message in channel.receive(0)])
        may_go_on.set()
        assert got == [Abort(("first",)), *(Abort((f"r{number}",)) for number in range(20))]
        await asyncio.to_thread(channel.close)

    on_loop(address, test)


def test_messages_keep_their_order_for_every_reader(address, parent_fd):
    async def test(wire, inbox):
        channel = Channel(address, identity_of(0, 0), parent_fd)
        channel.send(Phase("load", 1.5))
        await inbox.get()
        got = []

        def read() -> None:
            while len(got) < 3000:
                got.extend(channel.receive(0 if len(got) % 2 else 0.001))

        reading = asyncio.create_task(asyncio.to_thread(read))
        for number in range(3000):
            wire.send(0, Abort((f"r{number}",)))
            if number % 7 == 0:
                await asyncio.sleep(0)
        await reading
        assert got == [Abort((f"r{number}",)) for number in range(3000)]
        await asyncio.to_thread(channel.close)

    on_loop(address, test)


@LOOPBACK
def test_members_meet_over_tcp_and_a_stranger_is_refused_and_counted(parent_fd, host):
    keys = new_curve_keys()

    async def inside():
        wire = RankSocket(f"tcp://{in_address(host)}:*", 1, keys)
        inbox: asyncio.Queue = asyncio.Queue()
        wire.listen(
            lambda rank, message: take(inbox, rank, message), lambda rank: inbox.put_nowait((rank, BROKEN)), str
        )
        assert wire.address.startswith(f"tcp://{in_address(host)}:")
        try:
            async with asyncio.timeout(20):
                channel = Channel(wire.address, identity_of(0, 0), parent_fd, keys=keys)
                channel.send(Phase("load", 1.5))
                assert await inbox.get() == (0, Phase("load", 1.5))
                with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
                    stranger.setsockopt(zmq.LINGER, 0)
                    allow_ipv6(stranger, wire.address)
                    stranger.setsockopt(zmq.IDENTITY, identity_of(0, 0))
                    stranger.connect(wire.address)
                    stranger.send(encode(Failed("let me in")))
                    await asyncio.to_thread(wait_until, lambda: wire.num_refused)
                wire.send(0, ADD)
                assert await asyncio.to_thread(channel.receive, None) == [ADD]
                await asyncio.to_thread(channel.close)
                assert inbox.empty()
                assert wire.num_dropped == 0
        finally:
            wire.close()

    asyncio.run(inside())


def test_a_flood_arrives_whole_and_in_order(address, parent_fd):
    async def test(wire, inbox):
        channel = Channel(address, identity_of(0, 0), parent_fd)
        for i in range(5000):
            channel.send(Phase(str(i), 0.0))
        assert [(await inbox.get())[1].name for _ in range(5000)] == [str(i) for i in range(5000)]
        for i in range(5000):
            wire.send(0, Abort((str(i),)))
        got: list = []
        while len(got) < 5000:
            got += await asyncio.to_thread(channel.receive, None)
        assert [message.request_ids[0] for message in got] == [str(i) for i in range(5000)]
        await asyncio.to_thread(channel.close)

    on_loop(address, test)


def test_a_rank_that_is_not_there_cannot_be_reached(address):
    async def test(wire, inbox):
        with pytest.raises(NoEngineError):
            wire.send(0, ADD)

    on_loop(address, test)


def test_a_rank_speaks_twice_a_second_and_says_how_many_steps_it_has_begun(address, parent_fd):
    async def test() -> None:
        wire, beats = RankSocket(address, 1), asyncio.Queue()
        wire.listen(lambda rank, message: beats.put_nowait(message), lambda rank: None, str)
        channel = Channel(address, identity_of(0, 0), parent_fd)
        assert await beats.get() == Heartbeat(0)
        channel.num_steps = 7
        assert await beats.get() == Heartbeat(7)
        channel.owes = False
        assert await beats.get() == Heartbeat(7, owes=False, is_idle=True)
        await asyncio.to_thread(channel.close)
        wire.close()

    asyncio.run(test())


def test_an_idle_rank_sends_fewer_heartbeats_and_one_that_gets_work_says_so_at_once():
    beats = Beats(beat_ms=40, idle_beat_ms=200)

    def sent(from_ms: int, to_ms: int, num_steps: int, *, owes: bool) -> list[tuple[int, bool]]:
        every = ((at_ms, beats.next(num_steps, at_ms * 10**6, owes=owes)) for at_ms in range(from_ms, to_ms, 20))
        return [(at_ms, beat.is_idle) for at_ms, beat in every if beat is not None]

    assert sent(0, 120, 1, owes=True) == [(0, False), (40, False), (80, False)]
    assert sent(120, 600, 1, owes=False) == [(120, True), (320, True), (520, True)]
    assert sent(600, 700, 2, owes=False) == [(600, False), (640, True)]  # it has made a step
    assert sent(700, 800, 2, owes=True) == [(720, False), (760, False)]


def test_an_earlier_process_of_a_rank_is_ignored_and_the_next_one_received(address, parent_fd):
    async def test(wire, inbox):
        old, new = (Channel(address, identity_of(1, launch), parent_fd) for launch in (0, 1))
        old.send(Phase("old", 0.0))
        assert await inbox.get() == (1, Phase("old", 0.0))
        wire.expect(1, 1)
        old.send(Phase("stale", 0.0))
        await asyncio.to_thread(old.close)
        new.send(Phase("new", 0.0))
        assert await inbox.get() == (1, Phase("new", 0.0))
        wire.send(1, Shutdown())
        assert await asyncio.to_thread(new.receive, None) == [Shutdown()]
        await asyncio.to_thread(new.close)
        assert wire.num_dropped == 0

    on_loop(address, test)


def connected(address: str, identity: bytes) -> LocalStream:
    """A connection of which the test says what it sends."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(local_path(address))
    stream = LocalStream(connection)
    stream.send(identity)
    return stream


RNG = random.Random(0)
GARBAGE = [
    b"", b"\x80\x04\x95", encode(ADD), RNG.randbytes(100), b"\x91" * 100_000,
    msgspec.msgpack.encode({"type": "Boom"}), encode(Failed("x")).replace(b"\xa1x", b"\xa1\xff"),
]  # fmt: skip


@pytest.mark.parametrize("message", GARBAGE)
def test_a_rank_with_an_unreadable_message_is_broken_and_then_ignored(address, message):
    async def test(wire, inbox):
        broken, other = (connected(address, identity_of(rank, 0)) for rank in (0, 1))
        broken.send(message)
        assert await inbox.get() == (0, BROKEN)
        broken.send(encode(Phase("more", 0.0)))
        other.send(encode(Phase("good", 0.0)))
        assert await inbox.get() == (1, Phase("good", 0.0))
        await asyncio.sleep(0.05)  # for the broken one's
        assert inbox.empty()
        wire.expect(0, 1)
        heir = connected(address, identity_of(0, 1))
        heir.send(encode(Phase("new", 0.0)))
        assert await inbox.get() == (0, Phase("new", 0.0))
        for stream in (broken, other, heir):
            stream.close()

    assert on_loop(address, test).num_dropped == 1


@pytest.mark.parametrize("identity", [b"", b"stranger"])
def test_strangers_are_dropped_and_counted_and_logged_once(address, caplog, identity):
    async def test(wire, inbox):
        stranger = connected(address, identity)
        for message in GARBAGE:
            stranger.send(message)
        stranger.send(encode(Phase("from a stranger", 0.0)))
        await asyncio.sleep(0.3)
        assert inbox.empty()
        stranger.close()

    assert on_loop(address, test).num_dropped == len(GARBAGE) + 1
    assert [message for message in caplog.messages if "unknown process" in message] == [
        "dropped a message of an unknown process (1 dropped so far)"
    ]


def test_a_second_process_under_the_same_name_is_disconnected(address):
    async def test(wire, inbox):
        first, second = (connected(address, identity_of(0, 0)) for _ in range(2))
        first.send(encode(Phase("first", 0.0)))
        assert await inbox.get() == (0, Phase("first", 0.0))
        with contextlib.suppress(ConnectionError):
            second.send(encode(Phase("second", 0.0)))
        await until(lambda: second.receive() is None)
        wire.send(0, ADD)
        messages = []
        await until(lambda: bool(messages.extend(first.receive()) or messages))
        assert messages == [encode(ADD)]
        assert inbox.empty()
        for stream in (first, second):
            stream.close()

    on_loop(address, test)


async def until(is_so) -> None:
    while not is_so():  # noqa: ASYNC110 - nothing tells when the other end has read
        await asyncio.sleep(0.01)


def test_a_connection_whose_message_is_beyond_the_limit_is_closed(address):
    async def test(wire, inbox):
        rank = connected(address, identity_of(0, 0))
        rank.send(bytes(MAX_MESSAGE_BYTES + 1))
        await until(lambda: rank.receive() is None)
        assert inbox.empty()
        assert wire.num_dropped == 0
        rank.close()

    on_loop(address, test)


def test_a_rank_that_does_not_read_gets_its_messages_later_and_in_the_end_no_more(address, monkeypatch):
    limit = 50
    monkeypatch.setattr("moestro.server.engines.rank_socket.MAX_QUEUED_MESSAGES", limit)

    async def test(wire, inbox):
        rank, names, got = connected(address, identity_of(0, 0)), [], []
        rank.send(encode(Phase("here", 0.0)))
        await inbox.get()
        with contextlib.suppress(NoEngineError):
            while len(names) < 100 * limit:
                wire.send(0, Abort((f"{len(names)}" * 10_000,)))
                names.append(f"{len(names)}" * 10_000)
        assert limit < len(names) < 100 * limit

        def take() -> bool:
            got.extend(decode_to_rank(message).request_ids[0] for message in rank.receive())
            return len(got) == len(names)

        await until(take)
        assert got == names
        wire.send(0, ADD)
        await until(lambda: rank.receive() == [encode(ADD)])
        rank.close()

    on_loop(address, test)


def test_messages_that_the_api_server_does_not_read_wait_and_the_last_ones_leave_at_the_end(tmp_path, parent_fd):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "ranks"))
        listener.listen()
        channel = Channel(f"ipc://{tmp_path}/ranks", b"rank-0.0", parent_fd)
        connection, _ = listener.accept()
        reader, received = LocalStream(connection), []
        names = [f"{i}" * 10_000 for i in range(200)]
        for name in names:
            channel.send(Phase(name, 0.0))
        closing = threading.Thread(target=channel.close)
        closing.start()
        while (messages := reader.receive()) is not None:
            received += messages
        closing.join(PATIENCE_S)
        reader.close()
    assert received[0] == b"rank-0.0"
    phases = [message for message in map(decode_from_rank, received[1:]) if isinstance(message, Phase)]
    assert [phase.name for phase in phases] == names


@pytest.mark.parametrize("message", [b"", b"junk", encode(Phase("not for a rank", 0.0)), b"\x91" * 100_000])
def test_a_rank_that_cannot_read_a_message_ends(address, message):
    status, error = ended_rank(address, lambda stream: stream.send(message))
    assert status == 4
    assert b"the channel to the API server failed" in error


def test_a_rank_whose_connection_breaks_ends(address):
    status, error = ended_rank(address, LocalStream.close)
    assert status == 3
    assert b"the connection to the API server broke" in error


def ended_rank(address: str, do) -> tuple[int, bytes]:
    """Exit status and errors of a rank process to which `do` happens."""
    code = (
        "import sys; from moestro.worker.channel import Channel; from moestro.wire.messages import Phase;"
        "channel = Channel(sys.argv[1], b'rank-0.0', 0); channel.send(Phase('here', 0.0)); channel.receive(None)"
    )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(local_path(address))
    listener.listen()
    with (
        listener,
        subprocess.Popen([sys.executable, "-c", code, address], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as rank,
    ):
        connection, _ = listener.accept()
        stream = LocalStream(connection)
        do(stream)
        status = rank.wait(PATIENCE_S)
        stream.close()
        assert rank.stderr is not None
        return status, rank.stderr.read()


def test_a_path_that_is_too_long_names_the_remedy(tmp_path):
    async def test():
        with pytest.raises(ConfigError, match="TMPDIR"):
            RankSocket(f"ipc://{tmp_path}/{'x' * 120}", 1)

    asyncio.run(test())


class FakeChannel:
    """Hands over what was put in, and remembers what was sent."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.sent: list = []

    def has_messages(self) -> bool:
        return not self.inbox.empty()

    def receive(self, wait_s: float | None) -> list:
        messages = []
        with contextlib.suppress(queue.Empty):
            messages.append(self.inbox.get(timeout=wait_s) if wait_s != 0 else self.inbox.get_nowait())
        while not self.inbox.empty():
            messages.append(self.inbox.get())
        return messages

    def send(self, message: object) -> None:
        self.sent.append(message)


class SlowRank(FakeRank):
    """Has a step under way for ever, as an accelerator has, and counts how often the loop polls the result."""

    def __init__(self) -> None:
        super().__init__()
        self.num_requests_seen = 0
        self.polls_at_abort: list[int] = []

    def outputs(self, now_ns: int, is_wanted=None) -> NewOutputs:
        self.num_requests_seen += 1
        self.num_steps = 1
        return NewOutputs()

    def abort(self, request_id: str, now_ns: int) -> None:
        self.polls_at_abort.append(self.num_requests_seen)


def test_while_a_step_is_under_way_a_rank_does_not_spin_and_hears_messages_at_once():
    rank, waits = SlowRank(), []

    class Scripted(FakeChannel):
        """Delivers a request at the first look for messages, its end at the 52nd, and the shutdown at the 53rd."""

        script: ClassVar = {0: [ADD], 51: [Abort(("a",))], 52: [Shutdown()]}

        def receive(self, wait_s: float | None) -> list:
            if wait_s == 0:
                return []  # the second look, once the results are fetched
            waits.append(wait_s)
            return self.script.get(len(waits) - 1, [])

    run_rank(rank, Scripted(), lambda: 0)
    assert waits[0] is None, "a rank without work waits for a message"
    # Each look waits for a moment, in which the interpreter is free and a message ends the wait.
    assert set(waits[1:]) == {_LOOK_AGAIN_S}
    # The loop polls the device twice for the news and once a look, and obeys the abort before it polls again.
    assert rank.polls_at_abort == [2 + 50]


class PromptRank(FakeRank):
    """Begins a step at every request, as on a CPU."""

    def outputs(self, now_ns: int, is_wanted=None) -> NewOutputs:
        self.num_steps += 1
        return NewOutputs()


def test_a_rank_that_gets_on_with_every_step_is_never_made_to_wait():
    rank, waits = PromptRank(), []

    class Watched(FakeChannel):
        def receive(self, wait_s: float | None) -> list:
            waits.append(wait_s)
            return [ADD] if len(waits) == 1 else [] if len(waits) < 100 else [Shutdown()]

    run_rank(rank, Watched(), lambda: 0)
    assert waits == [None, *[0] * 99]


class WorkingRank(FakeRank):
    """Works when polled, as a CPU does, and notes what had been sent when it began to."""

    def __init__(self, channel: FakeChannel) -> None:
        super().__init__()
        self.channel, self.sent_before, self.added_before, self.num_added = channel, [], [], 0

    def add(self, request, now_ns: int) -> None:
        self.num_added += 1
        super().add(request, now_ns)

    def outputs(self, now_ns: int, is_wanted=None) -> NewOutputs:
        self.sent_before.append(sum(len(message.outputs) for message in self.channel.sent))
        gained = super().outputs(now_ns, is_wanted)
        if len(gained) == 1 and self.num_added == 1:  # a second request comes while the first is worked on
            self.channel.inbox.put(Add(msgspec.structs.replace(ADD.request, request_id="second")))
        return gained

    def begin(self, now_ns: int) -> None:
        self.added_before.append(self.num_added)


def test_outputs_leave_before_the_next_step_is_worked_on_and_who_came_meanwhile_is_in_it():
    channel = FakeChannel()
    rank = WorkingRank(channel)
    channel.inbox.put(ADD)
    thread = threading.Thread(target=run_rank, args=(rank, channel, lambda: 0))
    thread.start()
    while sum(len(message.outputs) for message in list(channel.sent)) < 6:
        assert thread.is_alive()
    channel.inbox.put(Shutdown())
    thread.join(PATIENCE_S)
    assert rank.sent_before[:3] == [0, 1, 3]
    assert rank.added_before[:2] == [2, 2]


def test_a_rank_serves_sleeps_and_leaves_on_shutdown():
    channel = FakeChannel()
    thread = threading.Thread(target=run_rank, args=(FakeRank(), channel, lambda: 0))
    thread.start()
    channel.inbox.put(ADD)
    while sum(len(message.outputs) for message in list(channel.sent)) < 3:
        assert thread.is_alive()
    channel.inbox.put(Shutdown())
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    last = channel.sent[-1]
    assert isinstance(last, Outputs)
    assert (last.outputs.others[0].finish_reason, last.load.num_running) == ("length", 0)
    assert channel.num_steps == 3


def test_law_what_is_sent_to_a_rank_decodes_to_itself():
    rng = random.Random(0)
    for _ in range(200):
        count = rng.randrange(1, 50)
        sampling = SamplingParams(
            max_tokens=rng.randrange(99),
            seed=rng.randrange(2**64),
            temperature=rng.random(),
            min_p=rng.random(),
            frequency_penalty=rng.uniform(-2, 2),
            repetition_penalty=rng.uniform(0.1, 2),
            logit_bias=tuple((rng.randrange(2**31), rng.uniform(-100, 100)) for _ in range(rng.randrange(4))),
        )
        request = Request(
            request_id=str(rng.random()),
            num_prompt_tokens=count,
            sampling=sampling,
            arrival_ns=rng.randrange(2**62),
            token_ids=rng.randbytes(4 * count),
            block_hashes=rng.randbytes(16 * rng.randrange(9)),
            service_class=rng.choice(list(ServiceClass)),
        )
        assert decode_to_rank(encode(Add(request))) == Add(request)


def test_what_a_scheduler_did_is_sent_before_the_outputs_of_its_step():
    rank, sent = PromptRank(), []
    rank.outputs = lambda now_ns, is_wanted=None: [Output(request_id="a", token_ids=(1,), finish_reason=None)]
    events = [(), (SequenceLeft("a"),), ()]

    class Notified(FakeChannel):
        def receive(self, wait_s: float | None) -> list:
            return [Shutdown()] if sent else []

        def send(self, message) -> None:
            sent.append(message)

    run_rank(rank, Notified(), lambda: 0, SideJobs(take_events=lambda: events.pop(1)))
    assert [type(message) for message in sent] == [EngineEvents, Outputs]
    assert sent[0].events == (SequenceLeft("a"),)
