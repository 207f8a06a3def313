"""What a rank tells about a request besides its tokens."""

from support import fake_device

from moestro.engine.rank import build_rank
from moestro.engine.settings import SchedulerSettings


def test_the_time_of_the_first_admission_stands_in_the_first_and_the_last_output():
    settings = SchedulerSettings(num_blocks=8, block_size=4, max_model_len=16, max_num_seqs=1, max_num_batched_tokens=8)
    rank = build_rank(settings, fake_device.KvDevice(8, 4))
    for name in "ab":
        rank.add(fake_device.make_request(name, range(3), max_tokens=2), now_ns=5)
    outputs = [output for now_ns in range(10, 20) for output in rank.step(now_ns)]
    first, second = ([output.admitted_ns for output in outputs if output.request_id == name] for name in "ab")
    assert first == [10, 10]
    assert second[0] == second[1] > 10  # there is one slot: it waited for it


def test_the_first_output_tells_of_the_prompt_and_further_tokens_travel_as_columns():
    settings = SchedulerSettings(num_blocks=9, block_size=4, max_model_len=16, max_num_seqs=2, max_num_batched_tokens=9)
    rank = build_rank(settings, fake_device.KvDevice(9, 4))
    outputs = []
    for now_ns, name in enumerate("ab", start=10):
        rank.add(fake_device.make_request(name, range(6), max_tokens=4), now_ns)
        outputs += [rank.outputs(now_ns)]
        rank.begin(now_ns)
    for now_ns in range(12, 20):
        outputs += [rank.outputs(now_ns)]
        rank.begin(now_ns)
    others = [output for each in outputs for output in each.others]
    assert [(each.request_id, each.num_cached_tokens, each.admitted_ns) for each in others] == [
        ("a", 0, 10), ("b", 4, 11), ("a", 0, 10), ("b", 4, 11)  # the first and the last
    ]  # fmt: skip
    assert sorted(name for each in outputs for name in each.request_ids) == [*"aabb"]


def test_a_first_token_that_a_decode_run_yields_tells_of_the_prompt_too():
    """A prompt's last chunk of one token looks like a decode."""
    settings = SchedulerSettings(num_blocks=8, block_size=4, max_model_len=16, max_num_seqs=1, max_num_batched_tokens=7)
    rank = build_rank(settings, fake_device.KvDevice(8, 4))
    rank.add(fake_device.make_request("a", range(8), max_tokens=3), now_ns=10)
    outputs = [output for now_ns in range(10, 16) for output in rank.step(now_ns)]
    assert [each.admitted_ns for each in outputs] == [10, 0, 10]


def test_stop_tokens_count_while_their_sequence_runs():
    settings = SchedulerSettings(num_blocks=8, block_size=4, max_model_len=16, max_num_seqs=2, max_num_batched_tokens=8)
    rank = build_rank(settings, fake_device.KvDevice(8, 4))
    for name, stop in (("a", (1,)), ("b", (1,)), ("c", (2, 3))):
        rank.add(fake_device.make_request(name, range(3), max_tokens=2, stop_token_ids=stop), now_ns=0)
    rank.step(0)
    stop_sets = rank.scheduler.table.stop_sets
    assert stop_sets == {frozenset({1}): 2}
    for now_ns in range(1, 12):
        rank.step(now_ns)
    assert not rank.scheduler.has_work
    assert not stop_sets


def test_after_the_kernels_change_no_request_reads_what_the_former_ones_computed():
    settings = SchedulerSettings(
        num_blocks=16, block_size=4, max_model_len=24, max_num_seqs=4, max_num_batched_tokens=9
    )
    rank = build_rank(settings, fake_device.KvDevice(16, 4))

    def serve(name: str, num_steps: int, max_tokens: int = 2) -> int:
        """Start a request with the prompt that all have. Returns the tokens that the cache had of it."""
        rank.add(fake_device.make_request(name, range(8), max_tokens=max_tokens), now_ns=0)
        outputs = [output for _ in range(num_steps) for output in rank.step(0)]
        return next(each.num_cached_tokens for each in outputs if each.request_id == name)

    assert [serve("a", 3), serve("b", 3)] == [0, 7]  # the last token is computed anew
    assert serve("long", 6, max_tokens=14) == 7  # in a decode run
    rank.forget_cache()
    rank.scheduler.check()
    for _ in range(12):
        rank.step(0)  # "long" fills more blocks, and ends
    assert not rank.scheduler.has_work
    assert rank.scheduler.pool.cached() == []
    assert [serve("c", 3), serve("d", 3)] == [0, 7]
    rank.scheduler.check()


def test_a_sequence_has_as_many_blocks_as_its_computed_tokens_fill():
    settings = SchedulerSettings(num_blocks=8, block_size=4, max_model_len=16, max_num_seqs=1, max_num_batched_tokens=8)
    rank = build_rank(settings, fake_device.KvDevice(8, 4))
    rank.add(fake_device.make_request("a", range(3), max_tokens=9), now_ns=0)
    held = []
    for now_ns in range(8):
        rank.step(now_ns)
        held.append(8 - rank.scheduler.pool.num_free)
    assert held == [1, 1, 2, 2, 2, 2, 3, 3], "3 tokens of the prompt, and one more in each step"
