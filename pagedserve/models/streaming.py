"""From safetensors files straight to a device: no second copy of the weights in host memory.

Bytes go through two staging buffers, pinned where the device copies from them by itself: while one is copied on a
stream of its own, the other is read, by several threads, for a page cache gives one thread less than a disk array or a
bus can take. Tensors are read when the model asks for them, layer after layer, each from front to back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from pagedserve.errors import ModelLoadError
from pagedserve.models.sources import SafetensorsSource
from pagedserve.quantization.gguf import FLOAT_TYPES

BUFFER_BYTES = 64 << 20
NUM_READERS = 4
_PAGE = 4096


class StreamedSource(SafetensorsSource):
    """Safetensors whose tensors arrive on `device`, ready for what its current stream does next."""

    def __init__(self, files: Sequence[Path], device: torch.device, *, buffer_bytes: int = BUFFER_BYTES):
        super().__init__(files)
        self._device = device
        self._staging = Staging(device, buffer_bytes)
        self._headers = {path: _header(path) for path in files}
        self._opened = {path: os.open(path, os.O_RDONLY) for path in files}

    def dense(self, name: str) -> torch.Tensor:
        path = self._files[name]
        start, fields = self._headers[path]
        entry = fields[self._stored(name)]
        dtype = torch.float64 if entry["dtype"] == "F64" else FLOAT_TYPES[self.kind(name)]
        tensor = torch.empty(entry["shape"], dtype=dtype, device=self._device)
        first, end = entry["data_offsets"]
        if end - first != tensor.nbytes:
            raise ModelLoadError(f"{path}: tensor {name} has {end - first} bytes where its shape takes {tensor.nbytes}")
        if tensor.nbytes:
            self._staging.fill(tensor.view(-1).view(torch.uint8), self._opened[path], start + first, path)
        return tensor.float() if dtype is torch.float64 else tensor

    def equal(self, first: str, second: str) -> bool:
        # By the mapped files: what is the same need not go to the device twice.
        return torch.equal(super().dense(first), super().dense(second))

    def close(self) -> None:
        """Gives back buffers, threads and files; tensors that were loaded stay."""
        self._staging.close()
        for opened in self._opened.values():
            os.close(opened)
        self._opened.clear()


class Staging:
    """Two buffers between files and one device."""

    def __init__(self, device: torch.device, buffer_bytes: int = BUFFER_BYTES):
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=self._on_gpu) for _ in range(2)]
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None
        self._copied: list[Any] = [None, None]  # event behind the last copy out of each buffer
        self._turn = 0
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="weights")

    def fill(self, target: torch.Tensor, opened: int, offset: int, path: Path) -> None:
        """Copies bytes of an open file from `offset` on into `target`, uint8 [num_bytes] on the device.

        Work that the current stream gets after this call finds them there. ModelLoadError for a file that ends early.
        """
        if self._stream is not None:
            # The memory of `target` may still be read by what the current stream was given before.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for first in range(0, target.shape[0], self._buffers[0].shape[0]):
            piece = target[first : first + self._buffers[0].shape[0]]
            self._turn = 1 - self._turn
            if self._copied[self._turn] is not None:
                self._copied[self._turn].synchronize()
            staged = self._buffers[self._turn][: piece.shape[0]]
            self._read(staged, opened, offset + first, path)
            if self._stream is None:
                piece.copy_(staged)
                continue
            with torch.cuda.stream(self._stream):
                piece.copy_(staged, non_blocking=True)
                self._copied[self._turn] = self._stream.record_event()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def close(self) -> None:
        """Waits for copies under way; the buffers are given back."""
        for event in filter(None, self._copied):
            event.synchronize()
        self._readers.shutdown()
        self._buffers.clear()

    def _read(self, staged: torch.Tensor, opened: int, offset: int, path: Path) -> None:
        view = memoryview(staged.numpy())
        share = -(-len(view) // (NUM_READERS * _PAGE)) * _PAGE
        jobs = [
            self._readers.submit(_read_exactly, opened, view[first : first + share], offset + first)
            for first in range(0, len(view), share)
        ]
        try:
            complete = [job.result() for job in jobs]
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
        if not all(complete):
            raise ModelLoadError(f"{path} ended while it was read; fetch it again")


def _read_exactly(opened: int, view: memoryview, offset: int) -> bool:
    """Fills `view`; False where the file ends before."""
    done = 0
    while done < len(view):
        count = os.preadv(opened, [view[done:]], offset + done)
        if count == 0:
            return False
        done += count
    return True


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the data begins, and the entries of the tensors; the file was checked by safetensors' own reader."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return 8 + length, json.loads(file.read(length))
