"""Counts which workers computed the experts of each unit of a step, for the records of requests."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moestro.core.work import range_ends
from moestro.model.step import PagedStep


class VisitTensor(NamedTuple):
    """`core.work.StepVisits`, on the device. `num_pairs`: int64[units, ranges, workers]."""

    version: int
    ends: tuple[int, ...]
    num_pairs: Tensor


class ExpertVisitCounter:
    """(Token, expert) pairs of each unit by range of layers and worker.

    Args:
        num_layers: layers of the network.
        num_workers: workers of the group.
    """

    def __init__(self, num_layers: int, num_workers: int) -> None:
        self._ends = range_ends(num_layers)
        self._range_of = np.searchsorted(np.array(self._ends), np.arange(num_layers), side="right").tolist()
        self._num_workers, self._version = num_workers, 0
        self._first_column = self._num_pairs = torch.empty(0, dtype=torch.int64)

    def begin(self, step: PagedStep) -> None:
        """Begin to count a step."""
        num_columns = len(self._ends) * self._num_workers
        unit_of_token = np.repeat(np.arange(len(step.units)), step.num_tokens_of)
        self._first_column = step.upload(unit_of_token * num_columns)
        self._num_pairs = torch.zeros(
            len(step.units) * num_columns, dtype=torch.int64, device=self._first_column.device
        )

    def add(self, layer: int, workers: Tensor, version: int) -> None:
        """Count a layer.

        Args:
            workers: int64[tokens * k], worker of each (token, expert) pair, by token.
            version: version of the expert table that is in use.
        """
        self._version = version
        columns = workers.view(len(self._first_column), -1) + self._first_column[:, None]
        columns += self._range_of[layer] * self._num_workers
        self._num_pairs.scatter_add_(0, columns.view(-1), torch.ones_like(workers))

    def read(self) -> VisitTensor:
        """Return the counts of the step."""
        shape = (-1, len(self._ends), self._num_workers)
        return VisitTensor(self._version, self._ends, self._num_pairs.view(shape))
