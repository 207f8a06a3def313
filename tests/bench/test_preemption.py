"""`bench/serving/preemption.py`: the load of a GPU, which keeps prompts queued while urgent requests arrive."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from serving import preemption


def test_backlog_is_sent_at_the_start_and_urgent_requests_arrive_later():
    point = preemption.Point(
        url="", pid=0, reads_priority=False, rate=10, seconds=15, seed=1, shrink=8, lengths="", be_input=(400, 800)
    )
    found = preemption.draw(point)
    assert len(found.prompts) == 150
    assert found.is_ls.sum() == 30
    sizes = [len(prompt) for prompt, is_ls in zip(found.prompts, found.is_ls, strict=True) if not is_ls]
    assert min(sizes) >= 400
    assert 700 < max(sizes) <= 800
    assert not found.offsets_ns[~found.is_ls].any()
    arrivals = found.offsets_ns[found.is_ls]
    assert (arrivals[1:] >= arrivals[:-1]).all()
    assert 8e9 < arrivals[-1] < 30e9
    assert {len(prompt) for prompt, is_ls in zip(found.prompts, found.is_ls, strict=True) if is_ls} == {256}
