"""Mode `ep` on every family with experts: the tokens of one rank that has them all."""

from __future__ import annotations

from parity import tiny
from support.lock_step_processes import answers_alone, answers_of_group


def test_two_ranks_in_lock_step_give_the_tokens_of_one(checkpoint, tmp_path):
    found = list(answers_of_group([checkpoint(name) for name in tiny.SPARSE], tmp_path))
    for name, answers in zip(tiny.SPARSE, found, strict=True):
        assert answers == answers_alone(checkpoint(name)), name
