"""Law: whatever becomes of messages, connections, replays and processes, the router counts no block as held that the
engine did not hold after the batch applied last; and as soon as nothing is missing, it counts all of them.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.fake_publisher import BLOCK_SIZE, END, MODEL, FakePublisher, Prompt, Sink, frames, replay_frames

from moestro.routing.kv_events import KvFeed, KvFeedSettings, StreamRules
from moestro.wire.kv_names import NamingRules

SECOND_NS = 1_000_000_000


class World:
    """A feed, the publisher's processes one after the other, and a network that may fail in any way."""

    def __init__(self, seed: int, *, num_kept: int, can_replay: bool) -> None:
        self.rng = np.random.default_rng(seed)
        self.num_kept, self.can_replay = num_kept, can_replay
        self.now_ns = 0
        self.sink = Sink()
        naming = NamingRules(model=MODEL, block_size=BLOCK_SIZE)
        rules = StreamRules(max_waiting_bytes=4000)
        settings = KvFeedSettings(engine=0, name="e", naming=naming, can_replay=can_replay, stream=rules)
        self.feed = KvFeed(self.sink, settings, lambda _kind, _text: None)
        self.position: tuple[FakePublisher, int] | None = None  # the batch that was applied last
        self.is_connected = False
        self.wire: list[tuple[int, bytes]] = []
        self.answers: list[list[bytes]] | None = None
        self.all: dict[bytes, tuple[FakePublisher, int]] = {}
        self._spy()
        self.start()

    def _spy(self) -> None:
        apply, lost, restarted = self.feed.apply, self.feed.lost, self.feed.restarted

        def on_apply(body: bytes, now_ns: int) -> None:
            process, seq = self.all[body]
            if self.position is not None:
                assert (process, seq - 1) == self.position, "a batch was left out, or came twice"
            self.position = (process, seq)
            apply(body, now_ns)

        def on_lost(now_ns: int) -> None:
            self.position = None
            lost(now_ns)

        def on_restarted(now_ns: int) -> None:
            self.position = None
            restarted(now_ns)

        self.feed.apply, self.feed.lost, self.feed.restarted = on_apply, on_lost, on_restarted

    # --- what can happen

    def start(self) -> None:
        """Another process, in place of the one there was."""
        self.cut()
        arrays, int_hashes = self.rng.random(2) < 0.5
        self.process = FakePublisher(self.rng, arrays=arrays, int_hashes=int_hashes, num_kept=self.num_kept)

    def act(self) -> None:
        rng, process = self.rng, self.process
        for _ in range(rng.integers(1, 4)):
            draw = rng.random()
            if draw < 0.5:
                process.compute(self.prompt())
            elif draw < 0.7:
                process.evict("GPU")
            elif draw < 0.85:
                process.offload(tells_tokens=bool(rng.random() < 0.5))
            elif draw < 0.98:
                process.evict("CPU")
            else:
                process.clear()
        before = len(process.published)
        process.publish()
        for seq, body in process.published[before:]:
            self.all[body] = (process, seq)
            if self.is_connected:
                self.wire.append((seq, body))

    def prompt(self) -> Prompt:
        rng = self.rng
        tokens = tuple(int(t) for t in rng.integers(2, size=rng.integers(0, 21)))
        adapter, salt = (rng.choice([None, None, "x"]) for _ in range(2))
        picture = int(rng.integers(5)) if rng.random() < 0.1 else None
        return Prompt(tokens, adapter, salt, picture)

    def deliver(self) -> None:
        if self.wire:
            self.feed.live(frames(*self.wire.pop(0)), self.now_ns)

    def lose(self) -> None:
        if self.wire:
            self.wire.pop(0)

    def answer(self) -> None:
        if self.answers:
            self.feed.replayed(self.answers.pop(0), self.now_ns)

    def silence(self) -> None:
        """The replay ends in the middle."""
        self.answers = None

    def cut(self) -> None:
        if self.is_connected:
            self.is_connected, self.wire, self.answers = False, [], None
            self.feed.stream.disconnected(self.now_ns)

    def connect(self) -> None:
        if not self.is_connected:
            self.is_connected = True
            self.feed.stream.connected(self.now_ns)

    def wait(self) -> None:
        self.now_ns += int(self.rng.integers(1, 4 * SECOND_NS))
        self.feed.stream.tick(self.now_ns)

    def settle_request(self) -> None:
        """If a replay is requested: the publisher answers with all that it has of it by now."""
        start = self.feed.stream.request()
        if start is not None:
            assert self.can_replay
            has_topic = bool(self.rng.random() < 0.5)
            kept = [batch for batch in self.process.buffer if batch[0] >= start]
            self.answers = [replay_frames(*batch, has_topic=has_topic) for batch in kept] + [END]

    def check(self) -> None:
        self.feed.work(self.now_ns)
        held = self.sink.held.get(0, set())
        if self.position is None:
            assert not held
            return
        process, seq = self.position
        assert held <= process.names_after[seq], "a hit that is none"
        if self.feed.stream.is_complete:
            assert held == process.names_after[seq]
            assert self.sink.hosted.get(0, set()) == process.hosted_after[seq]

    def step(self) -> None:
        steps = (self.act, self.deliver, self.answer, self.wait, self.lose, self.silence, self.cut, self.connect)
        weights = np.array([6, 8, 6, 1, 0.5, 0.3, 0.3, 2])
        steps[self.rng.choice(len(steps), p=weights / weights.sum())]()
        if self.rng.random() < 0.01:
            self.start()
        self.settle_request()
        self.check()

    def come_to_rest(self) -> None:
        """The network is sound again, and no engine computes."""
        self.connect()
        for _ in range(2000):
            self.settle_request()
            self.deliver()
            self.answer()
            self.now_ns += SECOND_NS // 10
            self.feed.stream.tick(self.now_ns)
            self.check()


@pytest.mark.parametrize("seed", range(60))
def test_no_block_is_counted_as_held_that_is_not(seed):
    world = World(seed, num_kept=int(np.random.default_rng(seed).choice([3, 1000])), can_replay=seed % 4 != 0)
    for _ in range(400):
        world.step()
    world.come_to_rest()
    process = world.process
    if process.published and world.can_replay:
        assert world.position == (process, len(process.published) - 1), "the newest batch was not found"
    if world.can_replay and world.num_kept > len(process.published):
        assert world.feed.stream.is_complete, "nothing is missing, and it was not noticed"


def test_the_histories_meet_what_they_are_to_meet():
    """Gaps, restarts, losses, silences, orphans, pictures: each comes to pass in some history."""
    totals: dict[str, int] = {}
    for seed in range(20):
        world = World(seed, num_kept=3 if seed % 2 else 1000, can_replay=seed % 4 != 0)
        for _ in range(400):
            world.step()
        counts = world.feed.counts
        for part in (counts.blocks, counts.stream, counts):
            for name in part.__dataclass_fields__:
                value = getattr(part, name)
                totals[name] = totals.get(name, 0) + (value if isinstance(value, int) else 0)
    for name in ("stored", "removed", "orphaned", "unnamed", "batches", "gaps", "replayed", "unanswered", "lost",
                 "restarts", "unknown", "cleared"):  # fmt: skip
        assert totals[name] > 0, name
