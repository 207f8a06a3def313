"""Counts of the items that step policies choose, for AMoE's figure 13."""

from __future__ import annotations

from moestro.core.views import QueueTable, Run, StepFunction, StepPolicy, Wait


class ItemTally:
    """Counts items and their tokens over any number of workers, without the samplers'.

    Attributes:
        num_items: items that policies chose while counting.
        num_tokens: tokens in them.
        is_counting: whether choices are counted.
    """

    def __init__(self) -> None:
        self.num_items = self.num_tokens = 0
        self.is_counting = False

    def watched(self, policy: StepPolicy) -> StepPolicy:
        """Return a policy that chooses as `policy`, and counts."""

        def choose(view: QueueTable, now_ns: int) -> Run | Wait:
            answer = policy(view, now_ns)
            if self.is_counting and isinstance(answer, Run) and answer.layer < view.n.shape[1] - 1:  # no sampler
                waiting = sum(int(view.n[each, answer.layer, answer.group]) for each in answer.classes)
                self.num_items += 1
                self.num_tokens += min(waiting, answer.max_rows)
            return answer

        return StepFunction(choose, policy.overlaps_prefill)
