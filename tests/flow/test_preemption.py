"""What preemption must do, and the defects that others had with it, each by name."""

from __future__ import annotations

import msgspec
import numpy as np
from support.fake_device import make_request
from support.fake_stages import FakeStages, expected_tokens, make_shape

from moestro.core.load_figures import PassCounts
from moestro.core.request import ServiceClass
from moestro.core.scheduling_events import BatchPassed
from moestro.core.views import ATTENTION, BE, EVERY_EXPERT, LS, Run, StepFunction, Wait
from moestro.engine.rank import build_preemptive_rank, recorder_of
from moestro.engine.settings import SchedulerSettings
from moestro.flow.policies.one_queue import in_order
from moestro.flow.policies.qllm import ExpertLevelPreemption

BLOCK_SIZE, BUDGET, NUM_LAYERS = 4, 24, 4
QLLM = ExpertLevelPreemption(max_wait_ns=None)
ALONE = ExpertLevelPreemption(max_wait_ns=None, max_merged=0)  # urgent tokens take none along


def request(name: str, service_class: str, length: int = 6, max_tokens: int = 3, first: int = 0):
    tokens = (np.arange(length) * 7 + first) % 50
    made = make_request(name, tokens, max_tokens=max_tokens, block_size=BLOCK_SIZE)
    return msgspec.structs.replace(made, service_class=ServiceClass(service_class))


class Served:
    """A rank on a device of integers, one piece a step."""

    def __init__(self, policy=QLLM, *, places=None, num_blocks=64, passes_decodes=True, **bounds):
        shape = make_shape(2 * BUDGET, places)
        self.device = FakeStages(shape, num_blocks, BLOCK_SIZE)
        self.device.may_forget = num_blocks < 64
        usual = {
            "max_model_len": 32, "max_num_seqs": 4, "max_num_urgent_seqs": 4, "max_num_batched_tokens": BUDGET,
            "scheduling_policy": "qllm", "evict_policy": "least_computed_be_first",
        }  # fmt: skip
        settings = SchedulerSettings(num_blocks=num_blocks, block_size=BLOCK_SIZE, **(usual | bounds))
        self.rank = build_preemptive_rank(settings, self.device, policy, passes_decodes=passes_decodes)
        self.requests, self.tokens, self.ended, self.now_ns = {}, {}, [], 0

    def add(self, request) -> int:
        self.requests[request.request_id] = request
        return self.rank.add(request, self.now_ns)

    def pieces(self, count: int) -> None:
        """So many pieces of work: the rank is wanted after each."""
        for _ in range(count):
            for output in self.rank.step(self.now_ns, lambda _: True):
                self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
                if output.finish_reason:
                    self.ended.append(output.request_id)
            self.now_ns += 1

    def until(self, what: str, layer: int) -> None:
        """Until a piece of this kind in this layer was done."""
        for _ in range(1000):
            if self.device.log and self.device.log[-1][:2] == (what, layer):
                return
            self.pieces(1)
        raise AssertionError(f"no {what} in layer {layer}")

    def finish(self) -> None:
        for _ in range(5000):
            if not self.rank.has_work:
                break
            self.pieces(1)
        assert not self.rank.has_work, "parked work was forgotten"
        for name, sent in self.requests.items():
            assert self.tokens[name] == expected_tokens(sent, self.device.shape), name


def test_an_urgent_request_is_next_after_the_piece_that_runs():
    served = Served(ALONE)
    served.add(request("be", "be", 20))
    served.until("expert", 2)
    urgent = served.add(request("ls", "ls", first=3))
    before = len(served.device.log)
    served.pieces(2)
    assert served.device.log[before] == ("attention", 0, [urgent])
    served.finish()
    assert served.ended == ["ls", "be"]


def test_an_urgent_request_that_has_its_first_token_passes_only_where_decodes_do():
    def layers_begun_alone(*, passes_decodes: bool) -> int:
        served = Served(ALONE, passes_decodes=passes_decodes)
        served.add(request("be", "be", 20))
        served.until("expert", 2)
        urgent = served.add(request("ls", "ls", first=3))
        served.finish()
        return served.device.log.count(("attention", 0, [urgent]))

    assert layers_begun_alone(passes_decodes=True) == 3, "each of its tokens passes"
    assert layers_begun_alone(passes_decodes=False) == 1, "the others come with best effort's"


