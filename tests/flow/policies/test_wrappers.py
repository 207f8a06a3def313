"""`urgent` and `priority`: when they choose themselves, what the policy inside sees, and how an operator nests them."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace
from support.queue_tables import KINDS, NUM_EXPERTS, NUM_LAYERS, of_classes, queues, random_table

from moestro.config.user_files import accept_user_code
from moestro.core.views import ATTENTION, BE, EVERY_EXPERT, LS, Run, Wait
from moestro.errors import ConfigError
from moestro.flow.policies.defrag import Defrag
from moestro.flow.policies.one_queue import ALL, in_order
from moestro.flow.policies.wrappers import ClassPriority, Urgent
from moestro.flow.registry import STEP_POLICIES, make_step_policy

accept_user_code()

MS = 1_000_000


class Always:
    """A policy that gives one answer, and keeps what it was shown."""

    def __init__(self, answer):
        self.answer, self.seen = answer, []

    def __call__(self, view, now_ns):
        self.seen.append(view)
        return self.answer


def around(wrapper, answer):
    wrapper.inner = Always(answer)
    return wrapper


# --- urgent ----------------------------------------------------------------------------------------------------------


def test_a_queue_that_waited_longer_than_the_bound_runs_first_the_oldest_of_several():
    view = queues({(0, 1): 9, (2, 1): 1, (3, 1): 1}, since={(0, 1): 100, (2, 1): 20, (3, 1): 10})
    policy = Urgent(inner="mtfs", max_wait=100e-9)
    assert policy(view, 110).layer == 0  # 100 ns are not more than 100 ns
    assert policy(view, 111).layer == 3
    assert policy(view, 200).layer == 3


def test_a_queue_is_urgent_after_the_100_ms_of_amoe():
    assert Urgent()._max_wait_ns == 100 * MS


def test_without_a_limit_the_inner_policy_chooses():
    view = queues({(0, 1): 9, (3, 1): 1}, since={(0, 1): 100, (3, 1): 10})
    assert Urgent(inner="mtfs", max_wait=float("inf"))(view, 10**15).layer == 0


def test_a_wait_or_a_passage_of_the_inner_policy_ends_when_a_queue_becomes_urgent():
    view = queues({(1, ATTENTION): 3}, since={(1, ATTENTION): 50})
    policy = Urgent(max_wait=100e-9)
    assert around(policy, Wait(1000))(view, 60) == Wait(151)
    assert around(policy, Wait(80))(view, 60) == Wait(80)
    passage = Run(1, ATTENTION, ALL, (LS, BE), until=ALL)
    assert around(policy, passage)(view, 60) == replace(passage, ask_again_ns=151)
    one_item = Run(1, ATTENTION, ALL, (LS, BE))
    assert around(policy, one_item)(view, 60) == one_item


@pytest.mark.parametrize("max_wait", [-1, float("nan")])
def test_a_negative_bound_is_refused(max_wait):
    with pytest.raises(ConfigError, match="max_wait must be at least 0"):
        Urgent(max_wait=max_wait)


# --- priority --------------------------------------------------------------------------------------------------------


def test_latency_sensitive_tokens_run_first_however_few():
    run = ClassPriority(inner="mtfs")(of_classes({(4, 1): 1}, {(0, 1): 99}), 0)
    assert (run.layer, run.group, run.classes) == (4, 1, (LS, BE))


def test_the_inner_policy_sees_one_class():
    policy = around(ClassPriority(), Run(4, 1, ALL, (LS, BE)))
    policy(of_classes({(4, 1): 1}, {(0, 1): 99}), 0)
    (seen,) = policy.inner.seen
    assert seen.n.shape[0] == seen.runnable.shape[0] == seen.num_expert_tokens.shape[0] == 1
    assert seen.n.sum() == 1


def test_few_best_effort_tokens_of_the_same_queue_join_and_many_do_not():
    few, many = of_classes({(4, 1): 1}, {(4, 1): 8}), of_classes({(4, 1): 1}, {(4, 1): 9})
    policy = ClassPriority(max_merged=8)
    assert policy(few, 0).classes == (LS, BE)
    assert policy(many, 0).classes == (LS,)
    every = around(ClassPriority(max_merged=8), Run(4, EVERY_EXPERT, ALL, (LS, BE)))
    assert every(many, 0).classes == (LS,)


def test_best_effort_runs_when_no_latency_sensitive_token_can():
    view = of_classes({(4, ATTENTION): 1}, {(0, 1): 9})
    runnable = view.runnable.copy()
    runnable[LS] = False
    run = ClassPriority()(replace(view, runnable=runnable), 0)
    assert (run.layer, run.group, run.classes) == (0, 1, (BE,))


def test_best_effort_that_was_passed_over_for_too_long_runs_before_everything_else():
    policy = ClassPriority(max_wait_ns=50)
    early, late = (of_classes({(4, 1): 1}, {(2, 3): 9}, passed_ns) for passed_ns in (30, 50))
    assert policy(early, 1000).ask_again_ns == 1020
    run = policy(late, 1000)
    assert (run.layer, run.group, run.classes) == (2, 3, (BE, LS))
    assert ClassPriority(max_wait_ns=None)(late, 1000) == Run(4, 1, ALL, (LS, BE))


def test_overdue_best_effort_that_cannot_run_lets_other_best_effort_free_its_places():
    view = of_classes({(4, 1): 1}, {(2, ATTENTION): 9, (5, 1): 2}, 99)
    passed, runnable = view.passed_ns.copy(), view.runnable.copy()
    passed[BE, 5, 1] = 0
    runnable[BE, 2, ATTENTION] = False
    run = ClassPriority(max_wait_ns=50)(replace(view, passed_ns=passed, runnable=runnable), 0)
    assert (run.layer, run.classes) == (5, (BE,))


@pytest.mark.parametrize("kind", KINDS)
def test_law_best_effort_runs_alone_only_if_it_is_overdue_or_nothing_else_can(kind):
    rng, policy = np.random.default_rng(4), ClassPriority(max_wait_ns=25)
    for _ in range(200):
        view = random_table(rng, kind, NUM_LAYERS, NUM_EXPERTS)
        run = policy(view, 0)
        is_overdue = view.passed_ns[BE].max() >= 25
        if run.classes[0] == BE:
            assert is_overdue or not view.runnable[LS].any()
        else:
            assert view.runnable[LS, run.layer, run.group]
            assert not is_overdue or not view.runnable[BE].any()


# --- as an operator writes them --------------------------------------------------------------------------------------


def test_a_chain_of_policies_shares_one_list_of_settings():
    text = "urgent:inner=priority+defrag,max_wait=0.05,max_merged=9,lookahead=3,decay=0.95"
    urgent = make_step_policy(text, max_be_wait_s=2)
    assert isinstance(urgent, Urgent)
    assert isinstance(urgent.inner, ClassPriority)
    assert urgent.inner.inner == Defrag(lookahead=3, decay=0.95)
    assert urgent._max_wait_ns == 50 * MS
    assert (urgent.inner._max_merged, urgent.inner._max_wait_ns) == (9, 2000 * MS)


@pytest.mark.parametrize(("inner", "overlaps"), [("priority+layered_prefill", True), ("priority+defrag", False)])
def test_decodes_enter_again_around_layered_prefill(inner, overlaps):
    assert make_step_policy(f"urgent:inner={inner}", 1).overlaps_prefill is overlaps


def test_a_policy_of_a_file_may_be_inside(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from moestro.flow.policies.one_queue import in_order as mine")
    assert make_step_policy(f"urgent:inner={file}:mine", 1).inner.choose is in_order


@pytest.mark.parametrize(("line", "overlaps"), [("", False), ("mine.overlaps_prefill = True", True)])
def test_a_function_of_a_file_overlaps_no_prefill_unless_it_says_so(tmp_path, line, overlaps):
    file = tmp_path / "mine.py"
    choice = (
        "from moestro.flow.policies.one_queue import in_order\ndef mine(view, now_ns): return in_order(view, now_ns)\n"
    )
    file.write_text(choice + line)
    assert make_step_policy(f"{file}:mine", 1).overlaps_prefill is overlaps


@pytest.mark.parametrize("name", STEP_POLICIES.names())
def test_every_policy_states_whether_decodes_overlap_prefill(name):
    """The flow core reads it from whatever policy it gets."""
    assert make_step_policy(name, 1).overlaps_prefill is (name == "layered_prefill")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("urgent:inner=nothing", "unknown step policy 'nothing'"),
        ("urgent:inner=mtfs,lookahead=3", "step policy 'mtfs' has no setting 'lookahead'"),
        ("urgent:inner=mtfs+defrag", "step policy 'mtfs' has no setting 'inner'"),
        ("priority:inner=qllm", "step policy 'priority' cannot decide"),
    ],
)
def test_a_chain_that_cannot_be_is_refused(text, why):
    with pytest.raises(ConfigError, match=why):
        make_step_policy(text, 1)
