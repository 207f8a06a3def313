"""What a rank tells about a request besides its tokens."""

from support import fake_device

from moestro.engine.rank import build_rank
from moestro.engine.settings import SchedulerSettings


def test_the_time_of_the_first_admission_stands_in_every_output():
    settings = SchedulerSettings(num_blocks=8, block_size=4, max_model_len=16, max_num_seqs=1, max_num_batched_tokens=8)
    rank = build_rank(settings, fake_device.KvDevice(8, 4))
    for name in "ab":
        rank.add(fake_device.make_request(name, range(3), max_tokens=2), now_ns=5)
    told = [output for now_ns in range(10, 20) for output in rank.step(now_ns)]
    first, second = ([output.admitted_ns for output in told if output.request_id == name] for name in "ab")
    assert first == [10, 10]
    assert second[0] == second[1] > 10  # there is one slot: it waited for it


def test_a_sequence_has_as_many_blocks_as_its_computed_tokens_fill():
    settings = SchedulerSettings(num_blocks=8, block_size=4, max_model_len=16, max_num_seqs=1, max_num_batched_tokens=8)
    rank = build_rank(settings, fake_device.KvDevice(8, 4))
    rank.add(fake_device.make_request("a", range(3), max_tokens=9), now_ns=0)
    held = []
    for now_ns in range(8):
        rank.step(now_ns)
        held.append(8 - rank.scheduler.pool.num_free)
    assert held == [1, 1, 2, 2, 2, 2, 3, 3], "3 tokens of the prompt, and one more in each step"
