"""Policies that another policy works inside: a bound on waiting, and classes in order of precedence."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from moestro.core.clock import to_ns
from moestro.core.policy_registry import Setting
from moestro.core.views import ATTENTION, BE, LS, QueueTable, Run, StepPolicy, Wait
from moestro.errors import ConfigError
from moestro.flow.policies.one_queue import ALL, OldestTokenFirst, find_oldest
from moestro.flow.registry import STEP_POLICIES

BOTH_MAY_JOIN = 256  # tokens; `max_merged` of QLLM's policy, which has the same reason


@STEP_POLICIES.register(
    "urgent",
    "A queue whose oldest token has waited there for over `max_wait` seconds runs first; otherwise `inner` chooses.",
    source="AMoE's code: 100 ms, oldest first",
)
class Urgent:
    """Runs queues that have waited too long, oldest first, and otherwise what the inner policy chooses.

    Bound: a token that has waited in its queue for `max_wait` is passed over only by tokens that came to their queues
    before it, and by what runs already. The bound is one of each queue, not of the whole network.

    Args:
        inner: name of the inner policy, or names joined by `+`: `priority+defrag` is `priority:inner=defrag`.
        max_wait: seconds in one queue after which a token goes first. Infinity means no limit.
        max_wait_ns: offered to the inner policy.
        settings: settings of the inner policy.

    Raises:
        ConfigError: `max_wait` is negative, or there is no such inner policy or setting.

    Source: the scheduler of AMoE's attention workers (USC-NSL/DisagMoE, `AdvancedLayerScheduler`).
    """

    def __init__(
        self, inner: str = "defrag", max_wait: float = 0.1, max_wait_ns: int | None = None, **settings: Setting
    ) -> None:
        if not max_wait >= 0:
            raise ConfigError("max_wait must be at least 0")
        self.inner = make_inner(inner, settings, max_wait_ns)
        self.overlaps_prefill = self.inner.overlaps_prefill
        self._max_wait_ns = to_ns(max_wait)
        self._oldest_first = OldestTokenFirst()

    def __call__(self, view: QueueTable, now_ns: int) -> Run | Wait:
        """Run the oldest queue if it is urgent."""
        _, since_ns = find_oldest(view)
        if now_ns - since_ns > self._max_wait_ns:
            return self._oldest_first(view, now_ns)
        answer = self.inner(view, now_ns)
        urgent_ns = since_ns + self._max_wait_ns + 1
        # What takes one item ends by itself; a longer run, and a wait, end when a queue becomes urgent.
        if isinstance(answer, Wait):
            return Wait(min(answer.until_ns, urgent_ns))
        return _choose_again_by(answer, urgent_ns) if answer.until > answer.layer else answer


@STEP_POLICIES.register(
    "priority",
    "`inner` chooses among latency-sensitive tokens; at most `max_merged` best-effort tokens of that queue join them.",
    source="Moestro; QLLM, section 3.2, for the classes",
)
class ClassPriority:
    """Runs latency-sensitive tokens first, in the order of the inner policy, and best effort when none of them can run.

    The inner policy sees one class at a time: tables with a single class.

    Bound: a best-effort unit that was passed over for `max_wait_ns` in total goes before all others until its step
    ends. Latency-sensitive tokens have the bound of the inner policy.

    Args:
        inner: name of the inner policy, or names joined by `+`.
        max_merged: most best-effort tokens that join a latency-sensitive queue.
        max_wait_ns: longest time for which a best-effort unit is passed over, ns. None means no bound.
        settings: settings of the inner policy.

    Raises:
        ConfigError: there is no such inner policy or setting.
    """

    def __init__(
        self,
        inner: str = "defrag",
        max_merged: int = BOTH_MAY_JOIN,
        max_wait_ns: int | None = 1_000_000_000,
        **settings: Setting,
    ) -> None:
        self.inner = make_inner(inner, settings, max_wait_ns)
        self.overlaps_prefill = self.inner.overlaps_prefill
        self._max_merged, self._max_wait_ns = max_merged, max_wait_ns

    def __call__(self, view: QueueTable, now_ns: int) -> Run | Wait:
        """Run best effort that was passed over for too long, then latency-sensitive tokens, then best effort."""
        left_ns = self._left_ns(view)
        is_overdue = left_ns is not None and left_ns <= 0
        if is_overdue and (overdue := view.runnable[BE] & (view.passed_ns[BE] >= self._max_wait_ns)).any():
            index = int(np.where(overdue, view.passed_ns[BE], -1).argmax())
            layer, group = divmod(index, view.n.shape[2])
            return Run(layer, group, ALL, (BE, LS))
        can_be, can_ls = np.count_nonzero(view.runnable[BE]), np.count_nonzero(view.runnable[LS])
        if can_be and (is_overdue or not can_ls):
            return self._ask_inner(view, BE, now_ns)
        answer = self._ask_inner(view, LS, now_ns)
        return answer if left_ns is None or isinstance(answer, Wait) else _choose_again_by(answer, now_ns + left_ns)

    def _ask_inner(self, view: QueueTable, service_class: int, now_ns: int) -> Run | Wait:
        """Return the inner policy's choice among queues of one class; a few tokens of best effort may join."""
        answer = self.inner(of_class(view, service_class), now_ns)
        if isinstance(answer, Wait) or service_class == BE:
            return answer if isinstance(answer, Wait) else replace(answer, classes=(BE,))
        others = view.n[BE, answer.layer]
        num = others[answer.group] if answer.group >= ATTENTION else view.num_expert_tokens[BE, answer.layer]
        return replace(answer, classes=(LS, BE) if num <= self._max_merged else (LS,))

    def _left_ns(self, view: QueueTable) -> int | None:
        """Return the remaining time for which best effort may be passed over. None means no limit or no best effort."""
        if self._max_wait_ns is None or not np.count_nonzero(view.n[BE]):
            return None
        return self._max_wait_ns - int(view.passed_ns[BE].max())


def of_class(view: QueueTable, service_class: int) -> QueueTable:
    """Return the table of one class alone: each column has a single class, which costs no copy."""
    own = slice(service_class, service_class + 1)
    return QueueTable(
        n=view.n[own],
        oldest_ns=view.oldest_ns[own],
        passed_ns=view.passed_ns[own],
        runnable=view.runnable[own],
        num_expert_tokens=view.num_expert_tokens[own],
        num_free_places=view.num_free_places,
        num_prefill_tokens=view.num_prefill_tokens[own],
    )


def make_inner(names: str, settings: dict[str, Setting], max_wait_ns: int | None) -> StepPolicy:
    """Make the policy inside a wrapper. Each policy of the chain `names` takes the settings that it knows.

    Raises:
        ConfigError: there is no such policy or setting.
    """
    name, _, inside = names.partition("+")
    own = {**settings, "inner": inside} if inside else settings
    written = ",".join(f"{key}={value}" for key, value in own.items())
    return STEP_POLICIES.make(f"{name}:{written}" if own else name, max_wait_ns=max_wait_ns)


def _choose_again_by(run: Run, at_ns: int) -> Run:
    """Return `run` with `at_ns` as the time at which the policy chooses again, if it names no earlier one."""
    return replace(run, ask_again_ns=at_ns if run.ask_again_ns is None else min(at_ns, run.ask_again_ns))
