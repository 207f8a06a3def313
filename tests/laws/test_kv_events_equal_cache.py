"""Law: who applies all that a rank publishes of its prefix cache holds exactly the names that the cache can find."""

from __future__ import annotations

import numpy as np
import pytest
from support.fake_device import KvDevice, make_request
from support.fake_publisher import Sink

from moestro.core.hashing import split_hashes
from moestro.engine.rank import CacheEvents, build_rank, changes_of
from moestro.engine.settings import SchedulerSettings
from moestro.routing.kv_events import KvFeed, KvFeedSettings
from moestro.wire.kv_names import NamingRules
from moestro.worker.kv_publisher import encode_batch


@pytest.mark.parametrize("host", [0, 20])
@pytest.mark.parametrize("seed", range(6))
def test_what_is_published_is_what_is_cached(seed, host):
    rng = np.random.default_rng(seed)
    settings = SchedulerSettings(num_blocks=24, num_host_blocks=host, block_size=4, max_model_len=64, max_num_seqs=4)
    rank = build_rank(settings, KvDevice(24, 4, num_host_blocks=host))
    cache, sink, names, num_batches = CacheEvents(rank.scheduler), Sink(), set[bytes](), 0
    naming = NamingRules(model="fake", block_size=4)
    feed = KvFeed(sink, KvFeedSettings(engine=0, name="e", naming=naming, can_replay=False), lambda _kind, _text: None)
    feed.stream.connected(0)
    num_removed = num_on_host = 0
    by_medium, stored, hosted = {False: set(), True: set()}, set(), set()
    for step in range(400):
        if rng.random() < 0.3:
            tokens = np.concatenate([np.arange(rng.integers(1, 12)), rng.integers(0, 3, rng.integers(1, 20))])
            salt = ("a", "b", None)[rng.integers(3)]
            rank.add(make_request(str(step), tokens, salt=salt, max_tokens=int(rng.integers(1, 12))), step)
        rank.step(step)
        changes = changes_of(rank.scheduler.pool.journal)
        now_stored, now_hosted, gone = map(set, map(split_hashes, (changes.stored, changes.hosted, changes.removed)))
        stored, hosted = (stored | now_stored) - now_hosted - gone, (hosted | now_hosted) - now_stored - gone
        events = cache.take()
        for event in events:
            names.update(event.names)
            own = by_medium[event.is_on_host]
            by_medium[event.is_on_host] = own | {*event.names} if hasattr(event, "parent") else own - {*event.names}
        if events:
            batch = encode_batch(0.0, events, rank=0, block_size=4)
            feed.live([b"", num_batches.to_bytes(8, "big"), batch], step)
            feed.work(step)
            num_batches += 1
        on_device = {name for name in names if name in rank.scheduler.pool}
        on_host = {name for name in names if name in rank.scheduler.state.host}
        assert sink.held.get(0, set()) == on_device | on_host
        assert (stored, hosted) == (on_device, on_host - on_device)
        assert by_medium == {False: on_device, True: on_host}
        num_on_host = max(num_on_host, len(on_host - on_device))
        num_removed = feed.counts.blocks.removed
    assert feed.counts.blocks.orphaned == feed.counts.blocks.unnamed == 0
    assert num_removed > 50
    assert (num_on_host > 0) == (host > 0)


def test_hashes_of_prompts_are_those_of_the_events():
    rank = build_rank(SchedulerSettings(num_blocks=24, block_size=4, max_model_len=64), KvDevice(24, 4))
    cache = CacheEvents(rank.scheduler)
    request = make_request("r", range(20), salt="tenant", max_tokens=1)
    rank.add(request, 0)
    rank.step(0)
    rank.step(1)
    (stored,) = cache.take()
    assert list(stored.names) == split_hashes(request.block_hashes)
    assert (stored.parent, stored.cache_salt) == (None, "tenant")
    assert cache.take() == []
