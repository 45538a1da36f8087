"""Captures as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagedserve.worker.decode_graphs import CaptureError


class CudaCapture:
    """Takes down what a function launches on one GPU. See `decode_graphs.CaptureDevice`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # Memory of the pool is only shared among captures on one stream.
        self._stream = torch.cuda.Stream(device)
        self._reserved: torch.cuda.CUDAGraph | None = None  # never replayed; keeps the pool's memory

    def reserve(self, num_bytes: int) -> None:
        """The allocator divides a piece that is there; captures from small to large would each ask for a new one."""
        if num_bytes == 0 or self._reserved is not None:
            return
        try:
            self._reserved = self._take_down(
                lambda: torch.empty(num_bytes, dtype=torch.uint8, device=self._device)[:1].zero_()
            )
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CaptureError(_first_line(error)) from error

    def release(self) -> None:
        self._reserved = None

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        try:
            # Kernels are compiled and loaded, and libraries make their workspaces, before anything is taken down.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                function()
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            return self._take_down(function).replay
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CaptureError(_first_line(error)) from error

    def _take_down(self, function: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # The outer context brings the stream back where the inner one, ending with an error, does not.
        # Other threads may do as they like meanwhile: copies of theirs are no part of it.
        with (
            torch.cuda.stream(torch.cuda.current_stream(self._device)),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            function()
        return graph


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
