"""Ranks in lock-step as processes with networks, without a server: their real loops, and queues for their messages."""

from __future__ import annotations

import contextlib
import gc
import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from support.fake_device import make_request
from support.loaded_processes import LOADED
from torch import distributed

from moestro.core.experts.expert_table import ExpertTable
from moestro.core.request import Request
from moestro.engine.lock_step import build_lock_step_rank, spread_over_ranks
from moestro.engine.rank import build_rank
from moestro.engine.settings import SchedulerSettings
from moestro.errors import GroupLostError
from moestro.model.device import open_device
from moestro.model.experts.exchange import GroupPlace, Meeting
from moestro.model.experts.spread_device import open_spread_device
from moestro.model.settings import ModelSettings
from moestro.wire.messages import Add, Shutdown, WakeGroup
from moestro.wire.sockets import SocketExchange
from moestro.worker.rank_loop import run_rank

_WAIT_S = 120.0
_NUM_BLOCKS, _BLOCK_SIZE = 40, 4
SETTINGS = SchedulerSettings(
    num_blocks=_NUM_BLOCKS, block_size=_BLOCK_SIZE, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16
)
PROMPTS = ([[5, 17, 4], [9] * 21, [33, 2, 8, 61, 7, 90, 13]], [[44, 45, 3]])  # by rank


def requests_of(rank: int) -> list[Request]:
    """Greedy requests, and one that is sampled with a seed."""
    made = [make_request(f"{rank}.{i}", prompt, max_tokens=5 + 2 * i) for i, prompt in enumerate(PROMPTS[rank])]
    return [*made, make_request(f"{rank}.sampled", [7, rank, 9], max_tokens=8, temperature=1.0, seed=3)]


def answers_alone(checkpoint: Path) -> dict[str, list[int]]:
    """Tokens of each request on one rank in the fused mode."""
    rank = build_rank(SETTINGS, open_device(settings_of(checkpoint))[0])
    tokens: dict[str, list[int]] = {}
    for number in range(len(PROMPTS)):
        for request in requests_of(number):
            rank.add(request, 0)
    while rank.has_work:
        for output in rank.step(0):
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


def answers_of_group(checkpoints: list[Path], directory: Path) -> Iterator[dict[str, list[int]]]:
    """Tokens of each request on a group of ranks, for one network after the other."""
    outbox: Any = LOADED.Queue()
    inboxes = [LOADED.Queue() for _ in PROMPTS]
    processes = [
        LOADED.Process(target=_run, args=(rank, checkpoints, directory, inbox, outbox), daemon=True)
        for rank, inbox in enumerate(inboxes)
    ]
    for process in processes:
        process.start()
    try:
        for _ in checkpoints:
            yield _serve(inboxes, outbox)
        for process in processes:
            process.join(_WAIT_S)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()


def _serve(inboxes: list[Any], outbox: Any) -> dict[str, list[int]]:
    """Give the requests to the ranks, those of rank 1 when rank 0 has begun, and pass on messages that wake."""
    requests = [requests_of(rank) for rank in range(len(inboxes))]
    tokens: dict[str, list[int]] = {request.request_id: [] for own in requests for request in own}
    _add(inboxes[0], requests[0])
    running = set(tokens)
    while running:
        rank, message = outbox.get(timeout=_WAIT_S)
        if isinstance(message, WakeGroup):
            inboxes[1 - rank].put(message)
            continue
        for output in message.outputs:
            tokens[output.request_id] += output.token_ids
            running -= {output.request_id} if output.finish_reason is not None else set()
        if len(tokens["0.0"]) >= 3:
            _add(inboxes[1], requests[1])
            requests[1] = []
    for inbox in inboxes:
        inbox.put(Shutdown())
    return tokens


def _add(inbox: Any, requests: list[Request]) -> None:
    for request in requests:
        inbox.put(Add(request))


class _QueueChannel:
    num_steps = 0

    def __init__(self, rank: int, inbox: Any, outbox: Any) -> None:
        self._rank, self._inbox, self._outbox = rank, inbox, outbox

    def receive(self, wait_s: float | None) -> list:
        messages = []
        with contextlib.suppress(queue.Empty):
            messages.append(self._inbox.get(timeout=_WAIT_S if wait_s is None else wait_s))
        return messages

    def has_messages(self) -> bool:
        return not self._inbox.empty()

    def send(self, message: object) -> None:
        self._outbox.put((self._rank, message))


def _run(rank: int, checkpoints: list[Path], directory: Path, inbox: Any, outbox: Any) -> None:
    gc.freeze()  # each network that is cut collects garbage, also among the libraries' objects
    torch.set_num_threads(1)
    place = GroupPlace(worker=rank, num_workers=len(PROMPTS), timeout_s=_WAIT_S)
    channel = _QueueChannel(rank, inbox, outbox)

    def make_table(num_layers: int, num_experts: int) -> ExpertTable:
        return spread_over_ranks(num_layers, num_experts, place.num_workers)

    for number, checkpoint in enumerate(checkpoints):
        store = distributed.FileStore(str(directory / f"store-{number}"), place.num_workers)
        sockets = SocketExchange(rank, place.num_workers, place.timeout_s, store)
        meeting = Meeting(store, sockets)
        device, _ = open_spread_device(settings_of(checkpoint), place, make_table, lambda meeting=meeting: meeting)
        made = build_lock_step_rank(SETTINGS, device, lambda step: channel.send(WakeGroup(step)))
        try:
            run_rank(made, channel, time.monotonic_ns)
        except GroupLostError:  # the other rank read its shutdown message first, as when a server stops
            while not any(isinstance(message, Shutdown) for message in channel.receive(_WAIT_S)):
                pass
        sockets.close()  # as the end of a process does, so that the other rank does not wait for this one


def settings_of(checkpoint: Path, dtype: str = "float64") -> ModelSettings:
    """A network on a CPU, with the blocks of `SETTINGS`."""
    return ModelSettings(
        model=str(checkpoint),
        dtype=dtype,
        device="cpu",
        num_gpu_blocks_override=_NUM_BLOCKS,
        block_size=_BLOCK_SIZE,
    )
