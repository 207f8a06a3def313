"""Tensors of the tokens inside the network, between stages, by row and by place (see `core.stages`).

The arena is allocated once, so parked work never asks for memory: as much may be parked as fits here.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moestro.core.stages import StageShape
from moestro.core.work import Int32s
from moestro.model.experts import add_contributions
from moestro.model.layer_stages import Attended
from moestro.model.upload import upload

Index = slice | Tensor


class Arena:
    """Residual stream of each row; and for each place the input, weights and answers of its experts.

    Args:
        shape: numbers of rows and places, and experts a token.
        hidden_size: hidden size of the network.
        keeps_mixed: whether the attention's output is kept as well.
        dtype, device: dtype and device of the network.
    """

    def __init__(
        self, shape: StageShape, hidden_size: int, dtype: torch.dtype, device: torch.device, *, keeps_mixed: bool
    ) -> None:
        def tensor(*sizes: int) -> Tensor:
            return torch.zeros(*sizes, dtype=dtype, device=device)

        self._device = device
        self._hidden = tensor(shape.num_rows, hidden_size)
        self._inputs = tensor(shape.num_places, hidden_size)
        self._contributions = tensor(shape.num_places, shape.num_chosen, hidden_size)
        # A gate may compute its weights in more than the network's precision.
        precision = torch.promote_types(dtype, torch.float32)
        self._weights = torch.zeros(shape.num_places, shape.num_chosen, dtype=precision, device=device)
        self._mixed = tensor(shape.num_places if keeps_mixed else 0, hidden_size)

    def index(self, rows: Int32s) -> Index:
        """Turn `rows` (or places) into an index: a slice where they are consecutive, which copies nothing."""
        first, num = int(rows[0]), len(rows)
        if int(rows[-1]) - first == num - 1 and (num < 3 or bool((np.diff(rows) == 1).all())):
            return slice(first, first + num)
        return upload(rows.astype(np.int64), self._device)

    def read_hidden(self, rows: Int32s) -> Tensor:
        """[tokens, hidden size], read-only."""
        return self._hidden[self.index(rows)]

    def write_hidden(self, rows: Int32s, hidden: Tensor) -> None:
        """Store the residual stream of `rows`. `hidden`: [tokens, hidden size]."""
        self._hidden[self.index(rows)] = hidden

    def write_attended(self, rows: Int32s, places: Int32s, attended: Attended) -> Tensor:
        """Store a layer's state at its gate.

        Returns:
            int64[tokens, k], each token's experts in ascending id.
        """
        assert attended.inputs is not None
        assert attended.topk_ids is not None
        assert attended.topk_weights is not None
        self.write_hidden(rows, attended.hidden)
        at = self.index(places)
        ids, order = attended.topk_ids.sort(dim=1)
        self._inputs[at] = attended.inputs
        self._weights[at] = attended.topk_weights.gather(1, order).to(self._weights.dtype)
        if attended.mixed is not None:
            self._mixed[at] = attended.mixed
        return ids

    def read_attended(self, rows: Int32s, places: Int32s) -> tuple[Attended, Tensor]:
        """Stored state of `write_attended`, and the weighted sum of all contributions [tokens, hidden size]."""
        at = self.index(places)
        mixed = self._mixed[at] if len(self._mixed) else None
        attended = Attended(self.read_hidden(rows), self._inputs[at], None, self._weights[at], mixed)
        return attended, add_contributions(self._contributions[at], self._weights[at])

    def read_inputs(self, places: Int32s) -> Tensor:
        """[n, hidden size], input of the experts at each of `places`, which may repeat."""
        return self._inputs.index_select(0, upload(places.astype(np.int64), self._device))

    def write_contributions(self, places: Int32s, choices: Int32s, contributions: Tensor) -> None:
        """Store one expert's answer for each (place, choice). `contributions`: [n, hidden size]."""
        num_chosen = self._contributions.shape[1]
        at = places.astype(np.int64) * num_chosen + choices
        self._contributions.view(-1, contributions.shape[1]).index_copy_(0, upload(at, self._device), contributions)


def bytes_per_token(hidden_size: int, num_chosen: int, itemsize: int, *, keeps_mixed: bool) -> tuple[int, int]:
    """Bytes of a row, and bytes of a place."""
    return hidden_size * itemsize, (1 + num_chosen + keeps_mixed) * hidden_size * itemsize + 8 * num_chosen