def test_without_preemption_it_waits_for_the_step():
    served = Served(in_order)
    served.add(request("be", "be", 20))
    served.until("expert", 2)
    urgent = served.add(request("ls", "ls", first=3))
    before = len(served.device.log)
    served.finish()
    after = served.device.log[before:]
    assert after.index(("attention", 0, [urgent])) > after.index(("sample", NUM_LAYERS, [0]))


def test_where_urgent_tokens_reach_parked_ones_they_go_on_together():
    served = Served(ExpertLevelPreemption(max_wait_ns=None, max_merged=60))
    parked = served.add(request("be", "be", 20))
    served.until("expert", 2)
    urgent = served.add(request("ls", "ls", first=3))
    served.until("sample", NUM_LAYERS)
    both = [entry[:2] for entry in served.device.log if set(entry[2]) == {parked, urgent}]
    assert ("expert", 2) in both
    assert ("attention", 3) in both
    assert ("attention", 1) not in both
    served.finish()


def test_a_parked_step_begins_nothing_again():
    """QLLM's second version restarted a deferred token at layer 0 and appended its K and V again."""
    served = Served()
    parked = served.add(request("be", "be", 20, max_tokens=1))
    served.until("expert", 2)
    served.add(request("ls", "ls", first=3))
    served.finish()
    attended = [layer for what, layer, serials in served.device.log if what == "attention" and parked in serials]
    assert attended == list(range(NUM_LAYERS)), "each layer's attention, and so its K and V, once"


def test_a_preempted_layer_contributes_in_full():
    """One version answered zeros for the experts of a preempted batch; another lost the gate's weights."""
    served = Served()
    served.add(request("be", "be", 20, max_tokens=1))
    served.until("expert", 2)
    served.add(request("ls", "ls", first=3, max_tokens=1))
    served.finish()  # every token's contributions are checked against the oracle's
    sparse = [layer for layer, is_sparse in enumerate(served.device.shape.is_sparse) if is_sparse]
    for serial, length in ((0, 20), (1, 6)):
        for position in range(length):
            for layer in sparse:
                visits = [n for key, n in served.device.executed.items() if key[:3] == (serial, position, layer)]
                assert visits == [1] * served.device.shape.num_chosen


def test_parked_work_goes_on_when_nothing_else_runs():
    """QLLM's first version resumed a parked token only when a later batch passed its layer."""
    served = Served()
    served.add(request("be", "be", 20))
    served.until("expert", 3)
    served.add(request("ls", "ls", 2, max_tokens=1, first=3))
    served.finish()
    assert served.ended == ["ls", "be"]


def test_without_ageing_a_stream_of_urgent_requests_starves_the_others_and_with_it_does_not():
    def last_step_of_best_effort(policy) -> int:
        served = Served(policy)
        served.add(request("be", "be", 8, max_tokens=1))
        served.until("attention", 1)
        for number in range(40):
            served.add(request(f"ls{number}", "ls", 4, max_tokens=2, first=number))
            served.pieces(30)
            if "be" in served.ended:
                return number
        served.finish()
        return 40

    assert last_step_of_best_effort(ALONE) == 40
    assert last_step_of_best_effort(ExpertLevelPreemption(max_wait_ns=200, max_merged=0)) < 15


def test_with_no_room_for_more_parked_state_the_layer_that_was_begun_is_completed_first():
    served = Served(ALONE, places=BUDGET)
    parked = served.add(request("be", "be", BUDGET))
    served.until("expert", 2)
    urgent = served.add(request("ls", "ls", first=3))
    before = len(served.device.log)
    served.finish()
    after = served.device.log[before:]
    passed = after.index(("attention", 0, [urgent]))
    assert {entry[1] for entry in after[:passed]} == {2}, "no more than what is left of the layer"
    assert any(parked in entry[2] for entry in after[passed:]), "and then it is parked"


def test_an_urgent_request_takes_the_kv_of_the_best_effort_sequence_with_least_computed():
    served = Served(num_blocks=12)
    served.add(request("old", "be", 20, max_tokens=12))
    served.pieces(80)
    served.add(request("young", "be", 8, max_tokens=8, first=1))
    served.pieces(60)
    served.until("expert", 2)
    served.add(request("ls", "ls", 16, max_tokens=2, first=3))
    served.finish()
    assert served.ended.index("ls") == 0
    assert served.rank.scheduler.counts.num_preemptions == 1
    assert served.ended == ["ls", "old", "young"]


