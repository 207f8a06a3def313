"""The prefix index against sets, one an engine."""

from __future__ import annotations

import random

import numpy as np
import pytest

from moestro.cluster.prefix_index import PAIR_BYTES, PrefixIndex, split
from moestro.core.hashing import HASH_BYTES, hash_blocks, hash_key

EXPIRY_NS = 100


def block(number: int) -> bytes:
    return number.to_bytes(HASH_BYTES, "little")


def packed(*numbers: int) -> bytes:
    return b"".join(block(number) for number in numbers)


def index(num_engines: int, num_blocks_each: int = 10_000) -> PrefixIndex:
    """With room for so many blocks of each engine, said and predicted."""
    made = PrefixIndex(2 * num_blocks_each * num_engines * (PAIR_BYTES + num_engines // 7), EXPIRY_NS)
    for engine in range(num_engines):
        made.add_engine(engine)
    return made


class Oracle:
    """The same books, as plainly as they can be kept: block -> time of last use, by engine."""

    def __init__(self, num_engines: int, room: int, capacity: int) -> None:
        self.by_word = [{} for _ in range(num_engines)]
        self.by_guess = [{} for _ in range(num_engines)]
        self.room, self.capacity, self.cursor = room, capacity, 0

    @staticmethod
    def put(blocks: dict, hashes: bytes, now_ns: int, room: int) -> None:
        for each in reversed(split(hashes)):
            blocks.pop(each, None)
            blocks[each] = now_ns
        while len(blocks) > room:
            del blocks[next(iter(blocks))]

    def said(self, engine, hashes, now_ns):
        self.put(self.by_word[engine], hashes, now_ns, self.room)

    def predict(self, engine, hashes, now_ns):
        self.put(self.by_guess[engine], hashes, now_ns, self.capacity)
        self.cursor = (self.cursor + 1) % len(self.by_guess)
        for each in (engine, self.cursor):
            self.by_guess[each] = {b: t for b, t in self.by_guess[each].items() if now_ns - t <= EXPIRY_NS}

    def removed(self, engine, hashes):
        for each in split(hashes):
            self.by_word[engine].pop(each, None)
            self.by_guess[engine].pop(each, None)

    def cleared(self, engine):
        self.by_word[engine], self.by_guess[engine] = {}, {}

    def lost_track(self, engine):
        self.by_word[engine] = {}

    def match(self, hashes: bytes) -> list[int]:
        depths = []
        for word, guess in zip(self.by_word, self.by_guess, strict=True):
            held = [each in word or each in guess for each in split(hashes)]
            depths.append([*held, False].index(False))
        return depths


@pytest.mark.parametrize("num_engines", [1, 3, 16, 70])
def test_law_random_histories_equal_sets(num_engines):
    rng = random.Random(num_engines)
    room, capacity = 60, 40
    ours, oracle = index(num_engines, room), Oracle(num_engines, room, capacity)
    for engine in range(num_engines):
        ours.set_capacity(engine, capacity)
    chains = [[rng.randrange(8) * 100 + depth for depth in range(rng.randrange(1, 12))] for _ in range(30)]
    deeds = {"said": 40, "predict": 40, "removed": 15, "cleared": 2, "lost_track": 2}
    for now_ns in range(0, 15_000, 10):
        engine, hashes = rng.randrange(num_engines), packed(*rng.choice(chains))
        (deed,) = rng.choices(list(deeds), list(deeds.values()))
        arguments = {
            "said": (engine, hashes, now_ns),
            "predict": (engine, hashes, now_ns),
            "removed": (engine, packed(*rng.choices(rng.choice(chains), k=2), *rng.choices(rng.choice(chains), k=2))),
        }.get(deed, (engine,))
        getattr(ours, deed)(*arguments)
        getattr(oracle, deed)(*arguments)
        if now_ns % 1000 == 0:
            handed_over = index(num_engines, room)
            for each in range(num_engines):
                handed_over.set_capacity(each, capacity)
            handed_over.load(ours.dump())
            ours, oracle.cursor = handed_over, 0
        asked = packed(*rng.choice(chains), 10_000)
        assert ours.match(asked).tolist() == oracle.match(asked)
    assert ours.num_blocks == len(set().union(*oracle.by_word, *oracle.by_guess))


def test_a_gap_ends_a_hit():
    two = index(2)
    two.said(0, packed(1, 2, 3, 4), 0)
    two.said(1, packed(1, 2), 0)
    assert two.match(packed(1, 2, 3, 4, 5)).tolist() == [4, 2]
    two.removed(0, packed(2))
    assert two.match(packed(1, 2, 3, 4)).tolist() == [1, 2]
    assert two.match(packed(2, 3)).tolist() == [0, 1]
    assert two.match(b"").tolist() == [0, 0]


def test_the_end_of_a_prompt_goes_before_its_beginning():
    one = index(1, 4)
    one.said(0, packed(1, 2, 3, 4), 0)
    one.said(0, packed(10, 11), 1)
    assert one.match(packed(1, 2, 3, 4)).tolist() == [2]
    assert one.match(packed(10, 11)).tolist() == [2]


def test_what_is_used_again_stays():
    one = index(1, 3)
    for number in (1, 2, 3):
        one.said(0, packed(number), number)
    one.said(0, packed(1), 4)
    one.said(0, packed(4), 5)
    assert [one.match(packed(number)).tolist() for number in (1, 2, 3, 4)] == [[1], [0], [1], [1]]


def test_memory_stays_within_its_bound_however_many_prompts_come():
    bound = 1_000_000
    made = PrefixIndex(bound, EXPIRY_NS)
    for engine in range(4):
        made.add_engine(engine)
    for prompt in range(2000):
        made.predict(prompt % 4, packed(*range(prompt * 10, prompt * 10 + 10)), prompt)
        made.said(prompt % 3, packed(*range(prompt * 10, prompt * 10 + 10)), prompt)
        assert made.num_bytes <= bound
    assert made.match(packed(19_990)).tolist() == [0, 1, 0, 1]


def test_salts_and_adapters_share_no_block():
    tokens = np.arange(64, dtype=np.int32)
    names = [hash_key("m"), hash_key("m", "adapter"), hash_key("m", None, "salt")]
    prompts = [hash_blocks(name, tokens, 16) for name in names]
    three = index(3)
    for engine, prompt in enumerate(prompts):
        three.said(engine, prompt, 0)
    assert [three.match(prompt).tolist() for prompt in prompts] == [[4, 0, 0], [0, 4, 0], [0, 0, 4]]


def test_thousands_of_engines_are_found_by_their_bits():
    many = index(4096, 100)
    for engine in range(4096):
        many.said(engine, packed(*range(1 + engine % 5)), 0)
    assert (many.match(packed(*range(10))) == 1 + np.arange(4096) % 5).all()


def test_a_dump_of_other_engines_is_refused():
    with pytest.raises(ValueError, match="2 engines, the index 3"):
        index(3).load(index(2).dump())
