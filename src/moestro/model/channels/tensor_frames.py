"""Bytes of the tensors that workers of a group send each other; torch has dtypes that NumPy has not."""

from __future__ import annotations

import torch
from torch import Tensor

from moestro.model.channels.transport import copy_to_host
from moestro.model.staged.staged_device import ExpertTorchDevice


class TorchFrames:
    """Turns vectors of a staged device into bytes and back; implements `wire.hop_frames.TensorFrames`.

    Args:
        device: the device whose vectors are sent and received.

    Attributes:
        dtype: dtype of the vectors by its name in torch, for instance `bfloat16`.
    """

    def __init__(self, device: ExpertTorchDevice) -> None:
        self._hidden_size, self._dtype = device.vector_form
        self.dtype = str(self._dtype).removeprefix("torch.")

    def pack(self, tensor: Tensor) -> memoryview:
        """Return the bytes of a tensor [rows, hidden size], which the caller leaves as they are."""
        return copy_to_host(tensor.contiguous()).view(torch.uint8).numpy().data

    def flatten(self, tensor: Tensor) -> Tensor:
        """Implement `TensorFrames.flatten`."""
        return tensor.contiguous().view(-1).view(torch.uint8)

    def num_bytes(self, num_rows: int) -> int:
        """Implement `TensorFrames.num_bytes`."""
        return num_rows * self._hidden_size * self._dtype.itemsize

    def unpack(self, frame: bytes | memoryview | Tensor, num_rows: int) -> Tensor:
        """Return the tensor [num_rows, hidden size] of some bytes, in host memory or where `frame` is.

        Raises:
            ValueError: the number of bytes is another.
        """
        if len(frame) != self.num_bytes(num_rows):
            raise ValueError(f"{len(frame)} bytes of tensor for {num_rows} rows of {self._hidden_size} {self.dtype}")
        if isinstance(frame, Tensor):
            return frame.view(self._dtype).view(num_rows, self._hidden_size)
        is_writable = isinstance(frame, memoryview) and not frame.readonly
        # Otherwise a copy, because torch takes no memory that it may not write.
        memory = frame if is_writable else bytearray(frame)
        return torch.frombuffer(memory, dtype=self._dtype).view(num_rows, self._hidden_size)
