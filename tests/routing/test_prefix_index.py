"""The prefix index against sets, one an engine."""

from __future__ import annotations

import math
import random
import tracemalloc

import numpy as np
import pytest

from moestro.core.hashing import HASH_BYTES, hash_blocks, hash_key, split_hashes
from moestro.routing.prefix_index import HOSTED_BYTES, REPORTED_BYTES, PrefixIndex

PLENTY = 1 << 40


def block(number: int) -> bytes:
    return number.to_bytes(HASH_BYTES, "little")


def packed(*numbers: int) -> bytes:
    return b"".join(block(number) for number in numbers)


def chain(rng: random.Random) -> list[int]:
    """Blocks named by all that is before them."""
    turns = [rng.choice("1112") for _ in range(rng.randrange(1, 12))]
    return [int("".join(turns[: depth + 1])) for depth in range(len(turns))]


def index(num_engines: int, max_bytes: int = PLENTY) -> PrefixIndex:
    made = PrefixIndex(max_bytes)
    for engine in range(num_engines):
        made.add_engine(engine)
    return made


class Engine:
    """The same books of one engine, as plainly as they can be kept."""

    def __init__(self) -> None:
        self.history: list[tuple[bytes, ...]] = []
        self.kept: list[tuple[bytes, ...]] = []  # sent while events are exact
        self.pending: list[tuple[bytes, ...]] = []
        self.reported: set[bytes] = set()
        self.hosted: set[bytes] = set()
        self.is_complete = self.is_exact = self.is_capacity_known = False
        self.capacity = math.inf

    def sent(self, blocks):
        if self.is_exact:
            self.kept.append(blocks)
            while sum(map(len, self.kept)) > 4 * self.capacity and len(self.kept) > 1:
                del self.kept[0]
            return
        self.history.append(blocks)
        self.keep(self.capacity)

    def distrust(self):
        self.is_exact = False
        kept, self.kept = self.kept, []
        for blocks in kept:
            self.sent(blocks)

    def keep(self, capacity):
        while len(self.history) > 1 and self.num_blocks > capacity:
            del self.history[0]

    @property
    def num_blocks(self) -> int:
        return len({each for prompt in self.history for each in prompt})

    def surprised(self, num_blocks):
        if self.is_capacity_known or self.is_exact:
            return
        if num_blocks < 0:
            self.capacity = max(min(self.capacity, self.num_blocks) + num_blocks, 1)
            self.keep(self.capacity)
        else:
            self.capacity += num_blocks

    def lost_track(self):
        self.reported, self.hosted = set(), set()
        self.incomplete()

    def incomplete(self):
        self.is_complete = False
        self.distrust()

    def forget(self):
        self.kept = []
        self.lost_track()
        self.history = []

    def cleared(self):
        self.forget()
        self.is_complete = True

    def match(self, blocks) -> int:
        prompts = self.pending if self.is_exact else self.history
        held = self.reported.union(*prompts)
        return [*(each in held for each in blocks), False].index(False)

    def report(self, blocks, *, is_hosted):
        self.reported |= blocks
        self.hosted = self.hosted | blocks if is_hosted else self.hosted - blocks
        self.is_exact = self.is_complete

    def match_hosted(self, blocks) -> int:
        return sum(each in self.hosted for each in blocks[: self.match(blocks)])