def test_while_urgent_tokens_can_run_nothing_runs_without_some():
    served = Served(ALONE)
    urgent = set()
    for number in range(6):
        served.add(request(f"be{number}", "be", 7, first=number))
        served.pieces(9)
        urgent.add(served.add(request(f"ls{number}", "ls", 5, first=10 + number)))
        before = len(served.device.log)
        served.pieces(12)
        for _, _, serials in served.device.log[before + 1 :]:
            assert urgent & set(serials)
    served.finish()


def test_an_urgent_request_takes_its_own_place_past_best_effort_that_waits_for_one():
    """Whatever the order, and also where it comes just when a step ends."""
    for moment in range(1, 40):
        served = Served(ALONE, max_num_seqs=1, scheduling_policy="fcfs", evict_policy="last_in_order")
        served.add(request("runs", "be", 6, max_tokens=20))
        served.add(request("waits", "be", 6, max_tokens=20, first=1))
        served.pieces(100 + moment)
        served.add(request("ls", "ls", first=3, max_tokens=1))
        served.pieces(2 * 6 * NUM_LAYERS)
        assert served.ended == ["ls"], f"it waited, having come {moment} pieces later"


def test_an_urgent_request_that_does_not_fit_lets_no_decodes_pass():
    def tokens_of_both(*, one_waits: bool) -> tuple[int, int]:
        served = Served(
            ALONE, num_blocks=16, passes_decodes=False, max_model_len=64, max_num_batched_tokens=2 * BUDGET,
            evict_policy="last_in_order",
        )  # fmt: skip
        served.add(request("be", "be", 10, max_tokens=30))
        served.pieces(100)
        before = len(served.tokens["be"])
        served.add(request("ls", "ls", 6, max_tokens=12, first=3))
        served.pieces(1)
        if one_waits:
            served.add(request("large", "ls", 52, max_tokens=2, first=5))
        while "ls" not in served.ended:
            served.pieces(1)
        return len(served.tokens["ls"]), len(served.tokens["be"]) - before

    assert tokens_of_both(one_waits=True) == tokens_of_both(one_waits=False) == (12, 12)


def test_a_parked_request_that_is_aborted_gives_its_kv_at_once_and_computes_no_more():
    served = Served(ALONE)
    served.add(request("be", "be", 20))
    served.until("expert", 2)
    served.add(request("ls", "ls", first=3))
    served.pieces(3)
    free = served.rank.scheduler.pool.num_free
    served.device.may_forget = True
    served.rank.abort("be", served.now_ns)
    assert served.rank.scheduler.pool.num_free == free + 5
    before = len(served.device.log)
    del served.requests["be"]
    served.finish()
    assert not any(0 in serials for _, _, serials in served.device.log[before + 1 :])


def test_while_the_device_works_a_policy_that_waits_does_not_put_the_rank_to_sleep():
    """An accelerator does not say when it is done: who slept until the policy's time would miss it."""

    class Accelerator(FakeStages):
        works_when_polled = False

    @StepFunction
    def waits_for_best_effort_alone(view, now_ns):
        layers = np.flatnonzero((view.n[BE] > 0).any(axis=1))
        if not len(layers):
            return Wait(now_ns + 10**9)
        layer = int(layers[-1])
        group = EVERY_EXPERT if view.num_expert_tokens[BE, layer] else ATTENTION
        return Run(layer, group, 2**30, (BE,), 0)

    device = Accelerator(make_shape(2 * BUDGET), 64, BLOCK_SIZE)
    bounds = SchedulerSettings(
        num_blocks=64, block_size=BLOCK_SIZE, max_model_len=32, max_num_urgent_seqs=4, max_num_batched_tokens=72
    )
    rank = build_preemptive_rank(bounds, device, waits_for_best_effort_alone, launch_ahead=2)
    rank.add(request("be", "be", 10), 0)
    rank.step(0, lambda _: True)
    rank.add(request("ls", "ls", first=3), 1)
    rank.step(1, lambda _: True)
    assert rank.executor._core.num_launched
    assert rank.ready_at_ns() is None


