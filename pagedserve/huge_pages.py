"""Memory in huge pages, where the system has them."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

PAGE_BYTES = 2 << 20


def reserve(num_bytes: int) -> np.ndarray:
    """Zeros, uint8 [num_bytes or a little more], that begin at a huge page; untouched, they take no memory."""
    size = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    pages = np.frombuffer(memory, dtype=np.uint8)
    return pages[-pages.ctypes.data % PAGE_BYTES :]