@pytest.mark.parametrize("num_engines", [1, 3, 16, 70])
def test_law_random_histories_equal_sets(num_engines):  # noqa: C901  # one branch for each deed
    rng = random.Random(num_engines)
    ours, oracle = index(num_engines), [Engine() for _ in range(num_engines)]
    was_exact = was_hosted = 0
    for engine in range(0, num_engines, 2):  # the others' capacity is learned
        ours.set_capacity(engine, 40)
        oracle[engine].capacity, oracle[engine].is_capacity_known = 40, True
    chains = [chain(rng) for _ in range(30)]
    deeds = {
        "sent": 30,
        "elsewhere": 10,
        "reported": 40,
        "hosted": 20,
        "removed": 15,
        "emptied": 2,
        "ended": 20,
        "forget": 0.5,
        "cleared": 1,
        "lost_track": 0.5,
        "incomplete": 0.5,
        "surprised": 5,
    }
    in_flight = []
    for _ in range(1500):
        engine, hashes = rng.randrange(num_engines), packed(*rng.choice(chains))
        plain = oracle[engine]
        (deed,) = rng.choices(list(deeds), list(deeds.values()))
        if deed in ("sent", "elsewhere"):
            is_in_flight = deed == "sent"
            pending = ours.sent(engine, hashes, is_in_flight=is_in_flight)
            plain.sent(split_hashes(hashes))
            assert (pending is not None) == (plain.is_exact and is_in_flight)
            if pending is not None:
                plain.pending.append(split_hashes(hashes))
                in_flight.append((engine, pending, split_hashes(hashes)))
        elif deed == "ended" and in_flight:
            engine, pending, blocks = in_flight.pop(rng.randrange(len(in_flight)))
            ours.ended(engine, pending)
            oracle[engine].pending.remove(blocks)
        elif deed == "reported":
            ours.reported(engine, hashes)
            plain.report(set(split_hashes(hashes)), is_hosted=False)
        elif deed == "hosted":
            some = split_hashes(hashes)[rng.randrange(3) :]
            ours.hosted(engine, b"".join(some))
            plain.report(set(some), is_hosted=True)
        elif deed == "removed":
            hashes = packed(*rng.choices(rng.choice(chains), k=2), *rng.choices(rng.choice(chains), k=2))
            ours.removed(engine, hashes)
            plain.reported -= set(split_hashes(hashes))
            plain.hosted -= set(split_hashes(hashes))
        elif deed == "emptied":
            ours.removed(engine, b"".join(plain.reported))
            plain.reported, plain.hosted = set(), set()
        elif deed != "ended":
            extra = [rng.choice([-9, -3, 4, 20])] if deed == "surprised" else []
            getattr(ours, deed)(engine, *extra)
            getattr(plain, deed)(*extra)
        fields = packed(*rng.choice(chains), 9)
        hits = ours.match(fields)
        assert hits.tolist() == [each.match(split_hashes(fields)) for each in oracle]
        hosted = [each.match_hosted(split_hashes(fields)) for each in oracle]
        assert ours.hosted_of(fields, hits).tolist() == hosted
        was_hosted += sum(hosted)
        assert [ours.is_exact(each) for each in range(num_engines)] == [each.is_exact for each in oracle]
        was_exact += plain.is_exact
    assert was_exact > 50
    assert was_hosted > 50


def pieces(rng: random.Random, hashes: bytes) -> list[bytes]:
    """Events about a prompt's blocks: all at once, one by one, from behind, in any order, or repeated."""
    blocks = split_hashes(hashes)
    begin = rng.randrange(len(blocks) + 1)
    some = blocks[begin:] if rng.random() < 0.6 else blocks[:begin]
    order = rng.choice(["forward", "forward", "backward", "backward", "shuffled", "repeated"])
    if order == "backward":
        some.reverse()
    elif order == "shuffled":
        rng.shuffle(some)
    elif order == "repeated":
        some += some[:2]
    size = rng.choice([1, 3, 100])
    return [b"".join(some[at : at + size]) for at in range(0, len(some), size)]


@pytest.mark.parametrize("seed", range(6))
def test_law_runs_of_reported_blocks_equal_single_blocks(seed):
    """Blocks of long prompts come and go in all orders, on few engines or on more than a set is walked through."""
    rng = random.Random(seed)
    num_engines = rng.choice([1, 3, 20])
    ours, held = index(num_engines), [set[bytes]() for _ in range(num_engines)]
    prompts = [rng.randbytes(20 * HASH_BYTES)]
    for _ in range(15):
        known = rng.choice(prompts)
        prompts.append(known[: rng.randrange(21) * HASH_BYTES] + rng.randbytes(rng.randrange(15) * HASH_BYTES))
    for _ in range(400):
        engine, deed = rng.randrange(num_engines), rng.choice(["reported", "reported", "removed", "lost_track"])
        if deed == "lost_track":
            if rng.random() < 0.1:
                ours.lost_track(engine)
                held[engine].clear()
        else:
            for event in pieces(rng, rng.choice(prompts)):
                getattr(ours, deed)(engine, event)
                change = held[engine].update if deed == "reported" else held[engine].difference_update
                change(split_hashes(event))
        hashes = rng.choice(prompts) + rng.randbytes(HASH_BYTES)
        blocks = split_hashes(hashes)
        expected = [[*(block in mine for block in blocks), False].index(False) for mine in held]
        assert ours.match(hashes).tolist() == expected
        assert ours.match(hashes, 16).tolist() == [16 * each for each in expected]
        for run in set(ours._reported.values()):
            assert all(ours._reported[block] is run for block in split_hashes(run.blocks))
    for engine, mine in enumerate(held):
        ours.removed(engine, b"".join(mine))
    assert not ours._reported


