"""Histories of one device in `preemptive` mode, given by the items that it launches and by the tokens of its requests.

Time is the number of pieces that the device has done, so that a history does not depend on how often a rank is polled.
"""

from __future__ import annotations

import msgspec
import numpy as np
from support.fake_device import make_request
from support.fake_stages import VOCAB, FakeStages, make_shape
from support.step_policies import ADVERSARIES

from moestro.core.request import ServiceClass
from moestro.core.stages import Attention, Experts, Passage
from moestro.engine.rank import build_preemptive_rank
from moestro.engine.settings import SchedulerSettings
from moestro.flow.policies.one_queue import in_order
from moestro.flow.policies.qllm import ExpertLevelPreemption

POLICIES = {
    "in order": lambda: in_order,
    "qllm": lambda: ExpertLevelPreemption(max_wait_ns=300, max_merged=4),
    "qllm without ageing": lambda: ExpertLevelPreemption(max_wait_ns=None, max_merged=0),
    **{name: (lambda policy=policy: policy) for name, policy in ADVERSARIES.items()},
}
_BLOCK_SIZE, _LONGEST, _BUDGET, _NUM_REQUESTS = 4, 32, 24, 10


def _describe(item) -> str:
    if isinstance(item, Experts):
        batches = zip(item.experts.tolist(), item.counts.tolist(), strict=True)
        return f"experts {item.layer}: " + " ".join(f"{expert}x{count}" for expert, count in batches)
    units = " ".join(f"{s}@{p}" for s, p in zip(item.units.serial.tolist(), item.units.start.tolist(), strict=True))
    if isinstance(item, Attention):
        return f"attention {item.layer}: {units}"
    return f"passage {item.layer} to {item.until}: {units}" if isinstance(item, Passage) else f"sample: {units}"


class _Recording(FakeStages):
    """Writes down what is launched, but for items without work of their own."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.launched: list[str] = []

    def launch(self, item, now_ns: int) -> None:
        if not (isinstance(item, Experts) and len(item.experts) == 0):
            self.launched.append(_describe(item))
        super().launch(item, now_ns)


def _requests(rng: np.random.Generator) -> list:
    requests = []
    for i in range(_NUM_REQUESTS):
        max_tokens = int(rng.integers(1, 8))
        tokens = rng.integers(0, VOCAB, int(rng.integers(1, _LONGEST - max_tokens)))
        request = make_request(f"r{i}", tokens, arrival_ns=i, max_tokens=max_tokens)
        service_class = ServiceClass.LS if rng.random() < 0.4 else ServiceClass.BE
        requests.append(msgspec.structs.replace(request, service_class=service_class))
    return requests


def run_history(seed: int, policy: str, *, passes_decodes: bool, num_chosen: int) -> dict[str, list]:
    """Serve ten requests that arrive in mid-network. Returns what was launched, and the tokens of each request."""
    rng = np.random.default_rng(seed)
    device = _Recording(make_shape(2 * _BUDGET, num_chosen=num_chosen), 8 * _LONGEST // _BLOCK_SIZE, _BLOCK_SIZE)
    settings = SchedulerSettings(
        num_blocks=8 * _LONGEST // _BLOCK_SIZE,
        block_size=_BLOCK_SIZE,
        max_model_len=_LONGEST,
        max_num_seqs=4,
        max_num_urgent_seqs=4,
        max_num_batched_tokens=_BUDGET,
        scheduling_policy="qllm",
    )
    rank = build_preemptive_rank(settings, device, POLICIES[policy](), passes_decodes=passes_decodes)
    requests = _requests(rng)
    arrives_at = rng.integers(0, 30, len(requests)).cumsum()
    tokens: list[list[int]] = [[] for _ in requests]
    num_added = 0
    for _ in range(100_000):
        now = len(device.log)
        while num_added < len(requests) and (arrives_at[num_added] <= now or not rank.has_work):
            rank.add(requests[num_added], now)
            num_added += 1
        for output in rank.step(now, lambda _: True):
            tokens[int(output.request_id[1:])].extend(output.token_ids)
        if num_added == len(requests) and not rank.has_work:
            return {"launched": device.launched, "tokens": tokens}
    raise AssertionError("parked work was forgotten")
