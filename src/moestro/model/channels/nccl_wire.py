"""A channel between two processes over NCCL, for tensors in the memory of two GPUs."""

from __future__ import annotations

import contextlib
import os
import threading
from datetime import timedelta
from typing import Any, cast

import torch
from torch import distributed
from torch.distributed import Store  # type: ignore[attr-defined]  # torch re-exports it unmarked

# Between looks whether a transfer has ended, of which NCCL reports nothing to the host: short at first, then longer.
_FIRST_LOOK_S, _LAST_LOOK_S = 50e-6, 1e-3
_SENDER, _RECEIVER = 0, 1  # ranks in the group of a direction


class NcclWire:
    """Implements `tensor_channel.Wire`.

    Each direction has a group of its own, because NCCL runs the calls of a group in order: two sends that wait for each
    other's receive would never end. The sizes are known before, and both ends make a direction's calls in the order of
    the announcements.

    The stream that computes never waits for the other process: a receive has a stream of its own, and its tensor is
    handed over when it is there. So a process that has died holds up no work of this one, until an abort ends the
    calls that wait for it.

    Args:
        device: this process's GPU.
        limit_s: longest transfer, in seconds. A longer one breaks the wire.
    """

    reaches_device = True

    def __init__(self, device: torch.device, limit_s: float) -> None:
        self._device, self._limit_s = device, limit_s
        self._is_over = threading.Event()
        self._groups: list[Any] = []
        self._outgoing: Any = None
        self._incoming: Any = None
        self._stream: Any = None

    def meet(self, store: Store, rank: int) -> None:
        """Implement `Wire.meet`. One byte goes each way, because NCCL connects at the first transfer."""
        # The watchdog would end this process, which must outlive the other one. `_ended` looks after transfers instead.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        with torch.cuda.device(self._device):
            self._stream = cast(Any, torch.cuda.Stream)(self._device)
            for sender in range(2):
                group = make_group(store, sender, _SENDER if rank == sender else _RECEIVER, self._limit_s)
                self._groups.append(group)
                byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
                move = group.send if rank == sender else group.recv
                self.wait(move([byte], _RECEIVER if rank == sender else _SENDER, 0))
            self._outgoing, self._incoming = self._groups[rank], self._groups[1 - rank]

    def send(self, frame: Any) -> tuple[Any, Any]:
        """Implement `Wire.send`. `frame`: uint8[bytes], written by the current stream."""
        return self._outgoing.send([frame], _RECEIVER, 0), frame

    def receive(self, num_bytes: int) -> tuple[Any, Any]:
        """Implement `Wire.receive`."""
        with torch.cuda.stream(self._stream):
            frame = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            work = self._incoming.recv([frame], _SENDER, 0)
        # Its memory is used again only after what the computing stream does with it.
        frame.record_stream(torch.cuda.current_stream(self._device))
        return work, frame

    def wait(self, work: Any) -> None:
        """Implement `Wire.wait`. No stream waits: what is launched afterwards comes after the transfer."""
        if not self._ended(work):
            self.stop()
            raise RuntimeError("a transfer over NCCL did not end in time, or the channel was closed")
        if not work.is_success():
            raise RuntimeError("a transfer over NCCL failed")

    def stop(self) -> None:
        """Implement `Wire.stop`. NCCL's kernels that wait for the other process end by an abort."""
        if not self._is_over.is_set():
            self._is_over.set()
            threading.Thread(target=self._abort, name="nccl-abort", daemon=True).start()

    def _ended(self, work: Any) -> bool:
        """Wait for the end of a transfer. False means that it did not end in time, or that the wire was stopped."""
        waited_s, look_s = 0.0, _FIRST_LOOK_S
        while not work.is_completed():
            if waited_s >= self._limit_s or self._is_over.wait(look_s):
                return False
            waited_s, look_s = waited_s + look_s, min(1.05 * look_s, _LAST_LOOK_S)
        return not self._is_over.is_set()

    def _abort(self) -> None:
        for group in self._groups:
            with contextlib.suppress(RuntimeError):
                group.abort()


def make_group(store: Store, sender: int, rank: int, limit_s: float) -> Any:
    """Make the group of a direction.

    Args:
        store: common store of the two processes.
        sender: end of the channel that sends.
        rank: rank of this process in the group.
        limit_s: longest abort, in seconds.
    """
    nccl = cast(Any, distributed).ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=limit_s)
    return nccl(cast(Any, distributed).PrefixStore(f"from-{sender}", store), rank, 2, options)