def num_runs(of: PrefixIndex, hashes: bytes) -> int:
    return len({of._reported[block] for block in split_hashes(hashes)})


def test_blocks_that_came_one_by_one_are_joined_when_a_prompt_has_them():
    two, hashes = index(2), packed(*range(1, 41))
    for block_of in split_hashes(hashes):
        two.reported(0, block_of)
    assert num_runs(two, hashes) == 40
    assert two.match(hashes).tolist() == [40, 0]
    assert num_runs(two, hashes) == 1
    two.reported(1, packed(*range(1, 11)))
    assert two.match(hashes).tolist() == [40, 10]
    assert num_runs(two, hashes) == 2, "cut where the holders differ"
    two.removed(0, packed(*range(40, 30, -1)))
    assert two.match(hashes).tolist() == [30, 10]
    assert num_runs(two, packed(*range(1, 31))) == 2, "the end of a run goes without a further cut"


def test_a_history_that_the_device_has_no_room_for_is_in_host_memory():
    one = index(2)
    one.set_capacity(0, 4, num_host_blocks=8)
    one.set_capacity(1, 4)
    for number in range(6):  # each prompt has two blocks, so the device holds the last two, and the cache all
        for engine in (0, 1):
            one.sent(engine, packed(10 * number, 10 * number + 1))
    assert one.has_hosted
    for number in range(6):
        hashes = packed(10 * number, 10 * number + 1)
        hits = one.match(hashes)
        assert hits.tolist() == [2, 2 if number >= 4 else 0]
        assert one.hosted_of(hashes, hits).tolist() == [0 if number >= 4 else 2, 0]
    one.sent(0, packed(0, 1, 2))
    assert one.hosted_of(packed(0, 1, 2), one.match(packed(0, 1, 2))).tolist() == [0, 0], "it was copied back"
    one.forget(0)
    assert one.hosted_of(packed(50, 51), one.match(packed(50, 51))).tolist() == [0, 0]
    one.set_capacity(0, 4)
    assert not one.has_hosted


def test_a_router_that_learns_the_sizes_late_places_the_history_that_it_has():
    late, known = index(1), index(1)
    known.set_capacity(0, 4, num_host_blocks=8)
    for number in range(8):
        if number == 6:
            late.set_capacity(0, 4, num_host_blocks=8)
        prompts = [packed(10 * each, 10 * each + 1) for each in range(number + 1)]
        for one in (late, known):
            one.sent(0, prompts[-1])
        for prompt in prompts if number >= 6 else ():
            places = [one.hosted_of(prompt, one.match(prompt)).tolist() for one in (late, known)]
            assert places[0] == places[1]
    late.set_capacity(0, 2, num_host_blocks=8)
    assert late.hosted_of(prompts[-2], late.match(prompts[-2])).tolist() == [2], "the device is smaller now"


def test_marks_of_host_memory_count_towards_an_engines_share():
    one = index(1, 2 * 100 * (REPORTED_BYTES + HOSTED_BYTES))
    one.cleared(0)
    for number in range(1000):
        one.hosted(0, packed(number))
    assert 150 < len(one._engines[0].reported) <= 200
    assert one._engines[0].num_hosted == len(one._hosted) == len(one._engines[0].reported)


def test_a_gap_ends_a_hit():
    two = index(2)
    two.reported(0, packed(1, 2, 3, 4))
    two.reported(1, packed(1, 2))
    assert two.match(packed(1, 2, 3, 4, 5)).tolist() == [4, 2]
    two.removed(0, packed(2))
    assert two.match(packed(1, 2, 3, 4)).tolist() == [1, 2]
    assert two.match(packed(2, 3)).tolist() == [0, 1]
    assert two.match(b"").tolist() == [0, 0]


