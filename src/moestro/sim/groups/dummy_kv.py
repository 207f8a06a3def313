"""Requests that enter with the KV of their prompts and decode at once, as behind prefill engines. Simulation alone.

AMoE's prototype and its baseline start decodes with dummy KV (section 5): the blocks are allocated, and nothing is
computed. Here a waiting sequence claims that the KV of its prompt lies in host memory, in no blocks. Its admission then
allocates device blocks, copies nothing, and leaves the prompt's last token to be computed, which samples the first one.
"""

from __future__ import annotations

from moestro.engine.scheduler import Scheduler


def give_prompt_kv(scheduler: Scheduler, request_id: str) -> None:
    """Let a waiting sequence start with the KV of all its prompt but the last token.

    The prefix cache counts these tokens as hits. A preempted sequence computes its tokens again like any other.
    `Scheduler.check` rejects such a sequence while it waits, because its KV lies nowhere.

    Args:
        scheduler: scheduler of the rank; no plan has been made since the request was added.
        request_id: the request.
    """
    sequence = scheduler.by_id[request_id]
    scheduler.waiting.remove(sequence)
    sequence.num_kept = sequence.num_tokens - 1
    scheduler.waiting.add(sequence)
