"""The two pools of KV blocks, and the copies between and within them.

A pool is one tensor, block-major: what one block holds is contiguous over all layers, so copying and swapping it is one
copy that knows nothing of what is inside.
"""

from __future__ import annotations

import math
import time

import numpy as np
import torch

from pagedserve.kernels import ops
from pagedserve.step import BlockOps

_PAGE = 4096


class KVStorage:
    """The device pool that attention reads, and the host pool that preempted sequences wait in.

    Both are [num_blocks, num_layers, *layer_block_shape]. Memory is taken when a block is first written, not before.
    """

    def __init__(
        self,
        *,
        num_device_blocks: int,
        num_host_blocks: int,
        num_layers: int,
        layer_block_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, *layer_block_shape)
        self.device_pool = _pool((num_device_blocks, *shape), dtype, device)
        self.host_pool = _pool((num_host_blocks, *shape), dtype, torch.device("cpu"), pin_for=device)

    def execute(self, block_ops: BlockOps) -> float:
        """Runs the copies in their documented order and returns the seconds that the swaps took."""
        seconds = self._swap(self.device_pool, self.host_pool, block_ops.swap_out)
        seconds += self._swap(self.host_pool, self.device_pool, block_ops.swap_in)
        if block_ops.copy:
            ops.copy_blocks(self.device_pool, _pairs(block_ops.copy, self.device_pool, self.device_pool))
        return seconds

    def _swap(self, source: torch.Tensor, target: torch.Tensor, pairs: list[tuple[int, int]]) -> float:
        if not pairs:
            return 0.0
        started = time.perf_counter()
        ops.swap_blocks(source, target, _pairs(pairs, source, target))
        if self.device_pool.is_cuda:
            torch.cuda.synchronize(self.device_pool.device)  # so that what is measured is the copy
        return time.perf_counter() - started


def _pairs(pairs: list[tuple[int, int]], source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """int64 [n, 2]; IndexError for a block that a pool does not have, which a raw copy would not notice."""
    result = torch.tensor(pairs, dtype=torch.int64)
    low, high = int(result.min()), result.amax(dim=0)
    if low < 0 or int(high[0]) >= len(source) or int(high[1]) >= len(target):
        raise IndexError(f"block copy outside the pools of {len(source)} and {len(target)} blocks")
    return result


def _pool(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, pin_for: torch.device | None = None
) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    if pin_for is not None and pin_for.type == "cuda":
        return torch.zeros(shape, dtype=dtype, pin_memory=True)
    # Zeros that the system gives on first touch: a backend that reads a whole block and masks a part of it must not
    # meet the NaNs that stale memory could hold. numpy asks for zeroed pages; torch.zeros would write them all.
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(num_bytes + _PAGE, dtype=np.uint8)
    offset = -raw.ctypes.data % _PAGE
    return torch.from_numpy(raw)[offset : offset + num_bytes].view(dtype).view(shape)
