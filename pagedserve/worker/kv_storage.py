"""The two pools of KV blocks, and the copies between and within them.

A pool is one tensor, block-major: what one block holds is contiguous over all layers, so copying and swapping it is one
copy that knows nothing of what is inside.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref

import torch

from pagedserve.errors import ConfigError
from pagedserve.kernels import ops
from pagedserve.step import BlockOps
from pagedserve.worker.swap_copies import HostCopies, StreamCopies, SwapCopies

_PAGE = mmap.PAGESIZE


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
        self.device_pool, self._device_memory = _pool((num_device_blocks, *shape), dtype, device)
        self.host_pool, _ = _pool((num_host_blocks, *shape), dtype, torch.device("cpu"))
        self._swaps: SwapCopies = HostCopies()
        if device.type == "cuda":
            _pin(self.host_pool)
            self._swaps = StreamCopies(device, torch.cuda)

    def execute(self, block_ops: BlockOps) -> float:
        """Runs the copies in their documented order and returns the seconds that swaps took: these, or, on a GPU, where
        nobody waits for them, those of earlier steps that have ended meanwhile.

        RuntimeError where they stop halfway for lack of memory: unlike a forward, they cannot simply be repeated.
        """
        try:
            return self._execute(block_ops)
        except torch.OutOfMemoryError as error:
            raise RuntimeError("blocks could not be moved: the device has no memory left") from error

    def _execute(self, block_ops: BlockOps) -> float:
        self._swap(self.device_pool, self.host_pool, block_ops.swap_out)
        self._swap(self.host_pool, self.device_pool, block_ops.swap_in)
        if block_ops.copy:
            ops.copy_blocks(self.device_pool, _pairs(block_ops.copy, self.device_pool, self.device_pool))
        if block_ops.discard and self._device_memory is not None:
            self._discard(self._device_memory, block_ops.discard)
        return self._swaps.take_seconds()

    def _discard(self, memory: mmap.mmap, block_ids: list[int]) -> None:
        """The whole pages of these blocks become the system's again; they read as zeros when next touched."""
        num_bytes = self.device_pool.stride(0) * self.device_pool.element_size()
        for block_id in block_ids:
            first = -(-block_id * num_bytes // _PAGE) * _PAGE
            end = (block_id + 1) * num_bytes // _PAGE * _PAGE
            if end > first:
                memory.madvise(mmap.MADV_DONTNEED, first, end - first)

    def _swap(self, source: torch.Tensor, target: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
        if pairs:
            checked = _pairs(pairs, source, target)
            self._swaps.run(lambda: ops.swap_blocks(source, target, checked))


def _pairs(pairs: list[tuple[int, int]], source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """int64 [n, 2]; IndexError for a block that a pool does not have, which a raw copy would not notice."""
    result = torch.tensor(pairs, dtype=torch.int64)
    low, high = int(result.min()), result.amax(dim=0)
    if low < 0 or int(high[0]) >= len(source) or int(high[1]) >= len(target):
        raise IndexError(f"block copy outside the pools of {len(source)} and {len(target)} blocks")
    return result


def _pool(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, mmap.mmap | None]:
    """The pool, and in the host's memory (where the system can take pages back) what it lies in."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device), None
    # Zeros that the system gives on first touch: a backend that reads a whole block and masks a part of it must not
    # meet the NaNs that stale memory could hold. torch.zeros would write them all.
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.zeros(shape, dtype=dtype), None
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    pool = torch.frombuffer(memory, dtype=dtype).view(shape)
    return pool, memory if hasattr(mmap, "MADV_DONTNEED") else None


def _pin(pool: torch.Tensor) -> None:
    """Lets the GPU copy from and to it by itself, until the tensor is gone.

    torch's own pinned memory comes in powers of two: up to twice of what is large already.
    """
    if pool.numel() == 0:
        return
    cudart = torch.cuda.cudart()
    address = pool.data_ptr()
    error = int(cudart.cudaHostRegister(address, pool.nbytes, 0))
    if error != 0:
        raise ConfigError(
            f"the host pool of {pool.nbytes / 2**30:.1f} GiB cannot be pinned (CUDA error {error}): lower --swap-space"
        )
    weakref.finalize(pool, cudart.cudaHostUnregister, address)
