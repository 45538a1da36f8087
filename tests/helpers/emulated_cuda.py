"""This process with csrc/cuda emulated on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pagedserve.kernels import native_cuda
from tests.helpers import cuda_emulation


def forget_library() -> None:
    """The next call looks for the library again."""
    for function in (native_cuda.library, native_cuda.is_emulated, native_cuda.why_not):
        function.cache_clear()


@contextmanager
def emulated_cuda() -> Iterator[None]:
    library = cuda_emulation.build()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEDSERVE_CUDA_LIBRARY", str(library))
        forget_library()
        yield
    forget_library()
