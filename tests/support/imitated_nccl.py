"""Imitated NCCL between processes that each have another imitated accelerator: gloo carries its bytes.

Its rules are enforced: it refuses two processes on one accelerator, runs the calls of a group one after the other, and
never returns from a call whose other process has died, until the group is aborted. What a receive brings is not there
before it has ended. What it cannot show: kernels, their speed, and how NCCL connects.
"""

from __future__ import annotations

import contextlib
import os
import threading
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from support import imitated_accelerator
from support.imitated_accelerator import FarStream, FarTensor
from torch import Tensor, distributed

_LONG = timedelta(hours=1)
_NEVER_SENT = 1  # a tag


class _Work:
    """A call that has been made; implements what is used of NCCL's."""

    def __init__(self, stream: FarStream, gloo: Any, near: Tensor, target: Tensor | None) -> None:
        self.gloo, self.near, self.target = gloo, near, target
        self.has_ended = self.has_failed = False
        self._stream, self._clock = stream, stream.so_far()

    def is_completed(self) -> bool:
        if self.has_ended:
            imitated_accelerator.pass_by(self._clock)
        return self.has_ended

    def is_success(self) -> bool:
        return not self.has_failed


class ImitatedNccl:
    """Implements what is used of `torch.distributed.ProcessGroupNCCL`, for two processes."""

    shares_card = False  # whether a test lets both processes have one accelerator

    class Options:
        _timeout: timedelta

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0", "the watchdog would end the process"
        assert options._timeout < _LONG
        if not self.shares_card:
            refuse_duplicates(store, rank, size)
        gloo: Any = distributed.ProcessGroupGloo
        made = gloo._Options()
        made._devices, made._threads, made._timeout = [gloo.create_device(hostname="127.0.0.1")], 1, _LONG
        self._group = gloo(distributed.PrefixStore("gloo", store), rank, size, made)
        self._rank, self._stream = rank, FarStream()
        self._is_aborted = threading.Event()
        self._works: SimpleQueue[_Work] = SimpleQueue()
        threading.Thread(target=self._run, name="imitated-nccl", daemon=True).start()

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> _Work:
        (tensor,) = tensors
        imitated_accelerator.use_on(self._stream, "send", [tensor], [])
        near = tensor.near.clone()
        return self._begin(_Work(self._stream, lambda: self._group.send([near], peer, tag), near, None))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> _Work:
        (tensor,) = tensors
        imitated_accelerator.use_on(self._stream, "recv", [], [tensor])
        near = torch.empty_like(tensor.near)
        tensor.near.fill_(imitated_accelerator.POISON)
        return self._begin(_Work(self._stream, lambda: self._group.recv([near], peer, tag), near, tensor.near))

    def abort(self) -> None:
        self._is_aborted.set()
        with contextlib.suppress(RuntimeError):
            never = torch.empty(1, dtype=torch.uint8)
            self._group.recv([never], 1 - self._rank, _NEVER_SENT).wait(timedelta(milliseconds=1))

    def _begin(self, work: _Work) -> _Work:
        self._works.put(work)
        return work

    def _run(self) -> None:
        while not self._is_aborted.is_set():
            work = self._works.get()
            try:
                work.gloo().wait()
            except RuntimeError:
                self._is_aborted.wait()
                work.has_failed = True
            else:
                if work.target is not None:
                    work.target.copy_(work.near)
            work.has_ended = True


def refuse_duplicates(store: Any, rank: int, size: int) -> None:
    """Fail as NCCL does where two processes are on one accelerator."""
    own = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    store.set(f"card-{rank}", own)
    if len({bytes(store.get(f"card-{other}")) for other in range(size)}) < size:
        raise RuntimeError("Duplicate GPU detected")


def imitate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch find NCCL, in `imitated_accelerator.imitated`."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # gloo would look the host's name up
    init, all_to_all = distributed.init_process_group, distributed.all_to_all_single

    def init_process_group(backend: str, *, store: Any, device_id: Any, **arguments: Any) -> None:
        assert backend == "nccl"
        assert device_id == imitated_accelerator.current_device()
        refuse_duplicates(store, arguments["rank"], arguments["world_size"])
        init("gloo", store=store, **arguments)

    def all_to_all_single(received: Tensor, sent: Tensor, *sizes: list[int]) -> None:
        if isinstance(received, FarTensor):
            imitated_accelerator.use("all_to_all", [sent], [received])
            received, sent = received.near, sent.near
        all_to_all(received, sent, *sizes)

    monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", ImitatedNccl, raising=False)
    monkeypatch.setattr(distributed, "init_process_group", init_process_group)
    monkeypatch.setattr(distributed, "all_to_all_single", all_to_all_single)
