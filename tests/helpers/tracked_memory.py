"""What a step holds at once, counted on CPU tensors as a GPU's allocator would."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pagedserve.worker.device import Device


class TrackedDevice(Device):
    """A device with `free` bytes (None: the machine's), that measures what torch allocates for CPU tensors."""

    def __init__(self, free: int | None = None) -> None:
        self._free = free

    def free_bytes(self) -> int:
        return super().free_bytes() if self._free is None else self._free

    def measure(self, function: Callable[[], object]) -> int:
        with _Tracker() as tracker:
            function()
        return tracker.peak


class ScriptedDevice(Device):
    """A device that runs nothing and knows the numbers already."""

    def __init__(self, free: int, measured: list[int | Exception]) -> None:
        self._free = free
        self._measured = list(measured)

    def free_bytes(self) -> int:
        return self._free

    def measure(self, function: Callable[[], object]) -> int:
        number = self._measured.pop(0)
        if isinstance(number, Exception):
            raise number
        return number


class _Tracker(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, int] = {}
        self._now = 0
        self.peak = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler to keep it away from this class

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if any(returned.alias_info for returned in func._schema.returns):
            return result  # a view of what was there
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._see(value.untyped_storage())
        return result

    def _see(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = storage.nbytes()
        self._now += storage.nbytes()
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self._now -= self._live.pop(key, 0)
