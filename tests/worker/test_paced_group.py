"""Paced ranks that share the experts of a network: one handshake a step, and one end for all."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from support.interrupted_answers import SentRequests, completion, disturbed, stream, total
from support.running import PATIENCE_S, REAL, Running, call_admin, complete, free_port, is_idle, metrics, wait_until

from moestro.config.launch_spec import LockStepSpec
from moestro.config.serve_settings import ProcessSettings, ServeSettings
from moestro.core.work import request_key
from moestro.cost.settings import PacedSettings
from moestro.errors import ConfigError, GroupLostError
from moestro.flow.settings import SteppingSettings
from moestro.model.settings import ModelSettings
from moestro.worker.paced import num_blocks_of
from moestro.worker.paced_group import (
    OpenedStep,
    PacedGroupDevice,
    PricedStep,
    StepHost,
    StepMember,
    _keyed_batch,
    make_step_pricer,
)

A100 = PacedSettings(device="paced:a100", network="qwen3-30b-a3b", paced_arithmetic="none")
NUM_RANKS = 3


def opened(rank: int, *units: tuple[int, int]) -> OpenedStep:
    start, num_tokens = (np.array(column, np.int32) for column in zip(*units, strict=True)) if units else ([], [])
    keys = np.array([request_key(100 * rank + i) for i in range(len(units))], np.uint64)
    return OpenedStep(rank, *(np.asarray(column).tobytes() for column in (start, num_tokens, keys)))


@pytest.fixture
def specs() -> Iterator[list[LockStepSpec]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield [
            LockStepSpec(
                num_ranks=NUM_RANKS,
                port=listener.getsockname()[1],
                listen_fd=None if rank else os.dup(listener.fileno()),
                join_by_ns=time.monotonic_ns() + 1_000_000_000,
                timeout_s=10,
            )
            for rank in range(NUM_RANKS)
        ]


@pytest.fixture
def ranks(specs) -> Iterator[list[StepHost | StepMember]]:
    """All ranks of a group; a real one has a process for each."""
    made: dict[int, StepHost | StepMember] = {}
    members = threading.Thread(
        target=lambda: made.update({rank: StepMember(specs[rank], rank) for rank in range(1, NUM_RANKS)})
    )
    members.start()
    made[0] = StepHost(specs[0], make_step_pricer(A100, NUM_RANKS, seed=3))
    members.join()
    yield [made[rank] for rank in range(NUM_RANKS)]
    for rank in made.values():
        close(rank)


def close(rank: StepHost | StepMember) -> None:
    """What the end of a process does."""
    for connection in rank._members if isinstance(rank, StepHost) else [rank._host]:
        connection.close()


def in_threads(*calls) -> list:
    found: list = [None] * len(calls)
    threads = [
        threading.Thread(target=lambda i=i, call=call: found.__setitem__(i, outcome(call)))
        for i, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return found


def outcome(call):
    try:
        return call()
    except GroupLostError as error:
        return error


def test_all_ranks_learn_one_end_and_the_tokens_of_each(ranks):
    parts = [opened(0, (10, 1), (0, 50)), opened(1), opened(2, (7, 1))]
    began_ns = time.monotonic_ns()
    found = in_threads(*(lambda rank=rank, part=part: rank.open(part) for rank, part in zip(ranks, parts, strict=True)))
    assert [step.num_tokens for step in found] == [[51, 0, 1]] * NUM_RANKS
    assert len({step.end_ns for step in found}) == 1
    priced = make_step_pricer(A100, NUM_RANKS, seed=3).draw([_keyed_batch(part) for part in parts])
    assert found[0].end_ns - began_ns >= priced.micro_batches(1).lock_step_ns > 0
    counts = [
        np.frombuffer(step.expert_counts, np.int32).reshape(step.num_layers, -1) for step in found if step.num_layers
    ]
    assert [own.sum(axis=1).tolist() for own in counts] == [[51 * 8] * 48, [1 * 8] * 48], "rank 1 has no tokens"
    assert (sum(counts) == priced.expert_counts).all()
    quiet = in_threads(*(lambda rank=rank, i=i: rank.open(opened(i)) for i, rank in enumerate(ranks)))
    assert [step.num_tokens for step in quiet] == [[0] * NUM_RANKS] * NUM_RANKS


def test_the_price_depends_on_who_has_which_tokens():
    pricer = make_step_pricer(A100, 2, seed=0)

    def price(*parts: OpenedStep) -> int:
        return pricer.draw([_keyed_batch(part) for part in parts]).micro_batches(1).lock_step_ns

    many = [(100, 1)] * 32
    together, apart = price(opened(0, *many), opened(1)), price(opened(0, *many[:16]), opened(1, *many[16:]))
    assert together > apart > price(opened(0, *many[:16]), opened(1)) > 0
    assert price(opened(0, *many), opened(1)) == together, "the same tokens visit the same experts"


def test_a_rank_that_ends_ends_the_step_of_the_others(ranks):
    close(ranks[2])

    def open_and_end() -> PricedStep:
        try:
            return ranks[0].open(opened(0, (0, 4)))
        finally:
            close(ranks[0])

    host, member = in_threads(open_and_end, lambda: ranks[1].open(opened(1)))
    assert isinstance(host, GroupLostError)
    assert "closed its connection" in str(host)
    assert isinstance(member, GroupLostError)


def test_a_rank_that_does_not_come_is_named(specs):
    found, member = in_threads(
        lambda: StepHost(specs[0], make_step_pricer(A100, NUM_RANKS, 0)), lambda: StepMember(specs[2], 2)
    )
    close(member)
    assert str(found) == "engine 1 did not join its group in time"


class FixedGroup:
    """A group whose steps take 30 ms."""

    def open(self, own: OpenedStep):
        num_tokens = int(np.frombuffer(own.num_tokens, np.int32).sum())
        return PricedStep([num_tokens, 5], time.monotonic_ns() + 30_000_000, 30_000_000, [0, 0])


def test_a_rank_without_tokens_sleeps_to_the_end_of_the_step():
    device = PacedGroupDevice(FixedGroup(), 0, None)
    assert device.open_step(None).tolist() == [0, 5]
    since = time.monotonic()
    device.take_part(0)
    assert time.monotonic() - since > 0.025


# --- the real command -------------------------------------------------------------------------------------------------

GROUP = ("qwen3-30b-a3b", "--device", "paced:a100", "--mode", "ep", "--engines", "2")


def idle_steps(server: Running) -> list[float]:
    figures = metrics(server)
    return [figures[f'moestro:group_idle_steps_total{{engine="{i}"}}'] for i in (0, 1)]


@pytest.mark.parametrize(
    ("flags", "is_disturbed"),
    [
        (("--paced-arithmetic", "none"), True),
        # Engines with a network restart in tests/server/test_expert_parallel.py.
        (("--num-gpu-blocks-override", "500", "--dtype", "float32"), False),
    ],
    ids=["without arithmetic", "demo network"],
)
def test_a_paced_group_serves_sleeps_and_restarts(flags, is_disturbed, tmp_path):
    server = Running((*REAL, *GROUP, *flags, "--route-policy", "round_robin"), tmp_path, admin_port=free_port())
    try:
        since = time.monotonic()
        usage = complete(server, max_tokens=20, ignore_eos=True).json["usage"]
        assert usage["completion_tokens"] == 20
        assert time.monotonic() - since > 20 * 0.004, "no A100 is that fast"
        wait_until(lambda: is_idle(server))
        # An idle rank tells its figures once the group sleeps, which may be after the answer.
        wait_until(lambda: sorted(idle_steps(server)) == [0, 20])
        found = call_admin(server, "GET", "/admin/experts").json
        assert [each["num_steps"] for each in found["engines"] if each["num_visits"]] == [20]
        assert sum(each["num_visits"] for each in found["engines"]) == 48 * 8 * (usage["total_tokens"] - 1)
        assert (found["num_experts"], len(found["layers"])) == (128, 48), "of the modelled network"
        bodies = stream("def f(x):", max_tokens=80), completion("import", max_tokens=80)
        if is_disturbed:
            expected, found = disturbed(server, *bodies)
        else:
            expected, found = (SentRequests(server, [*bodies] * 2).answers() for _ in range(2))
        assert found == expected
        assert total(server, "engine_restarts_total") == 2 * is_disturbed
        assert "Traceback" not in server.text
        assert server.stop() == 0
    finally:
        server.kill()


def test_a_group_needs_a_gpu_by_name():
    for device in ("paced:qllm", "paced:table.json"):
        with pytest.raises(ConfigError, match="give --device paced:GPU with the name of a GPU"):
            ServeSettings(
                pacing=PacedSettings(device=device),
                stepping=SteppingSettings(mode="ep"),
                processes=ProcessSettings(engines=2),
            )
    with pytest.raises(ConfigError, match="link 'string'"):
        PacedSettings(device="paced:a100", paced_link="string")


def test_devices_that_share_experts_have_more_room_for_kv():
    assert num_blocks_of(A100, ModelSettings(), 4) > num_blocks_of(A100, ModelSettings()) > 0