def test_an_engine_that_says_all_is_not_believed_to_hold_what_was_only_sent_once():
    one = index(1)
    one.sent(0, packed(1, 2))
    assert one.match(packed(1, 2)).tolist() == [2]
    one.cleared(0)
    one.reported(0, packed(1))
    assert one.match(packed(1, 2)).tolist() == [1]
    pending = one.sent(0, packed(1, 2, 3))
    assert one.match(packed(1, 2, 3)).tolist() == [3]
    one.ended(0, pending)
    assert one.match(packed(1, 2, 3)).tolist() == [1]
    one.lost_track(0)
    assert one.match(packed(1, 2, 3)).tolist() == [3]


def test_an_engine_whose_last_block_was_removed_is_still_known_by_what_is_pending_alone():
    one = index(1)
    one.cleared(0)
    one.reported(0, packed(1))
    one.ended(0, one.sent(0, packed(1, 2)))
    one.sent(0, packed(3, 4))
    one.removed(0, packed(1))
    assert one.is_exact(0)
    assert one.match(packed(1, 2)).tolist() == [0]
    assert one.match(packed(3, 4)).tolist() == [2]


def test_the_oldest_prompt_goes_when_the_cache_is_full_and_what_others_share_stays():
    one = index(1)
    one.set_capacity(0, 5)
    one.sent(0, packed(1, 2, 3))
    one.sent(0, packed(1, 2, 4))
    one.sent(0, packed(8, 9))
    assert [one.match(packed(*each)).tolist() for each in ((1, 2, 3), (1, 2, 4), (8, 9))] == [[2], [3], [2]]


def test_of_reported_blocks_the_end_of_a_prompt_goes_before_its_beginning():
    one = index(1, 4 * REPORTED_BYTES)
    one.reported(0, packed(1, 2, 3, 4))
    one.reported(0, packed(10, 11))
    assert one.match(packed(1, 2, 3, 4)).tolist() == [2]
    assert one.match(packed(10, 11)).tolist() == [2]


def test_what_is_reported_again_stays():
    one = index(1, 3 * REPORTED_BYTES)
    for number in (1, 2, 3, 1, 4):
        one.reported(0, packed(number))
    assert [one.match(packed(number)).tolist() for number in (1, 2, 3, 4)] == [[1], [0], [1], [1]]


def test_memory_stays_within_its_bound_however_many_prompts_come():
    bound = 1_000_000
    made = index(4, bound)
    for prompt in range(4000):
        made.sent(prompt % 4, packed(*range(prompt * 10, prompt * 10 + 10)))
        made.reported(prompt % 3, packed(*range(prompt * 10, prompt * 10 + 10)))
        assert made.num_bytes <= bound
    assert made.num_bytes > bound / 2
    assert made.match(packed(39_990)).tolist() == [1, 0, 0, 1]


def test_the_memory_of_the_books_is_what_is_taken():
    """Measured: prompts, and reported blocks, within a factor of two of the books."""
    rng = random.Random(0)
    shared = [rng.randbytes(32 * HASH_BYTES) for _ in range(20)]
    for by_word in (False, True):
        made = index(8)
        tracemalloc.start()
        for i in range(2000):
            hashes = rng.choice(shared) + rng.randbytes(20 * HASH_BYTES)
            made.reported(i % 8, hashes) if by_word else made.sent(i % 8, hashes)
        taken = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert 0.5 * taken < made.num_bytes < 2 * taken


def test_salts_and_adapters_share_no_block():
    tokens = np.arange(64, dtype=np.int32)
    names = [hash_key("m"), hash_key("m", "adapter"), hash_key("m", None, "salt")]
    prompts = [hash_blocks(name, tokens, 16) for name in names]
    three = index(3)
    for engine, prompt in enumerate(prompts):
        three.reported(engine, prompt)
    assert [three.match(prompt).tolist() for prompt in prompts] == [[4, 0, 0], [0, 4, 0], [0, 0, 4]]


def test_thousands_of_engines_are_found_by_their_bits():
    many = index(4096)
    for engine in range(4096):
        many.reported(engine, packed(*range(1 + engine % 5)))
    assert (many.match(packed(*range(10))) == 1 + np.arange(4096) % 5).all()


