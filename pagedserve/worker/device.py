"""What a worker asks of its device beside computing: how much memory there is, how much a step takes, is it alive."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagedserve.worker.memory import free_memory

# What drivers and libraries say when there is no memory, where torch does not turn it into an OutOfMemoryError.
_NO_MEMORY = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)


class Device:
    """A CPU: memory is the machine's, nothing is cached, and what fails has failed for good reasons."""

    def free_bytes(self) -> int:
        """What can still be allocated."""
        return free_memory(torch.device("cpu"))

    def measure(self, function: Callable[[], object]) -> int | None:
        """The most bytes that `function` holds at once beside what was there before; None where it was not run,
        because the pool leaves enough for every step anyway (of a CPU's memory it takes half)."""
        return None

    def release_caches(self) -> None:
        """Gives memory that is held for later back."""

    def why_lost(self) -> str | None:
        """Why nothing will ever run here again, in one line; None while the device works."""
        return None


class CudaDevice(Device):
    """One NVIDIA GPU, by torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_bytes(self) -> int:
        self.release_caches()
        return torch.cuda.mem_get_info(self._device)[0]

    def measure(self, function: Callable[[], object]) -> int:
        self.release_caches()
        before = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        function()
        torch.cuda.synchronize(self._device)
        # What was reserved, not what was asked for: the difference is lost between the pieces.
        return torch.cuda.max_memory_reserved(self._device) - before

    def release_caches(self) -> None:
        torch.cuda.empty_cache()

    def why_lost(self) -> str | None:
        # An error that stays (an illegal address, a failed assertion, a broken card) is given back by every later call.
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            return str(error).strip().splitlines()[0]
        return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` only says that something was too large."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _NO_MEMORY)
