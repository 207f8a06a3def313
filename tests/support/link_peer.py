"""A worker's process that is ended in the middle of a transfer in two phases."""

from __future__ import annotations

import time

import numpy as np
from support.replaced import replace_names

from moestro.core.stages import HOP_RECORD, REPLY, Hop, HopMessage
from moestro.model.channels import TensorChannels
from moestro.wire.hop_frames import Hello, HopLimits
from moestro.wire.sockets import ListenAddress
from moestro.worker.peer_links import PeerLinks
from moestro.worker.two_phase import TwoPhase, TwoPhaseLinks


class ByteFrames:
    """Tensors of uint8[rows, width]."""

    dtype = "uint8"

    def __init__(self, width: int) -> None:
        self.width = width

    def pack(self, tensor) -> memoryview:
        return np.ascontiguousarray(tensor).reshape(-1).data

    def flatten(self, tensor) -> memoryview:
        return self.pack(tensor)

    def num_bytes(self, num_rows: int) -> int:
        return num_rows * self.width

    def unpack(self, frame, num_rows: int) -> np.ndarray:
        if len(frame) != self.num_bytes(num_rows):
            raise ValueError("another size")
        return np.frombuffer(frame, np.uint8).reshape(num_rows, self.width)


def make_links(directory, worker: int, launch: int, width: int, inline_limit: int = 0) -> PeerLinks:
    """The links of one of two workers: a home, number 0, and a worker with experts, number 1."""
    limits = HopLimits(
        worker=worker, num_workers=2, num_layers=1, num_chosen=1, num_slots=1, num_places=9, num_remote_places=9
    )
    way = TwoPhase(given_limit=inline_limit, channels=TensorChannels("127.0.0.1"))
    return PeerLinks(
        Hello(worker, launch), ListenAddress(address_of(directory, worker, launch)), ByteFrames(width), limits, way
    )


def address_of(directory, worker: int, launch: int) -> str:
    return f"ipc://{directory}/{worker}.{launch}"


def reply(seq: int, width: int) -> HopMessage:
    hop = Hop(kind=REPLY, src=1, dst=0, epoch=0, seq=seq, layer=0, num_rows=1, dtype="uint8")
    return HopMessage(hop, np.zeros(1, HOP_RECORD), np.full((1, width), seq, np.uint8))


def _count_tensor(links: TwoPhaseLinks, worker: int, _tensor: object) -> None:
    """Count a tensor as sent, and send none."""
    links._peers[worker].num_sent += 1


def run_peer(directory: str, launch: int, width: int, has_announced, *, sends_tensors: bool) -> None:
    """Be the worker with experts: open a channel, send one small reply whole, then announce large ones until killed.

    Args:
        has_announced: set after the first announcement that follows the whole reply.
        sends_tensors: whether tensors follow their announcements.
    """
    links = make_links(directory, 1, launch, width)
    links.connect(0, address_of(directory, 0, 0), 0)
    seq = 0
    while not links.sent[0].num_two_phase:  # until the channel is open, replies go inline
        links.send(reply(seq, width), 0)
        seq += 1
        links.receive(0)
        time.sleep(0.02)
    if not sends_tensors:
        replace_names(TwoPhaseLinks, send_tensor=_count_tensor)
    while True:
        links.send(reply(seq, width), 0)
        seq += 1
        has_announced.set()
        links.receive(0)
        time.sleep(0.02)
