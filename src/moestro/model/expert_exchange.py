"""Exchange of rows between the workers of a group, over `torch.distributed`.

All workers of a group make the same calls in the same order. A worker without tokens makes them with no rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed

Int64s = NDArray[np.int64]


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
class GroupAddress:
    """Place of a worker in a group of `torch.distributed`.

    Attributes:
        url: address of the group's store, as `tcp://HOST:PORT` or `file:///PATH`; new for each start of the group.
        worker, num_workers: number of this worker, and of all.
        timeout_s: longest wait for another worker, in seconds.
    """

    url: str
    worker: int
    num_workers: int
    timeout_s: float


class GroupExchange:
    """Exchanges rows over `torch.distributed`: gloo on a CPU, NCCL on CUDA devices.

    A call raises `RuntimeError` where another worker ended, or did not answer in time. The group is then lost.

    Args:
        address: place of this worker. The call returns when all workers have joined.
        device: device of the tensors.

    Raises:
        RuntimeError: another worker did not join in time.
    """

    def __init__(self, address: GroupAddress, device: torch.device) -> None:
        self.worker, self.num_workers = address.worker, address.num_workers
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        distributed.init_process_group(
            backend,
            init_method=address.url,
            rank=address.worker,
            world_size=address.num_workers,
            timeout=timedelta(seconds=address.timeout_s),
        )

    def gather(self, numbers: Int64s) -> Int64s:
        """Gather numbers on the host from all workers, as int64[workers, n]. `numbers`: int64[n], of this worker."""
        own = torch.from_numpy(numbers)
        gathered = [torch.empty_like(own) for _ in range(self.num_workers)]
        distributed.all_gather(gathered, own)
        return torch.stack(gathered).numpy()

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """Implement `ExpertExchange.exchange_counts`."""
        received = torch.empty_like(counts)
        distributed.all_to_all_single(received, counts)
        return received

    def exchange_rows(self, rows: Tensor, num_sent: list[int], num_received: list[int]) -> Tensor:
        """Implement `ExpertExchange.exchange_rows`."""
        received = rows.new_empty(sum(num_received), rows.shape[1])
        # As bytes, because gloo does not know every dtype.
        distributed.all_to_all_single(
            received.view(torch.uint8), rows.contiguous().view(torch.uint8), num_received, num_sent
        )
        return received

    def leave(self) -> None:
        """Leave the group. Another one may be joined afterwards."""
        distributed.destroy_process_group()