def test_thousands_of_engines_share_the_beginning_of_their_prompts():
    many = index(4096)
    for engine in range(4096):
        many.sent(engine, packed(1, 2, 3, 100 + engine, 200 + engine))
    expected = np.full(4096, 3)
    expected[7] = 5
    assert (many.match(packed(1, 2, 3, 107, 207)) == expected).all()


def test_the_history_of_an_engine_can_be_read():
    one = index(1)
    one.sent(0, packed(1, 2, 3))
    one.sent(0, packed(1, 2))
    one.sent(0, packed(1, 9))
    assert [last.hashes() for last in one.prompts(0)] == [packed(1, 2, 3), packed(1, 2), packed(1, 9)]


@pytest.mark.parametrize("learns", [True, False])
def test_the_size_of_a_cache_is_learned_from_answers(learns):
    """An engine has room for 12 of 40 prompts, and evicts the least recent; the router knows its answers alone."""
    rng, held, wrong, one = random.Random(3), dict[int, None](), [], index(1)
    for _ in range(600):
        prompt = min(rng.randrange(40), rng.randrange(40))
        hashes = packed(*range(prompt * 10, prompt * 10 + 10))
        surprise = 10 * (prompt in held) - int(one.match(hashes)[0])
        held.pop(prompt, None)
        held[prompt] = None
        if len(held) > 12:
            del held[next(iter(held))]
        one.sent(0, hashes)
        if learns:
            one.surprised(0, surprise)
        wrong.append(surprise != 0)
    assert np.mean(wrong[100:]) < 0.1 if learns else np.mean(wrong[100:]) > 0.4


def test_events_that_stop_without_a_gap_are_noticed_and_the_next_one_is_believed_again():
    one = index(1)
    one.cleared(0)
    one.reported(0, packed(1))

    def served(*blocks: int, says: bool) -> None:
        pending = one.sent(0, packed(*blocks))
        if says:
            one.reported(0, packed(*blocks))
        if pending is not None:
            one.ended(0, pending, is_computed=True)

    served(2, 3, says=True)
    for blocks in ((4, 5), (6, 7)):
        served(*blocks, says=False)
        assert one.is_exact(0), "a full cache may have lost one of them"
        assert one.match(packed(*blocks)).tolist() == [0]
    served(8, 9, says=False)
    assert not one.is_exact(0)
    assert one.lacks_events(0)
    assert one.match(packed(8, 9)).tolist() == [2], "predicted from now on"
    one.reported(0, packed(10))
    assert one.is_exact(0)
    assert not one.lacks_events(0)
    assert one.match(packed(8, 9)).tolist() == [0]


def test_what_an_engine_held_before_it_lost_track_goes_in_pieces_and_counts_at_once(monkeypatch):
    monkeypatch.setattr("moestro.routing.prefix_index._LEAVE_AT_ONCE", 1)
    monkeypatch.setattr("moestro.routing.prefix_index._LEAVE_A_CALL", 1)
    made, prompt = index(2), packed(*range(10))
    for engine in (0, 1):
        made.cleared(engine)
        made.reported(engine, prompt)
    assert made.match(prompt).tolist() == [10, 10]
    made.cleared(0)
    made.reported(0, packed(0, 1, 2))
    assert made.match(prompt).tolist() == [0, 10]  # new reports come with the last of the old ones
    for _ in range(10):
        made.match(prompt)
    assert made.match(prompt).tolist() == [3, 10]
    made.lost_track(0)
    made.lost_track(1)
    for _ in range(14):
        made.match(prompt)
    assert made.match(prompt).tolist() == [0, 0]
    assert made.num_bytes == 0


def test_a_prompt_that_was_never_computed_and_a_cache_that_is_empty_raise_no_doubt():
    one = index(1)
    one.cleared(0)
    one.reported(0, b"")  # as `moestro serve` does at the start of an engine
    for first in range(1, 9, 2):
        one.ended(0, one.sent(0, packed(first, first + 1)), is_computed=True)
    assert one.is_exact(0)
    one.reported(0, packed(20))
    for first in range(1, 9, 2):
        one.ended(0, one.sent(0, packed(first, first + 1)), is_computed=False)
    assert one.is_exact(0)