def test_a_plan_that_is_alone_enters_the_books_only_when_something_comes_before_its_result():
    served = Served()
    served.add(request("be", "be", 20))
    served.pieces(3)
    core = served.rank.executor._core
    assert (core.num_plans, core._pool.num_units) == (1, 0)
    served.add(request("ls", "ls", first=3))
    served.pieces(1)
    assert (core.num_plans, core._pool.num_units) == (2, 2)
    served.finish()
    assert (core.num_plans, core._pool.num_free_rows) == (0, served.device.shape.num_rows)


def test_a_plan_that_is_alone_is_no_single_item_where_the_policy_parts_its_classes():
    @StepFunction
    def urgent_alone(view, now_ns):
        is_there = view.n[LS, 0, ATTENTION] > 0
        return Run(0, ATTENTION, 2**30, (LS,), 2**30) if is_there else in_order(view, now_ns)

    served = Served(urgent_alone)
    served.add(request("be", "be", 10))
    served.add(request("ls", "ls", first=3))
    while "ls" not in served.tokens:
        served.pieces(1)
    assert "be" not in served.tokens
    served.finish()


def test_while_batches_are_parked_a_poll_ends_an_item_and_tells_until_when():
    """A return after each piece would cost the urgent tokens a turn of the rank's loop for each of their pieces."""
    served = Served(ExpertLevelPreemption(max_wait_ns=1000, max_merged=0))
    served.add(request("be", "be", 20))
    served.until("expert", 2)
    served.add(request("ls", "ls", first=3))
    bounds_ns, num_pieces = [], served.rank.num_steps
    served.now_ns += 7
    begun_ns = served.now_ns
    served.rank.step(begun_ns)  # the best-effort item ends where it is, and the urgent one begins
    served.rank.step(served.now_ns, lambda until_ns: bounds_ns.append(until_ns) or False)
    assert served.rank.num_steps > num_pieces + NUM_LAYERS, "pieces of one item in one poll"
    assert set(bounds_ns[:-1]) == {begun_ns + 1000}, "the time at which best effort was passed over for long enough"
    assert bounds_ns[-1] is None, "the item is over"


def test_time_passed_over_is_the_pieces_that_urgent_units_ran_meanwhile():
    served = Served(ALONE, passes_decodes=False)
    served.add(request("be", "be", 20, max_tokens=1))
    served.until("expert", 2)
    served.add(request("ls", "ls", max_tokens=1, first=3))
    served.finish()
    shape, counts = served.device.shape, served.rank.stats().pass_counts
    num_pieces = shape.num_layers + sum(shape.is_sparse) * shape.num_experts + 1  # of the urgent pass, 1 ns each
    assert counts.passed_over_ns == num_pieces
    assert (counts.num_passes, counts.num_withdrawals) == (1, 1)
    assert (counts.num_parked_tokens, counts.max_parked_tokens) == (0, 20)


def test_units_that_entered_together_do_not_pass_each_other():
    for policy in (QLLM, ALONE):
        served = Served(policy)
        for number in range(3):
            served.add(request(f"be{number}", "be", 5, max_tokens=1, first=number))
            served.add(request(f"ls{number}", "ls", 3, max_tokens=1, first=number + 3))
        served.finish()
        assert served.rank.stats().pass_counts == PassCounts()


def test_a_request_can_be_aborted_at_any_piece():
    """At the 76th its layer has all contributions, and the device has an item that only completes the layer."""
    for moment in range(60, 90):
        served = Served(in_order)
        served.device.may_forget = True
        for number in range(3):
            served.add(request(f"r{number}", "be", 3, max_tokens=10, first=30 + number))
        served.pieces(moment)
        served.rank.abort("r1", served.now_ns)
        del served.requests["r1"]
        served.finish()


def test_the_record_has_the_pass_of_a_batch_only_where_it_happened():
    def passes(policy) -> list[BatchPassed]:
        served = Served(policy)
        recorder = recorder_of(served.rank)
        served.add(request("be", "be", 20))
        served.until("expert", 2)
        served.add(request("ls", "ls", first=3))
        served.finish()
        return [event for event in recorder.take() if isinstance(event, BatchPassed)]

    found = passes(ALONE)
    assert found
    assert {(event.by, event.passed) for event in found} == {(("ls",), ("be",))}
    assert passes(in_order) == []
