"""What the engines' prefix caches hold: as they say it themselves, and as the router's own decisions predict it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.cluster.prefix_index import PrefixIndex


class EngineCaches:
    """Two prefix indices. The exact one is fed by KV events; the predicted one by where requests were sent.

    An engine that says nothing is known by prediction alone: of limited age, and of as many blocks as its cache has. Of
    one that does, the prediction covers the time between a decision and the event that follows from it; what the
    engine removes is removed from both.

    Args:
        max_bytes: of both indices.
        expiry_ns: age at which a prediction is dropped.
    """

    def __init__(self, max_bytes: int, expiry_ns: int) -> None:
        self._exact = PrefixIndex(max_bytes // 2)
        self._predicted = PrefixIndex(max_bytes // 2)
        self._expiry_ns = expiry_ns
        self._num_engines = 0
        self._next_to_expire = 0

    def add_engine(self, engine: int) -> None:
        """A new engine, whose number is the next, or one that was cleared."""
        self._exact.add_engine(engine)
        self._predicted.add_engine(engine)
        self._num_engines = max(self._num_engines, engine + 1)

    def set_capacity(self, engine: int, num_blocks: int | None) -> None:
        """Blocks that the KV cache of `engine` holds; None: not known."""
        self._predicted.set_capacity(engine, num_blocks)

    def match(self, hashes: bytes, now_ns: int) -> NDArray[np.int64]:
        """int64[n], leading blocks of a prompt that each engine is thought to hold."""
        # One engine's outdated predictions at a time: no decision waits for them all.
        self._next_to_expire = (self._next_to_expire + 1) % self._num_engines
        self._predicted.expire(self._next_to_expire, now_ns - self._expiry_ns)
        predicted = self._predicted.match(hashes)
        if not self._exact.num_blocks:
            return predicted
        return np.maximum(predicted, self._exact.match(hashes))

    def routed(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """A prompt was sent to `engine`, which will hold its blocks."""
        self._predicted.expire(engine, now_ns - self._expiry_ns)
        self._predicted.store(engine, hashes, now_ns)

    def stored(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """`engine` said that it holds these."""
        self._exact.store(engine, hashes, now_ns)

    def removed(self, engine: int, hashes: bytes) -> None:
        """`engine` said that it holds these no more."""
        self._exact.remove(engine, hashes)
        self._predicted.remove(engine, hashes)

    def cleared(self, engine: int) -> None:
        """`engine` holds nothing."""
        self._exact.clear(engine)
        self._predicted.clear(engine)

    def lost_track(self, engine: int) -> None:
        """Events of `engine` were missed: what it said cannot be believed, and prediction takes over."""
        self._exact.clear(engine)

    def is_exact(self, engine: int) -> bool:
        """Whether `engine` has said what it holds."""
        return self._exact.num_blocks_on(engine) > 0

    @property
    def num_bytes(self) -> int:
        """Memory taken, about."""
        return self._exact.num_bytes + self._predicted.num_bytes
