"""The exchange of rows between the workers of a group on one machine: through host memory, or by NCCL.

All workers of a group make the same calls in the same order. A worker without tokens makes them with no rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # torch re-exports them unmarked

from moestro.errors import GroupLostError
from moestro.model.channels import choose_backend, copy_to_host, describe_backend, empty_on_host, name_device

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


class HostExchange(Protocol):
    """Exchanges host memory between the workers of a group. Calls raise `GroupLostError`, as those of the group do."""

    def gather(self, numbers: Int64s) -> Int64s:
        """Gather numbers from all workers, as int64[workers, n]. `numbers`: int64[n], of this worker."""
        ...

    def swap(self, sent: Sequence[memoryview], received: Sequence[memoryview]) -> None:
        """Send bytes to each worker, and take in those from each.

        Args:
            sent: bytes by worker.
            received: memory by worker, to be filled; as long as what that worker sends.
        """
        ...


class Meeting(NamedTuple):
    """How the workers of a group reach each other.

    Attributes:
        store: common store of the workers; a new one for each start of the group.
        host: what carries host memory.
    """

    store: Store
    host: HostExchange


class GroupExchange:
    """Exchanges rows by the way that `choose_backend` chooses for the workers' devices: host memory, or NCCL.

    Rows of an accelerator that go through host memory are copied to pinned memory there, and back.
    Every call raises `GroupLostError` where another worker ended, or did not answer in time. NCCL cannot raise: where
    it waits in vain, its watchdog ends the process.

    Args:
        place: place of this worker. The call returns when all workers have made it.
        meeting: how the workers reach each other.
        device: device of the tensors.

    Attributes:
        note: sentence for the operator; "" for a group without accelerators.

    Raises:
        GroupLostError: another worker did not join in time.
    """

    def __init__(self, place: GroupPlace, meeting: Meeting, device: torch.device) -> None:
        self.worker, self.num_workers = place.worker, place.num_workers
        self._device = device
        self._store, self._host = meeting  # the store ends with its last reference here, and others may still read it
        with _losing_group():
            names = _share_names(place, self._store, name_device(device))
            self._has_nccl = choose_backend(names) == "nccl"
            if self._has_nccl:
                distributed.init_process_group(
                    "nccl",
                    store=self._store,
                    rank=place.worker,
                    world_size=place.num_workers,
                    timeout=timedelta(seconds=place.timeout_s),
                    device_id=device,
                )
        way = describe_backend(names, "sockets")
        self.note = way and f"Engines exchange tokens by {way}."

    def gather(self, numbers: Int64s) -> Int64s:
        """Gather numbers on the host from all workers, as int64[workers, n]. `numbers`: int64[n], of this worker."""
        return self._host.gather(numbers)

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """Implement `ExpertExchange.exchange_counts`."""
        one_each = [1] * self.num_workers
        return self.exchange_rows(counts, one_each, one_each)

    def exchange_rows(self, rows: Tensor, num_sent: list[int], num_received: list[int]) -> Tensor:
        """Implement `ExpertExchange.exchange_rows`."""
        rows = rows.contiguous()
        shape = (sum(num_received), rows.shape[1])
        if self._has_nccl:
            received = rows.new_empty(shape)
            with _losing_group():  # as bytes, because NCCL does not know every dtype
                distributed.all_to_all_single(_bytes_of(received), _bytes_of(rows), num_received, num_sent)
            return received
        received = empty_on_host(shape, rows.dtype, self._device)
        self._host.swap(_parts(copy_to_host(rows), num_sent), _parts(received, num_received))
        return received.to(self._device, non_blocking=True)


def _bytes_of(rows: Tensor) -> Tensor:
    return rows.view(torch.uint8)


def _parts(rows: Tensor, num_rows: list[int]) -> list[memoryview]:
    """Return the bytes of each worker's rows, which share the memory of `rows`."""
    flat, num_bytes = _bytes_of(rows).flatten().numpy().data, rows.shape[1] * rows.element_size()
    ends = [0, *accumulate(num * num_bytes for num in num_rows)]
    return [flat[begin:end] for begin, end in pairwise(ends)]


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
