"""A step's integers on their way to the device: all arrays in one copy."""

from __future__ import annotations

import numpy as np
import torch

from pagedserve.sampling.transfers import Mark

# Of the places of arrays in the buffer: what vector loads ask for.
_ALIGNMENT = 16
_TORCH_TYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}


class InputBuffer:
    """Sends arrays to a device. Those of a step are overwritten when the one after the next is sent."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_here = device.type == "cpu"
        # Two, used in turn: while one's copy is still to be made, the other is filled.
        self._buffers: list[_Buffer | None] = [None, None]
        self._turn = 0

    def send(self, arrays: list[np.ndarray]) -> list[torch.Tensor]:
        """The arrays (int32 or int64, contiguous) as tensors on the device; on CPUs they share their memory."""
        if self._is_here:
            return [torch.from_numpy(array) for array in arrays]
        places, size = _places(arrays)
        self._turn = 1 - self._turn
        buffer = self._buffers[self._turn]
        if buffer is None or buffer.size < size:
            buffer = self._buffers[self._turn] = _Buffer(2 * size, self._device)
        return buffer.send(arrays, places, size)


class _Buffer:
    """Pinned memory and its counterpart on the device."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self._device = device
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._bytes = self._host.numpy()
        self._there = torch.empty(size, dtype=torch.uint8, device=device)
        self._sent: Mark | None = None

    def send(self, arrays: list[np.ndarray], places: list[int], size: int) -> list[torch.Tensor]:
        if self._sent is not None:
            self._sent.wait()  # two steps ago, so it has been for long
        for array, place in zip(arrays, places, strict=True):
            self._bytes[place : place + array.nbytes] = array.reshape(-1).view(np.uint8)
        self._there[:size].copy_(self._host[:size], non_blocking=True)
        self._sent = Mark(self._device)
        return [
            self._there[place : place + array.nbytes].view(_TORCH_TYPES[array.dtype]).view(array.shape)
            for array, place in zip(arrays, places, strict=True)
        ]


def _places(arrays: list[np.ndarray]) -> tuple[list[int], int]:
    """Where each array begins, and where the last one ends."""
    places, end = [], 0
    for array in arrays:
        places.append(end)
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    return places, max(end, _ALIGNMENT)
