import numpy as np
import pytest

from moestro.core.request import Request, SamplingParams
from moestro.engine.sequences import Sequence
from moestro.engine.waiting import WaitingQueue
from moestro.policy.ordering import ORDERING


def sequence(serial, arrival_ns=0, priority=0):
    request = Request(
        request_id=str(serial), num_prompt_tokens=1, sampling=SamplingParams(), arrival_ns=arrival_ns, priority=priority
    )
    return Sequence(request, serial)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(5))
def test_the_queue_agrees_with_a_sorted_list_under_any_traffic(policy, seed):
    rng = np.random.default_rng(seed)
    queue, oracle = WaitingQueue(), []
    for serial in range(300):
        oracle.append(sequence(serial, int(rng.integers(50)), int(rng.integers(3))))
        queue.add(oracle[-1])
        while oracle and rng.random() < 0.45:
            queue.remove(oracle.pop(rng.integers(len(oracle))))
        urgency = (lambda s: s.request.priority) if policy == "priority" else (lambda s: 0)
        expected = sorted(oracle, key=lambda s: (urgency(s), s.request.arrival_ns, s.serial))
        assert list(queue.in_order(ORDERING[policy], 0)) == expected
        assert len(queue) == len(oracle)
