import msgspec
import numpy as np
import pytest

from moestro.core.hashing import HASH_BYTES, name_key
from moestro.core.request import Request, SamplingParams
from moestro.core.views import Admitted, WaitingView
from moestro.engine.block_pool import BlockPool
from moestro.engine.policies.ordering import Fcfs, PrefillAware, Sjf, WeightedFair
from moestro.engine.registry import ORDER_POLICIES
from moestro.engine.sequences import Sequence
from moestro.engine.waiting import MAX_LOOKED_UP, WaitingQueue


def sequence(serial, arrival_ns=0, priority=0, num_prompt_tokens=1, hashes=b""):
    request = Request(
        request_id=str(serial),
        num_prompt_tokens=num_prompt_tokens,
        sampling=SamplingParams(),
        arrival_ns=arrival_ns,
        priority=priority,
        block_hashes=hashes,
    )
    return Sequence(request, serial)


def queue_of(policy, pool=None, sequences=()):
    queue = WaitingQueue(policy, pool or BlockPool(8), 4)
    for member in sequences:
        queue.add(member)
    return queue


def serials(queue, now_ns):
    return [member.serial for member in queue.in_order(now_ns)]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(5))
def test_the_queue_agrees_with_a_sorted_list_under_any_traffic(policy, seed):
    rng = np.random.default_rng(seed)
    queue, oracle = queue_of(ORDER_POLICIES.make(policy)), []
    for serial in range(300):
        oracle.append(sequence(serial, int(rng.integers(50)), int(rng.integers(3))))
        queue.add(oracle[-1])
        while oracle and rng.random() < 0.45:
            queue.remove(oracle.pop(rng.integers(len(oracle))))
        urgency = (lambda s: s.request.priority) if policy == "priority" else (lambda s: 0)
        expected = sorted(oracle, key=lambda s: (urgency(s), s.request.arrival_ns, s.serial))
        assert list(queue.in_order(0)) == expected
        assert len(queue) == len(oracle)


class Counting(Sjf):
    """How often the queue asks."""

    num_sorted = 0

    def order(self, view: WaitingView, now_ns: int):
        self.num_sorted += 1
        return super().order(view, now_ns)


def test_the_policy_sorts_again_only_when_the_order_may_have_changed():
    policy = Counting(theta_age_s=5e-9)
    queue = queue_of(policy, sequences=[sequence(0, 0, num_prompt_tokens=9), sequence(1, 1, num_prompt_tokens=3)])
    assert [serials(queue, now_ns) for now_ns in (1, 2, 3, 4)] == [[1, 0]] * 4
    assert policy.num_sorted == 1
    assert queue.order_holds_until_ns(4) == 5
    assert serials(queue, 5) == [0, 1]
    assert policy.num_sorted == 2
    queue.add(sequence(2, 5, num_prompt_tokens=1))
    assert serials(queue, 5) == [0, 2, 1]


def test_the_policy_sorts_again_for_an_earlier_time():
    queue = queue_of(Sjf(theta_age_s=5e-9), sequences=[sequence(0, 0, num_prompt_tokens=9), sequence(1, 1)])
    assert [serials(queue, now_ns) for now_ns in (5, 4)] == [[0, 1], [1, 0]]


def test_what_a_policy_observes_may_change_the_order():
    queue = queue_of(WeightedFair(), sequences=[sequence(0), sequence(1)])
    assert serials(queue, 0) == [0, 1]
    with_user = msgspec.structs.replace(sequence(2).request, user="ann")
    queue.add(Sequence(with_user, 2))
    assert serials(queue, 0) == [0, 2, 1]
    queue.observe(Admitted(name_key(None), 5))
    assert serials(queue, 0) == [2, 0, 1]


def hashes(*names):
    return b"".join(block_name.to_bytes(HASH_BYTES, "little") for block_name in names)


def remember(pool, *names):
    for name in names:
        pool.remember([pool.allocate()], [hashes(name)])


class Seen(PrefillAware):
    """What the queue shows."""

    def order(self, view: WaitingView, now_ns: int):
        self.num_uncached = view.num_uncached.tolist()
        return super().order(view, now_ns)


def test_what_is_left_after_cached_prefixes_follows_the_cache():
    pool, policy = BlockPool(8), Seen()
    queue = queue_of(
        policy,
        pool,
        [
            sequence(0, num_prompt_tokens=14, hashes=hashes(1, 2, 3)),
            sequence(1, num_prompt_tokens=8, hashes=hashes(1, 2)),
            sequence(2, num_prompt_tokens=5, hashes=hashes(7)),
        ],
    )
    assert serials(queue, 0) == [2, 1, 0]
    assert policy.num_uncached == [14, 8, 5]
    remember(pool, 1, 2, 3)
    assert serials(queue, 0) == [1, 0, 2]
    assert policy.num_uncached == [2, 1, 5], "of a full hit the last token is computed again"


def test_a_request_that_wants_prompt_logprobs_reads_no_cache():
    pool, policy = BlockPool(8), Seen()
    scored = sequence(0, num_prompt_tokens=8, hashes=hashes(1, 2)).request
    scored = msgspec.structs.replace(scored, sampling=SamplingParams(prompt_logprobs=0))
    queue = queue_of(policy, pool, [Sequence(scored, 0), sequence(1, num_prompt_tokens=8, hashes=hashes(1, 2))])
    remember(pool, 1, 2)
    assert serials(queue, 0) == [1, 0]
    assert policy.num_uncached == [8, 1]


def test_only_the_oldest_are_looked_up():
    pool, policy = BlockPool(8), Seen()
    remember(pool, 1)
    newest = [sequence(i, 1000 - i, num_prompt_tokens=6, hashes=hashes(1)) for i in range(MAX_LOOKED_UP + 3)]
    assert len(serials(queue_of(policy, pool, newest), 0)) == MAX_LOOKED_UP + 3
    assert policy.num_uncached == [6] * 3 + [2] * MAX_LOOKED_UP


def test_the_rank_of_sequences_that_are_not_in_the_queue():
    assert queue_of(Fcfs()).rank([sequence(5, 9), sequence(6, 2), sequence(7, 4)], 0).tolist() == [2, 0, 1]
