"""The loop of a rank process on an accelerator, whose steps follow each other without the host."""

from __future__ import annotations

import time

import pytest
from laws.test_steps_ahead_change_no_token import count_next_steps
from parity import tiny
from support.fake_device import make_request

from moestro.config.launch_spec import LaunchSpec
from moestro.engine.settings import SchedulerOptions
from moestro.flow.settings import SteppingSettings
from moestro.wire.messages import Abort, Add, Outputs, Shutdown
from moestro.worker.network_rank import build_network_rank
from moestro.worker.rank_builder import side_jobs_of
from moestro.worker.rank_loop import run_rank

NUM_NEW = 12


class ClientInbox:
    """Sends requests, aborts one at its third token, and shuts the rank down when the others have ended."""

    num_steps, owes = 0, False

    def __init__(self, requests: list, aborted: str) -> None:
        self.messages = [Add(request) for request in requests]
        self.aborted, self.open = aborted, {request.request_id for request in requests}
        self.tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        self.loads: list = []

    def has_messages(self) -> bool:
        return bool(self.messages)

    def receive(self, wait_s: float | None) -> list:
        messages, self.messages = self.messages, []
        if not self.open:
            self.messages.append(Shutdown())
        return messages

    def send(self, message: Outputs) -> None:
        self.loads.append(message.load)
        for output in message.outputs.others:
            self.take(output.request_id, output.token_ids, is_end=output.finish_reason is not None)
        for request_id, token in zip(message.outputs.request_ids, message.outputs.token_ids, strict=True):
            self.take(request_id, (token,))

    def take(self, request_id: str, token_ids: tuple[int, ...], *, is_end: bool = False) -> None:
        self.tokens[request_id] += token_ids
        if request_id == self.aborted:  # its tokens go on until the rank has the message
            if len(self.tokens[request_id]) == 3:
                self.open.remove(request_id)
                self.messages.append(Abort((request_id,)))
            return
        assert request_id in self.open, "an answer goes on after its end"
        if is_end:
            self.open.remove(request_id)


def served(directory, device: str, requests: list, aborted: str, **settings) -> ClientInbox:
    """A client whose requests a rank has answered. `settings`: of the model."""
    spec = LaunchSpec(
        rank=0, launch=0, address="", launched_ns=0, log_level="info",
        model=tiny.settings_of(directory, device=device, **settings),
        scheduler=SchedulerOptions(max_num_seqs=4), stepping=SteppingSettings(mode="fused"),
    )  # fmt: skip
    rank, _ = build_network_rank(spec, lambda _: None, lambda _: None)
    inbox = ClientInbox(requests, aborted)
    run_rank(rank, inbox, time.monotonic_ns, side_jobs_of(spec, rank))
    return inbox


@pytest.mark.parametrize("stops", [False, True])
def test_a_rank_of_an_accelerator_runs_ahead_and_answers_as_one_on_the_cpu(stops, checkpoint, accelerator, monkeypatch):
    counts = count_next_steps(monkeypatch)
    directory = checkpoint("qwen3_moe")
    requests = [make_request(name, [5, 6, 7, len(name)], max_tokens=NUM_NEW) for name in ("a", "bb", "ccc")]
    near = served(directory, "cpu", requests, "ccc")
    assert not counts
    if stops:
        stop = near.tokens["a"][5]
        requests[0] = make_request("a", [5, 6, 7, 1], max_tokens=NUM_NEW, stop_token_ids=(stop,))
        near.tokens["a"] = near.tokens["a"][: near.tokens["a"].index(stop) + 1]
    far = served(directory, "cuda", requests, "ccc")
    assert len(counts) >= NUM_NEW - 4
    assert {name: far.tokens[name] for name in ("a", "bb")} == {name: near.tokens[name] for name in ("a", "bb")}
    assert far.loads[-1].num_dropped_rows >= 1
