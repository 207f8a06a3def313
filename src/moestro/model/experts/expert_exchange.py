"""Exchange of rows between the workers of a group, over `torch.distributed`.

All workers of a group make the same calls in the same order. A worker without tokens makes them with no rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # torch re-exports them unmarked

from moestro.errors import GroupLostError
from moestro.model.channels.transport import choose_backend, copy_to_host, describe_backend, empty_on_host, name_device

Int64s = NDArray[np.int64]

_LOOPBACK = "127.0.0.1"


class ExpertExchange(Protocol):
    """Moves rows between the workers of a group.

    Attributes:
        worker, num_workers: number of this worker, and of all.
    """

    worker: int
    num_workers: int

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """Tell each worker how many rows it gets.

        Args:
            counts: int64[workers, slots], rows for each worker's slots.

        Returns:
            int64[workers, slots], rows from each worker for the own slots.
        """
        ...

    def exchange_rows(self, rows: Tensor, num_sent: list[int], num_received: list[int]) -> Tensor:
        """Send and receive rows.

        Args:
            rows: [sum of num_sent, columns], those for worker 0 first.
            num_sent, num_received: rows for, and from, each worker.

        Returns:
            [sum of num_received, columns], those from worker 0 first.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """Place of a worker in a group of processes.

    Attributes:
        worker, num_workers: number of this worker, and of all.
        timeout_s: longest wait for another worker in an exchange, in seconds.
    """

    worker: int
    num_workers: int
    timeout_s: float


def meet(place: GroupPlace, port: int, listen_fd: int | None, wait_s: float) -> Store:
    """Meet the other workers of a group on this machine, and return their common store.

    Args:
        port: port of the store on the loopback interface.
        listen_fd: descriptor of the socket that listens there, in the process that keeps the store; else None.
        wait_s: longest wait, in seconds.

    Raises:
        GroupLostError: some workers did not come; the text names them.
    """
    wait = timedelta(seconds=wait_s)
    keys = [f"worker-{worker}" for worker in range(place.num_workers)]
    store, is_host = None, listen_fd is not None
    try:
        store = TCPStore(
            _LOOPBACK, port, place.num_workers, is_host, wait, wait_for_workers=False, master_listen_fd=listen_fd
        )
        store.set(keys[place.worker], "here")
        store.wait(keys, wait)
    except distributed.DistError as error:
        absent = _absent(store, keys)
        raise GroupLostError(f"engine {absent} did not join its group within {wait_s:.0f} s") from error
    return store


def _absent(store: Store | None, keys: list[str]) -> str:
    """Return the workers that have not come. Without an answer of the store, that is worker 0, which keeps it."""
    try:
        return "0" if store is None else ", ".join(str(i) for i, key in enumerate(keys) if not store.check([key]))
    except distributed.DistError:
        return "0"


class GroupExchange:
    """Exchanges rows over `torch.distributed`, by the backend that `choose_backend` chooses for the workers' devices.

    gloo exchanges host memory: rows of an accelerator are copied to pinned memory there, and back.
    Every call raises `GroupLostError` where another worker ended, or did not answer in time. NCCL cannot raise: where
    it waits in vain, its watchdog ends the process.

    Args:
        place: place of this worker. The call returns when all workers have made it.
        store: common store of the workers; a new one for each start of the group.
        device: device of the tensors.

    Attributes:
        note: sentence for the operator; "" for a group without accelerators.

    Raises:
        GroupLostError: another worker did not join in time.
    """

    def __init__(self, place: GroupPlace, store: Store, device: torch.device) -> None:
        self.worker, self.num_workers = place.worker, place.num_workers
        self._device = device
        with _losing_group():
            names = _share_names(place, store, name_device(device))
            backend = choose_backend(names)
            distributed.init_process_group(
                "gloo" if backend == "gloo" else f"cpu:gloo,{device.type}:nccl",
                store=store,
                rank=place.worker,
                world_size=place.num_workers,
                timeout=timedelta(seconds=place.timeout_s),
                device_id=None if backend == "gloo" else device,
            )
        way = describe_backend(names)
        self.note = way and f"Engines exchange tokens by {way}."
        self._is_staged = backend == "gloo" and device.type != "cpu"

    def gather(self, numbers: Int64s) -> Int64s:
        """Gather numbers on the host from all workers, as int64[workers, n]. `numbers`: int64[n], of this worker."""
        own = torch.from_numpy(numbers)
        gathered = [torch.empty_like(own) for _ in range(self.num_workers)]
        with _losing_group():
            distributed.all_gather(gathered, own)
        return torch.stack(gathered).numpy()

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """Implement `ExpertExchange.exchange_counts`."""
        sent, received = self._buffers(counts, counts.shape)
        with _losing_group():
            distributed.all_to_all_single(received, sent)
        return self._on_device(received)

    def exchange_rows(self, rows: Tensor, num_sent: list[int], num_received: list[int]) -> Tensor:
        """Implement `ExpertExchange.exchange_rows`."""
        sent, received = self._buffers(rows.contiguous(), (sum(num_received), rows.shape[1]))
        # As bytes, because gloo does not know every dtype.
        sent_bytes, received_bytes = sent.view(torch.uint8), received.view(torch.uint8)
        with _losing_group():
            distributed.all_to_all_single(received_bytes, sent_bytes, num_received, num_sent)
        return self._on_device(received)

    def _buffers(self, sent: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(`sent`, memory for what comes) where the backend reads and writes."""
        if self._is_staged:
            return copy_to_host(sent), empty_on_host(shape, sent.dtype, self._device)
        return sent, sent.new_empty(shape)

    def _on_device(self, received: Tensor) -> Tensor:
        return received.to(self._device, non_blocking=True) if self._is_staged else received


def _share_names(place: GroupPlace, store: Store, own: str) -> list[str]:
    """Return the names of all workers' devices."""
    keys = [f"device-{worker}" for worker in range(place.num_workers)]
    store.set(keys[place.worker], own)
    return [store.get(key).decode() for key in keys]


@contextlib.contextmanager
def _losing_group() -> Iterator[None]:
    """Turn an error of a collective into a `GroupLostError`. No exchange is possible afterwards."""
    try:
        yield
    except RuntimeError as error:
        raise GroupLostError(f"the exchange with the other engines of the group failed: {error}") from error
