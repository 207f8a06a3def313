"""Law: whatever moves, dies and comes late, each slot in use has its expert, and every token gets each expert once."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest
from msgspec.structs import replace
from support.examples import num_examples
from support.fake_stages import expected_tokens, make_shape
from support.linked_group import serve
from support.migrating_group import Memory, MigratingGroup, random_requests, rows_of, run_at_once

from moestro.config.launch_spec import GroupSpec
from moestro.flow.executor import FlowExecutor
from moestro.flow.settings import GroupOptions
from moestro.worker import peer_inbox

SHAPE = make_shape(8, num_chosen=3)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """No worker is added, nothing runs beside the turns, and waits last a turn."""
    monkeypatch.setattr("moestro.flow.settings.NUM_SPARE", 0)
    monkeypatch.setattr(peer_inbox.threading, "Thread", run_at_once)
    monkeypatch.setattr(peer_inbox, "CONFIRM_NS", 1)
    monkeypatch.setattr(peer_inbox, "LOADER_LOOK_NS", 1)


class Mover:
    """Starts and cancels migrations at random."""

    def __init__(self, group: MigratingGroup, cancel_rate: float) -> None:
        self.group, self.cancel_rate = group, cancel_rate
        self.ends: list[str] = []
        self.was_running = False

    def turn(self) -> None:
        migration, rng = self.group.migration, self.group.rng
        if self.was_running and not migration.progress.is_running:
            self.ends.append(migration.progress.error)
        self.was_running = migration.progress.is_running
        if not self.was_running and rng.random() < 0.1:
            with contextlib.suppress(ValueError):  # no slot is free, or an expert's only worker does not run
                migration.start(self.group.random_target(), int(rng.integers(1, 50)))
            self.was_running = migration.progress.is_running
        elif rng.random() < self.cancel_rate:
            migration.cancel()


def serve_and_move(
    seed: int, *, colocated: bool, death_rate: float, cancel_rate: float
) -> tuple[MigratingGroup, Mover]:
    rng = np.random.default_rng(seed)
    options = GroupOptions(
        attention=int(rng.integers(1, 4)) + colocated,
        experts=0 if colocated else int(rng.integers(2, 4)),
    )
    num_redundant = int(rng.integers(1, 6))
    num_credits, ahead = int(rng.choice([1, 2, 5, 40])), int(rng.integers(1, 3))
    repeats = float(rng.choice([0.0, 0.2]))
    losses = float(rng.choice([0.0, 0.01]))
    group = MigratingGroup(
        rng,
        options,
        num_redundant,
        death_rate=0.0 if colocated else death_rate,
        num_credits=num_credits,
        ahead=ahead,
        repeats=repeats,
        losses=losses,
    )
    mover, turn = Mover(group, cancel_rate), group.turn

    def moving(now_ns: int) -> list:
        gained = turn(now_ns)
        mover.turn()
        if now_ns % 3 == 0:
            group.check_slots()
        return gained

    group.turn = moving
    requests = random_requests(rng, 8)
    tokens = serve(group, requests, abort_share=0.005)
    for request in requests:
        if request.request_id in tokens:
            assert tokens[request.request_id] == expected_tokens(request, SHAPE)
    group.turn = turn
    return group, mover


def settle(group: MigratingGroup) -> None:
    """Let a migration come to its end, without deaths; then another one must reach its goal."""
    group.death_rate = 0.0

    def wait() -> None:
        for now_ns in range(group.now_ns + 1, group.now_ns + 20_000):
            group.turn(now_ns)
            if not group.migration.progress.is_running and not group.down:
                return
        raise AssertionError("the migration stands still")

    wait()
    target = group.random_target()
    try:
        group.migration.start(target, 1)
    except ValueError:
        return
    wait()
    assert group.migration.progress.error == ""
    assert rows_of(group.migration.table) == rows_of(target)


@pytest.mark.parametrize("seed", range(num_examples(2, thorough=4)))
@pytest.mark.parametrize(
    ("colocated", "death_rate", "cancel_rate"),
    [(False, 0.0, 0.0), (False, 0.01, 0.01), (True, 0.0, 0.01)],
    ids=["moves", "moves and deaths", "colocated"],
)
def test_every_token_is_exact_and_every_slot_has_its_expert(seed, colocated, death_rate, cancel_rate):
    async def inside() -> Mover:
        found = serve_and_move(seed, colocated=colocated, death_rate=death_rate, cancel_rate=cancel_rate)
        settle(found[0])
        return found[1]

    mover = asyncio.run(inside())
    assert mover.ends


def hasty_homes(patch: pytest.MonkeyPatch) -> None:
    """Homes confirm a table although they wait for slots of the one before."""
    patch.setattr(FlowExecutor, "is_settled", True)


def lazy_workers(patch: pytest.MonkeyPatch) -> None:
    """Workers say that they are prepared without having loaded anything."""
    patch.setattr(Memory, "write", lambda *_: None)


def forgetful_restarts(patch: pytest.MonkeyPatch) -> None:
    """Workers start again with the slots of the group's start."""
    real = GroupSpec.expert_table
    patch.setattr(GroupSpec, "expert_table", lambda spec, *sizes: real(replace(spec, table=None), *sizes))


@pytest.mark.parametrize("mistake", [hasty_homes, lazy_workers, forgetful_restarts])
def test_the_law_finds_a_mistake(mistake, monkeypatch):
    mistake(monkeypatch)

    async def inside(seed: int) -> None:
        serve_and_move(seed, colocated=False, death_rate=0.01, cancel_rate=0.0)

    for seed in (0, 1, 3, 4):
        with pytest.raises(AssertionError):
            asyncio.run(inside(seed))
