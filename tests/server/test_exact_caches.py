"""`moestro serve --engines N` knows what its engines' prefix caches hold, block by block."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.fake_device import KvDevice, make_request
from support.fake_rank import INFO
from support.kv_listener import DEMO, Listener, free_ports, publishing_config
from support.kv_listener import names as names_of
from support.routers import request, router
from support.running import Running, call_admin, complete, free_port, is_idle, wait_until

from moestro.config.linux_process import usable_cores
from moestro.core.hashing import split_hashes
from moestro.core.load_figures import IDLE
from moestro.core.request import FinishReason, NewOutputs, Output
from moestro.engine.rank import UNCHANGED, build_rank, changes_of
from moestro.engine.settings import SchedulerSettings
from moestro.routing.decision_record import KvCleared, KvRemoved, KvStored, decode_entry, is_entry, keyed_entry
from moestro.server.engines.engine_client import EngineClient
from moestro.server.engines.request_state import Metrics
from moestro.web.record_file import record_key
from moestro.wire.messages import Outputs, Ready

NUM_BLOCKS = 40
OWN = str(DEMO)  # name of the model by which the server itself names blocks
HEADS = ("import os\n" * 24, "class Tree:\n    pass\n" * 12, "for i in range(3):\n    print(i)\n" * 9)


@pytest.fixture(scope="module")
def ports() -> tuple[int, int]:
    return free_ports(2)


@pytest.fixture(scope="module")
def small(real_command, tmp_path_factory, ports) -> Iterator[tuple[Running, Path]]:
    """Two engines with 40 blocks each, which publish what they hold to anyone as well."""
    directory = tmp_path_factory.mktemp("small")
    record = directory / "record.jsonl"
    command = (
        *real_command, "--engines", "2", "--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-model-len", "480",
        "--kv-events-config", publishing_config(ports), "--record", str(record),
        "--record-key-file", str(directory / "key"),
    )  # fmt: skip
    server = Running(command, directory, admin_port=free_port())
    yield server, record
    server.kill()


def recorded_names(record: Path, held: set[bytes]) -> set[bytes]:
    """The names that a record has for blocks: hashes under its key."""
    secret = record_key(record.with_name("key")).secret
    entry = keyed_entry(secret, KvStored(0, b"".join(held), 0))
    return set(split_hashes(entry.hashes))


def table_of(record: Path) -> dict[int, set[bytes]]:
    """Blocks that each engine has reported to the router, from the record of its calls."""
    held: dict[int, set[bytes]] = {}
    for line in record.read_bytes().splitlines():
        if not line.strip() or not is_entry(line):
            continue
        match decode_entry(line):
            case KvCleared(engine):
                held[engine] = set()
            case KvStored(engine, hashes):
                held[engine] |= set(split_hashes(hashes))
            case KvRemoved(engine, hashes):
                held[engine] -= set(split_hashes(hashes))
    return held


def hits_of(server: Running, text: str) -> dict[str, int]:
    """The hits that the router expects on each engine for a prompt, in blocks."""
    reply = complete(server, prompt=text, max_tokens=1)
    assert reply.status == 200, reply.body
    trace = call_admin(server, "GET", f"/admin/explain/{reply.json['id']}").json
    return {each["engine"]: each["hit_tokens"] // 16 for each in trace["attempts"][0]["candidates"]}


def names(text: str) -> list[bytes]:
    return names_of(text, model=OWN)


def leading(blocks: list[bytes], held: set[bytes]) -> int:
    return next((depth for depth, block in enumerate(blocks) if block not in held), len(blocks))


@pytest.mark.skipif(len(usable_cores()) < 2, reason="needs two cores")
def test_engines_of_one_machine_have_cores_of_their_own(small):
    server, _ = small
    first, second = (set(rank.cpu_affinity()) for rank in server.ranks())
    assert not first & second
    assert sorted(first | second) == list(usable_cores())


def test_after_evictions_the_routers_table_equals_the_engines_caches(small, ports):
    server, record = small
    listeners = [Listener(ports[0] + rank, ports[1] + rank, OWN) for rank in range(2)]
    try:
        rng = random.Random(0)
        prompts = [f"{rng.choice(HEADS)}x = {i}\n" + f"y_{i} = {i * 7}\n" * 12 for i in range(24)]
        for text in prompts:
            assert complete(server, prompt=text, max_tokens=2).status == 200
        wait_until(lambda: is_idle(server))
        caches = [listener.held for listener in listeners]
        sent = {name for text in prompts for name in names(text)}
        assert len(sent) > 2 * NUM_BLOCKS, "so blocks were evicted"
        assert max(len(cache) for cache in caches) <= NUM_BLOCKS
        wait_until(
            lambda: (
                [table_of(record).get(engine) for engine in range(2)]
                == [recorded_names(record, each.held) for each in listeners]
            )
        )
        # The decisions use it: each prompt is expected exactly where its blocks are, evicted ones nowhere.
        num_evicted = 0
        for text in prompts:
            expected = {f"engine {rank}": leading(names(text), listeners[rank].held) for rank in range(2)}
            assert hits_of(server, text) == expected
            num_evicted += max(expected.values()) < len(names(text))
            wait_until(lambda: is_idle(server))
        assert num_evicted > 5
        # A new process has an empty cache, which the router knows before the first block.
        server.ranks()[0].kill()
        wait_until(lambda: set() in table_of(record).values())
    finally:
        for listener in listeners:
            listener.close()


@pytest.mark.parametrize("seed", range(4))
def test_law_changes_of_every_step_rebuild_the_cache(seed):
    rng = np.random.default_rng(seed)
    settings = SchedulerSettings(num_blocks=24, block_size=4, max_model_len=64, max_num_seqs=4)
    rank = build_rank(settings, KvDevice(24, 4))
    pool = rank.scheduler.pool
    pool.journal = []
    held: set[bytes] = set()
    seen: set[bytes] = set()
    num_removed = 0
    for step in range(300):
        if rng.random() < 0.3:
            tokens = np.concatenate([np.arange(rng.integers(1, 12)), rng.integers(0, 3, rng.integers(1, 20))])
            rank.add(make_request(str(step), tokens, max_tokens=int(rng.integers(1, 12))), step)
        rank.step(step)
        changes = changes_of(pool.journal) if pool.journal else UNCHANGED
        pool.journal.clear()
        removed, stored = set(split_hashes(changes.removed)), set(split_hashes(changes.stored))
        assert not removed & stored
        held = held - removed | stored
        seen |= stored
        num_removed += len(removed)
        assert held == {name for name in seen if pool.find_prefix([name])}
    assert num_removed > 50


def client(policy: str, num_engines: int = 2) -> tuple[EngineClient, list]:
    sent: list = []
    made = router(num_engines, policy)
    engines = EngineClient(made, lambda engine, message: sent.append((engine, message)), Metrics(num_engines))
    for engine in range(num_engines):
        engines.on_message(engine, Ready(INFO))
    return engines, sent


@pytest.mark.parametrize(
    ("policy", "num_engines", "follows"), [("moestro", 2, True), ("moestro", 1, False), ("round_robin", 2, False)]
)
def test_engines_report_their_caches_where_a_choice_depends_on_them(policy, num_engines, follows):
    async def inside() -> None:
        assert client(policy, num_engines)[0].follows_caches is follows

    asyncio.run(inside())


def test_a_prompt_counts_until_its_end_and_then_by_its_engines_reports():
    async def inside() -> None:
        engines, sent = client("lmetric")
        prompt = list(range(64))
        inbox: asyncio.Queue = asyncio.Queue()
        fields = request("a", prompt=prompt)
        engines.submit(fields, inbox)
        home = sent[-1][0]
        assert expected_hits(engines, prompt)[home] == 64, "under way"
        first, last = split_hashes(fields.block_hashes)[:2], split_hashes(fields.block_hashes)[2:]
        end = Output(request_id="a", token_ids=(1,), finish_reason=FinishReason.STOP)
        engines.on_message(home, Outputs(NewOutputs((end,)), IDLE, stored=b"".join(first + last), removed=b""))
        assert expected_hits(engines, prompt)[home] == 64
        engines.on_message(home, Outputs(NewOutputs(), IDLE, removed=b"".join(last)))
        assert expected_hits(engines, prompt)[home] == 32
        engines.on_exit(home, "killed")
        engines.on_message(home, Ready(INFO))
        assert expected_hits(engines, prompt) == [0, 0]

    asyncio.run(inside())


def expected_hits(engines: EngineClient, prompt: list[int]) -> list[int]:
    return (engines._router._index.match(request("probe", prompt=prompt).block_hashes) * 16).tolist()
